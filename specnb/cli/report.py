"""`specnb report`: table, answers and figure of a result file, or two files side by side.

It knows which files there are and how each is shown; what they mean is known to `specnb.measure`.
"""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from specnb.cli.parts import Worth


def report(
    path: Annotated[Path, typer.Argument(metavar="RESULT", help="The result file.")],
    figure: Annotated[Path | None, typer.Option(help="Draw the picture here too.")] = None,
    compare: Annotated[
        Path | None, typer.Option(metavar="OTHER", help="Set another result beside it, with differences.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the answers of a sweep alone, as a JSON list.")
    ] = False,
    worth: Worth = 1.05,
):
    """Print table and answers of a result file."""
    from specnb.measure import results, summary
    from specnb.measure.compare import compare as side_by_side

    results.check_outputs(figure, inputs=[path, compare], replace=True)
    result = results.load(path)
    kind = results.kind_of(result)
    if kind not in SHOWN:
        raise ValueError(f"{path} holds a result of another kind, {kind}; shown are {', '.join(SHOWN)}")
    if kind != "sweep" and (compare is not None or as_json):
        raise ValueError(f"{path} is a result of another kind, {kind}; --compare and --json are for those of sweeps")
    if figure is not None and kind not in DRAWN:
        raise ValueError(f"{path}: there is no figure of a result of kind {kind}; leave --figure out")
    other = None if compare is None else summary.load(compare)
    if kind == "sweep":
        show_sweep(summary.load(path), path, figure, worth, as_json)
    else:
        _show_other(kind, result, path, figure)
    if other is not None:
        table = side_by_side(*map(summary.frame, (result, other)))
        print(f"\nbeside it, b: {summary.origin(other)}")
        print(table.to_string(index=False, float_format="{:.2f}".format, na_rep="-"))


def _show_other(kind, result, path, figure):
    try:
        SHOWN[kind](result, path, figure)
    except KeyError as missing:
        raise ValueError(f"{path} is no whole result of kind {kind}: it lacks {missing}") from missing


def show_sweep(result, path, figure=None, worth=1.05, as_json=False):
    """Print table and answers of the result in `path`; draw its figure where a path for it is given.

    With `as_json` the answers alone are printed, as DESIGN has them. Whatever has no result is named.
    """
    from specnb.cli import show
    from specnb.measure import answer, concurrency, plots, results, summary

    several = concurrency.batches_of(result) != [1]
    answers, finished = concurrency.answers(result, worth), concurrency.finished(result)
    title = f"{summary.origin(result)}; {path.name}"
    drawn = None
    if not several and finished:
        rows = summary.frame(result)
        table = summary.by_arm(rows)
        shown = [show.sweep_table(table), *_unfinished(result), summary.origin(result)]
        shown.append(answer.report(rows, summary.frame(result, phase="confirm"), worth=worth))
        shown += [str(found) for found in answers if found.temperature not in set(rows.temperature)]
        drawn = figure and plots.draw_sweep(table, summary.predicted(table), title)
    elif finished:
        table = concurrency.batch_table(result)
        shown = [table.to_string(index=False, float_format="{:.2f}".format, na_rep="-"), *_unfinished(result)]
        shown += [summary.origin(result), *concurrency.crossover(answers), *map(str, answers)]
        drawn = figure and plots.draw_batches(table, title)
    else:
        shown = [*_unfinished(result), summary.origin(result), *map(str, answers)]
    if as_json:
        print(
            json.dumps([found.to_dict() | ({"batch_size": found.batch_size} if several else {}) for found in answers])
        )
    else:
        machines = results.machines_in_words(result)
        print(*_left_out(result), *([machines] if machines else []), *shown, sep="\n")
    if drawn:
        _save(drawn, figure)
    elif figure:
        print("no figure is drawn, because nothing finished", file=sys.stderr)


def _left_out(result):
    left_out = result["settings"].get("prompts_left_out", [])
    several = f"{len(left_out)} prompts were left out, or measured less often than asked: {', '.join(left_out)}"
    return [several] if left_out else []


def _unfinished(result):
    """What failed: how many rows in all, and the parts of the grid of which nothing is left."""
    from specnb.measure import concurrency

    failed = [row["status"] for row in result["rows"] if row["status"] != "ok"]
    if not failed:
        return []
    total = f"{len(failed)} of {len(result['rows'])} rows did not finish; the first: {failed[0]}"
    return [total, *concurrency.holes(result)]


def show_costs(result, path, figure):
    """The same for the costs of a suite: c, v and the acceptance that breaks even, eager and replayed."""
    import pandas as pd

    from specnb.measure import plots
    from specnb.measure import shapes as suite

    for column, how in suite.HOW.items():
        print(f"\n{how}")
        print(suite.cost_table(result, column).to_string(index=False, float_format="{:.3f}".format, na_rep="-"))
    print(f"\n{suite.origin(result)}; acceptance {result['acceptance']}")
    if figure is not None:
        targets = [target for target, _ in result["settings"]["pairs"]]
        _save(plots.draw_costs(pd.DataFrame(result["rows"]), targets, f"{suite.origin(result)}; {path.name}"), figure)


def _save(drawn, figure):
    figure.parent.mkdir(parents=True, exist_ok=True)
    drawn.savefig(figure, dpi=110)


def show_serve(result, *_):
    """The same for a running server: table, and by which rule it accepts."""
    from specnb.serving.load import levels_table

    print(levels_table(result).to_string(index=False, float_format="{:.3f}".format, na_rep="-"))
    for level in result["levels"]:
        if level.get("metrics_note"):
            print(f"at concurrency {level['concurrency']}: {level['metrics_note']}")
    print(f"engine: {result['engine'] or 'unknown, its /metrics say nothing of speculation'}")
    if result["rule"]:
        print(f"acceptance rule: {result['rule']}")


def show_audit(result, *_):
    """The same for an audit: what `specnb audit` printed when it was made, and of which engine it is."""
    from specnb.audit import Report

    print(Report.from_dict(result))
    if result.get("server"):
        print("engine: " + ", ".join(f"{key} {value}" for key, value in result["server"].items()))


SHOWN = {"sweep": show_sweep, "costs": show_costs, "serve": show_serve, "audit": show_audit}
DRAWN = ("sweep", "costs")
