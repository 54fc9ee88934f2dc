"""A concurrency sweep against a small local server that streams like an engine does."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from specnb.cli import main
from specnb.measure.prompts import Prompt
from specnb.serving.load import levels_table, serve_bench
from specnb.serving.metrics import growth, parse_metrics

VLLM = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 40.0
vllm:spec_decode_num_draft_tokens_total{engine="1",model_name="m"} 2.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 21.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 9.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 7.0
vllm:num_requests_running{engine="0"} 3.0
"""
LLAMA = """llamacpp:prompt_tokens_total 12
llamacpp:spec_decode_num_drafts_total 4
llamacpp:spec_decode_num_draft_tokens_total 16
llamacpp:spec_decode_num_accepted_tokens_total 3
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 3
"""


def test_metrics_of_both_engines():
    assert parse_metrics(VLLM) == (
        "vllm",
        {
            "drafts": 10.0, "draft_tokens": 42.0, "accepted_tokens": 21.0, "accepted_tokens_per_pos_0": 9.0,
            "accepted_tokens_per_pos_1": 7.0,
        },
    )  # fmt: skip
    engine, counted = parse_metrics(LLAMA)
    assert engine == "llamacpp" and counted["accepted_tokens"] == 3.0 and counted["drafts"] == 4.0
    assert parse_metrics("up 1\n") == (None, {})


class Engine(ThreadingHTTPServer):
    """Streams one token, then three chunks of four; after each request its counters have grown."""

    daemon_threads, request_queue_size = True, 64

    def __init__(self, *, pause=0.04, speculates=True, status=200, usage=True, answer=None, page=None):
        super().__init__(("127.0.0.1", 0), Handler)
        self.pause, self.speculates, self.status, self.usage = pause, speculates, status, usage
        self.answer, self.page = answer, page
        self.url, self.lock, self.seen = f"http://127.0.0.1:{self.server_port}", threading.Lock(), []
        self.busy = self.most_busy = self.done = 0

    def handle_error(self, request, client_address):
        """A client that hangs up is part of these tests."""


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        engine = self.server
        if engine.page is not None:
            return engine.page(self)
        lines = {"drafts": 3, "draft_tokens": 12, "accepted_tokens": 9} if engine.speculates else {}
        page = "".join(f"llamacpp:spec_decode_num_{n}_total {v * engine.done}\n" for n, v in lines.items())
        self.send_response(200)
        self.end_headers()
        self.wfile.write(page.encode())

    def do_POST(self):
        engine = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with engine.lock:
            engine.seen.append((self.path, body))
            engine.busy += 1
            engine.most_busy = max(engine.most_busy, engine.busy)
        if engine.answer is not None:
            return engine.answer(self, body)
        self.send_response(engine.status)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.end_headers()
        if engine.status != 200:
            self.wfile.write(b"overloaded")
        else:
            for number in (1, 4, 4, 4):
                time.sleep(engine.pause)
                self._event({"choices": [{"text": "x" * number} if "prompt" in body else {"delta": {"content": "x"}}]})
            self._event({"choices": [], "usage": {"completion_tokens": 13} if engine.usage else None})
            self.wfile.write(b"data: [DONE]\n\n")
        with engine.lock:
            engine.busy -= 1
            engine.done += 1

    def _event(self, payload):
        self.wfile.write(f"data: {json.dumps(payload)}\n\n".encode())
        self.wfile.flush()

    def log_message(self, *args):
        pass

    def reply(self, payload, status=200, kind="text/event-stream"):
        """A whole answer, sent at once."""
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(payload.encode())

    def drip(self, payload, head=b""):
        """Send `head`, then a piece twice within every time limit of these tests, for 30 seconds."""
        self.wfile.write(head)
        for _ in range(300):
            self.wfile.write(payload)
            time.sleep(0.1)


@pytest.fixture
def engine(serving):
    return lambda **options: serving(Engine(**options))


