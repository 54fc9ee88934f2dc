"""The card and the figure of a draft, from its config, its training log and its evaluation: nothing is typed."""

import json
import sys
from pathlib import Path

import numpy as np

from specnb.measure import summary

NUM_RESAMPLES = 4000


def read(folder):
    """(config, lines of the training log, rows of the evaluation as a frame, the evaluation)."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    log = [json.loads(line) for line in (folder / "training.jsonl").read_text(encoding="utf-8").splitlines()]
    result = summary.load(folder / "evaluation.json")
    return config, log, summary.frame(result), result


def alpha(rows):
    """(alpha_hat, low, high) with a 95 % bootstrap interval over prompts; rows of one temperature, drafted."""
    by_prompt = rows.groupby("prompt_id")[["num_accepted", "num_tested"]].sum().to_numpy()
    chosen = np.random.default_rng(0).integers(len(by_prompt), size=(NUM_RESAMPLES, len(by_prompt)))
    sums = by_prompt[chosen].sum(1)
    total = by_prompt.sum(0)
    return total[0] / total[1], *np.percentile(sums[:, 0] / np.maximum(sums[:, 1], 1), [2.5, 97.5])


def alpha_by_position(result, temperature):
    """Acceptance of the first, second, ... draft of a block, given that those before it were accepted."""
    gamma = max(result["settings"]["gammas"])
    tested, accepted = np.zeros(gamma), np.zeros(gamma)
    for row in result["rows"]:
        if row["gamma"] == gamma and row["temperature"] == temperature and row["status"] == "ok":
            for drafted, kept, emitted in row["rounds"]:
                accepted[:kept] += 1
                tested[: kept + (kept < drafted and emitted > kept)] += 1
    return accepted / tested


def cost_ratio(rows):
    """Time of one draft step over one plain step of the target, both from the evaluation's own run."""
    plain, drafted = rows[rows.gamma == 0], rows[rows.gamma > 0]
    step = plain.decode_sec.sum() / plain.num_later_rounds.sum()
    # The first round holds the draft's prefill: it is left out on both sides by taking a draft's share of later rounds.
    return drafted.draft_sec.sum() / drafted.num_drafted.sum() / step


def text(folder):
    config, log, rows, result = read(folder)
    how, made_for = config["how"], config["made_for"]
    model = next(iter(result["models"]["draft"].values()))
    target = result["models"]["target"]
    drafted = rows[rows.gamma > 0]
    temperatures = sorted(drafted.temperature.unique())
    names = {t: "greedy" if t == 0 else f"T={t:g}" for t in temperatures}
    positions = {t: alpha_by_position(result, t) for t in temperatures}

    def cells(part):
        return " | ".join("{:.2f} ({:.2f}-{:.2f})".format(*alpha(part[part.temperature == t])) for t in temperatures)

    kinds = [f"| {kind} | {part.prompt_id.nunique()} | {cells(part)} |" for kind, part in drafted.groupby("kind")]
    by_position = [
        f"| {i + 1} | {' | '.join(f'{positions[t][i]:.2f}' for t in temperatures)} |"
        for i in range(max(result["settings"]["gammas"]))
    ]
    last = log[-1]
    gamma = max(result["settings"]["gammas"])
    return f"""# {folder.name}

A draft model for speculative decoding with {made_for["id"]}: {len(config["kept_layers"])} of the target's layers
({", ".join(map(str, config["kept_layers"]))}, counted from 0), trained further. It is of no use alone: it reads the
target's embedding and proposes only among {model["num_output_ids"]:,} of its tokens. The output of speculative decoding
with it is distributed as the target's, whatever it proposes.

Made by `scripts/distill.py` (`make draft`); this card is written from `config.json`, `training.jsonl` and
`evaluation.json`, nothing in it is typed.

| | |
|---|---|
| licence | Apache-2.0, as the target's |
| made for | {made_for["id"]}, sha256 {", ".join((made_for["sha256"] or {"unknown": "unknown"}).values())} |
| those weights | Q4_1 above means: rounded to 4 bits and expanded again; the draft imitates the rounded model |
| text | {how["text"]["num_tokens"]:,} tokens the target wrote itself, {how["text"]["num_held_out_tokens"]:,} more \
held out; {how["text"]["worker_seconds"] / 60:.0f} worker-minutes. The step `synthesise` with the same seed writes it \
again: {how["text"]["num_shards"]} shards of {how["text"]["rows_per_shard"]} x {how["text"]["tokens_per_row"]} |
| training | {last["tokens"]:,} tokens ({last["tokens"] / how["text"]["num_tokens"]:.1f} passes) in \
{last["seconds"] / 60:.0f} min on {how["processor"]} |
| command | `{how["command"]}`, seed {how["seed"]}, commit {(how["commit"] or "unknown")[:7]} |
| own parameters | {model["num_params"] / 1e6:.1f} M, {100 * model["num_params"] / target["num_params"]:.0f} % of the \
target's {target["num_params"] / 1e6:.1f} M; {model["num_shared_params"] / 1e6:.1f} M of embedding are shared |
| cost_ratio | {cost_ratio(rows):.2f} measured: time of a draft step over a step of the target, {target["dtype"]}, \
{result["environment"]["processor"]}, {result["environment"]["num_threads"]} threads |
| output ids | {model["num_output_ids"]:,} of {made_for["vocab_size"]:,}; they cover \
{how["output_ids_cover_percent"]:.1f} % of the text |
| held-out alpha | {last["held_out_overlap"]:.3f} = mean of sum min(p, q) at T=1, along the target's own path |

## Acceptance

alpha_hat = accepted / tested, gamma {gamma}, on prompts never trained on, with 95 % intervals over prompts
({result["settings"]["prompts"][next(iter(result["settings"]["prompts"]))]["max_new_tokens"]} tokens at most each).

| kind of prompt | prompts | {" | ".join(names.values())} |
|---|---|{"---|" * len(temperatures)}
{chr(10).join(kinds)}
| all | {drafted.prompt_id.nunique()} | {cells(drafted)} |

By position in the block, given that the drafts before were accepted:

| position | {" | ".join(names.values())} |
|---|{"---|" * len(temperatures)}
{chr(10).join(by_position)}

## What it is bad at

The kinds at the bottom of the table above: {worst(drafted)}. It was trained on rows of
{how["text"]["tokens_per_row"]} tokens, mostly English, and copies nothing from far back: where the answer repeats the
prompt, prompt lookup is the better draft. Text in other languages, long contexts and the tokens outside its
{model["num_output_ids"]:,} are where it is rejected most.
"""


