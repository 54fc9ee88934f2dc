"""The audit of two running servers, against small local ones that answer as real ones do, or badly."""

import asyncio
import itertools
import json
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from specnb import gof
from specnb.cli import main
from specnb.serving import audit
from specnb.serving.audit import audit_endpoint


class Server(ThreadingHTTPServer):
    """A local completions server; `answer(number of the request, body)` gives status and payload."""

    daemon_threads = True
    request_queue_size = 64
    key = None

    def handle_error(self, request, client_address):
        """A client that hangs up is part of these tests."""

    def __init__(self, answer):
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer, self.seen, self.busy, self.most_busy, self.lock = answer, [], 0, 0, threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_POST(self):
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.seen.append((self.path, body))
            number = len(server.seen) - 1
            server.busy += 1
            server.most_busy = max(server.most_busy, server.busy)
        status, payload, *headers = server.answer(number, body)
        if server.key not in (None, self.headers.get("Authorization")):
            status, payload = 401, f"wrong key: {self.headers.get('Authorization')}"
        with server.lock:
            server.busy -= 1
        payload = (payload if isinstance(payload, str) else json.dumps(payload)).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(payload)), **dict(headers)}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *args):
        pass


@pytest.fixture
def serve(serving):
    return lambda answer: serving(Server(answer))


def text(value, tokens=None, usage=None, **more):
    choice = {"text": value, "logprobs": tokens and {"tokens": tokens}, **more}
    return 200, {"choices": [choice], "usage": usage and {"completion_tokens": usage}}


def draws(probs, seed, **more):
    """An arm that draws one of a, b, c."""
    words = np.random.default_rng(seed).choice(["a", "b", "c"], size=5_000, p=probs).tolist()
    return lambda number, body: text(words[number], **more)


TRUE = [0.5, 0.3, 0.2]
ALWAYS_ACCEPTED = [0.2, 0.3, 0.5]  # total variation .3


