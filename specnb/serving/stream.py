"""One streamed answer: when its first and last tokens came, how many there were, or why it failed.

It knows Server-Sent Events and the chunks of OpenAI-compatible servers. It does not know concurrency. Read
`specnb.serving.load` next.
"""

import asyncio
import json
import time

from specnb.serving.client import refusal, without_key

MEASURED = ("ttft_sec", "ttft_content_sec", "total_sec", "num_tokens", "num_hidden_tokens", "num_chunks")


async def stream(client, url, body, seconds):
    """The row of one request, which is cut off when so many seconds are over.

    Returns
    -------
    dict
        `status`: "ok" or "failed: ..."; then None where it failed: `ttft_sec` and `total_sec` until the first and the
        last chunk of anything generated, be it thought, content or a tool call; `ttft_content_sec` until the first of
        content (None where none came); `num_tokens` by the server's own count; `num_hidden_tokens`, those of them that
        the server thought but did not stream; `num_chunks`.
    """
    import httpx
    from httpx_sse import EventSource

    began, answer = time.perf_counter(), Streamed()
    try:
        async with asyncio.timeout(seconds), client.stream("POST", url, json=body) as response:
            if response.status_code != 200 or "text/event-stream" not in response.headers.get("content-type", ""):
                await response.aread()
                return failed(refusal(client, response))
            async for event in EventSource(response).aiter_sse():
                answer.take(event, time.perf_counter() - began)
            return answer.row()
    except TimeoutError:
        return failed(f"cut off after {seconds:.3g} seconds")
    except (httpx.HTTPError, ValueError, TypeError, AttributeError) as error:
        return failed(without_key(client, f"{type(error).__name__}: {error}"))


def failed(why):
    return {"status": f"failed: {why}", **dict.fromkeys(MEASURED)}


class Streamed:
    """What has come of one streamed answer: the seconds of its chunks, and the server's own count of tokens."""

    def __init__(self):
        self.all_sec, self.content_sec, self.has_thought, self.usage = [], [], False, {}

    def take(self, event, now_sec):
        """Take in one event; a ValueError where it reports an error."""
        if event.data.strip() in ("", "[DONE]"):
            return
        chunk = json.loads(event.data)
        if chunk.get("error") or "error" in (event.event, chunk.get("object")):
            raise ValueError(f"the server reported an error in its stream: {event.data[:200]}")
        deltas = [choice.get("delta") or choice for choice in chunk.get("choices") or ()]
        content, thought = any(map(_content, deltas)), any(map(_thought, deltas))
        self.has_thought |= thought
        if content:
            self.content_sec.append(now_sec)
        if content or thought or any(delta.get("tool_calls") or delta.get("function_call") for delta in deltas):
            self.all_sec.append(now_sec)
        self.usage = chunk.get("usage") or self.usage

    def row(self):
        """The row of a stream that has ended."""
        num_tokens = self.usage.get("completion_tokens")
        if not self.all_sec or not isinstance(num_tokens, int) or num_tokens < 1:
            return failed("the stream held no text or no usage; is stream_options supported?")
        thought = (self.usage.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0
        first_content = self.content_sec[0] if self.content_sec else None
        hidden = 0 if self.has_thought else thought
        measured = (self.all_sec[0], first_content, self.all_sec[-1], num_tokens, hidden, len(self.all_sec))
        return {"status": "ok", **dict(zip(MEASURED, measured, strict=True))}


def _content(delta):
    """Whether a chunk holds text; content is a text, or a list of parts, as in `[{"type": "text", "text": "Hi"}]`."""
    content = delta.get("text") or delta.get("content") or delta.get("refusal")
    return any(part.get("text") for part in content) if isinstance(content, list) else bool(content)


def _thought(delta):
    """Whether a chunk holds reasoning, in a field of its own or in a part of the content like `{"thinking": ...}`."""
    parts = delta["content"] if isinstance(delta.get("content"), list) else ()
    return bool(delta.get("reasoning_content") or delta.get("reasoning")) or any(part.get("thinking") for part in parts)
