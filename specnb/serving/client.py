"""The one HTTP client: it goes where it is told and nowhere else, and it is back when its time is up.

It knows URLs, keys and time limits. It does not know what is asked. Read `specnb.serving.audit` next.
"""

import asyncio
import json
import math
import numbers
import os
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit


def base_url(base):
    """The URL without a slash or /v1 at its end; a ValueError for what is none."""
    import httpx

    try:
        parts = urlsplit(base)
        leads = parts.scheme in ("http", "https") and parts.port != 0 and httpx.URL(base).host
    except (ValueError, httpx.InvalidURL):
        leads = False
    if leads and parts.username is not None:
        raise ValueError("the base URL holds a name or a key, which would be kept in the result; use --key-env instead")
    if not leads or parts.query or parts.fragment:
        raise ValueError(f"{base!r} is no base URL; write it like http://127.0.0.1:8111")
    return base.rstrip("/").removesuffix("/v1")


def check_bounds(most, **bounds):
    """A ValueError for the first bound that is not above 0; all but `seconds` and `timeout` are counts up to `most`."""
    for name, value in bounds.items():
        timed = name in ("seconds", "timeout")
        kind, above = (numbers.Real, math.inf) if timed else (numbers.Integral, most + 1)
        if isinstance(value, bool) or not isinstance(value, kind) or not 0 < value < above:
            what = "a finite number above 0" if timed else f"a whole number above 0 and at most {most}"
            raise ValueError(f"{name} must be {what}, got {value!r}")


def body_of(fields, options):
    """The request: `fields`, where `options` say otherwise theirs, and without those that are None.

    Examples
    --------
    >>> body_of({"temperature": 1.0, "logprobs": 1}, {"temperature": 0.5, "logprobs": None})
    {'temperature': 0.5}
    """
    body = {name: value for name, value in {**fields, **(options or {})}.items() if value is not None}
    try:
        json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, TypeError) as error:
        raise ValueError(f"the request cannot be written as JSON, so nothing was sent: {error}") from error
    return body


def open_client(concurrency, key_env=None):
    """An httpx client for so many requests at once, which sends the key in the environment variable `key_env`."""
    import httpx

    # httpx starts its own time limit again with every read. It gets none: callers limit the request as a whole.
    # Many servers close a connection after 5 idle seconds, httpx by default too: a request could meet the closing.
    limits = httpx.Limits(max_connections=concurrency, keepalive_expiry=2)
    headers = {} if key_env is None else {"Authorization": f"Bearer {_key(key_env)}"}
    return httpx.AsyncClient(trust_env=False, follow_redirects=False, timeout=None, limits=limits, headers=headers)


def _key(name):
    key = os.environ.get(name, "").strip()
    if not key or not (key.isascii() and key.isprintable()):
        raise ValueError(f"the environment variable {name} holds no key; give the name of the variable, not the key")
    return key


def run(work):
    """What a coroutine returns, also where an event loop is running already, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as aside:
        return aside.submit(asyncio.run, work).result()


async def each(steps, concurrency, work):
    """Await `work(step)` for every step, at most `concurrency` at once; the first that raises stops the others."""
    left = iter(steps)

    async def worker():
        for step in left:
            await work(step)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(worker())
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from failed.exceptions[0].__cause__
    finally:
        if hasattr(left, "close"):
            left.close()  # A progress bar ends here, although not every step was taken.


def refusal(client, response):
    """In words, what came instead of the answer that was asked for, and what may help."""
    status, help_ = response.status_code, ""
    if status == 200:
        help_ = f" with {response.headers.get('content-type')}, which is not what was asked for"
    elif status == 401:
        help_ = " (where it needs a key, put it into an environment variable and name that with --key-env)"
    elif 300 <= status < 400:
        help_ = " (redirects are not followed)"
    return f"answered {status}{help_}: {without_key(client, response.text.strip()[:200])!r}"


def without_key(client, text):
    """The text with stars for the key, which some servers repeat in their errors."""
    key = client.headers.get("authorization", "").removeprefix("Bearer ")
    return text.replace(key, "***") if key else text
