"""A concurrency sweep against a small local server that streams like an engine does."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from specnb.cli import main
from specnb.measure.prompts import Prompt
from specnb.serving.load import parse_metrics, serve_bench, table

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

    def __init__(self, *, pause=0.04, speculates=True, status=200, usage=True):
        super().__init__(("127.0.0.1", 0), Handler)
        self.pause, self.speculates, self.status, self.usage = pause, speculates, status, usage
        self.url, self.lock, self.seen = f"http://127.0.0.1:{self.server_port}", threading.Lock(), []
        self.busy = self.most_busy = self.done = 0


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        engine = self.server
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
        self.send_response(engine.status)
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
    found = table(result).iloc[0]
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
    found = table(result)
    assert found.concurrency.tolist() == [1, 3] and found.tokens_per_sec[1] > 1.5 * found.tokens_per_sec[0]
    assert found.accepted_fraction.isna().all() and result["engine"] is None and result["rule"] is None


def test_when_the_time_is_up_no_more_requests_are_sent(engine):
    server = engine(pause=0.05)
    result = serve_bench(server.url, PROMPTS, concurrencies=[1], requests=1_000, seconds=0.5)
    assert 1 <= len(result["rows"]) == len(server.seen) < 10


def test_a_server_that_answers_nothing_is_one_clear_error(engine):
    with pytest.raises(RuntimeError, match="answered no request: failed: answered 503: overloaded"):
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
        ("http://h:1", {"concurrencies": []}, "give prompts, and concurrencies"),
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
