"""From a result file to an answer: which draft length, how sure, or "do not deploy here".

It knows rows of a sweep. It does not know how they were measured, nor drawing. Every figure is a ratio of sums over
prompts, beside plain decoding measured in the same run; intervals come from resampling prompts. Read notebook 09.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from specnb import theory
from specnb.measure import results
from specnb.trace import Round

PLAIN = ("-", 0)  # Drafter and gamma of plain decoding.
NUM_RESAMPLES = 4000
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
FEW_PROMPTS = 10
LOOP_PERCENT = 20  # Rows with a larger share of repeated 4-grams are loops: lookup accepts everything there.


def load(path):
    """Read the result file of a sweep; a ValueError where it is none."""
    return results.load(path, "sweep", "specnb sweep")


def frame(result, batch_size=1):
    """One line per finished generation, with counts added up over its rounds and seconds over its phases.

    Only those of one batch size; `specnb.measure.concurrency` puts several side by side.
    """
    prompts, lines = result["settings"]["prompts"], []
    for row in result["rows"]:
        if row["status"] != "ok" or row.get("batch_size", 1) != batch_size:
            continue
        rounds = [Round(*counts) for counts in row["rounds"]]
        # A last round with one token left could not draft; any other without drafts had nothing to propose.
        clipped = row["stop_reason"] == "length" and rounds[-1].num_drafted == 0 and rounds[-1].num_emitted == 1
        lines.append(
            {
                **{k: v for k, v in row.items() if k != "rounds"},
                **prompts[row["prompt_id"]],
                "drafter": row["drafter"] or "-",
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
    if not lines:
        raise ValueError(f"the result holds no finished generation of batch size {batch_size}")
    return pd.DataFrame(lines)


def summary(rows):
    """One line per temperature, drafter and gamma.

    Returns
    -------
    DataFrame
        Every sum is weighted by prompt. `sec_per_token` (all phases over all tokens), `speedup` over gamma 0 with its
        95 % bootstrap interval `low`..`high` over prompts (NaN for a single prompt), `tokens_per_round`,
        `accepted_fraction` (accepted / drafted), `alpha_hat` (accepted / tested), `wasted_per_token`, seconds per
        round by phase, `round_cost` (time of one round over one plain round, first rounds with their prefill left
        out), `break_even_fraction` (accepted / drafted at which `round_cost` is just earned back).
    """
    lines = []
    for temperature, part in rows.groupby("temperature"):
        by_arm = speedups(part)
        for arm, group in part.groupby(["drafter", "gamma"]):
            lines.append({"temperature": temperature, **_line(arm, group, by_arm[arm])})
    table = pd.DataFrame(lines)
    for _, part in table.groupby("temperature"):
        plain = part[part.gamma == 0].iloc[0]
        cost = part.decode_sec_per_round / plain.decode_sec_per_round
        drafted = (part.num_drafted_later / part.num_later_rounds).where(part.gamma > 0)
        table.loc[part.index, "round_cost"] = cost
        table.loc[part.index, "break_even_fraction"] = (cost - 1).clip(lower=0) / drafted
    return table.sort_values(["temperature", "drafter", "gamma"], ignore_index=True)


def _line(arm, group, ratios):
    total = {name: (group[name] * group.weight).sum() for name in (*COUNTS, *SECONDS)}
    several = group.prompt_id.nunique() > 1  # Resampling a single prompt says nothing about others.
    low, high = np.nanpercentile(ratios[1:], [2.5, 97.5]) if several else (np.nan, np.nan)
    return {
        "drafter": arm[0],
        "gamma": arm[1],
        "num_prompts": group.prompt_id.nunique(),
        "weight": group.weight.sum(),
        **{name: total[name] for name in COUNTS},
        "sec_per_token": total["total_sec"] / total["num_tokens"],
        "speedup": ratios[0],
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


def speedups(part):
    """{(drafter, gamma): speed-ups}, the first as measured, the others over resampled prompts.

    The resamples are the same for every arm, so that arms can be compared in pairs.
    """
    weighted = part.assign(sec=part.total_sec * part.weight, tokens=part.num_tokens * part.weight)
    sec, tokens = (
        weighted.pivot_table(index="prompt_id", columns=["drafter", "gamma"], values=values, aggfunc="sum")
        for values in ("sec", "tokens")
    )
    if PLAIN not in sec.columns:
        raise ValueError("the result holds no plain decoding (gamma 0) to compare with")
    measured = np.arange(len(sec))
    chosen = np.random.default_rng(0).integers(len(sec), size=(NUM_RESAMPLES, len(sec)))
    chosen = np.vstack([measured, chosen])  # (1 + NUM_RESAMPLES, prompts)

    def sec_per_token(arm, used):
        return np.nansum((sec[arm] * used).to_numpy()[chosen], 1) / np.nansum(
            (tokens[arm] * used).to_numpy()[chosen], 1
        )

    by_arm = {}
    for arm in sec.columns:
        # A prompt that ran out of memory in one arm is left out of both sides of that arm's ratio.
        used = (sec[arm] + sec[PLAIN]).notna().replace(False, np.nan).astype(float)
        by_arm[arm] = sec_per_token(PLAIN, used) / sec_per_token(arm, used)
    return by_arm


@dataclass(frozen=True)
class Verdict:
    """The answer for one temperature.

    `best` and `plain` are lines of `summary`; `tied` names the arms whose paired 95 % interval against `best`
    contains 1; `deploy` says whether the interval of `best` clears plain decoding.
    """

    temperature: float
    best: pd.Series
    plain: pd.Series
    tied: list
    deploy: bool

    def __str__(self):
        best = self.best
        measured = (
            f"{_name(best)} is {best.speedup:.2f}x as fast as plain decoding, prefill included (95 % interval "
            f"{best.low:.2f}-{best.high:.2f}, n = {best.num_prompts} prompts)"
        )
        lines = [
            f"{_temperature(self.temperature)}: "
            + (f"{measured}." if self.deploy else f"do not deploy here; at best, {measured}: not clearly above 1."),
            f"  sec_per_token {best.sec_per_token:.4f}, plain decoding {self.plain.sec_per_token:.4f}; wasted drafts "
            f"per emitted token {best.wasted_per_token:.2f}.",
            f"  Break-even at accepted/drafted {best.break_even_fraction:.3f}, measured {best.accepted_fraction:.3f}.",
        ]
        if self.tied:
            lines.append(f"  It cannot be told from {', '.join(self.tied)} on these prompts.")
        if best.num_prompts < FEW_PROMPTS:
            lines.append(f"  With fewer than {FEW_PROMPTS} prompts the interval itself is rough; measure more.")
        return "\n".join(lines)


def decide(rows):
    """One `Verdict` per temperature: the draft length of highest speed-up, and whether it beats plain decoding.

    A temperature at which nothing was drafted, or no plain decoding is left, has none.

    Notes
    -----
    The best arm is chosen and measured on the same prompts, which flatters it a little. Measure it again on prompts
    of your own before you rely on the second decimal.
    """
    verdicts = []
    for temperature, part in rows.groupby("temperature"):
        if not ((part.gamma == 0).any() and (part.gamma > 0).any()):
            continue
        arms, by_arm = summary(part), speedups(part)
        best = arms.loc[arms[arms.gamma > 0].speedup.idxmax()]
        tied = []
        for _, arm in arms.drop(best.name).iterrows():
            ratios = by_arm[arm.drafter, arm.gamma][1:] / by_arm[best.drafter, best.gamma][1:]
            low, high = np.nanpercentile(ratios, [2.5, 97.5])
            if low <= 1 <= high:
                tied.append(arm)
        verdicts.append(Verdict(temperature, best, arms[arms.gamma == 0].iloc[0], _names(tied), bool(best.low > 1)))
    return verdicts


def without_loops(rows, loop_percent=LOOP_PERCENT):
    """The rows whose share of repeated 4-grams is at most `loop_percent`."""
    return rows[rows.repeated_4gram_percent <= loop_percent]


def predicted(table):
    """Speed-up of each line of `summary` by the cost model, from measured alpha_hat, draft cost and verify cost.

    The model assumes independent acceptance with one alpha; a round for which the drafter had nothing to propose
    counts as rejected at once. `theory.speedup` is the decoding phase; the measured prefill is added on both sides.

    Returns
    -------
    Series, aligned with `table`; NaN where every generation was a single round
    """
    speedups = pd.Series(np.nan, index=table.index)
    for _, part in table.groupby("temperature"):
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


def _name(arm):
    return f"gamma {arm.gamma:g} with {arm.drafter}"


def _names(arms):
    """Names of several arms, the draft lengths of one drafter together."""
    names = ["plain decoding"] if any(arm.gamma == 0 for arm in arms) else []
    for drafter in dict.fromkeys(arm.drafter for arm in arms if arm.gamma):
        names.append(f"gamma {', '.join(f'{arm.gamma:g}' for arm in arms if arm.drafter == drafter)} with {drafter}")
    return names


def _temperature(temperature):
    return "greedy" if temperature == 0 else f"T={temperature:g}"


def report(rows):
    """The verdicts as text, and the same without rows that loop."""
    kept = without_loops(rows)
    if len(kept) == len(rows):
        note = f"No row has more than {LOOP_PERCENT} % repeated 4-grams, so no loop flatters these figures."
        return "\n".join([*map(str, decide(rows)), note])
    note = f"Without the {len(rows) - len(kept)} of {len(rows)} rows with more than {LOOP_PERCENT} % repeated 4-grams:"
    return "\n".join([*map(str, decide(rows)), note, *map(str, decide(kept) or ["nothing is left to compare."])])


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