PROMPTS = [
    Prompt("a", "own", None, "Once", 8, 1.0),
    Prompt("b", "own", [{"role": "user", "content": "Hi"}], None, 8, 1.0),
]


def test_time_per_token_of_chunks_is_the_rest_of_the_time_over_the_rest_of_the_tokens(engine):
    # ray-project/llmperf PR #99, vllm #6531: a gap between chunks of four tokens is no inter-token latency.
    server = engine(pause=0.04)
    result = serve_bench(server.url, PROMPTS, concurrencies=[1], requests=10, max_tokens=13)
    for row in result["rows"]:
        assert row["status"] == "ok" and (row["num_tokens"], row["num_chunks"]) == (13, 4)
        assert 0.03 < row["ttft_sec"] < row["total_sec"]
    found = levels_table(result).iloc[0]
    assert found.n == 10 and 0.12 / 12 * 0.8 < found.per_token_p50_sec < 0.12 / 12 * 3
    assert found.tokens_per_sec == pytest.approx(130 / result["levels"][0]["wall_sec"])
    assert found.accepted_fraction == 9 / 12 and found.accepted_per_draft == 3.0
    assert result["engine"] == "llamacpp" and "token matching" in result["rule"]
    assert {path for path, _ in server.seen} == {"/v1/completions", "/v1/chat/completions"}
    assert all(body["stream"] and body["stream_options"] == {"include_usage": True} for _, body in server.seen)


def test_so_many_requests_are_under_way_and_no_more(engine):
    server = engine(pause=0.02, speculates=False)
    result = serve_bench(server.url + "/v1/", PROMPTS, concurrencies=[1, 3], requests=9)
    assert server.most_busy == 3 and len(server.seen) == 18
    found = levels_table(result)
    assert found.concurrency.tolist() == [1, 3] and found.tokens_per_sec[1] > 1.5 * found.tokens_per_sec[0]
    assert found.accepted_fraction.isna().all() and result["engine"] is None and result["rule"] is None


def test_when_the_time_is_up_no_more_requests_are_sent(engine):
    server = engine(pause=0.05)
    result = serve_bench(server.url, PROMPTS, concurrencies=[1], requests=1_000, seconds=2)
    assert 1 <= len(result["rows"]) == len(server.seen) < 12


def test_a_server_that_answers_nothing_is_one_clear_error(engine):
    with pytest.raises(RuntimeError, match="answered no request: failed: answered 503: 'overloaded'"):
        serve_bench(engine(status=503).url, PROMPTS, concurrencies=[1], requests=2)
    with pytest.raises(RuntimeError, match="no usage; is stream_options supported"):
        serve_bench(engine(usage=False, pause=0).url, PROMPTS, concurrencies=[1], requests=2)
    gone = Engine()
    gone.server_close()
    with pytest.raises(RuntimeError, match="answered no request: failed: ConnectError"):
        serve_bench(gone.url, PROMPTS, concurrencies=[1], requests=2)


@pytest.mark.parametrize(
    ("base", "more", "message"),
    [
        ("h:1", {}, "no base URL"),
        ("http://h:1", {"requests": 0}, "above 0"),
        ("http://h:1", {"requests": 10**9}, "at most"),
        ("http://h:1", {"concurrencies": [0]}, "above 0"),
        ("http://h:1", {"concurrencies": []}, "at least one prompt and one concurrency"),
    ],
)
def test_bad_input_is_refused_before_anything_is_sent(base, more, message):
    with pytest.raises(ValueError, match=message):
        serve_bench(base, PROMPTS, **more)