def worst(drafted, num=2):
    by_kind = {kind: alpha(part)[0] for kind, part in drafted.groupby("kind")}
    return ", ".join(f"{kind} ({by_kind[kind]:.2f})" for kind in sorted(by_kind, key=by_kind.get)[:num])


def figure(folder):
    """Acceptance on held-out text against tokens trained on, and against time."""
    from matplotlib.figure import Figure

    from specnb.measure.plots import COLOURS

    config, log, *_ = read(folder)
    drawn = Figure(figsize=(9, 3.6), layout="constrained", facecolor="white")
    left, right = drawn.subplots(1, 2)
    held_out = [line for line in log if "held_out_overlap" in line]
    million = [line["tokens"] / 1e6 for line in log]
    left.plot(
        million, [line["overlap"] for line in log], color=COLOURS["plain"], linewidth=0.8, label="batch trained on"
    )
    left.plot(
        [line["tokens"] / 1e6 for line in held_out],
        [line["held_out_overlap"] for line in held_out],
        color=COLOURS["draft"],
        marker="o",
        markersize=3,
        label="held out",
    )
    left.set(xlabel="tokens trained on (million)", ylabel="alpha at T=1: mean of sum min(p, q)")
    left.axvline(config["how"]["text"]["num_tokens"] / 1e6, color=COLOURS["plain"], linestyle=":", label="one pass")
    left.legend(frameon=False, fontsize=8)
    right.plot(
        [line["seconds"] / 60 for line in log], [line["loss"] for line in log], color=COLOURS["draft"], linewidth=0.8
    )
    right.set(xlabel="minutes of training", ylabel="loss (divergence, later total variation)", yscale="log")
    for ax in (left, right):
        ax.spines[["top", "right"]].set_visible(False)
    drawn.suptitle(f"{folder.name}: training on {config['how']['processor']}; training.jsonl", fontsize=10)
    return drawn


def write(folder):
    """`README.md` in the folder; the curve beside the other figures for a draft in data/, else in the folder."""
    folder = Path(folder).resolve()
    (folder / "README.md").write_text(text(folder), encoding="utf-8")
    figures = folder.parent.parent / "figures" if folder.parent.name == "data" else folder
    figures.mkdir(exist_ok=True)
    figure(folder).savefig(figures / f"{folder.name}-training.png", dpi=110)


if __name__ == "__main__":
    write(sys.argv[1])