def test_two_servers_of_one_law_pass_and_only_they_are_asked_so_often_and_so_many_at_once(serve, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # a setting of the environment must not matter
    on, off = serve(draws(TRUE, 1)), serve(draws(TRUE, 2))
    report = audit_endpoint(on.url, off.url + "/v1/", n=200, concurrency=2, model="m", options={"top_k": 0})
    assert report.verdict == "pass", f"n = 200 and 200; a false alarm has probability .001, seed fixed\n{report}"
    assert len(on.seen) == len(off.seen) == 200 and max(on.most_busy, off.most_busy) <= 2
    path, body = on.seen[0]
    assert path == "/v1/completions" and body["temperature"] == 1 and (body["model"], body["top_k"]) == ("m", 0)
    assert report.n == 400 and report.smallest_tv == gof.smallest_total_variation(100, 3, alpha=0.001, power=0.99)


def test_a_server_whose_speculation_is_lossy_fails(serve):
    report = audit_endpoint(serve(draws(ALWAYS_ACCEPTED, 1)).url, serve(draws(TRUE, 2)).url, n=300)
    # Power .99 at 56 draws against the known law (FACTS 6), so at 112 of each here.
    assert report.verdict == "fail" and report.exit_code == 2 and report.p_value < 1e-6


def test_speculation_that_turned_greedy_fails(serve):
    # mistral.rs PR #2424: the speculative path gave the mode of the distribution.
    assert audit_endpoint(serve(draws([1, 0, 0], 1)).url, serve(draws(TRUE, 2)).url, n=100).verdict == "fail"


@pytest.mark.parametrize(("other", "message"), [([1, 0, 0], "the same"), ([0, 1, 0], "but not the same")])
def test_servers_that_give_one_text_every_time_cannot_be_tested(serve, other, message):
    report = audit_endpoint(serve(draws([1, 0, 0], 1)).url, serve(draws(other, 2)).url, n=50)
    assert report.verdict == "cannot test" and report.exit_code == 3 and message in report.found
    assert report.p_value is None


def test_tokens_are_compared_where_both_servers_offer_them(serve):
    whole, plain = (lambda number, body: text("ab", ["ab"])), (lambda number, body: text("ab"))
    newer = lambda number, body: (200, {"choices": [{"text": "ab", "logprobs": {"content": [{"token": "ab"}]}}]})  # noqa: E731
    report = audit_endpoint(serve(whole).url, serve(newer).url, n=20)
    assert report.settings["compared"] == "tokens" and "1 different" in report.found
    report = audit_endpoint(serve(whole).url, serve(plain).url, n=20)
    assert report.settings["compared"] == "text" and "1 different" in report.found


def two_words(seed, answer_of):
    """An arm that draws two of three words, and answers with them as `answer_of(first, second)` says."""
    words = np.random.default_rng(seed).choice(["a", "b", "c"], size=(5_000, 2), p=TRUE).tolist()
    return lambda number, body: answer_of(*words[number])


def both(first, second, **more):
    return text(first + second, [first, second], usage=2, finish_reason="length", **more)


def content(first, second, *listed):
    """The newer form, with these entries, of which each is a dict."""
    return text(first + second, usage=2, logprobs={"content": list(listed)})


LENGTHS = itertools.cycle([1, 2, 2])
LISTS = {
    "the first of a block only": lambda x, y: text(x + y, [x], usage=2),
    "the first of a block only, without a count": lambda x, y: text(x + y, [x]),
    "the first of blocks of one and of two tokens": lambda x, y: text(x + y, [x, y][: next(LENGTHS)], usage=2),
    "ids as numbers": lambda x, y: text(x + y, [ord(x), ord(y)], usage=2),
    "ids as text": lambda x, y: text(x + y, [f"token_id:{ord(x)}", f"token_id:{ord(y)}"], usage=2),
    "ids beside the tokens": lambda x, y: content(x, y, {"id": ord(x), "token": x}, {"id": ord(y), "token": y}),
    "bytes": lambda x, y: content(x, y, {"bytes": [ord(x)]}, {"bytes": [ord(y)]}),
    "another spelling": lambda x, y: text(x + y, [f"G{x}", f"G{y}"], usage=2),
    "nothing": lambda x, y: text(x + y, usage=2),
    "null": lambda x, y: text(x + y, logprobs={"tokens": None, "content": None}),
    "more than was asked for": lambda x, y: text(x + y + "!", [x, y, "!"], usage=3),
}


@pytest.mark.parametrize("name", LISTS)
def test_servers_of_one_law_that_list_their_tokens_differently_do_not_fail(serve, name):
    on, off = serve(two_words(1, LISTS[name])), serve(two_words(2, both))
    report = audit_endpoint(on.url, off.url, n=100)
    assert report.verdict == "pass", f"n = 100 each; a false alarm has probability .001, seeds fixed\n{report}"
    assert report.settings["compared"] == ("tokens" if name == "more than was asked for" else "text")


def test_an_end_that_only_one_server_lists_and_counts_is_no_difference(serve):
    def ends(seed, listed):
        """The second word, where it is c, is the end, of which the text shows nothing."""
        return two_words(seed, lambda x, y: text(x, [x, *listed], usage=1 + len(listed)) if y == "c" else both(x, y))

    report = audit_endpoint(serve(ends(1, ["</s>"])).url, serve(ends(2, [])).url, n=100)
    assert report.verdict == "pass" and report.settings["compared"] == "text"


def test_a_wrong_law_fails_however_the_tokens_are_listed(serve):
    wrong = two_words(1, lambda x, y: text(x + x, [x], usage=2))  # the second word repeats the first
    report = audit_endpoint(serve(wrong).url, serve(two_words(2, both)).url, n=150)
    assert report.verdict == "fail" and report.settings["compared"] == "text"


def test_texts_cut_at_different_lengths_cannot_be_tested_where_no_tokens_tell_how_they_begin(serve):
    longer = two_words(1, lambda x, y: text(x + y + "!", usage=3, finish_reason="length"))
    endless = two_words(1, lambda x, y: text(x + y + "!" * 7, usage=9, finish_reason="stop"))
    for on in (longer, endless):
        report = audit_endpoint(serve(on).url, serve(two_words(2, both)).url, n=50)
        assert report.verdict == "cannot test" and "tokens, on and off, cannot be compared as texts" in report.found


def test_one_text_of_different_tokens_is_seen_where_both_list_them_alike(serve):
    def cut(seed, share):
        halves = np.random.default_rng(seed).random(5_000) < share
        return lambda number, body: text("ab", ["a", "b"] if halves[number] else ["ab"], usage=1 + int(halves[number]))

    report = audit_endpoint(serve(cut(1, 0.2)).url, serve(cut(2, 0.8)).url, n=100)
    assert report.verdict == "fail" and report.settings["compared"] == "tokens"


# ---- servers that stumble


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(audit, "WAITS_SEC", (0.01, 0.02, 0.03))


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_server_that_stumbles_in_the_middle_costs_no_audit(serve, quick, status):
    answer = draws(TRUE, 1)
    on = serve(lambda number, body: (status, "busy") if number in (20, 40) else answer(number, body))
    report = audit_endpoint(on.url, serve(draws(TRUE, 2)).url, n=60)
    assert report.verdict == "pass" and report.settings["num_texts"] == [60, 60] and len(on.seen) == 62
    assert "2 requests had to be sent again" in report.found


def test_a_connection_that_breaks_in_the_middle_costs_no_audit(serve, quick):
    answer = draws(TRUE, 1)
    cut = [("Content-Length", "1000"), ("Connection", "close")]
    on = serve(lambda number, body: (200, "{", *cut) if number == 20 else answer(number, body))
    report = audit_endpoint(on.url, serve(draws(TRUE, 2)).url, n=60, concurrency=1)
    assert report.verdict == "pass" and "1 requests had to be sent again" in report.found


def test_a_server_that_always_stumbles_is_an_error_after_four_tries(serve, quick):
    on, off = serve(lambda number, body: (503, "busy")), serve(draws(TRUE, 2))
    with pytest.raises(RuntimeError, match="answered 503: 'busy'"):
        audit_endpoint(on.url, off.url, n=60, concurrency=1)
    assert len(on.seen) == 4 and not off.seen


def test_a_refusal_is_no_stumble(serve, quick):
    answer = draws(TRUE, 1)
    on = serve(lambda number, body: (400, "no") if number == 20 else answer(number, body))
    with pytest.raises(RuntimeError, match="answered 400"):
        audit_endpoint(on.url, serve(draws(TRUE, 2)).url, n=60)


class Dripping(Server):
    """Sends a byte of its answer every tenth of a second, for half a minute."""

    def __init__(self, head):
        super().__init__(None)
        self.head, self.RequestHandlerClass = head, Drip


class Drip(BaseHTTPRequestHandler):
    def handle(self):
        self.request.recv(65_536)
        self.request.sendall(self.server.head)
        for _ in range(300):
            self.request.sendall(b" ")
            time.sleep(0.1)


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\nX:", b"HTTP/1.1 503 Busy\r\n\r\n"])
def test_a_server_that_drips_is_left_when_the_time_is_over(serving, serve, quick, head):
    on, off, began = serving(Dripping(head)), serve(draws(TRUE, 2)), time.perf_counter()
    with pytest.raises(RuntimeError, match=r"no whole answer within 0\.2 seconds"):
        audit_endpoint(on.url, off.url, n=10, timeout=0.2)
    with pytest.raises(RuntimeError, match="no text came within 1 seconds"):
        audit_endpoint(on.url, off.url, n=10, timeout=20, seconds=1)
    assert time.perf_counter() - began < 8


# ---- what is sent, and what is refused before that


def test_options_replace_what_is_said_elsewhere_and_the_report_says_what_was_sent(serve):
    on, off = serve(two_words(1, both)), serve(two_words(2, both))
    options = {"temperature": 0.5, "max_tokens": 1, "model": "other", "prompt": "Twice", "logprobs": None}
    report = audit_endpoint(on.url, off.url, n=100, model="m", options=options)
    sent = {name: value for name, value in options.items() if value is not None}
    assert report.tested.startswith("at temperature 0.5 the first 1 tokens")
    assert {name: report.settings[name] for name in sent} == sent and "logprobs" not in report.settings
    for _, body in on.seen + off.seen:
        assert body == sent
    report = audit_endpoint(on.url, off.url, n=20, options={"temperature": None, "max_tokens": None})
    assert report.tested.startswith("at temperature (left to the servers) the texts have one law")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"level": 2}, "level is a probability between 0 and 1, such as 0.001, got 2"),
        ({"level": 0}, "level is a probability"),
        ({"level": float("nan")}, "level is a probability"),
        ({"seconds": float("nan")}, "seconds must be a finite number above 0, got nan"),
        ({"timeout": -1}, "timeout must be a finite number above 0, got -1"),
        ({"n": 2.5}, "n must be a whole number"),
        ({"num_tokens": 0}, "num_tokens must be a whole number"),
        ({"temperature": float("nan")}, "cannot be written as JSON"),
        ({"prompt": "\ud800"}, "cannot be written as JSON"),
        ({"options": {"max_tokens": 0}}, "max_tokens must be a whole number"),
        ({"options": {"max_tokens": "2"}}, "max_tokens must be a whole number"),
        ({"options": {"stream": True}}, "leave stream out"),
        ({"key_env": "SPECNB_NO_SUCH_KEY"}, "the environment variable SPECNB_NO_SUCH_KEY holds no key"),
    ],
)
def test_what_cannot_be_asked_is_refused_before_the_first_request(serve, more, message):
    on, off = serve(draws(TRUE, 1)), serve(draws(TRUE, 2))
    with pytest.raises(ValueError, match=message):
        audit_endpoint(on.url, off.url, **{"n": 20, **more})
    assert not on.seen and not off.seen


