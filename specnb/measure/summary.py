"""From a result file to a table: one line for each temperature, drafter and draft length.

It knows rows of a sweep. It does not know how they were measured, what to conclude from them (`specnb.measure.answer`
does), nor drawing. Every figure is a ratio of sums over prompts, beside plain decoding measured in the same run.
"""

import numpy as np
import pandas as pd

from specnb import theory
from specnb.measure import intervals, results
from specnb.measure.layout import check_sweep
from specnb.trace import Round

PLAIN = ("-", 0)  # Drafter and gamma of plain decoding.
PHASES = ("draft_sec", "verify_sec", "other_sec")
SECONDS = ("total_sec", "ttft_sec", "decode_sec", *PHASES)
COUNTS = (
    "num_tokens",
    "num_rounds",
    "num_later_rounds",
    "num_drafted",
    "num_drafted_later",
    "num_accepted",
    "num_tested",
    "num_undrafted",
)
LOOP_PERCENT = 20  # Rows with a larger share of repeated 4-grams are loops: lookup accepts everything there.


def load(path):
    """Read the result file of a sweep; a ValueError names what is missing or wrong in it."""
    result = results.load(path, "sweep", "specnb sweep")
    check_sweep(path, result)
    return result


def frame(result, batch_size=1, phase="choose"):
    """One line per finished generation, with counts added up over its rounds and seconds over its phases.

    Only those of one batch size; `specnb.measure.concurrency` puts several side by side. Only those of one phase: every
    arm was measured to "choose" among them, and the chosen one again on other prompts to "confirm" the choice.
    """
    prompts, lines = result["settings"]["prompts"], []
    for row in result["rows"]:
        cell = (row.get("batch_size", 1), row.get("phase", "choose"))
        if row["status"] != "ok" or cell != (batch_size, phase):
            continue
        rounds = [Round(*counts) for counts in row["rounds"]]
        # A last round with one token left could not draft; any other without drafts had nothing to propose.
        clipped = row["stop_reason"] == "length" and rounds[-1].num_drafted == 0 and rounds[-1].num_emitted == 1
        lines.append(
            {
                **{k: v for k, v in row.items() if k != "rounds"},
                **prompts[row["prompt_id"]],
                "drafter": row["drafter"] or PLAIN[0],
                "batch_size": batch_size,
                "total_sec": row["ttft_sec"] + row["decode_sec"],
                "num_rounds": len(rounds),
                "num_later_rounds": len(rounds) - 1,
                "num_drafted": sum(r.num_drafted for r in rounds),
                "num_drafted_later": sum(r.num_drafted for r in rounds[1:]),
                "num_accepted": sum(r.num_accepted for r in rounds),
                "num_tested": sum(r.num_tested for r in rounds),
                "num_undrafted": sum(r.num_drafted == 0 for r in rounds) - clipped,
            }
        )
    if not lines and phase == "choose":
        raise ValueError(f"the result holds no finished generation of batch size {batch_size}")
    return pd.DataFrame(lines)


def by_arm(rows):
    """One line per temperature, drafter and gamma.

    Returns
    -------
    DataFrame
        Every sum is weighted by prompt. `sec_per_token` (all phases over all tokens), `speedup` over gamma 0 with the
        95 % interval `low`..`high` over prompts of an arm that was fixed beforehand (NaN for a single prompt, or where
        nothing was measured to compare with), `tokens_per_round`,
        `accepted_fraction` (accepted / drafted), `alpha_hat` (accepted / tested), `wasted_per_token`, seconds per
        round by phase, `round_cost` (time of one round over one plain round, first rounds with their prefill left
        out), `break_even_fraction` (accepted / drafted at which `round_cost` is just earned back).
    """
    lines = []
    for temperature, part in rows.groupby("temperature"):
        ratios = over_plain(part)
        for arm, group in part.groupby(["drafter", "gamma"]):
            lines.append({"temperature": temperature, **_line(arm, group, *ratios[arm])})
    table = pd.DataFrame(lines)
    for _, part in table.groupby("temperature"):
        cost = part.decode_sec_per_round / part[part.gamma == 0].decode_sec_per_round.mean()  # One line, or none.
        drafted = (part.num_drafted_later / part.num_later_rounds).where(part.gamma > 0)
        table.loc[part.index, "round_cost"] = cost
        table.loc[part.index, "break_even_fraction"] = (cost - 1).clip(lower=0) / drafted
    return table.sort_values(["temperature", "drafter", "gamma"], ignore_index=True)


def _line(arm, group, speedup, pseudo):
    total = {name: (group[name] * group.weight).sum() for name in (*COUNTS, *SECONDS)}
    (low,), (high,) = intervals.fixed(speedup, pseudo[:, None])
    return {
        "drafter": arm[0],
        "gamma": arm[1],
        "num_prompts": group.prompt_id.nunique(),
        "weight": group.weight.sum(),
        **{name: total[name] for name in COUNTS},
        "sec_per_token": total["total_sec"] / total["num_tokens"],
        "speedup": speedup,
        "low": low,
        "high": high,
        "tokens_per_round": total["num_tokens"] / total["num_rounds"],
        "accepted_fraction": _ratio(total["num_accepted"], total["num_drafted"]),
        "alpha_hat": _ratio(total["num_accepted"], total["num_tested"]),
        "drafted_per_round": total["num_drafted"] / total["num_rounds"],
        "wasted_per_token": (total["num_drafted"] - total["num_accepted"]) / total["num_tokens"],
        "ttft_sec": total["ttft_sec"] / group.weight.sum(),
        "decode_sec_per_round": _ratio(total["decode_sec"], total["num_later_rounds"]),
        **{f"{phase}_per_round": total[phase] / total["num_rounds"] for phase in PHASES},
    }


