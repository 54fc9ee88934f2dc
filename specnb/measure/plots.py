"""Figures from data frames: a frame and an axes in, the axes out.

It knows matplotlib and the project's colours. It does not know files or measuring. The colours are Okabe and Ito's,
which colour-blind eyes tell apart; each line also has its own marker.
"""

import textwrap
from typing import NamedTuple

from specnb.measure.summary import at

COLOURS = {
    "target": "#0072B2",
    "draft": "#E69F00",
    "accepted": "#009E73",
    "recovered": "#D55E00",
    "bonus": "#CC79A7",
    "plain": "#7F7F7F",
}
PHASE_COLOURS = {"draft": COLOURS["draft"], "verify": COLOURS["target"], "other": COLOURS["plain"]}
SERIES_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#000000")
MARKERS = "os^Dvp*"


def speedup(table, ax, predictions=None):
    """Speed-up against gamma with 95 % intervals; `predictions`, aligned with `table`, are drawn as thin lines."""
    ax.axhline(1, color=COLOURS["plain"], linewidth=1, linestyle=":", label="plain decoding")
    for index, series in enumerate(_series(table)):
        arms, style = series.arms, series.style
        ax.errorbar(
            arms.gamma + 0.08 * index,  # Side by side, so that intervals do not cover each other.
            arms.speedup,
            yerr=[arms.speedup - arms.low, arms.high - arms.speedup],
            capsize=3,
            label=series.name,
            **{**style, "linestyle": "none"},
        )
        if predictions is not None:
            line = {**style, "marker": ""}
            label = "" if index else "lines: cost model"
            ax.plot(arms.gamma, predictions[arms.index], linewidth=1, label=label, **line)
    return _finish(ax, "speed-up over plain decoding")


def tokens_per_round(table, ax):
    """Tokens emitted per round against gamma."""
    for series in _series(table):
        ax.plot(series.arms.gamma, series.arms.tokens_per_round, label=series.name, **series.style)
    return _finish(ax, "tokens per round")


def phases(table, ax):
    """Stacked time per round, first rounds with their prefill included: draft, verify, other."""
    table, bottom = table.sort_values("gamma"), 0
    for phase, colour in PHASE_COLOURS.items():
        height = 1000 * table[f"{phase}_sec_per_round"]
        ax.bar(table.gamma, height, bottom=bottom, color=colour, edgecolor="white", label=phase)
        bottom = bottom + height
    return _finish(ax, "time per round, prefill included (ms)")


