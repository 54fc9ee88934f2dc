"""`specnb report`: table, verdict and figure of a result file, or two files side by side.

It knows which files there are and how each is shown; what they mean is `verdict`, `compare` and `suite`.
"""

from pathlib import Path
from typing import Annotated

import typer


def report(
    path: Annotated[Path, typer.Argument(metavar="RESULT", help="The result file.")],
    figure: Annotated[Path | None, typer.Option(help="Draw the picture here too.")] = None,
    compare: Annotated[
        Path | None, typer.Option(metavar="OTHER", help="Set another result beside it, with differences.")
    ] = None,
):
    """Print table and verdict of a result file."""
    from specnb.measure import results, verdict
    from specnb.measure.compare import compare as side_by_side

    results.check_outputs(figure, inputs=[path, compare], replace=True)
    result = results.load(path)
    kind = results.kind_of(result)
    if kind not in SHOWN:
        raise ValueError(f"{path} holds a result of another kind, {kind}; shown are {', '.join(SHOWN)}")
    if compare is not None and kind != "sweep":
        raise ValueError(f"{path} is a result of another kind, {kind}; only those of sweeps are compared")
    if figure is not None and kind not in DRAWN:
        raise ValueError(f"{path}: there is no figure of a result of kind {kind}; leave --figure out")
    try:
        SHOWN[kind](result, path, figure)
    except KeyError as missing:
        raise ValueError(f"{path} is no whole result of kind {kind}: it lacks {missing}") from missing
    if compare is not None:
        other = verdict.load(compare)
        print(f"\nbeside it, b: {verdict.origin(other)}")
        print(side_by_side(*map(verdict.frame, (result, other))).to_string(index=False, float_format="{:.2f}".format))


def show_sweep(result, path, figure):
    """Print table and verdict of the result in `path`; draw its figure where a path for it is given."""
    from specnb.cli import show
    from specnb.measure import concurrency, plots, results, verdict

    if left_out := result["settings"].get("prompts_left_out"):
        print(f"{len(left_out)} prompts were left out, or measured less often than asked: {', '.join(left_out)}")
    if machines := results.machines_in_words(result):
        print(machines)
    if concurrency.batches_of(result) != [1]:
        found = concurrency.batch_table(result)
        print(found.to_string(index=False, float_format="{:.2f}".format))
        print(verdict.origin(result), *concurrency.crossover(found), sep="\n")
        if figure is not None:
            _save(plots.draw_batches(found, f"{verdict.origin(result)}; {path.name}"), figure)
        return
    rows = verdict.frame(result)
    summary = verdict.summary(rows)
    print(show.sweep_table(summary))
    failed = [row for row in result["rows"] if row["status"] != "ok"]
    if failed:
        print(f"{len(failed)} of {len(result['rows'])} rows did not finish; the first: {failed[0]['status']}")
    print(verdict.origin(result))
    print(verdict.report(rows))
    if figure is not None:
        title = f"{verdict.origin(result)}; {path.name}"
        _save(plots.draw_sweep(summary, verdict.predicted(summary), title), figure)


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
