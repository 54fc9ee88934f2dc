"""From a prompt to token ids, such that nothing of it is lost on the way.

It knows chat templates and tokenizers. It does not know where a prompt comes from, nor models.
"""

import warnings


def encode(tokenizer, prompt, name="the prompt"):
    """Token ids of a text, or of messages through the tokenizer's chat template (without one, their texts in a row).

    A template that has no place for a system message gets it as the beginning of the first user message, and a
    warning says so.

    Parameters
    ----------
    prompt : str, or list of {"role": str, "content": str}
    name : str
        What error messages call it.

    Raises
    ------
    ValueError
        Where the template complains or leaves a message out, or the tokenizer cannot represent the text.
    """
    if isinstance(prompt, str) or not tokenizer.chat_template:
        text = prompt if isinstance(prompt, str) else "\n\n".join(message["content"] for message in prompt)
        return _tokens(tokenizer, text, name)
    return _tokens(tokenizer, _rendered(tokenizer, prompt, name), name, add_special_tokens=False)


def _rendered(tokenizer, messages, name):
    """The text of a conversation, by the template; a system message that has no place in it is merged."""
    try:
        return _render(tokenizer, messages)
    except ValueError as error:
        complaint = error
    if [message["role"] for message in messages[:2]] == ["system", "user"]:
        system, user, *rest = messages
        try:
            text = _render(tokenizer, [{**user, "content": f"{system['content']}\n\n{user['content']}"}, *rest])
        except ValueError:
            pass  # The complaint was about something else, too, so the first one is what matters.
        else:
            warnings.warn(
                f"the chat template of {tokenizer.name_or_path or 'the target'} has no place for system messages; they "
                "are put before the first user message",
                stacklevel=4,
            )
            return text
    raise ValueError(f"{name}: the chat template of {tokenizer.name_or_path or 'the target'} {complaint}")


def _render(tokenizer, messages):
    """The text of a conversation; a ValueError where the template complains, or where a message is not in its text."""

    def text_of(shown):
        return tokenizer.apply_chat_template(shown, tokenize=False, add_generation_prompt=True)

    # Marks behind the contents tell messages with equal texts apart, and a short text from a word of the template.
    marked = [{**message, "content": f"{message['content'].strip()}<mark {i}>"} for i, message in enumerate(messages)]
    try:
        text, with_marks = text_of(messages), text_of(marked)
    except Exception as error:  # A template is a program of somebody else, which may fail in any way.
        raise ValueError(f"refuses it: {' '.join(str(error).split())}") from error
    for message in marked:
        if message["content"] not in with_marks:
            raise ValueError(f"leaves out or changes the text of the {message['role']} message")
    return text


def _tokens(tokenizer, text, name, **options):
    """Token ids of `text`; a ValueError where the tokenizer drops a part of it or has no token for it."""
    found = tokenizer(text, return_offsets_mapping=tokenizer.is_fast, **options)
    ids, lost, unknown = list(found["input_ids"]), "", tokenizer.unk_token_id
    if tokenizer.is_fast:
        lost = _uncovered(text, found["offset_mapping"])
    if not lost and unknown in ids:  # GPT-2's kind uses this id for the ends of texts, too.
        words = (word for word in text.split() if tokenizer.unk_token not in word)
        lost = next((word for word in words if unknown in tokenizer(word, add_special_tokens=False)["input_ids"]), "")
    if lost:
        known_as = tokenizer.name_or_path or "the target"
        raise ValueError(f"{name}: the tokenizer of {known_as} has no token for {lost!r}")
    return ids


def _uncovered(text, spans):
    """What no token covers, apart from blanks and signs that do not print: "ab c", [(0, 1)] -> "bc"."""
    covered = {place for first, last in spans for place in range(first, last)}
    return "".join(
        sign for place, sign in enumerate(text) if place not in covered and sign.isprintable() and sign != " "
    )
