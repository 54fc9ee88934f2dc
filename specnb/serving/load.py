"""A concurrency sweep against a running OpenAI-compatible server: latency, throughput, acceptance.

It sends streamed completions and looks at the server's metrics before and after. It contacts the server it is given and
nothing else: no proxy, no redirect, no setting of the environment. It does not start servers. Read
`specnb.measure.latency` beside it.
"""

import asyncio
import time

import pandas as pd

from specnb.measure import results
from specnb.measure.latency import quantile
from specnb.serving.client import base_url, body_of, check_bounds, each, open_client, run
from specnb.serving.metrics import growth, read_metrics
from specnb.serving.stream import stream

SCHEMA = "specnb-serve/1"
MAX_REQUESTS = 10_000
METRICS_SHARE = 0.1  # Of a concurrency's time, for each of the two looks at the metrics.
RULES = {
    "vllm": "rejection sampling unless told otherwise, the rule of this project",
    "llamacpp": "token matching unless told otherwise: a draft is kept where the target's own draw equals it, which is "
    "lossless and accepts less",
}


def serve_bench(
    base, prompts, *, concurrencies=(1, 2, 4), requests=16, max_tokens=64, temperature=0.0, model=None, seconds=300,
    timeout=60, options=None, key_env=None, server=None, out=None, command=None, track=iter,
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
    max_tokens, temperature, model, options : of each request
        `options` are more fields, and replace what is said elsewhere; None leaves one out.
    seconds, timeout : numbers
        For each concurrency with everything that belongs to it; for one request. When time is up no more requests are
        sent, and those under way are cut off and fail.
    key_env : str, optional
        Name of the environment variable that holds the key, where the server asks for one.
    server : dict, optional
        What is known of the server, such as version, weights and flags; kept in the file.
    out : path, optional
        Written after each concurrency, so that what is finished is kept.
    track : callable
        Wraps the list of concurrencies.

    Returns
    -------
    dict
        `rows`: concurrency, order, start_sec (since the concurrency began), and what `specnb.serving.stream.stream`
        says of the request. `levels`: for each concurrency wall_sec, and from /metrics, where the server has it, what
        its counters grew by, or a sentence why this is unknown. `engine` and `rule`: by the names of the metrics; None
        where they say nothing. `settings` holds the fields that were sent.

    Raises
    ------
    ValueError, RuntimeError
        For a malformed URL, bounds out of range or an `out` that cannot be written, before anything is sent; where no
        request was answered, with what the server said.
    """
    url, concurrencies = base_url(base), list(concurrencies)
    if not prompts or not concurrencies:
        raise ValueError("give at least one prompt and one concurrency")
    check_bounds(MAX_REQUESTS, requests=requests, max_tokens=max_tokens, seconds=seconds, timeout=timeout)
    for concurrency in concurrencies:
        check_bounds(MAX_REQUESTS, concurrency=concurrency)
    if fixed := sorted({"prompt", "messages", "stream"} & {*(options or {})}):
        raise ValueError(f"leave {', '.join(fixed)} out of the options: prompts are a list, answers are streamed")
    fields = {"model": model, "max_tokens": max_tokens, "temperature": temperature, "stream": True}
    body = body_of({**fields, "stream_options": {"include_usage": True}}, options)
    bodies = [body_of({**_asked(prompts[i % len(prompts)]), **body}, None) for i in range(requests)]
    results.check_outputs(out, replace=True)
    settings = {**body, "requests": requests, "num_prompts": len(prompts), "seconds": seconds, "timeout": timeout}
    result = {**results.header(SCHEMA, command), "server": server, "engine": None, "rule": None, "settings": settings}
    result |= {"levels": [], "rows": []}
    for concurrency in track(concurrencies):
        rows, level, engine = run(_level(url, bodies, concurrency, seconds, timeout, key_env))
        result["rows"] += [{"concurrency": concurrency, **row} for row in rows]
        if all(row["status"] != "ok" for row in result["rows"]):
            raise RuntimeError(f"{url} answered no request: {rows[0]['status'] if rows else 'the time was up'}")
        result["levels"].append({"concurrency": concurrency, **level})
        result |= {"engine": engine or result["engine"], "rule": RULES.get(engine or result["engine"])}
        if out is not None:
            results.write(out, result)
    return result


def _asked(prompt):
    return {"prompt": prompt.text} if prompt.messages is None else {"messages": prompt.messages}


async def _level(url, bodies, concurrency, seconds, timeout, key_env):
    """(rows, level, engine) of one concurrency, all of it within `seconds`."""
    clock, rows = asyncio.get_running_loop().time, []
    for_metrics = min(timeout, METRICS_SHARE * seconds)
    async with open_client(concurrency, key_env) as client:
        stop = clock() + seconds - for_metrics
        _, before = await read_metrics(client, url, for_metrics)
        began = time.perf_counter()

        async def one(numbered):
            order, body = numbered
            if (left := stop - clock()) <= 0:
                return
            start = {"order": order, "start_sec": time.perf_counter() - began}
            path = "chat/completions" if "messages" in body else "completions"
            rows.append({**start, **await stream(client, f"{url}/v1/{path}", body, min(timeout, left))})

        await each(enumerate(bodies), min(concurrency, len(bodies)), one)
        wall = time.perf_counter() - began
        engine, after = await read_metrics(client, url, for_metrics)
    grown, why_unknown = growth(before, after)
    level = {"wall_sec": wall, "metrics": grown, "metrics_note": why_unknown}
    return sorted(rows, key=lambda row: row["order"]), level, engine


def levels_table(result):
    """A line for each concurrency.

    Returns
    -------
    DataFrame
        `n` answered and `failed`; `tokens_per_sec`, all requests over the wall time; quantiles of `ttft_sec`, of
        `ttft_content_sec` where some answers think first, and of the time per output token after the first,
        `(total - ttft) / (tokens - 1)`, where the answer came in more than one chunk; `accepted_fraction` (accepted
        over drafted) and `accepted_per_draft` (tokens a block), from the server's own counters or, SGLang's, from its
        means over the last decoding steps.
    """
    rows = pd.DataFrame(result["rows"])
    timed = ["ttft_sec", "per_token_sec"]
    if "ttft_content_sec" in rows and (rows.ttft_content_sec != rows.ttft_sec)[rows.status == "ok"].any():
        timed.insert(1, "ttft_content_sec")
    levels = [(level, rows[rows.concurrency == level["concurrency"]]) for level in result["levels"]]
    return pd.DataFrame([_line(level, part, timed) for level, part in levels])


def _line(level, rows, timed):
    done = rows[rows.status == "ok"]
    # Tokens that were thought without being streamed were over before the first chunk.
    later = done.num_tokens - 1 - (done.num_hidden_tokens if "num_hidden_tokens" in done else 0)
    per_token = (done.total_sec - done.ttft_sec) / later.where((later > 0) & (done.num_chunks > 1))
    done = done.assign(per_token_sec=per_token)
    quantiles = {
        name.replace("_sec", f"_p{100 * share:g}_sec"): quantile(done[name].dropna().astype(float), share)
        for name in timed
        for share in (0.5, 0.9)
    }
    counts = {"concurrency": level["concurrency"], "n": len(done), "failed": len(rows) - len(done)}
    tokens_per_sec = done.num_tokens.sum() / level["wall_sec"]
    return {**counts, "tokens_per_sec": tokens_per_sec, **quantiles, **_acceptance(level["metrics"])}


def _acceptance(counted):
    """`accepted_fraction` and `accepted_per_draft`; None where the server says nothing of them."""
    accepted, drafted, drafts = (counted.get(name) for name in ("accepted_tokens", "draft_tokens", "drafts"))
    length = counted.get("accept_length")  # SGLang counts the bonus token, and shows 0 where nothing was drafted.
    return {
        "accepted_fraction": (accepted or 0) / drafted if drafted else counted.get("accept_rate") if length else None,
        "accepted_per_draft": (accepted or 0) / drafts if drafts else length - 1 if length else None,
    }
