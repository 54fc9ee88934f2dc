"""What a result file of a sweep must hold, so that a foreign or damaged one is refused by one line.

It knows the layout that `data/README.md` describes. It does not know what the numbers mean.
"""

import fastjsonschema

OBJECT, TEXT, NUMBER = {"type": "object"}, {"type": "string"}, {"type": "number", "minimum": 0}
PROMPT = {**OBJECT, "required": ["kind", "weight"], "properties": {"weight": NUMBER}}
COUNTS = {"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 3}
SECONDS = ("ttft_sec", "decode_sec", "draft_sec", "verify_sec", "other_sec")
FINISHED = {
    "stop_reason": {"enum": ["eos", "length"]},
    "num_tokens": {"type": "integer", "minimum": 1},
    "repeated_4gram_percent": NUMBER,
    **dict.fromkeys(SECONDS, NUMBER),
    "rounds": {"type": "array", "items": COUNTS, "minItems": 1},
}
ROW = {
    "drafter": {"type": ["string", "null"]},
    "gamma": {"type": "integer", "minimum": 0},
    "temperature": NUMBER,
    "prompt_id": TEXT,
    "repeat": {"type": "integer"},
    "status": TEXT,
}


def _whole(properties, **rest):
    return {**OBJECT, "required": list(properties), "properties": properties, **rest}


IF_FINISHED = {"if": {"properties": {"status": {"const": "ok"}}}, "then": _whole(FINISHED)}
SWEEP = _whole(
    {
        "environment": _whole({"processor": {}, "num_threads": {}, "gpus": {"type": "array"}}),
        "models": _whole({"target": _whole({"id": TEXT, "device": TEXT, "dtype": TEXT})}),
        "settings": _whole({"drafters": {"type": "array"}, "prompts": {**OBJECT, "additionalProperties": PROMPT}}),
        "rows": {"type": "array", "minItems": 1, "items": _whole(ROW, **IF_FINISHED)},
    }
)


# Of a result of whatever kind.
ANY = {"properties": {"rows": {"type": "array", "minItems": 1, "items": OBJECT}}}
ANY["properties"] |= dict.fromkeys(("environment", "settings", "models"), OBJECT)
WORDS = {
    "type": "type {}",
    "const": "{!r}",
    "enum": "one of {}",
    "minItems": "at least {} entries",
    "minimum": "{} or more",
}


def check_sweep(path, result):
    """Raise a ValueError where this is no whole result of a sweep."""
    check(path, result, SWEEP)
    unknown = {row["prompt_id"] for row in result["rows"]} - set(result["settings"]["prompts"])
    if unknown:
        raise ValueError(f"{path}: rows name the prompt {min(unknown)!r}; expected those of settings.prompts")


def check(path, result, schema=ANY):
    """Raise a ValueError that names the file, the key, what is there and what was expected.

    Examples
    --------
    >>> check("r.json", {"rows": None})
    Traceback (most recent call last):
    ValueError: r.json: rows is None; expected type array
    """
    try:
        fastjsonschema.compile(schema)(result)
    except fastjsonschema.JsonSchemaValueException as error:
        key = ".".join(error.path[1:]) or "the file"
        if error.rule == "required":
            missing = next(name for name in error.rule_definition if name not in error.value)
            expected = ", ".join(error.rule_definition)
            raise ValueError(f"{path}: {key} lacks {missing!r}; expected {expected}") from error
        shown = repr(error.value)
        shown = shown if len(shown) < 60 else f"{shown[:60]}..."
        expected = WORDS.get(error.rule, error.rule + " {}").format(error.rule_definition)
        raise ValueError(f"{path}: {key} is {shown}; expected {expected}") from error