def _ratio(part, whole):
    return part / whole if whole else np.nan


def sums(part):
    """Weighted seconds and tokens of each prompt in each arm; rows of one temperature.

    Returns
    -------
    (arms, sec, tokens)
        `arms` is a list of (drafter, gamma), the columns of the two arrays; NaN where an arm has no row of a prompt.
    """
    weighted = part.assign(sec=part.total_sec * part.weight, tokens=part.num_tokens * part.weight)
    by_prompt = weighted.pivot_table(
        index="prompt_id", columns=["drafter", "gamma"], values=["sec", "tokens"], aggfunc="sum"
    )
    return list(by_prompt["sec"].columns), by_prompt["sec"].to_numpy(), by_prompt["tokens"].to_numpy()


def over_plain(part):
    """`intervals.speedups` over plain decoding by arm: {(drafter, gamma): (speed-up, what each prompt says of it)}."""
    arms, sec, tokens = sums(part)
    if PLAIN not in arms:
        return {arm: (np.nan, np.full(len(sec), np.nan)) for arm in arms}
    measured, pseudo = intervals.speedups(sec, tokens, arms.index(PLAIN))
    return {arm: (measured[i], pseudo[:, i]) for i, arm in enumerate(arms)}


def fastest(ratios):
    """The arm of highest speed-up in what `over_plain` returns, None where nothing drafts.

    An arm that was measured on a single prompt is passed over as long as there is another.
    """
    drafting = {arm: (s, (~np.isnan(pseudo)).sum() > 1) for arm, (s, pseudo) in ratios.items() if arm[1] and s == s}
    arm = max(drafting, key=lambda arm: (drafting[arm][1], drafting[arm][0]), default=None)
    return arm and (arm[0], int(arm[1]))


def arm_names(arms):
    """Names of several arms, the draft lengths of one drafter together."""
    names = ["plain decoding"] if PLAIN in arms else []
    for drafter in dict.fromkeys(drafter for drafter, gamma in arms if gamma):
        names.append(f"gamma {', '.join(f'{gamma:g}' for name, gamma in arms if name == drafter)} with {drafter}")
    return names


def at(temperature):
    """How a temperature is named in text: 0 is greedy decoding."""
    return "greedy" if temperature == 0 else f"T={temperature:g}"


def without_loops(rows, loop_percent=LOOP_PERCENT):
    """The rows whose share of repeated 4-grams is at most `loop_percent`."""
    return rows[rows.repeated_4gram_percent <= loop_percent] if len(rows) else rows


def predicted(table):
    """Speed-up of each line of `by_arm` by the cost model, from measured alpha_hat, draft cost and verify cost.

    The model assumes independent acceptance with one alpha; a round for which the drafter had nothing to propose
    counts as rejected at once. `theory.speedup` is the decoding phase; the measured prefill is added on both sides.

    Returns
    -------
    Series, aligned with `table`; NaN where every generation was a single round, or no plain decoding is there
    """
    speedups = pd.Series(np.nan, index=table.index)
    for _, part in table.groupby("temperature"):
        if not (part.gamma == 0).any():
            continue
        plain = part[part.gamma == 0].iloc[0]
        step = plain.decode_sec_per_round
        mean_tokens = plain.num_tokens / plain.weight
        prefill = max(plain.ttft_sec - step, 0.0)
        for _, arms in part[part.gamma > 0].groupby("drafter"):
            alpha = arms.num_accepted.sum() / (arms.num_tested + arms.num_undrafted).sum()
            for index, arm in arms[arms.round_cost.notna()].iterrows():
                own_prefill = max(arm.ttft_sec - arm.decode_sec_per_round, 0.0)  # that of a draft model included
                decoding = theory.speedup(alpha, arm.gamma, 0.0, arm.round_cost)
                speedups[index] = (prefill + mean_tokens * step) / (own_prefill + mean_tokens * step / decoding)
        speedups[part[part.gamma == 0].index] = 1.0
    return speedups


def origin(result):
    """One line that names machine, pair and prompts, as every figure's caption needs it."""
    machine, models, settings = result["environment"], result["models"], result["settings"]
    gpus = ", ".join(gpu["name"] for gpu in machine["gpus"])
    on_cpu = models["target"]["device"] == "cpu"
    device = (
        f"{machine['processor']}, {machine['num_threads']} threads" if on_cpu else gpus or models["target"]["device"]
    )
    kinds = {prompt["kind"] for prompt in settings["prompts"].values()}
    return (
        f"{device}; {models['target']['id']} {models['target']['dtype']} with {', '.join(settings['drafters'])}; "
        f"{len(settings['prompts'])} prompts of {len(kinds)} kinds; commit {(result['commit'] or 'unknown')[:7]}"
    )
