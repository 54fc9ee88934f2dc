"""What several commands share: options, how a list of numbers is written, target and drafters by name."""

import json
import math
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from specnb.measure.json_lines import no_number

PAIR, SHIPPED_DRAFT = "smollm2", "smollm2-draft"
MOST_NUMBERS = 10_000

Target = Annotated[str, typer.Option(help="smollm2, a hub id or a local folder.")]
Draft = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help=f"lookup, {SHIPPED_DRAFT} (made for smollm2), the folder of a draft made by make draft, a model with the "
        "target's vocabulary, or lookup+ before one of these, which then drafts at most 2 tokens, where nothing can be "
        "copied; in a sweep it may be given more than once.",
        show_default=f"{SHIPPED_DRAFT} for smollm2, in a sweep lookup too; lookup for other targets",
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        help="cpu, cuda, cuda:1, mps, or auto, which spreads a target too large for one GPU over all of them (needs "
        "accelerate).",
        show_default="cuda where there is one, else cpu",
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(help="bfloat16, float16, float32, float64.", show_default="bfloat16 where it is fast, else float32"),
]
KeyEnv = Annotated[
    str | None, typer.Option(metavar="NAME", help="Name of the environment variable that holds the servers' key.")
]
Prompts = Annotated[Path | None, typer.Option(metavar="FILE", help="JSON lines.", show_default="the project's prompts")]
Replace = Annotated[bool, typer.Option("--replace", help="Replace what is in the file that --out names.")]
Worth = Annotated[
    float,
    typer.Option(min=1, help='The least speed-up worth deploying for; "do not deploy" says that no draft reaches it.'),
]


@dataclass(frozen=True)
class Pair:
    """Target and drafts as they are named on the command line."""

    target: str
    draft: list[str] | None
    device: str | None
    dtype: str | None

    def load(self, default):
        """The target, and its drafters by name; `default` names those of the pair that ships with the project."""
        from specnb.models import CausalLM, load_pair

        spread = self.device == "auto"
        options = {"dtype": self.dtype} | ({"device_map": "auto"} if spread else {"device": self.device})
        if self.target == PAIR:
            target, shipped, _ = load_pair(device=None if spread else self.device, dtype=self.dtype)
        else:
            target, shipped, default = CausalLM.from_pretrained(self.target, **options), None, ["lookup"]
        if target.tokenizer is None:
            raise ValueError(f"{self.target} has no tokenizer; the command line needs one")
        drafters = {}
        for name in self.draft or default:
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


def whole_numbers(text, at_least=0):
    """The numbers that a text such as "0-3,6" names, in order.

    >>> whole_numbers("6,0-3")
    [0, 1, 2, 3, 6]
    """
    if not isinstance(text, str):  # a default, read already
        return text
    values = set()
    for part in text.split(","):
        written = re.fullmatch(r"\s*([0-9]{1,9})(?:-([0-9]{1,9}))?\s*", part)
        numbers = range(int(written[1]), int(written[2] or written[1]) + 1) if written else range(0)
        if not numbers or numbers[0] < at_least or len(numbers) > MOST_NUMBERS:
            raise typer.BadParameter(
                f"{part!r} names no whole numbers of at least {at_least}; write them like {at_least}-8 or 1,2,4"
            )
        values.update(numbers)
    return sorted(values)


def temperatures(text):
    """The temperatures that a text such as "0,0.7" names.

    >>> temperatures("0,0.7")
    [0.0, 0.7]
    """
    if not isinstance(text, str):
        return text
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = [math.nan]
    if not all(0 <= value < math.inf for value in values):
        raise typer.BadParameter(f"{text!r} is no list of temperatures of at least 0; write them like 0,0.7,1")
    return values


def fields(text):
    """The JSON object written in `text`."""
    try:
        found = json.loads(text, parse_constant=no_number) if isinstance(text, str) else text
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise typer.BadParameter(f"""{text!r} is no JSON object; write it like '{{"top_k": 0}}'""")
    return found


def whole_number_list(at_least, **options):
    """The type of an option that takes a list of whole numbers."""
    return Annotated[Any, typer.Option(parser=partial(whole_numbers, at_least=at_least), metavar="LIST", **options)]


def json_object(**options):
    """The type of an option that takes a JSON object."""
    return Annotated[Any, typer.Option(parser=fields, metavar="JSON", **options)]
