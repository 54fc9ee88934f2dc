"""What several commands share: target and drafters by name, and the types of options."""

import argparse
import json
from pathlib import Path

PAIR, SHIPPED_DRAFT = "smollm2", "smollm2-draft"


def add_pair(parser):
    parser.add_argument("--target", default=PAIR, help="smollm2 (default), a hub id or a local folder")
    parser.add_argument(
        "--draft",
        action="append",
        help=f"lookup, {SHIPPED_DRAFT} (made for smollm2), the folder of a draft made by make draft, a model with the "
        "target's vocabulary, or lookup+ before one of these, which then drafts at most 2 tokens, where nothing can be "
        "copied; in a sweep it may be given more than once (default: "
        f"{SHIPPED_DRAFT} for smollm2, in a sweep lookup too; lookup for other targets)",
    )
    parser.add_argument(
        "--device",
        help="cpu, cuda, cuda:1, mps, or auto, which spreads a target too large for one GPU over all of them (needs "
        "accelerate; default: cuda where there is one, else cpu)",
    )
    parser.add_argument("--dtype", help="bfloat16, float16, float32 (default: bfloat16 where it is fast)")


def load(arguments, default):
    """The target, and its drafters by name; `default` names those of the pair that ships with the project."""
    from specnb.models import CausalLM, load_pair

    spread = arguments.device == "auto"
    options = {"dtype": arguments.dtype} | ({"device_map": "auto"} if spread else {"device": arguments.device})
    if arguments.target == PAIR:
        target, shipped, _ = load_pair(device=None if spread else arguments.device, dtype=arguments.dtype)
    else:
        target, shipped, default = CausalLM.from_pretrained(arguments.target, **options), None, ["lookup"]
    if target.tokenizer is None:
        raise ValueError(f"{arguments.target} has no tokenizer; the command line needs one")
    drafters = {}
    for name in arguments.draft or default:
        short = "+".join(Path(part).name for part in name.split("+"))
        drafters[short if short not in drafters else name] = _drafter(name, target, shipped, options)
    return target, drafters


def _drafter(name, target, shipped, options):
    """`lookup`, the draft that ships, a model, or `lookup+` one of these: the second where the first has nothing."""
    from specnb.drafters import FirstOf, ModelDrafter, PromptLookup
    from specnb.drafters.pruned import is_draft, load_draft
    from specnb.models import CausalLM

    if name == "lookup":
        return PromptLookup()
    if name.startswith("lookup+"):
        # With a model to fall back on, a match of one token is worth less than the model's own guess; and copying is
        # cheap, so it may draft gamma tokens where the model drafts two.
        second = _drafter(name.removeprefix("lookup+"), target, shipped, options)
        return FirstOf(PromptLookup(min_ngram=2), second, caps=(None, 2))
    if name == SHIPPED_DRAFT and shipped is not None:
        return shipped
    if is_draft(name):
        return ModelDrafter(load_draft(name, target))
    return ModelDrafter(CausalLM.from_pretrained(name, **options))


def whole_numbers(text):
    values = set()
    try:
        for part in text.split(","):
            first, _, last = part.partition("-")
            values.update(range(int(first), int(last or first) + 1))
    except ValueError:
        values.clear()
    if not values:
        raise argparse.ArgumentTypeError(f"{text!r} names no numbers; write them like 0-8 or 1,2,4")
    return sorted(values)


def positive(text):
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def temperatures(text):
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of temperatures; write them like 0,0.7,1") from error


def fields(text):
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError) as error:
        raise argparse.ArgumentTypeError(f"""{text!r} is no JSON object; write it like '{{"top_k": 0}}'""") from error