def test_what_is_finished_is_kept_and_the_command_prints_it(engine, tmp_path, capsys):
    out, server = tmp_path / "serve.json", engine(pause=0.001)
    command = ["serve-bench", "--endpoint", server.url, "--concurrency", "1,2", "--requests", "4", "--out", str(out)]
    assert main([*command, "--server", '{"version": "1.2"}']) == 0
    shown = capsys.readouterr().out
    assert "tokens_per_sec" in shown and "token matching" in shown
    assert main(["report", str(out)]) == 0 and "token matching" in capsys.readouterr().out
    kept = json.loads(out.read_text())
    assert len(kept["rows"]) == 8 and kept["command"].startswith("specnb serve-bench")
    assert kept["server"] == {"version": "1.2"}

    def interrupted(levels):
        yield levels[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        serve_bench(server.url, PROMPTS, concurrencies=[1, 2], requests=3, out=out, track=interrupted)
    assert [level["concurrency"] for level in json.loads(out.read_text())["levels"]] == [1]


# ---- a time limit holds as a whole

HEADERS = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
DRIPS = {
    "comments": lambda handler, body: handler.drip(b": still here\n\n", HEADERS),
    "a header": lambda handler, body: handler.drip(b"X-More: 1\r\n", b"HTTP/1.1 200 OK\r\n"),
    "a status line": lambda handler, body: handler.drip(b"0", b"HTTP/1.1 2"),
    "the body of an error": lambda handler, body: handler.drip(b"x", b"HTTP/1.1 503 Busy\r\n\r\n"),
    "chunks of text": lambda handler, body: handler.drip(b'data: {"choices": [{"text": "a"}]}\n\n', HEADERS),
}


@pytest.mark.parametrize("name", DRIPS)
def test_a_server_that_drips_is_cut_off_when_the_time_of_the_request_is_over(engine, name):
    server, began = engine(answer=DRIPS[name]), time.perf_counter()
    with pytest.raises(RuntimeError, match=r"cut off after 0\.4 seconds"):
        serve_bench(server.url, PROMPTS, concurrencies=[2], requests=2, seconds=20, timeout=0.4)
    assert time.perf_counter() - began < 6 and len(server.seen) == 2


def test_the_time_of_a_concurrency_cuts_off_what_is_under_way(engine):
    server, began = engine(answer=DRIPS["comments"]), time.perf_counter()
    with pytest.raises(RuntimeError, match=r"cut off after 0\.[89]"):
        serve_bench(server.url, PROMPTS, concurrencies=[1], requests=50, seconds=1, timeout=20)
    assert time.perf_counter() - began < 6 and len(server.seen) == 1


def test_a_server_that_takes_in_nothing_of_a_long_prompt_is_left_in_time(engine):
    class Deaf(Handler):
        def handle(self):
            time.sleep(8)

    server, began = engine(), time.perf_counter()
    server.RequestHandlerClass = Deaf
    long = [Prompt("a", "own", None, "word " * 3_000_000, 8, 1.0)]  # more than the buffers of both ends hold
    with pytest.raises(RuntimeError, match=r"cut off after 0\.4 seconds"):
        serve_bench(server.url, long, concurrencies=[1], requests=1, seconds=9, timeout=0.4)
    assert time.perf_counter() - began < 6


def test_metrics_that_drip_delay_nothing_and_are_said_to_be_unknown(engine, tmp_path, capsys):
    server = engine(pause=0.001, page=lambda handler: handler.drip(b"# more\n", b"HTTP/1.1 200 OK\r\n\r\n"))
    began, out = time.perf_counter(), tmp_path / "serve.json"
    result = serve_bench(server.url, PROMPTS, concurrencies=[1], requests=2, seconds=4, out=out)
    assert time.perf_counter() - began < 6 and [row["status"] for row in result["rows"]] == ["ok", "ok"]
    assert result["levels"][0]["metrics"] == {} and "could not be read" in result["levels"][0]["metrics_note"]
    assert main(["report", str(out)]) == 0 and "at concurrency 1: the server's /metrics" in capsys.readouterr().out


# ---- what a stream may hold


def events(*chunks, tokens=13):
    """The text of a stream of these chunks, with the usage at its end."""
    usage = [{"choices": [], "usage": {"completion_tokens": tokens}}]
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in [*chunks, *usage]) + "data: [DONE]\n\n"


def delta(**fields):
    return {"choices": [{"delta": fields}]}


