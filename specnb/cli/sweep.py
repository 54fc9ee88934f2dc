"""The command `specnb sweep`: measure over a grid, then print table and answers and draw the figure.

It finds out what is meant and where it goes, and refuses what cannot work. The measuring is `specnb.measure.sweep`.
"""

import math
import sys
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from specnb.cli import parts
from specnb.cli.parts import PAIR, SHIPPED_DRAFT, Device, Draft, Dtype, Pair, Prompts, Target, Worth, whole_number_list
from specnb.cli.report import show_costs, show_sweep

DEFAULT_PROMPTS = 14  # Of the project's, to choose a draft; as many again to confirm the choice.
SUITE_SECONDS, COSTS_SHARE = 450, 0.6  # Half a minute of the eight is for loading and drawing.


def sweep(
    context: typer.Context,
    target: Target = PAIR,
    draft: Draft = None,
    device: Device = None,
    dtype: Dtype = None,
    gammas: whole_number_list(0, help="Draft lengths, such as 0-8 or 1,2,4.") = "0-4,6,8",
    temperatures: Annotated[Any, typer.Option(parser=parts.temperatures, metavar="LIST", help="0 is greedy.")] = "0,1",
    batches: whole_number_list(1, help="Requests at once, such as 1,2,4.") = "1",
    ray: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS|local", help="Each cell on its own GPU or CPU slot of a Ray cluster."),
    ] = None,
    prompts: Prompts = None,
    limit: Annotated[
        int | None,
        typer.Option(min=1, help="Only the first so many prompts.", show_default="14 of the project's, all of a FILE"),
    ] = None,
    confirm: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="So many prompts are held back from choosing; the chosen draft is measured on them again.",
            show_default="14 of the project's, every third of a FILE of 9 or more",
        ),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="At most so many tokens an answer.", show_default="20 for the project's, else as FILE says"
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1)] = 1,
    seed: int = 0,
    seconds: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="For all measurements; prompts beyond are left out.",
            show_default=f"no bound; {SUITE_SECONDS} for the suite",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Result file.",
            show_default="data/own/sweep-TARGET-DRAFT-DEVICE.json; without the repository in the current folder",
        ),
    ] = None,
    figure: Annotated[
        Path | None,
        typer.Option(help="Picture.", show_default="figures/own/ for a result in data/own/, else beside it"),
    ] = None,
    suite: Annotated[
        Literal["gpu"] | None,
        typer.Option(
            help="gpu: costs of forwards at the sizes of published pairs with random weights, to costs-gpu.json "
            "beside the result, then the sweep; bounded to 8 minutes, needs no network."
        ),
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace a finished result, once the new one is complete.")
    ] = False,
    worth: Worth = 1.05,
    restart: Annotated[
        bool, typer.Option("--restart", help="Throw an unfinished sweep away instead of resuming it.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Measure although the machine is busy.")] = False,
):
    """Measure speed against draft length, and whether it pays."""
    from rich.progress import track

    from specnb.measure.prompts import load_prompts
    from specnb.measure.results import check_outputs
    from specnb.measure.sweep import run
    from specnb.models import available_device

    own = prompts is not None
    loaded = load_prompts(prompts, limit if own else None)
    choosing, confirming = _shared_out(loaded, confirm, None if own else limit or DEFAULT_PROMPTS)
    where = available_device(None if device == "auto" else device)
    out = out or _default_out(target, draft, where, batches)
    figure, costs = figure or _figure_of(out), out.with_name("costs-gpu.json")
    costs = costs if suite and (replace or not costs.exists()) else None  # Costs that are there already stay.
    seconds = seconds or (SUITE_SECONDS if suite else math.inf)
    _refuse(where, seconds, suite=suite, ray=ray)
    check_outputs(out, figure, costs, costs and _figure_of(costs), inputs=[prompts], replace=replace)
    if not force:
        _refuse_busy(where)
    pair = Pair(target, draft, device, dtype)
    measure = _measure_on_ray(ray, pair, where) if ray else None
    same = {"command": context.obj, "restart": restart, "replace": replace}
    began = time.monotonic()
    try:
        if costs is not None:
            _costs(costs, where, dtype, seconds=COSTS_SHARE * seconds, **same)
        model, drafters = pair.load(["lookup", SHIPPED_DRAFT])
        result = run(
            model,
            drafters,
            choosing,
            confirm=confirming,
            out=out,
            gammas=gammas,
            temperatures=temperatures,
            batches=batches,
            max_new_tokens=max_new_tokens or (None if own else 20),
            repeats=repeats,
            seed=seed,
            track=lambda steps: track(steps, description="measuring", update_period=1),
            measure=measure,
            seconds=seconds - (time.monotonic() - began),
            **same,
        )
    except KeyboardInterrupt:
        print("\nspecnb: what was measured is kept; the same command resumes", file=sys.stderr)
        raise
    show_sweep(result, out, figure, worth)
    print("\nwritten:", out, figure)


