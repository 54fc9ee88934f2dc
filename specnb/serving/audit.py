"""Speculation on against off, behind OpenAI-compatible HTTP servers: do both give texts of one law?

It knows `/v1/completions` and bounded requests. It contacts the two servers it is given and nothing else: no proxy, no
redirect, no setting of the environment. It does not know the model, so it compares the servers with each other only.
Read `specnb.audit` first.
"""

import asyncio
import contextlib
import json
from collections import Counter
from typing import NamedTuple

from specnb import gof
from specnb.audit import LEVEL, report_of
from specnb.serving.client import base_url, body_of, check_bounds, each, open_client, refusal, run, without_key

MAX_REQUESTS = 100_000
WAITS_SEC = (0.1, 0.5, 2.0)  # Before a request is sent again that met a server which was busy or out of reach.
PASSING = (408, 425, 429, 500, 502, 503, 504)  # The same request may be answered a moment later.


def audit_endpoint(
    on, off, *, prompt="Once upon a time", model=None, n=1_000, num_tokens=2, temperature=1.0, concurrency=4,
    seconds=600, timeout=30, options=None, key_env=None, level=LEVEL, track=iter,
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
        Tokens are compared where both servers list all of them in the same way (logprobs), else the text.
    concurrency, seconds, timeout : numbers
        Requests under way at once; for everything; for one request. When time is up the texts so far are tested.
    options : dict, optional
        More fields of the request, such as {"top_k": 0}. They replace what is said elsewhere; None leaves one out.
    key_env : str, optional
        Name of the environment variable that holds the key, where the servers ask for one.

    Returns
    -------
    Report, by `gof.two_sample`; "cannot test" also where each server gives one text every time, and where the texts
    have different lengths

    Raises
    ------
    ValueError, RuntimeError
        For two equal or malformed URLs, bounds or a level out of range, before anything is sent; for a server that
        does not answer with a completion. A request that a server is too busy for is sent again up to three times.
    """
    urls = {arm: f"{base_url(base)}/v1/completions" for arm, base in (("on", on), ("off", off))}
    if urls["on"] == urls["off"]:
        raise ValueError(f"both are {urls['on']}: name two servers, one with speculation and one without")
    check_bounds(MAX_REQUESTS, n=n, num_tokens=num_tokens, concurrency=concurrency, seconds=seconds, timeout=timeout)
    if not 0 < level < 1:
        raise ValueError(f"level is a probability between 0 and 1, such as {LEVEL}, got {level}")
    fields = {"model": model, "prompt": prompt, "max_tokens": num_tokens, "temperature": temperature, "logprobs": 1}
    body = body_of(fields, options)
    if "max_tokens" in body:
        check_bounds(MAX_REQUESTS, max_tokens=body["max_tokens"])
    if body.get("stream"):
        raise ValueError("leave stream out of the options: an audit asks for whole completions")
    pairs, num_retries = run(_ask(urls, body, n, concurrency, seconds, timeout, key_env, track))
    if not pairs:
        raise RuntimeError(f"no text came within {seconds} seconds; allow more")
    answers = {arm: [pair[arm] for pair in pairs] for arm in urls}
    return _report(urls, body, answers, num_retries, level)


def _report(urls, body, answers, num_retries, level):
    limit, num_texts = body.get("max_tokens"), len(answers["on"])
    by_tokens = _listed_alike(answers, limit)
    texts = {arm: [one.tokens[:limit] if by_tokens else one.text for one in answers[arm]] for arm in urls}
    result, found = _compare(Counter(texts["on"]), Counter(texts["off"]), level)
    lengths = [sorted({one.num_tokens for one in answers[arm] if one.is_cut(limit)}) for arm in urls]
    if not by_tokens and all(lengths) and lengths[0] != lengths[1]:
        result = result._replace(verdict="cannot test")
        found += f"; texts of {lengths[0]} and of {lengths[1]} tokens, on and off, cannot be compared as texts"
    if num_retries:
        found += f"; {num_retries} requests had to be sent again"
    what = "the texts" if limit is None else f"the first {limit} tokens"
    temperature = body.get("temperature", "(left to the servers)")
    return report_of(
        result,
        found,
        level,
        num_equivalent=num_texts // 2,  # so many draws tested against a known law have this power
        tested=f"at temperature {temperature} {what} have one law, speculation on or off",
        not_tested="that this law is the model's; later tokens, other prompts; greedy equality",
        settings={**urls, **body, "compared": "tokens" if by_tokens else "text", "num_texts": [num_texts] * 2},
    )


def _listed_alike(answers, limit):
    """Whether both servers list all tokens, and list them alike: each text that both gave has tokens that both gave.

    A server may list only the first token of a block, or ids where the other lists words. Such lists differ although
    the texts have one law, so then the texts are compared.
    """
    if not all(one.lists_all(limit) for arm in answers.values() for one in arm):
        return False
    seen = {arm: {(one.text, one.tokens[:limit]) for one in answers[arm]} for arm in answers}
    shared = seen["on"] & seen["off"]
    texts = [{text for text, _ in seen[arm]} for arm in answers]
    return {text for text, _ in shared} == texts[0] & texts[1]


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


async def _ask(urls, body, n, concurrency, seconds, timeout, key_env, track):
    """(a list of {"on" and "off": Completion}, how many requests were sent again) until the time is up.

    The servers are asked in turns, so that what drifts hits both.
    """
    pairs, retries = [], []

    async def one(_):
        pairs.append({arm: await _complete(client, url, body, timeout, retries) for arm, url in urls.items()})

    async with open_client(concurrency, key_env) as client:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await each(track(range(n)), min(concurrency, n), one)
    return pairs, len(retries)


async def _complete(client, url, body, timeout, retries):
    """One `Completion`; a request that meets a busy server is sent again, and noted in `retries`."""
    for wait_sec in WAITS_SEC:
        try:
            return await _complete_once(client, url, body, timeout)
        except Busy:
            retries.append(url)
            await asyncio.sleep(wait_sec)
    return await _complete_once(client, url, body, timeout)


class Busy(RuntimeError):
    """A request failed in a way that may have passed a moment later."""


async def _complete_once(client, url, body, timeout):
    import httpx

    try:
        async with asyncio.timeout(timeout):
            response = await client.post(url, json=body)
    except TimeoutError as error:
        raise Busy(f"{url} gave no whole answer within {timeout:g} seconds; allow more, or is it down?") from error
    except httpx.HTTPError as error:
        raise Busy(f"{url} cannot be reached: {str(error) or type(error).__name__}. Is the server up?") from error
    if response.status_code != 200:
        raise (Busy if response.status_code in PASSING else RuntimeError)(
            f"{url} {refusal(client, response)}. Check base URL, model name and the options sent "
            "(logprobs=None leaves logprobs out)"
        )
    try:
        return Completion.of(json.loads(response.text, parse_constant=_refuse))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        said = without_key(client, response.text[:200])
        raise RuntimeError(
            f"{url} answered what is no completion ({type(error).__name__}: {error}): {said!r}. "
            "Is it an OpenAI-compatible /v1/completions?"
        ) from error


def _refuse(constant):
    raise ValueError(f"{constant} is no JSON number")


class Completion(NamedTuple):
    """A text, the tokens a server lists for it, how many it counts (None where it does not), and why it ended."""

    text: str
    tokens: tuple
    num_tokens: int | None
    finish_reason: str | None

    @classmethod
    def of(cls, said):
        choice, num_tokens = said["choices"][0], (said.get("usage") or {}).get("completion_tokens")
        offered = choice.get("logprobs") or {}
        # The older form lists tokens, the newer one objects with a token each, and often its id.
        listed = offered.get("tokens") or [one.get("id", one.get("token")) for one in offered.get("content") or ()]
        tokens = () if None in listed else tuple(map(str, listed))
        if not isinstance(choice["text"], str):
            raise TypeError("text must be text")
        counted = num_tokens if isinstance(num_tokens, int) else None
        return cls(choice["text"], tokens, counted, choice.get("finish_reason"))

    def lists_all(self, limit):
        """Whether the tokens listed are as many as were generated, or as were asked for."""
        if self.num_tokens is None and "".join(self.tokens) == self.text:
            return bool(self.tokens)
        generated = limit if self.num_tokens is None else min(self.num_tokens, limit or self.num_tokens)
        return generated is not None and 0 < generated <= len(self.tokens)

    def is_cut(self, limit):
        """Whether its length ended it, or should have."""
        counted = self.num_tokens is not None
        return counted and (self.finish_reason == "length" or (limit is not None and self.num_tokens > limit))
