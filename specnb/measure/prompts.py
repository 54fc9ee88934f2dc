"""Prompt files: one JSON object a line, with messages for a chat model or a plain prompt.

It knows files and chat templates. It does not know models or timing. The format is described in `data/README.md`.
"""

import json
from dataclasses import dataclass

from specnb.models.fetch import PROJECT

DEFAULT_PROMPTS = PROJECT / "data" / "prompts.jsonl"


@dataclass(frozen=True)
class Prompt:
    id: str
    kind: str
    messages: list | None
    text: str | None
    max_new_tokens: int
    weight: float

    def encode(self, tokenizer):
        """Token ids: messages through the tokenizer's chat template, plain text (or no template) as it stands."""
        if self.messages and tokenizer.chat_template:
            ids = tokenizer.apply_chat_template(self.messages, add_generation_prompt=True, return_dict=False)
            return list(ids)
        text = self.text if self.messages is None else "\n\n".join(m["content"] for m in self.messages)
        return list(tokenizer(text)["input_ids"])


def load_prompts(path=DEFAULT_PROMPTS, limit=None):
    """Read a prompt file; a ValueError names the line that is wrong.

    Parameters
    ----------
    path : path
    limit : int, optional
        Take only the first so many; the project's own file is ordered so that any multiple of 7 is balanced.
    """
    with open(path, encoding="utf-8-sig") as lines:
        prompts = [_parse(line, number, path) for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise ValueError(f"{path} holds no prompts")
    ids = [prompt.id for prompt in prompts]
    if repeated := {i for i in ids if ids.count(i) > 1}:
        raise ValueError(f"{path} uses the id {min(repeated)!r} more than once")
    return prompts[:limit]


def _parse(line, number, path):
    try:
        entry = json.loads(line)
        messages, text = entry.get("messages"), entry.get("prompt")
        if (messages is None) == (text is None):
            raise ValueError("needs either 'messages' or 'prompt'")
        if messages is not None:
            messages = [{"role": str(m["role"]), "content": str(m["content"])} for m in messages]
        max_new_tokens, weight = int(entry.get("max_new_tokens", 64)), float(entry.get("weight", 1.0))
        if max_new_tokens < 1 or not weight > 0 or not (messages or text):
            raise ValueError("needs some text, max_new_tokens of at least 1 and a weight above 0")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}, line {number}: {type(error).__name__} {error}; see data/README.md") from error
    return Prompt(str(entry.get("id", number)), str(entry.get("kind", "own")), messages, text, max_new_tokens, weight)