def thinks(*pauses_and_chunks, tokens, details=None):
    """A server that waits so long before each chunk."""

    def answer(handler, body):
        handler.wfile.write(HEADERS)
        for pause, chunk in pauses_and_chunks:
            time.sleep(pause)
            handler._event(chunk)
        handler._event({"choices": [], "usage": {"completion_tokens": tokens, "completion_tokens_details": details}})

    return answer


@pytest.mark.parametrize(
    "thought",
    [
        delta(reasoning_content="hm"),
        delta(reasoning="hm", content=""),
        delta(content=[{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}]),
    ],
)
def test_tokens_that_are_thought_aloud_count_and_the_first_of_the_answer_has_a_time_of_its_own(engine, thought):
    chunks = [(0.01, delta(role="assistant", content="")), *[(0.01, thought)] * 50, *[(0.01, delta(content="x"))] * 2]
    result = serve_bench(
        engine(answer=thinks(*chunks, tokens=52)).url, PROMPTS, concurrencies=[10], requests=10, max_tokens=52
    )
    for row in result["rows"]:
        assert row["status"] == "ok" and row["num_chunks"] == row["num_tokens"] == 52
        assert row["ttft_sec"] + 0.4 < row["ttft_content_sec"] < row["total_sec"]
    found = levels_table(result).iloc[0]
    assert found.per_token_p50_sec > 0.009 and found.ttft_p50_sec + 0.4 < found.ttft_content_p50_sec


def test_tokens_that_are_thought_in_silence_are_not_spread_over_the_time_of_the_answer(engine):
    answer = thinks((0.1, delta(content="x")), (0.1, delta(content="x")), tokens=52, details={"reasoning_tokens": 50})
    result = serve_bench(engine(answer=answer).url, PROMPTS, concurrencies=[10], requests=10)
    assert {row["num_hidden_tokens"] for row in result["rows"]} == {50}
    assert levels_table(result).per_token_p50_sec[0] > 0.09


def test_an_answer_that_comes_in_one_piece_has_no_time_per_token(engine):
    answer = thinks((0, delta(content="all of it")), tokens=5)
    result = serve_bench(engine(answer=answer).url, PROMPTS, concurrencies=[5], requests=10)
    assert levels_table(result).per_token_p50_sec.isna().all() and levels_table(result).n[0] == 10