def test_a_key_comes_from_the_environment_and_is_kept_nowhere(serve, tmp_path, monkeypatch, capsys):
    words, out = draws(TRUE, 1), tmp_path / "report.json"
    on, off = (serve(lambda number, body: words(number, body)) for _ in range(2))
    on.key = off.key = "Bearer s3cret"
    command = ["audit", "endpoint", on.url, off.url, "--requests", "50", "--out", str(out)]
    assert main(command) == 1 and "name that with --key-env" in capsys.readouterr().err
    monkeypatch.setenv("SPECNB_TEST_KEY", "s3cret")
    assert main([*command, "--key-env", "SPECNB_TEST_KEY"]) == 0
    on.key = "Bearer another"
    assert main([*command, "--key-env", "SPECNB_TEST_KEY", "--replace"]) == 1
    shown = capsys.readouterr()
    assert "***" in shown.err and "s3cret" not in out.read_text() + shown.out + shown.err


def test_a_running_event_loop_such_as_a_notebooks_is_no_obstacle(serve):
    on, off = serve(draws(TRUE, 1)), serve(draws(TRUE, 2))

    async def cell():
        return audit_endpoint(on.url, off.url, n=20)

    assert asyncio.run(cell()).n == 40


BROKEN = {
    "404": ((404, "no such model"), "answered 404: 'no such model'"),
    "redirect": ((302, "", ("Location", "http://127.0.0.1:9/")), "answered 302"),
    "malformed": ((200, '{"choices": ['), "no completion"),
    "no object": ((200, "[]"), "no completion"),
    "empty choices": ((200, {"choices": []}), "no completion"),
    "no text": ((200, {"choices": [{"text": None}]}), "no completion"),
    "NaN": ((200, '{"choices": [{"text": "a", "logprobs": {"token_logprobs": [NaN]}}]}'), "NaN is no JSON number"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_server_is_one_clear_error_that_names_it(serve, name):
    answer, message = BROKEN[name]
    on, off = serve(lambda number, body: answer), serve(draws(TRUE, 2))
    with pytest.raises(RuntimeError, match=message) as caught:
        audit_endpoint(on.url, off.url, n=5_000)
    assert on.url in str(caught.value) and len(on.seen) < 50  # it stops at once


def test_a_server_that_is_not_there_or_does_not_answer_is_an_error(serve):
    gone = Server(None)
    gone.server_close()
    off = serve(draws(TRUE, 2))
    with pytest.raises(RuntimeError, match=f"{gone.url}.* cannot be reached"):
        audit_endpoint(gone.url, off.url, n=5)
    slow = serve(lambda number, body: (time.sleep(1), text("a"))[1])
    with pytest.raises(RuntimeError, match=r"no whole answer within 0\.1 seconds"):
        audit_endpoint(slow.url, off.url, n=5, timeout=0.1)


def test_when_the_time_is_up_the_texts_so_far_are_tested(serve):
    slow = serve(lambda number, body: (time.sleep(0.05), text("ab"[number % 2]))[1])
    report = audit_endpoint(slow.url, serve(draws([0.5, 0.5, 0], 2)).url, n=5_000, seconds=1)
    assert 20 < report.n < 200 and report.settings["num_texts"][0] == report.n // 2


@pytest.mark.parametrize(
    ("urls", "more", "message"),
    [
        (("http://h:1", "http://h:1/v1"), {}, "name two servers"),
        (("h:1", "http://h:2"), {}, "base URL"),
        (("http://h:1", "file:///etc"), {}, "base URL"),
        (("http://h:1", "http://h:2"), {"n": 0}, "above 0"),
        (("http://h:1", "http://h:2"), {"n": 10**9}, "at most"),
        (("http://h:1", "http://h:2"), {"concurrency": 0}, "above 0"),
    ],
)
def test_requests_without_bounds_or_servers_are_refused(urls, more, message):
    with pytest.raises(ValueError, match=message):
        audit_endpoint(*urls, **more)


def test_servers_are_audited_from_the_command_line(serve, capsys):
    on, off, greedy = serve(draws(ALWAYS_ACCEPTED, 1)), serve(draws(TRUE, 2)), serve(draws([1, 0, 0], 1))
    assert main(["audit", "endpoint", on.url, off.url, "--requests", "200", "--options", '{"min_p": 0}']) == 2
    assert Counter(body["min_p"] for _, body in on.seen) == {0: 200}
    assert main(["audit", "endpoint", greedy.url, serve(draws([1, 0, 0], 1)).url, "--requests", "10"]) == 3
    assert main(["audit", "endpoint", on.url, on.url]) == 1