def _shared_out(prompts, confirm, choosing):
    """The prompts that choose a draft and those that confirm the choice.

    Of the project's prompts `choosing` choose and those after them confirm; of a file's own the last ones confirm, or
    every third where nothing is said, so that both shares hold every kind.

    Examples
    --------
    >>> _shared_out(list("abcdefghi"), None, None)
    (['a', 'b', 'd', 'e', 'g', 'h'], ['c', 'f', 'i'])
    >>> _shared_out(list("abcdefghi"), 2, None)
    (['a', 'b', 'c', 'd', 'e', 'f', 'g'], ['h', 'i'])
    >>> _shared_out(list("abcdefghi"), None, 4)
    (['a', 'b', 'c', 'd'], ['e', 'f', 'g', 'h', 'i'])
    """
    if choosing is None and confirm is None:
        few = len(prompts) < 9
        return (prompts, []) if few else ([p for i, p in enumerate(prompts) if i % 3 < 2], prompts[2::3])
    choosing = len(prompts) - confirm if choosing is None else choosing
    if choosing < 1 or (confirm or 0) > max(len(prompts) - choosing, 0):
        raise ValueError(
            f"{len(prompts)} prompts are too few to hold back {confirm}; give a smaller --confirm or --limit"
        )
    return prompts[:choosing], prompts[choosing:][: DEFAULT_PROMPTS if confirm is None else confirm]


def _default_out(target, draft, device, batches):
    """Where the result of a sweep goes that names no --out: a name made of target, drafts and device."""
    from specnb.measure.results import results_folder

    drafts = draft or ([] if target == PAIR else ["lookup"])
    names = (Path(name).name.lower() for name in (target, *drafts))
    many = "" if batches == [1] else "-batches"
    return results_folder() / f"sweep-{'-'.join(names)}-{device.type}{many}.json"


def _refuse(device, seconds, *, suite, ray):
    """Raise for a sweep that cannot work, before anything is loaded."""
    if suite and device.type != "cuda":
        raise ValueError(f"the suite needs a CUDA device, and this is {device.type}; run specnb sweep without --suite")
    if ray and seconds < math.inf:
        raise ValueError("on a Ray cluster nothing bounds the time; leave out --ray, or --seconds and --suite")


def _refuse_busy(device):
    from specnb.measure.machine import busy_reasons

    if reasons := busy_reasons(device):
        raise RuntimeError(
            f"the machine is busy: {'; '.join(reasons)}. What is measured now would be worthless: stop the rest, "
            "or measure all the same with --force"
        )


def _measure_on_ray(address, pair, device):
    from specnb.measure.on_ray import OnRay

    return OnRay(address, partial(pair.load, ["lookup", SHIPPED_DRAFT]), num_gpus=int(device.type == "cuda"))


def _costs(out, device, dtype, **options):
    """The suite's cost curves, shown and drawn."""
    from rich.progress import track

    from specnb.measure import shapes

    result = shapes.run(
        out,
        device=device,
        dtype=dtype,
        track=lambda names: track(names, description="costs", update_period=1),
        **options,
    )
    show_costs(result, out, _figure_of(out))
    print("\nwritten:", out, _figure_of(out))


def _figure_of(out):
    """data/own/r.json -> figures/own/r.png, data/r.json -> figures/r.png, and elsewhere beside the result."""
    folder = out.parent
    if folder.name == "data":
        folder = folder.with_name("figures")
    elif folder.parent.name == "data" and folder.name == "own":
        folder = folder.parent.with_name("figures") / "own"
    return folder / f"{out.stem}.png"