ANSWERS = {
    "reasoning without content": (delta(reasoning_content="hm"), False),
    "a tool call": (delta(content=None, tool_calls=[{"index": 0, "function": {"arguments": "{"}}]), False),
    "a function call": (delta(function_call={"arguments": "{"}), False),
    "parts of content": (delta(content=[{"type": "text", "text": "Hi"}]), True),
    "a refusal": (delta(refusal="I would rather not"), True),
    "plain text": ({"choices": [{"text": "Hi"}]}, True),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_whatever_is_generated_is_an_answer(engine, name):
    chunk, has_content = ANSWERS[name]
    server = engine(answer=lambda handler, body: handler.reply(events(chunk, chunk)))
    for row in serve_bench(server.url, PROMPTS, concurrencies=[1], requests=2)["rows"]:
        assert (row["status"], row["num_chunks"], row["num_tokens"]) == ("ok", 2, 13)
        assert row["ttft_sec"] > 0 and (row["ttft_content_sec"] is not None) == has_content


PLAIN = events({"choices": [{"text": "a"}]}, {"choices": [{"text": "b"}]})
FORMS = {
    "U+2028 in a chunk": PLAIN.replace('"a"', '"a\u2028b\u0085c"'),
    "a blank after [DONE]": PLAIN.replace("[DONE]", "[DONE] "),
    "comments": ": hello\n\n" + PLAIN.replace("\n\n", "\n: ping\n\n"),
    "data over several lines": PLAIN.replace('{"text"', '\ndata: {"text"'),
    "carriage returns": PLAIN.replace("\n", "\r"),
    "both line ends": PLAIN.replace("\n", "\r\n"),
    "other fields": PLAIN.replace("data: {", "id: 1\nretry: 10\nevent: message\ndata: {"),
    "no blank after the colon": PLAIN.replace("data: ", "data:"),
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_of_a_stream_is_read_as_its_standard_says(engine, name):
    server = engine(answer=lambda handler, body: handler.reply(FORMS[name]))
    row = serve_bench(server.url, PROMPTS, concurrencies=[1], requests=1)["rows"][0]
    assert (row["status"], row["num_chunks"], row["num_tokens"]) == ("ok", 2, 13)


ERRORS = {
    "an error object": "data: " + json.dumps({"error": {"message": "out of blocks", "code": 500}}) + "\n\n",
    "an older error object": 'data: {"object": "error", "message": "out of blocks"}\n\n',
    "an event of its own": 'event: error\ndata: {"message": "out of blocks"}\n\n',
}


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize("rest", ["", PLAIN])
def test_an_error_in_the_middle_of_a_stream_is_a_failure_whatever_follows(engine, name, rest):
    begun = "".join(PLAIN.partition("\n\n")[:2])

    def answer(handler, body):
        handler.reply(begun + ERRORS[name] + rest if len(handler.server.seen) == 2 else PLAIN)

    result = serve_bench(engine(answer=answer).url, PROMPTS, concurrencies=[1], requests=3)
    first, failed, last = result["rows"]
    assert first["status"] == last["status"] == "ok"
    assert failed["status"].startswith("failed: ") and "out of blocks" in failed["status"]
    assert failed["num_tokens"] is None and levels_table(result).failed[0] == 1


BROKEN = {
    "no JSON": ("data: {\n\n", "JSONDecodeError"),
    "no object": ("data: [1]\n\n", "AttributeError"),
    "no count": (events({"choices": [{"text": "a"}]}, tokens=None), "no usage"),
    "a count that is text": (events({"choices": [{"text": "a"}]}, tokens="13"), "no usage"),
    "a count of nothing": (events({"choices": [{"text": "a"}]}, tokens=0), "no usage"),
    "usage of another form": (PLAIN.replace('{"completion_tokens": 13}', "[13]"), "AttributeError"),
    "no text": (events(delta(role="assistant", content="")), "no text"),
    "nothing": ("", "no text"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_stream_that_is_none_is_a_failure_with_a_reason(engine, name):
    payload, why = BROKEN[name]
    server = engine(answer=lambda handler, body: handler.reply(payload))
    with pytest.raises(RuntimeError, match=f"answered no request: failed: .*{why}"):
        serve_bench(server.url, PROMPTS, concurrencies=[1], requests=1)


def test_an_answer_that_is_no_stream_is_shown(engine):
    server = engine(answer=lambda handler, body: handler.reply('{"choices": []}', kind="application/json"))
    with pytest.raises(RuntimeError, match="answered 200 with application/json, which is not what was asked for"):
        serve_bench(server.url, PROMPTS, concurrencies=[1], requests=1)


# ---- metrics


def test_sglangs_means_are_shown_as_they_stand_and_without_the_bonus_token(engine):
    page = """# TYPE sglang:spec_accept_length gauge
sglang:spec_accept_length{dp_rank="0",model_name="m"} 2.0
sglang:spec_accept_length{dp_rank="1",model_name="m"} 3.0
# TYPE sglang:spec_accept_rate gauge
sglang:spec_accept_rate{dp_rank="0"} 0.5
sglang:spec_num_draft_tokens{dp_rank="0"} 4.0
"""
    assert parse_metrics(page) == ("sglang", {"accept_length": 2.5, "accept_rate": 0.5})
    server = engine(pause=0, page=lambda handler: handler.reply(page))
    result = serve_bench(server.url, PROMPTS, concurrencies=[1], requests=2)
    found = levels_table(result).iloc[0]
    assert result["engine"] == "sglang" and (found.accepted_fraction, found.accepted_per_draft) == (0.5, 1.5)
    nothing_drafted = growth({}, {"accept_length": 0.0, "accept_rate": 0.0})[0]
    result["levels"][0]["metrics"] = nothing_drafted
    assert levels_table(result)[["accepted_fraction", "accepted_per_draft"]].isna().all(axis=None)


def test_a_page_with_odd_lines_loses_no_counter():
    odd = 'other{a="} 1\n# TYPE\n' + VLLM + 'vllm:spec_decode_num_drafts_total{m="a\u2028b"} 2.0 1700000000\n\x00\n'
    assert parse_metrics(odd)[1]["drafts"] == 12.0


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (
            {"drafts": 10.0, "accepted_tokens": 5.0},
            {"drafts": 2.0, "accepted_tokens": 9.0},
            "the counter drafts went from 10 to 2",
        ),
        ({"drafts": 10.0}, {"drafts": float("nan")}, "the counter drafts went from 10 to nan"),
        ({"drafts": 10.0}, {"drafts": float("inf")}, "from 10 to inf"),
        ({"drafts": 10.0}, {}, "from 10 to nan"),
    ],
)
def test_what_counters_grew_by_is_unknown_where_one_was_reset_or_is_no_number(before, after, said):
    grown, why = growth(before, after)
    assert set(grown.values()) == {None} and said in why


def test_a_server_that_is_started_again_in_the_middle_gives_no_acceptance_and_a_sentence(engine, tmp_path, capsys):
    pages = iter(["50 200 100", "1 4 3", "1 4 NaN"])

    def page(handler):
        names = ("drafts", "draft_tokens", "accepted_tokens")
        counts = next(pages).split()
        handler.reply("".join(f"llamacpp:spec_decode_num_{n}_total {v}\n" for n, v in zip(names, counts, strict=True)))

    out = tmp_path / "serve.json"
    result = serve_bench(engine(pause=0, page=page).url, PROMPTS, concurrencies=[1], requests=1, out=out)
    assert levels_table(result)[["accepted_fraction", "accepted_per_draft"]].isna().all(axis=None)
    kept = json.loads(out.read_text(), parse_constant=pytest.fail)
    assert kept["levels"][0]["metrics"] == {"drafts": None, "draft_tokens": None, "accepted_tokens": None}
    assert main(["report", str(out)]) == 0 and "drafts went from 50 to 1" in capsys.readouterr().out


# ---- what is sent, and what is kept


def test_options_replace_what_is_said_elsewhere_and_the_result_says_what_was_sent(engine):
    server = engine(pause=0)
    options = {"temperature": 0.5, "max_tokens": 7, "model": "other", "stream_options": {"include_usage": True, "x": 1}}
    result = serve_bench(server.url, PROMPTS, concurrencies=[1], requests=2, model="m", options=options)
    for _, body in server.seen:
        assert {name: body[name] for name in options} == options
    assert {name: result["settings"][name] for name in options} == options


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"options": {"stream": False}}, "leave stream out of the options"),
        ({"options": {"prompt": "a", "messages": []}}, "leave messages, prompt out of the options"),
        ({"options": {"top_p": float("nan")}}, "cannot be written as JSON"),
        ({"temperature": float("inf")}, "cannot be written as JSON"),
        ({"seconds": float("nan")}, "seconds must be a finite number above 0, got nan"),
        ({"timeout": float("inf")}, "timeout must be a finite number above 0, got inf"),
        ({"requests": 2.5}, "requests must be a whole number above 0 and at most 10000, got 2.5"),
        ({"max_tokens": True}, "max_tokens must be a whole number"),
        ({"concurrencies": [1, -1]}, "concurrency must be a whole number above 0 and at most 10000, got -1"),
        ({"key_env": "SPECNB_NO_SUCH_KEY"}, "the environment variable SPECNB_NO_SUCH_KEY holds no key"),
        ({"out": Path("/")}, "is a folder; give the name of a file"),
    ],
)
def test_what_cannot_be_sent_or_kept_is_refused_before_the_first_request(engine, more, message):
    server = engine(pause=0)
    with pytest.raises(ValueError, match=message):
        serve_bench(server.url, PROMPTS, **more)
    assert not server.seen


