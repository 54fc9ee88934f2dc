"""A concurrency sweep against a running OpenAI-compatible server: latency, throughput, acceptance.

It knows streamed completions and Prometheus metrics. It contacts the server it is given and nothing else: no
proxy, no redirect, no setting of the environment. It does not start servers. Read `specnb.measure.latency` beside it.
"""

import asyncio
import json
import re
import time
from collections import defaultdict

import pandas as pd

from specnb.measure import results
from specnb.measure.latency import quantile
from specnb.serving.client import base_url, client_options

SCHEMA = "specnb-serve/1"
MAX_REQUESTS = 10_000
# vLLM and llama.cpp share these stems; the first ends in _total in one and not in the other.
METRIC = re.compile(
    r"^(?P<engine>\w+):spec_decode_num_(?P<name>drafts|draft_tokens|accepted_tokens|accepted_tokens_per_pos)(_total)?"
    r"(\{(?P<labels>[^}]*)\})? (?P<value>\S+)",
    re.M,
)
RULES = {
    "vllm": "rejection sampling unless told otherwise, the rule of this project",
    "llamacpp": "token matching unless told otherwise: a draft is kept where the target's own draw equals it, which is "
    "lossless and accepts less",
}


def serve_bench(
    base, prompts, *, concurrencies=(1, 2, 4), requests=16, max_tokens=64, temperature=0.0, model=None, seconds=300,
    timeout=60, options=None, server=None, out=None, command=None, track=iter,
):  # fmt: skip
    """Send `requests` streamed completions at each concurrency; a result with a row for each request.

    Parameters
    ----------
    base : str
        Base URL, such as "http://127.0.0.1:8111".
    prompts : list of Prompt
        Used in turns, the same ones at every concurrency; messages go to the chat completions.
    concurrencies, requests : list of int, int
        Requests under way at once, and how many are sent in all at each.
    max_tokens, temperature, model, options : of each request; `options` are more fields
    seconds, timeout : numbers
        For each concurrency; for one request. When time is up no more requests are sent.
    server : dict, optional
        What is known of the server, such as version, weights and flags; kept in the file.
    out : path, optional
        Written after each concurrency, so that what is finished is kept.
    track : callable
        Wraps the list of concurrencies.

    Returns
    -------
    dict
        `rows`: concurrency, order, status, start_sec (since the concurrency began), ttft_sec, total_sec, num_tokens,
        num_chunks. `levels`: for each concurrency wall_sec, and from /metrics, where the server has it, what its
        counters grew by. `engine` and `rule`: by the names of the metrics; None where they say nothing.

    Raises
    ------
    ValueError, RuntimeError
        For a malformed URL or bounds not above 0; where no request was answered, with what the server said.
    """
    url = base_url(base)
    bounds = [*concurrencies, requests, max_tokens, seconds, timeout]
    if not prompts or not len(concurrencies) or min(bounds) <= 0 or requests > MAX_REQUESTS:
        raise ValueError(
            f"give prompts, and concurrencies, requests (at most {MAX_REQUESTS}), max_tokens, seconds, timeout above 0"
        )
    body = {"model": model, "max_tokens": max_tokens, "temperature": temperature, "stream": True}
    body |= {"stream_options": {"include_usage": True}, **(options or {})}
    body = {name: value for name, value in body.items() if value is not None}
    result = {**results.header(SCHEMA, command), "server": server, "engine": None, "rule": None}
    result |= {"settings": {**body, "requests": requests, "num_prompts": len(prompts), "seconds": seconds}}
    result |= {"levels": [], "rows": []}
    for concurrency in track(list(concurrencies)):
        bodies = [{**body, **_asked(prompts[i % len(prompts)])} for i in range(requests)]
        rows, level, engine = asyncio.run(_level(url, bodies, concurrency, seconds, timeout))
        if all(row["status"] != "ok" for row in rows):
            raise RuntimeError(f"{url} answered no request: {rows[0]['status'] if rows else 'the time was up'}")
        result["rows"] += [{"concurrency": concurrency, **row} for row in rows]
        result["levels"].append({"concurrency": concurrency, **level})
        result |= {"engine": engine, "rule": RULES.get(engine)}
        if out is not None:
            results.write(out, result)
    return result


