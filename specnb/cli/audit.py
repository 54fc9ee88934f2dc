"""The command `specnb audit`, with one command of its own for each kind of engine.

It reads and writes files and turns a verdict into an exit code. It does not know how anything is tested; that is in
`specnb.audit`, `specnb.audit.generate` and `specnb.serving.audit`.
"""

import json
from pathlib import Path
from typing import Annotated

import typer

from specnb.cli.parts import PAIR, Device, Dtype, KeyEnv, Replace, json_object

EPILOG = """\b
exit code: 0 nothing found against it, 1 error, 2 not lossless, 3 cannot test

\b
examples:
  specnb audit transformers --path assistant
  specnb audit endpoint http://127.0.0.1:8111 http://127.0.0.1:8112 --model NAME
  specnb audit greedy plain.jsonl speculative.jsonl --target smollm2"""

audit = typer.Typer(
    help="Find out whether another engine is lossless.", epilog=EPILOG, no_args_is_help=True,
    rich_markup_mode=None,
)  # fmt: skip

Out = Annotated[Path | None, typer.Option(help="Write the report here too, as JSON.")]
Server = json_object(help="""What is known of the engine, kept in the report, as JSON, such as '{"version": "1.2"}'.""")
Level = Annotated[float, typer.Option(min=0, max=1, help="Probability of failing a correct engine.")]
Length = Annotated[int, typer.Option(help="Tokens counted together.")]


@audit.command(epilog=EPILOG)
def transformers(
    context: typer.Context,
    path: Annotated[str, typer.Option(help="assistant, 'prompt lookup', 'early exit' or plain.")] = "assistant",
    calls: int = 20_000,
    vocab: int = 32,
    length: Length = 2,
    gamma: Annotated[int, typer.Option(help="Draft length.")] = 3,
    seed: int = 0,
    candidates: Annotated[
        bool, typer.Option("--candidates", help="Check the drafts' q instead of the law of the text.")
    ] = False,
    level: Level = 0.001,
    out: Out = None,
    replace: Replace = False,
    server: Server = None,
):
    """Audit the installed generate(), on a tiny random model."""
    from specnb.audit import generate

    _check(out, replace)
    same = {"n": calls, "vocab": vocab, "gamma": gamma, "seed": seed, "level": level, "track": _track}
    if candidates:
        found = generate.check_candidates(path, **same)
    else:
        found = generate.audit_transformers(path, length=length, **same)
    _end(found, out, server, context.obj)


@audit.command(epilog=EPILOG)
def endpoint(
    context: typer.Context,
    on: Annotated[str, typer.Argument(help="Base URL of the server that speculates.")],
    off: Annotated[str, typer.Argument(help="Base URL of the one that does not.")],
    model: Annotated[str | None, typer.Option(help="Name sent to both, where they ask for one.")] = None,
    key_env: KeyEnv = None,
    prompt: str = "Once upon a time",
    requests: Annotated[int, typer.Option(help="To each server.")] = 1_000,
    tokens: Length = 2,
    temperature: float = 1.0,
    concurrency: Annotated[int, typer.Option(help="Requests at once.")] = 4,
    seconds: Annotated[float, typer.Option(help="For everything.")] = 600,
    options: json_object(help="""More fields, as JSON, such as '{"top_k": 0}'.""") = "{}",
    level: Level = 0.001,
    out: Out = None,
    replace: Replace = False,
    server: Server = None,
):
    """Audit two OpenAI-compatible servers, speculation on and off."""
    from specnb.serving.audit import audit_endpoint

    _check(out, replace)
    found = audit_endpoint(
        on,
        off,
        n=requests,
        num_tokens=tokens,
        prompt=prompt,
        model=model,
        temperature=temperature,
        concurrency=concurrency,
        seconds=seconds,
        options=options,
        key_env=key_env,
        level=level,
        track=_track,
    )
    _end(found, out, server, context.obj)


@audit.command(epilog=EPILOG)
def greedy(
    context: typer.Context,
    baseline: Annotated[Path, typer.Argument(help='JSON lines: lists of ids, or {"prompt_ids": [...], "ids": [...]}.')],
    candidate: Annotated[Path, typer.Argument(help="The same, in the same order.")],
    target: Annotated[
        str | None,
        typer.Option(help="smollm2, a hub id or a folder: teacher-forced where ids part; needs prompt_ids."),
    ] = None,
    max_ulps: Annotated[
        float | None, typer.Option(help="Largest margin taken for rounding.", show_default="by dtype")
    ] = None,
    device: Device = None,
    dtype: Dtype = None,
    out: Out = None,
    replace: Replace = False,
    server: Server = None,
):
    """Audit ids of two greedy runs, from files; --dtype is the one the engines ran in."""
    from specnb.audit import compare_greedy, teacher_forced

    _check(out, replace, [baseline, candidate])
    prompts, ids = _read(baseline)
    other_prompts, other_ids = _read(candidate)
    if any(ours != theirs for ours, theirs in zip(prompts, other_prompts, strict=False) if ours and theirs):
        raise ValueError(f"{baseline} and {candidate} answer different prompts, or in another order")
    logits_at = None
    if target is not None:
        if not all(prompts):
            raise ValueError(f"--target needs prompt_ids on every line of {baseline}")
        logits_at = teacher_forced(_target(target, device=device, dtype=dtype), prompts)
    _end(compare_greedy(ids, other_ids, logits_at=logits_at, max_ulps=max_ulps), out, server, context.obj)


def _check(out, replace, inputs=()):
    from specnb.measure.results import check_outputs

    check_outputs(out, inputs=inputs, replace=replace)


def _end(found, out, server, command):
    """Print the report, keep it where a file is named, and end with its exit code."""
    print(found)
    if out is not None:
        from specnb.measure.results import came_to_be, write_text

        kept = {**found.to_dict(), "server": server, **came_to_be(command)}
        write_text(out, json.dumps(kept, indent=1, allow_nan=False) + "\n")
    raise typer.Exit(found.exit_code)


def _track(steps):
    from rich.progress import track

    return track(steps, description="asking", update_period=1)


def _target(name, **options):
    from specnb.models import CausalLM, default_target

    return default_target(**options) if name == PAIR else CausalLM.from_pretrained(name, **options)


def _read(path):
    """Prompts (None where a line has none) and ids of a JSON-lines file."""
    from specnb.measure.json_lines import json_lines

    prompts, ids = [], []
    for place, _, value in json_lines(path):
        row = value if isinstance(value, dict) else {"ids": value}
        for name in ("ids", *({"prompt_ids"} & {*row})):
            if not isinstance(row.get(name), list) or not all(type(token) is int for token in row[name]):
                raise ValueError(f'{place}: must be a list of ids or {{"prompt_ids": [...], "ids": [...]}}')
        prompts.append(row.get("prompt_ids"))
        ids.append(row["ids"])
    return prompts, ids