def test_a_prompt_that_is_no_text_is_refused_before_the_first_request(engine):
    server = engine(pause=0)
    with pytest.raises(ValueError, match="surrogates not allowed"):
        serve_bench(server.url, [*PROMPTS, Prompt("c", "own", None, "\ud800", 8, 1.0)], concurrencies=[1], requests=3)
    assert not server.seen


@pytest.mark.parametrize("base", ["http://h:port", "http://h:99999", "http://[::1", "http:///v1", "http://h:1/\n"])
def test_a_base_url_that_leads_nowhere_is_refused(base):
    with pytest.raises(ValueError, match="no base URL"):
        serve_bench(base, PROMPTS)


def test_a_key_comes_from_the_environment_and_is_kept_nowhere(engine, tmp_path, monkeypatch, capsys):
    def answer(handler, body):
        sent = handler.headers.get("Authorization")
        if sent != "Bearer s3cret" or handler.server.strict:
            return handler.reply(f"wrong key: {sent}", status=401, kind="text/plain")
        handler.reply(PLAIN)

    server, out = engine(answer=answer), tmp_path / "serve.json"
    server.strict = False
    command = ["serve-bench", "--endpoint", server.url, "--concurrency", "1", "--requests", "1", "--out", str(out)]
    assert main(command) == 1 and "name that with --key-env" in capsys.readouterr().err
    monkeypatch.setenv("SPECNB_TEST_KEY", " s3cret\n")
    assert main([*command, "--key-env", "SPECNB_TEST_KEY"]) == 0
    server.strict = True
    assert main([*command[:-2], "--key-env", "SPECNB_TEST_KEY"]) == 1
    shown = capsys.readouterr()
    assert "***" in shown.err and "s3cret" not in out.read_text() + shown.out + shown.err
    with pytest.raises(ValueError, match="use --key-env instead") as caught:
        serve_bench("http://user:s3cret@127.0.0.1:1", PROMPTS)
    assert "s3cret" not in str(caught.value)