def draw_sweep(table, predictions, title):
    """The pictures of a sweep: speed-up for each temperature, tokens and time per round; returns the figure."""
    from matplotlib.figure import Figure

    temperatures = sorted(table[table.gamma > 0].temperature.unique())
    panels = len(temperatures) + 2
    columns = 2 if panels in (2, 4) else 3
    lines = -(-panels // columns)
    figure = Figure(figsize=(5.2 * columns, 0.4 + 3.8 * lines), layout="constrained", facecolor="white")
    axes = figure.subplots(lines, columns, squeeze=False).flatten()
    for ax in axes[panels:]:
        ax.set_axis_off()
    *first, middle, right = axes[:panels]
    for temperature, ax in zip(temperatures, first, strict=True):
        part = table[table.temperature == temperature]
        speedup(part, ax, predictions[part.index])
        ax.set_title(at(temperature), fontsize=10)
    tokens_per_round(table, middle)
    # Phases differ little between temperatures: one series is shown, that whose drafts take longest.
    shown = max(_series(table), key=lambda series: series.arms.draft_sec_per_round.max(), default=None)
    if shown is None:  # Nothing was drafted, or nothing that was finished.
        phases(table[table.temperature == table.temperature.min()], right)
    else:
        phases(shown.arms, right)
        right.set_title(f"{shown.drafter}, {at(shown.temperature)}", fontsize=10)
    figure.suptitle(textwrap.fill(title, 30 * panels), fontsize=10)
    return figure


def draw_costs(rows, targets, title):
    """Costs of forwards against new tokens, for the shortest and the longest context: time, and v for the targets.

    `rows` as from `specnb.measure.shapes`: eager forwards solid with their 20-80 % band, replays dashed, the floor
    dotted.
    """
    from matplotlib.figure import Figure

    contexts = sorted({rows.context.min(), rows.context.max()})
    figure = Figure(figsize=(10.4, 0.4 + 3.8 * len(contexts)), layout="constrained", facecolor="white")
    for (left, right), context in zip(figure.subplots(len(contexts), 2, squeeze=False), contexts, strict=True):
        for index, (name, part) in enumerate(rows[rows.context == context].groupby("model", sort=False)):
            part, style = part.sort_values("width"), {"color": SERIES_COLOURS[index % len(SERIES_COLOURS)]}
            left.plot(part.width, 1000 * part.sec, marker=MARKERS[index], label=name, **style)
            left.fill_between(part.width, 1000 * part.low_sec, 1000 * part.high_sec, alpha=0.2, **style)
            left.plot(part.width, 1000 * part.graph_sec.astype(float), linestyle="--", **style)
            left.plot(part.width, 1000 * part.floor_sec, linestyle=":", **style)
            if name in targets:
                right.plot(part.width - 1, part.sec / part.sec.iloc[0], marker=MARKERS[index], label=name, **style)
                replayed = part.graph_sec.astype(float)
                right.plot(part.width - 1, replayed / replayed.iloc[0], linestyle="--", **style)
        left.plot([], [], "k--", label="replayed as a CUDA graph")
        left.plot([], [], "k:", label="floor: memory or arithmetic")
        _finish(left, "time of a forward (ms)").set_xlabel("new tokens")
        left.set_ylim(bottom=0)
        _finish(right, "v: time over that of one token")
        for ax in (left, right):
            ax.set_title(f"{context} tokens in the cache", fontsize=10)
    figure.suptitle(textwrap.fill(title, 100), fontsize=10)
    return figure


def draw_batches(table, title):
    """Throughput, and speed-up over plain decoding of the same batch size, against batch size; the best arms only.

    `table` as from `specnb.measure.concurrency`: of each drafter the draft length that is fastest at the smallest
    batch, and the one that is fastest at the largest.
    """
    from matplotlib.figure import Figure

    temperatures = sorted(table.temperature.unique())
    figure = Figure(figsize=(10.4, 0.4 + 3.8 * len(temperatures)), layout="constrained", facecolor="white")
    for (left, right), temperature in zip(
        figure.subplots(len(temperatures), 2, squeeze=False), temperatures, strict=True
    ):
        part = table[table.temperature == temperature]
        plain, sizes = part[part.gamma == 0].sort_values("batch_size"), sorted(part.batch_size.unique())
        left.plot(plain.batch_size, plain.tokens_per_sec, color=COLOURS["plain"], marker="o", label="plain decoding")
        right.axhline(1, color=COLOURS["plain"], linewidth=1, linestyle=":")
        ends = part[(part.gamma > 0) & part.batch_size.isin([part.batch_size.min(), part.batch_size.max()])]
        best = ends.loc[ends.groupby(["drafter", "batch_size"]).tokens_per_sec.idxmax(), ["drafter", "gamma"]]
        for index, (drafter, gamma) in enumerate(best.drop_duplicates().itertuples(index=False)):
            arms = part[(part.drafter == drafter) & (part.gamma == gamma)].sort_values("batch_size")
            style = {"color": SERIES_COLOURS[index % len(SERIES_COLOURS)], "marker": MARKERS[index % len(MARKERS)]}
            left.plot(arms.batch_size, arms.tokens_per_sec, label=f"{drafter}, gamma {gamma:g}", **style)
            bars = [arms.speedup - arms.low, arms.high - arms.speedup]
            right.errorbar(arms.batch_size, arms.speedup, yerr=bars, capsize=3, label=f"{drafter}, {gamma:g}", **style)
        for ax, ylabel in ((left, "tokens per second, all rows"), (right, "speed-up over plain, same batch size")):
            _finish(ax, ylabel)
            ax.set_xlim(sizes[0] / 1.2, 1.2 * sizes[-1])
            ax.set_xscale("log", base=2)
            ax.set_xticks(sizes, [f"{size:g}" for size in sizes])
            ax.set_xlabel("batch size (requests at once)")
            ax.set_title(at(temperature), fontsize=10)
    figure.suptitle(textwrap.fill(title, 100), fontsize=10)
    return figure


class _Series(NamedTuple):
    temperature: float
    drafter: str
    name: str  # shortest that tells it from the others
    style: dict  # colour by drafter, marker and dashes by temperature
    arms: object  # lines of the summary, the baseline among them


def _series(table):
    keys = table[table.gamma > 0].groupby(["temperature", "drafter"]).groups
    temperatures, drafters = (sorted({key[i] for key in keys}) for i in (0, 1))
    for temperature, drafter in keys:
        colour, which = drafters.index(drafter), temperatures.index(temperature)
        style = {
            "color": SERIES_COLOURS[colour % len(SERIES_COLOURS)],
            "marker": MARKERS[(len(temperatures) * colour + which) % len(MARKERS)],
            "linestyle": "-:"[which % 2],
        }
        name = drafter if len(temperatures) == 1 else f"{drafter}, {at(temperature)}"
        arms = table[(table.temperature == temperature) & ((table.drafter == drafter) | (table.gamma == 0))]
        yield _Series(temperature, drafter, name, style, arms.sort_values("gamma"))


def _finish(ax, ylabel):
    ax.set_xlabel("gamma (draft length, tokens)")
    ax.set_ylabel(ylabel)
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.spines[["top", "right"]].set_visible(False)
    ax.set_ylim(top=ax.get_ylim()[1] + 0.3 * (ax.get_ylim()[1] - ax.get_ylim()[0]))  # room for the legend
    if ax.get_legend_handles_labels()[1]:
        ax.legend(frameon=False, fontsize=7, loc="upper left", ncols=2)
    return ax
