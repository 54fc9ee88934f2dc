"""Prompt files: one JSON object a line, with messages for a chat model or a plain prompt.

It knows what people write into such files. It does not know tokenizers, which is `specnb.measure.chat`, nor models.
The format is described in `data/README.md`.
"""

from dataclasses import dataclass
from itertools import islice

from specnb.measure.chat import encode
from specnb.measure.json_lines import json_lines
from specnb.models.places import shipped

MOST = 1e15  # of any number in a prompt file; infinity and NaN are not below it
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}


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
        return encode(tokenizer, self.text if self.messages is None else self.messages, f"prompt {self.id!r}")


def load_prompts(path=None, limit=None):
    """Read a prompt file; a ValueError names the line that is wrong.

    Parameters
    ----------
    path : path, optional
        Default: the project's own prompts.
    limit : int, optional
        Read only the first so many; the project's own file is ordered so that any multiple of 7 is balanced.
    """
    path, prompts = path or shipped("prompts.jsonl"), {}
    for place, number, entry in islice(json_lines(path), limit):
        try:
            prompt = _prompt(entry, number)
            if prompt.id in prompts:
                raise ValueError(f"the id {prompt.id!r} is used more than once")
        except ValueError as error:
            raise ValueError(f"{place}: {error}; see data/README.md") from error
        prompts[prompt.id] = prompt
    if not prompts:
        raise ValueError(f"{path} holds no prompts")
    return list(prompts.values())


def _prompt(entry, number):
    if not isinstance(entry, dict):
        raise ValueError(f"a prompt is a JSON object, this is a {type(entry).__name__}")
    if entry.get("tools"):
        raise ValueError("'tools' would change the prompt and cannot be rendered; leave them out")
    forms = [name for name in READ if entry.get(name) is not None]
    if len(forms) != 1:
        raise ValueError(f"needs either 'messages' or 'prompt', and has {' and '.join(map(repr, forms)) or 'none'}")
    messages, text = READ[forms[0]](entry[forms[0]])
    max_new_tokens, weight = _number(entry, "max_new_tokens", 64), _number(entry, "weight", 1.0)
    if max_new_tokens < 1 or max_new_tokens != int(max_new_tokens):
        raise ValueError(f"'max_new_tokens' is a whole number of at least 1, got {entry['max_new_tokens']!r}")
    if weight <= 0:
        raise ValueError(f"'weight' is above 0, got {weight}")
    name, kind = _first(entry, ("id", "question_id"), number), _first(entry, ("kind", "category"), "own")
    return Prompt(name, kind, messages, text, int(max_new_tokens), float(weight))


def _first(entry, names, default):
    """The first of these fields that is not null, as text."""
    value = next((entry[name] for name in names if entry.get(name) is not None), default)
    if not isinstance(value, (str, int, float)):
        raise ValueError(f"{names[0]!r} is a text or a number, got {value!r}")
    return str(value)


def _number(entry, name, default):
    value = entry.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < MOST:
        raise ValueError(f"{name!r} is a finite number, got {value!r}")
    return value


# Each way in which people write a prompt, read into (messages, text), one of them None.


def _of_prompt(value):
    """A text, or a list that holds one."""
    if isinstance(value, list) and len(value) > 1 and all(isinstance(part, str) for part in value):
        raise ValueError(f"'prompt' holds {len(value)} texts; write each on a line of its own")
    text = value[0] if isinstance(value, list) and len(value) == 1 else value
    if isinstance(value, list) and not isinstance(text, str):
        raise ValueError("'prompt' holds no text; token ids mean nothing without their tokenizer, so write the text")
    if not isinstance(text, str) or not text:
        raise ValueError(f"'prompt' is a text that is not empty, got {value!r}")
    return None, text


def _of_messages(value):
    """[{"role": "user", "content": "Hi"}], the content a text or a list of text parts."""
    if not isinstance(value, list) or not value:
        raise ValueError("'messages' is a list of at least one message")
    messages = [_message(message, f"message {number}") for number, message in enumerate(value, 1)]
    if messages[-1]["role"] == "assistant":
        raise ValueError(
            "the last message is the assistant's, and nothing says whether it is the expected answer or the beginning "
            "of one; leave it out, so that the last is the user's"
        )
    if not messages[-1]["content"].strip():
        raise ValueError("the last message holds no text")
    return messages, None


def _message(message, which):
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError(f"{which} needs a 'role' and a 'content'")
    if message.get("tool_calls") or message.get("function_call"):
        raise ValueError(f"{which} calls a tool, which cannot be rendered; leave such turns out")
    return {"role": message["role"], "content": _content(message.get("content"), which)}


def _content(content, which):
    """The text itself, or that of {"type": "text", "text": "..."} parts, a line each."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise ValueError(f"{which} has a 'content' that is neither a text nor a list of text parts: {content!r}")
    parts = [part.get("text") if isinstance(part, dict) else part for part in content]
    kinds = {part.get("type", "text") for part in content if isinstance(part, dict)} - {"text", "input_text"}
    if kinds or not all(isinstance(part, str) for part in parts):
        raise ValueError(f"{which} has parts that are no text{': ' * bool(kinds)}{', '.join(map(str, kinds))}")
    return "\n".join(parts)


def _of_turns(value):
    """MT-bench's ["What is ...?"], if it is one turn: a second would need the answer to the first."""
    if not isinstance(value, list) or len(value) != 1:
        raise ValueError(
            "'turns' is a list of one text: what follows would need the answers in between; keep the first"
        )
    return _of_messages([{"role": "user", "content": value[0]}])


def _of_conversations(value):
    """ShareGPT's [{"from": "human", "value": "Hi"}]."""
    if not isinstance(value, list) or not all(isinstance(turn, dict) for turn in value):
        raise ValueError("""'conversations' is a list of turns such as {"from": "human", "value": "..."}""")
    roles = (SHAREGPT_ROLES.get(turn.get("from"), turn.get("from")) for turn in value)
    return _of_messages([{"role": role, "content": turn.get("value")} for role, turn in zip(roles, value, strict=True)])


READ = {"messages": _of_messages, "prompt": _of_prompt, "turns": _of_turns, "conversations": _of_conversations}
