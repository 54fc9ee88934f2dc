"""Figures from data frames: a frame and an axes in, the axes out.

It knows matplotlib and the project's colours. It does not know files or measuring. The colours are Okabe and Ito's,
which colour-blind eyes tell apart; each line also has its own marker.
"""

COLOURS = {
    "target": "#0072B2",
    "draft": "#E69F00",
    "accepted": "#009E73",
    "recovered": "#D55E00",
    "bonus": "#CC79A7",
    "plain": "#7F7F7F",
}
PHASE_COLOURS = {"draft": COLOURS["draft"], "verify": COLOURS["target"], "other": COLOURS["plain"]}
MARKERS = "os^Dvp*"


def speedup(table, ax, predictions=None):
    """Speed-up against gamma with 95 % intervals; `predictions`, aligned with `table`, are drawn as lines."""
    ax.axhline(1, color=COLOURS["plain"], linewidth=1, linestyle=":", label="plain decoding")
    for index, (colour, marker, name, arms) in enumerate(_series(table)):
        ax.errorbar(
            arms.gamma + 0.08 * index,  # Side by side, so that intervals do not cover each other.
            arms.speedup,
            yerr=[arms.speedup - arms.low, arms.high - arms.speedup],
            fmt=marker,
            color=colour,
            capsize=3,
            label=f"{name}, measured",
        )
        if predictions is not None:
            ax.plot(arms.gamma, predictions[arms.index], color=colour, linewidth=1, label=f"{name}, cost model")
    return _finish(ax, "speed-up over plain decoding")


def tokens_per_round(table, ax):
    """Tokens emitted per round against gamma."""
    for colour, marker, name, arms in _series(table):
        ax.plot(arms.gamma, arms.tokens_per_round, marker=marker, color=colour, label=name)
    return _finish(ax, "tokens per round")


def phases(table, ax):
    """Stacked time per round, first rounds with their prefill included: draft, verify, other."""
    table, bottom = table.sort_values("gamma"), 0
    for phase, colour in PHASE_COLOURS.items():
        height = 1000 * table[f"{phase}_sec_per_round"]
        ax.bar(table.gamma, height, bottom=bottom, color=colour, edgecolor="white", label=phase)
        bottom = bottom + height
    return _finish(ax, "time per round, prefill included (ms)")


def sweep(table, predictions, title):
    """The three pictures of a sweep side by side; returns the figure."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.2), layout="constrained", facecolor="white")
    left, middle, right = figure.subplots(1, 3)
    speedup(table, left, predictions)
    tokens_per_round(table, middle)
    first = next(_series(table))  # Phases differ little between temperatures; one is shown.
    phases(first[3], right)
    right.set_title(first[2], fontsize=10)
    figure.suptitle(title, fontsize=10)
    return figure


def _series(table):
    """(colour, marker, name, lines with the baseline) for each temperature and drafter."""
    colours = [COLOURS["target"], COLOURS["recovered"], COLOURS["accepted"], COLOURS["bonus"], COLOURS["draft"]]
    keys = [(t, d) for t, d in table[table.gamma > 0].groupby(["temperature", "drafter"]).groups]
    for index, (temperature, drafter) in enumerate(keys):
        arms = table[(table.temperature == temperature) & ((table.drafter == drafter) | (table.gamma == 0))]
        name = f"{drafter}, {'greedy' if temperature == 0 else f'T={temperature:g}'}"
        yield colours[index % len(colours)], MARKERS[index % len(MARKERS)], name, arms.sort_values("gamma")


def _finish(ax, ylabel):
    ax.set_xlabel("gamma (draft length, tokens)")
    ax.set_ylabel(ylabel)
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.spines[["top", "right"]].set_visible(False)
    ax.set_ylim(top=ax.get_ylim()[1] + 0.3 * (ax.get_ylim()[1] - ax.get_ylim()[0]))  # room for the legend
    ax.legend(frameon=False, fontsize=8, loc="upper left", ncols=2)
    return ax
