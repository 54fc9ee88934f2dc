"""Speculation on against off, behind OpenAI-compatible HTTP servers: do both give texts of one law?

It knows `/v1/completions` and bounded requests. It contacts the two servers it is given and nothing else: no proxy, no
redirect, no setting of the environment. It does not know the model, so it compares the servers with each other only.
Read `specnb.audit` first.
"""

import json
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from specnb import gof
from specnb.audit import LEVEL, report_of
from specnb.serving.client import base_url, client_options

MAX_REQUESTS = 100_000


def audit_endpoint(
    on, off, *, prompt="Once upon a time", model=None, n=1_000, num_tokens=2, temperature=1.0, concurrency=4,
    seconds=600, timeout=30, options=None, level=LEVEL, track=iter,
):  # fmt: skip
    """Two-sample test of the first tokens a server gives with speculation `on` and `off`.

    Parameters
    ----------
    on, off : str
        Base URLs, such as "http://127.0.0.1:8111"; the same weights, dtype and sampling defaults behind both.
    prompt, model : str
        The same for both; without a model none is named.
    n : int
        Requests to each server, sent in turns. Each gives one text, counted as one cell.
    num_tokens : int, length of a text
        Tokens are compared where both servers return them (logprobs), else the text.
    concurrency, seconds, timeout : numbers
        Requests under way at once; for everything; for one request. When time is up the texts so far are tested.
    options : dict, optional; more fields of the request, such as {"top_k": 0}, None leaves one out

    Returns
    -------
    Report, by `gof.two_sample`; "cannot test" also where each server gives one text every time

    Raises
    ------
    ValueError, RuntimeError
        For two equal or malformed URLs or bounds not above 0; for a server that does not answer with a completion.
    """
    urls = {arm: f"{base_url(base)}/v1/completions" for arm, base in (("on", on), ("off", off))}
    if urls["on"] == urls["off"]:
        raise ValueError(f"both are {urls['on']}: name two servers, one with speculation and one without")
    if min(n, num_tokens, concurrency, seconds, timeout) <= 0 or n > MAX_REQUESTS:
        raise ValueError(f"n (at most {MAX_REQUESTS}), num_tokens, concurrency, seconds and timeout must be above 0")
    body = {"model": model, "prompt": prompt, "max_tokens": num_tokens, "temperature": temperature, "logprobs": 1}
    body = {name: value for name, value in {**body, **(options or {})}.items() if value is not None}
    answers = _ask(urls, body, n, concurrency, seconds, timeout, track)
    by_tokens = all(tokens for arm in answers.values() for tokens, _ in arm)
    texts = {arm: [tokens[:num_tokens] if by_tokens else text for tokens, text in answers[arm]] for arm in urls}
    result, found = _compare(Counter(texts["on"]), Counter(texts["off"]), level)
    sizes = [len(texts[arm]) for arm in urls]
    return report_of(
        result,
        found,
        level,
        num_equivalent=sizes[0] * sizes[1] // sum(sizes),  # so many draws tested against a known law have this power
        tested=f"at temperature {temperature:g} the first {num_tokens} tokens have one law, speculation on or off",
        not_tested="that this law is the model's; later tokens, other prompts; greedy equality",
        settings={**urls, **body, "compared": "tokens" if by_tokens else "text", "num_texts": sizes},
    )


def _compare(on, off, level):
    """(GofResult, in words) of two `Counter`s of texts."""
    cells = sorted({*on, *off})
    result = gof.two_sample(*([counts[cell] for cell in cells] for counts in (on, off)), alpha=level)
    found = f"{on.total()} and {off.total()} texts, {len(cells)} different, {result.num_pooled} pooled"
    if len(on) == len(off) == 1:
        result = result._replace(verdict="cannot test")
        same = "the same" if len(cells) == 1 else "but not the same, so look at the seeds and at greedy ids"
        found += f"; each server gives one text every time ({same}): these are no random draws"
    return result, found


def _ask(urls, body, n, concurrency, seconds, timeout, track):
    """{"on" and "off": list of (tokens, text)}; the servers are asked in turns, so that what drifts hits both."""
    import httpx

    deadline = time.monotonic() + seconds
    with (
        httpx.Client(**client_options(concurrency, min(timeout, seconds))) as client,
        ThreadPoolExecutor(concurrency) as pool,
    ):
        stopped = threading.Event()

        def one():
            if stopped.is_set() or time.monotonic() > deadline:
                return None
            try:
                return {arm: _complete(client, url, body) for arm, url in urls.items()}
            except BaseException:
                stopped.set()
                raise

        futures = [pool.submit(one) for _ in range(n)]
        try:
            pairs = [pair for pair in (future.result() for future in track(futures)) if pair]
        finally:
            stopped.set()
    if not pairs:
        raise RuntimeError(f"no text came within {seconds} seconds; allow more")
    return {arm: [pair[arm] for pair in pairs] for arm in urls}


def _complete(client, url, body):
    """One completion: (tuple of tokens, empty where none are offered; text)."""
    import httpx

    try:
        response = client.post(url, json=body)
    except httpx.HTTPError as error:
        why = str(error) or type(error).__name__
        raise RuntimeError(f"{url} cannot be reached: {why}. Is the server up, and the timeout long enough?") from error
    if response.status_code != 200:
        said = response.text.strip()[:200]
        raise RuntimeError(
            f"{url} answered {response.status_code}: {said!r}. Check base URL, model name and the options sent "
            "(logprobs=None leaves logprobs out); redirects are not followed"
        )
    try:
        choice = json.loads(response.text, parse_constant=_refuse)["choices"][0]
        text, offered = choice["text"], choice.get("logprobs") or {}
        # The older form lists tokens, the newer one objects with a token each.
        tokens = offered.get("tokens") or [one["token"] for one in offered.get("content") or ()]
        if not isinstance(text, str) or not all(isinstance(token, str | int) for token in tokens):
            raise TypeError("text and tokens must be text")
        return tuple(map(str, tokens)), text
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise RuntimeError(
            f"{url} answered what is no completion ({type(error).__name__}: {error}): {response.text[:200]!r}. "
            "Is it an OpenAI-compatible /v1/completions?"
        ) from error


def _refuse(constant):
    raise ValueError(f"{constant} is no JSON number")