async def _level(url, bodies, concurrency, seconds, timeout):
    import httpx

    async with httpx.AsyncClient(**client_options(concurrency + 1, min(timeout, seconds))) as client:
        (_, before), began = await _metrics(client, url), time.perf_counter()
        free, rows = asyncio.Semaphore(concurrency), []

        async def one(order, body):
            async with free:
                if time.perf_counter() - began > seconds:
                    return
                started = time.perf_counter()
                path = "chat/completions" if "messages" in body else "completions"
                row = await _stream(client, f"{url}/v1/{path}", body)
                rows.append({"order": order, "start_sec": started - began, **row})

        await asyncio.gather(*(one(order, body) for order, body in enumerate(bodies)))
        wall = time.perf_counter() - began
        engine, after = await _metrics(client, url)
    grown = {name: count - before.get(name, 0.0) for name, count in after.items()}
    return sorted(rows, key=lambda row: row["order"]), {"wall_sec": wall, "metrics": grown}, engine


async def _stream(client, url, body):
    """One request: time of the first chunk with text, of the last, tokens by the server's own count."""
    import httpx

    began, first, last, chunks, tokens = time.perf_counter(), None, None, 0, None
    try:
        async with client.stream("POST", url, json=body) as response:
            if response.status_code != 200:
                said = (await response.aread()).decode(errors="replace").strip()[:200]
                return _row(f"failed: answered {response.status_code}: {said}")
            async for line in response.aiter_lines():
                if not line.startswith("data:") or line.endswith("[DONE]"):
                    continue
                event = json.loads(line.removeprefix("data:"))
                if any(_text(choice) for choice in event.get("choices") or ()):
                    last = time.perf_counter()
                    first, chunks = first or last, chunks + 1
                tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    except (httpx.HTTPError, ValueError, AttributeError) as error:
        return _row(f"failed: {type(error).__name__}: {error}")
    if first is None or tokens is None:
        return _row("failed: the stream held no text or no usage; is stream_options supported?")
    return _row("ok", first - began, last - began, tokens, chunks)


def _asked(prompt):
    return {"prompt": prompt.text} if prompt.messages is None else {"messages": prompt.messages}


def _text(choice):
    return choice.get("text") or (choice.get("delta") or {}).get("content")


def _row(status, *measured):
    names = ("ttft_sec", "total_sec", "num_tokens", "num_chunks")
    return {"status": status, **dict(zip(names, measured or [None] * 4, strict=True))}


async def _metrics(client, url):
    """(engine, counters of speculation) of the server now; (None, {}) where it offers none."""
    import httpx

    try:
        response = await client.get(f"{url}/metrics")
        text = response.text if response.status_code == 200 else ""
    except httpx.HTTPError:
        text = ""
    return parse_metrics(text)


def parse_metrics(text):
    """(engine, counters of speculation) of a Prometheus page, summed over all labels but the position.

    Examples
    --------
    >>> parse_metrics('vllm:spec_decode_num_drafts_total{engine="0"} 7.0')
    ('vllm', {'drafts': 7.0})
    """
    found, engine = defaultdict(float), None
    for match in METRIC.finditer(text):
        position = re.search(r'position="(\d+)"', match["labels"] or "")
        name = match["name"] if position is None else f"{match['name']}_{position[1]}"
        found[name] += float(match["value"])
        engine = match["engine"]
    return engine, dict(found)


def table(result):
    """A line for each concurrency.

    Returns
    -------
    DataFrame
        `n` answered and `failed`; `tokens_per_sec`, all requests over the wall time; quantiles of `ttft_sec`, and of
        time per output token after the first, `(total - ttft) / (tokens - 1)`; `accepted_fraction` (accepted over
        drafted) and `accepted_per_draft` (tokens a block), from the server's own counters.
    """
    lines, rows = [], pd.DataFrame(result["rows"])
    for level in result["levels"]:
        part = rows[rows.concurrency == level["concurrency"]]
        done = part[part.status == "ok"]
        per_token = (done.total_sec - done.ttft_sec) / (done.num_tokens - 1).where(done.num_tokens > 1)
        counted = level["metrics"]
        accepted = counted.get("accepted_tokens", 0)
        lines.append(
            {
                "concurrency": level["concurrency"],
                "n": len(done),
                "failed": len(part) - len(done),
                "tokens_per_sec": done.num_tokens.sum() / level["wall_sec"],
                **{f"ttft_p{100 * q:g}_sec": quantile(done.ttft_sec.astype(float), q) for q in (0.5, 0.9)},
                **{f"per_token_p{100 * q:g}_sec": quantile(per_token.dropna().astype(float), q) for q in (0.5, 0.9)},
                "accepted_fraction": accepted / counted["draft_tokens"] if counted.get("draft_tokens") else None,
                "accepted_per_draft": accepted / counted["drafts"] if counted.get("drafts") else None,
            }
        )
    return pd.DataFrame(lines)