def test_a_concurrency_at_which_everything_fails_is_kept_as_such(engine):
    def answer(handler, body):
        handler.reply(PLAIN) if len(handler.server.seen) <= 2 else handler.reply("busy", status=503)

    result = serve_bench(engine(answer=answer).url, PROMPTS, concurrencies=[1, 2], requests=2)
    found = levels_table(result)
    assert found.n.tolist() == [2, 0] and found.failed.tolist() == [0, 2] and found.tokens_per_sec[1] == 0


def test_a_running_event_loop_such_as_a_notebooks_is_no_obstacle(engine):
    server = engine(pause=0)

    async def cell():
        return serve_bench(server.url, PROMPTS, concurrencies=[1], requests=2)

    assert len(asyncio.run(cell())["rows"]) == 2


def test_what_is_finished_is_kept_when_ctrl_c_ends_the_command(engine, tmp_path):
    def answer(handler, body):
        handler.reply(PLAIN) if len(handler.server.seen) == 1 else DRIPS["comments"](handler, body)

    server, out = engine(answer=answer), tmp_path / "serve.json"
    command = ["-m", "specnb", "serve-bench", "--endpoint", server.url, "--concurrency", "1,2", "--requests", "1"]
    root = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    with subprocess.Popen([sys.executable, *command, "--out", str(out)], cwd=root, env=environment) as running:
        deadline = time.monotonic() + 60
        while len(server.seen) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        running.send_signal(signal.SIGINT)
        assert running.wait(10) == 130
    assert [level["concurrency"] for level in json.loads(out.read_text())["levels"]] == [1]


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parents[1] / "data").rglob("*-serve-*.json")), ids=lambda p: p.stem
)
def test_every_result_of_a_server_that_is_kept_can_be_shown(path, capsys):
    assert main(["report", str(path)]) == 0 and "tokens_per_sec" in capsys.readouterr().out
