"""The command `specnb audit`: parser and runners.

It reads and writes files and turns a verdict into an exit code. It does not know how anything is tested; that is in
`specnb.audit`, `specnb.audit.generate` and `specnb.serving.audit`.
"""

import argparse
import json
from pathlib import Path

from specnb.cli.parts import fields

EPILOG = """exit code: 0 nothing found against it, 1 error, 2 not lossless, 3 cannot test

examples:
  specnb audit transformers --path assistant
  specnb audit endpoint http://127.0.0.1:8111 http://127.0.0.1:8112 --model NAME
  specnb audit greedy plain.jsonl speculative.jsonl --target smollm2"""


def add_audit(commands):
    """Add `audit` and what it can audit to the commands."""
    shown = {"epilog": EPILOG, "formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = commands.add_parser(
        "audit", help="is another engine lossless? transformers, a server, greedy ids", **shown
    )
    engines = parser.add_subparsers(required=True, metavar="ENGINE")

    _add_transformers(engines.add_parser("transformers", help="the installed generate(), on a tiny random model"))
    _add_endpoint(engines.add_parser("endpoint", help="two OpenAI-compatible servers, speculation on and off"))
    _add_greedy(engines.add_parser("greedy", help="ids of two greedy runs, from files"))
    for engine in engines.choices.values():
        engine.add_argument("--out", type=Path, help="write the report here too, as JSON")
        known = """what is known of the engine, kept there, as JSON, such as '{"version": "1.2"}'"""
        engine.add_argument("--server", type=fields, help=known)


def _add_transformers(parser):
    parser.add_argument("--path", default="assistant", help="assistant (default), 'prompt lookup', 'early exit', plain")
    parser.add_argument("--calls", type=int, default=20_000, help="(default 20000)")
    parser.add_argument("--vocab", type=int, default=32, help="(default 32)")
    parser.add_argument("--length", type=int, default=2, help="tokens counted together (default 2)")
    parser.add_argument("--gamma", type=int, default=3, help="draft length (default 3)")
    parser.add_argument("--seed", type=int, default=0, help="(default 0)")
    parser.add_argument("--candidates", action="store_true", help="check the drafts' q instead of the law of the text")
    _add_level(parser)
    parser.set_defaults(run=_run, audit=_transformers)


def _add_endpoint(parser):
    parser.add_argument("on", help="base URL of the server that speculates")
    parser.add_argument("off", help="base URL of the one that does not")
    parser.add_argument("--model", help="name sent to both, where they ask for one")
    parser.add_argument("--prompt", default="Once upon a time", help="(default: %(default)s)")
    parser.add_argument("--requests", type=int, default=1_000, help="to each server (default 1000)")
    parser.add_argument("--tokens", type=int, default=2, help="tokens counted together (default 2)")
    parser.add_argument("--temperature", type=float, default=1.0, help="(default 1)")
    parser.add_argument("--concurrency", type=int, default=4, help="requests at once (default 4)")
    parser.add_argument("--seconds", type=float, default=600, help="for everything (default 600)")
    parser.add_argument("--options", type=fields, default={}, help="""more fields, as JSON, such as '{"top_k": 0}'""")
    _add_level(parser)
    parser.set_defaults(run=_run, audit=_endpoint)


def _add_greedy(parser):
    parser.add_argument("baseline", type=Path, help='JSON lines: lists of ids, or {"prompt_ids": [...], "ids": [...]}')
    parser.add_argument("candidate", type=Path, help="the same, in the same order")
    parser.add_argument(
        "--target", help="smollm2, a hub id or a folder: teacher-forced where ids part; needs prompt_ids"
    )
    parser.add_argument("--max-ulps", type=float, help="largest margin taken for rounding (default: by dtype)")
    parser.add_argument("--device", help="of the target: cpu, cuda, mps (default: cuda where there is one, else cpu)")
    parser.add_argument(
        "--dtype", help="of the target: bfloat16, float16, float32, float64; the one the engines ran in"
    )
    parser.set_defaults(run=_run, audit=_greedy)


def _add_level(parser):
    parser.add_argument("--level", type=float, default=0.001, help="odds of failing a correct engine (default 0.001)")


def _run(arguments):
    report = arguments.audit(arguments)
    print(report)
    if arguments.out is not None:
        from specnb.measure.results import came_to_be

        kept = {**report.to_dict(), "server": arguments.server, **came_to_be(arguments.command_line)}
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(kept, indent=1, allow_nan=False) + "\n")
    return report.exit_code


def _track(steps):
    from rich.progress import track

    return track(steps, description="asking", update_period=1)


def _transformers(arguments):
    from specnb.audit import generate as audit_generate

    same = {name: getattr(arguments, name) for name in ("vocab", "gamma", "seed", "level")}
    if arguments.candidates:
        return audit_generate.check_candidates(arguments.path, n=arguments.calls, track=_track, **same)
    return audit_generate.audit_transformers(
        arguments.path, n=arguments.calls, length=arguments.length, track=_track, **same
    )


def _endpoint(arguments):
    from specnb.serving.audit import audit_endpoint

    same = ("prompt", "model", "temperature", "concurrency", "seconds", "options", "level")
    return audit_endpoint(
        arguments.on,
        arguments.off,
        n=arguments.requests,
        num_tokens=arguments.tokens,
        track=_track,
        **{name: getattr(arguments, name) for name in same},
    )


def _greedy(arguments):
    from specnb.audit import compare_greedy, teacher_forced

    prompts, baseline = _read(arguments.baseline)
    others, candidate = _read(arguments.candidate)
    if any(ours != theirs for ours, theirs in zip(prompts, others, strict=False) if ours and theirs):
        raise ValueError(
            f"{arguments.baseline} and {arguments.candidate} answer different prompts, or in another order"
        )
    logits_at = None
    if arguments.target is not None:
        if not all(prompts):
            raise ValueError(f"--target needs prompt_ids on every line of {arguments.baseline}")
        logits_at = teacher_forced(_target(arguments), prompts)
    return compare_greedy(baseline, candidate, logits_at=logits_at, max_ulps=arguments.max_ulps)


def _target(arguments):
    from specnb.models import CausalLM, default_target

    options = {"device": arguments.device, "dtype": arguments.dtype}
    if arguments.target == "smollm2":
        return default_target(**options)
    return CausalLM.from_pretrained(arguments.target, **options)


def _read(path):
    """Prompts (None where a line has none) and ids of a JSON-lines file."""
    prompts, ids = [], []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.strip():
            try:
                row = json.loads(line)
                row = row if isinstance(row, dict) else {"ids": row}
                prompts.append(row.get("prompt_ids"))
                ids.append(row["ids"])
            except (ValueError, KeyError) as error:
                raise ValueError(
                    f'line {number} of {path} must be a list of ids or {{"prompt_ids": [...], "ids": [...]}}: {error}'
                ) from error
    return prompts, ids
