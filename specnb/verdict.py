"""From a result file to an answer: which draft length, how sure, or "do not deploy here".

It knows rows of a sweep. It does not know how they were measured, nor drawing. Every figure is a ratio of sums over
prompts, beside plain decoding measured in the same run; intervals come from resampling prompts. Read notebook 09.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from specnb import theory

PLAIN = ("-", 0)  # Drafter and gamma of plain decoding.
NUM_RESAMPLES = 4000
PHASES = ("draft_sec", "verify_sec", "other_sec")
COUNTS = ("num_tokens", "num_rounds", "num_drafted", "num_accepted", "num_tested", "num_undrafted")
FEW_PROMPTS = 10
LOOP_PERCENT = 20  # Rows with a larger share of repeated 4-grams are loops: lookup accepts everything there.


def load(path):
    """Read a result file; a ValueError where it is none."""
    try:
        result = json.loads(Path(path).read_text(encoding="utf-8"))
        assert result["schema"].startswith("specnb-sweep/")
    except (ValueError, KeyError, TypeError, AssertionError) as error:
        raise ValueError(f"{path} is not a result of `specnb sweep`: {error or 'unknown schema'}") from error
    return result


def frame(result):
    """One line per finished generation, with counts added up over its rounds and seconds over its phases."""
    prompts, lines = result["settings"]["prompts"], []
    for row in result["rows"]:
        if row["status"] != "ok":
            continue
        rounds = np.array(row["rounds"]).reshape(-1, 3)
        drafted, accepted, emitted = rounds.T
        rejected = (accepted < drafted) & (emitted > accepted)
        lines.append(
            {
                **{k: v for k, v in row.items() if k != "rounds"},
                **prompts[row["prompt_id"]],
                "drafter": row["drafter"] or "-",
                "total_sec": row["ttft_sec"] + row["decode_sec"],
                "num_rounds": len(rounds),
                "num_drafted": int(drafted.sum()),
                "num_accepted": int(accepted.sum()),
                "num_tested": int((accepted + rejected).sum()),
                "num_undrafted": int((drafted == 0).sum()),
            }
        )
    if not lines:
        raise ValueError("the result holds no finished generation")
    return pd.DataFrame(lines)


def summary(rows):
    """One line per temperature, drafter and gamma.

    Returns
    -------
    DataFrame
        `sec_per_token` (all phases over all tokens, weighted by prompt), `speedup` over gamma 0 with its 95 %
        bootstrap interval `low`..`high` over prompts, `tokens_per_round`, `accepted_fraction` (accepted / drafted),
        `alpha_hat` (accepted / tested), `wasted_per_token`, seconds per round by phase, `round_cost` (time of one
        round over one plain round, without the prefill), `break_even_fraction` (accepted / drafted at which
        `round_cost` is just earned back).
    """
    lines = []
    for temperature, part in rows.groupby("temperature"):
        resampled = _resampled_speedups(part)
        for arm, group in part.groupby(["drafter", "gamma"]):
            lines.append({"temperature": temperature, **_line(arm, group, resampled[arm])})
    table = pd.DataFrame(lines)
    for _, part in table.groupby("temperature"):
        plain = part[part.gamma == 0].iloc[0]
        table.loc[part.index, "speedup"] = plain.sec_per_token / part.sec_per_token
        cost = part.decode_sec_per_round / plain.decode_sec_per_round
        table.loc[part.index, "round_cost"] = cost
        table.loc[part.index, "break_even_fraction"] = (cost - 1).clip(lower=0) / part.drafted_per_round.where(
            part.gamma > 0
        )
    return table.sort_values(["temperature", "drafter", "gamma"], ignore_index=True)


def _line(arm, group, resampled):
    total = {name: int(group[name].sum()) for name in COUNTS}
    later_rounds = total["num_rounds"] - len(group)  # The first round holds the prefill.
    low, high = np.nanpercentile(resampled, [2.5, 97.5])
    return {
        "drafter": arm[0],
        "gamma": arm[1],
        "num_generations": len(group),
        **total,
        "sec_per_token": (group.total_sec * group.weight).sum() / (group.num_tokens * group.weight).sum(),
        "low": low,
        "high": high,
        "tokens_per_round": total["num_tokens"] / total["num_rounds"],
        "accepted_fraction": _ratio(total["num_accepted"], total["num_drafted"]),
        "alpha_hat": _ratio(total["num_accepted"], total["num_tested"]),
        "drafted_per_round": total["num_drafted"] / total["num_rounds"],
        "wasted_per_token": (total["num_drafted"] - total["num_accepted"]) / total["num_tokens"],
        "ttft_sec": group.ttft_sec.mean(),
        "decode_sec_per_round": _ratio(group.decode_sec.sum(), later_rounds),
        **{f"{phase}_per_round": group[phase].sum() / total["num_rounds"] for phase in PHASES},
    }


def _ratio(part, whole):
    return part / whole if whole else np.nan


def _resampled_speedups(part):
    """{(drafter, gamma): speed-ups over resampled prompts}: the same resamples for every arm, so arms are paired."""
    weighted = part.assign(sec=part.total_sec * part.weight, tokens=part.num_tokens * part.weight)
    arms = ["drafter", "gamma"]
    sec = weighted.pivot_table(index="prompt_id", columns=arms, values="sec", aggfunc="sum")
    tokens = weighted.pivot_table(index="prompt_id", columns=arms, values="tokens", aggfunc="sum")
    if PLAIN not in sec.columns:
        raise ValueError("the result holds no plain decoding (gamma 0) to compare with")
    chosen = np.random.default_rng(0).integers(len(sec), size=(NUM_RESAMPLES, len(sec)))
    base_sec, base_tokens = sec[PLAIN].to_numpy(), tokens[PLAIN].to_numpy()
    speedups = {}
    for arm in sec.columns:
        # A prompt that ran out of memory in one arm is left out of both sides of that arm's ratio.
        both = np.where(np.isnan(sec[arm]) | np.isnan(base_sec), np.nan, 1.0)
        ours, theirs = (
            np.nansum((both * a)[chosen], 1) / np.nansum((both * b)[chosen], 1)
            for a, b in ((sec[arm].to_numpy(), tokens[arm].to_numpy()), (base_sec, base_tokens))
        )
        speedups[arm] = theirs / ours
    return speedups


@dataclass(frozen=True)
class Verdict:
    """The answer for one temperature. `tied` are the arms whose paired 95 % interval against the best contains 1."""

    temperature: float
    best: pd.Series
    tied: list
    deploy: bool
    num_prompts: int

    def __str__(self):
        best, name = self.best, "greedy" if self.temperature == 0 else f"T={self.temperature:g}"
        if not self.deploy:
            reason = (
                "no draft length was faster than plain decoding"
                if best.gamma == 0
                else f"the best draft length, {_name(best)}, measured {best.speedup:.2f}x with a 95 % interval of "
                f"{best.low:.2f}-{best.high:.2f}, which does not clear 1"
            )
            return f"{name}: do not deploy here; {reason} (n = {self.num_prompts} prompts)."
        lines = [
            f"{name}: {_name(best)} decodes {best.speedup:.2f}x as fast as plain decoding (95 % interval "
            f"{best.low:.2f}-{best.high:.2f} over n = {self.num_prompts} prompts)."
        ]
        if self.num_prompts < FEW_PROMPTS:
            lines.append(f"  With fewer than {FEW_PROMPTS} prompts the interval itself is rough; measure more.")
        if self.tied:
            lines.append(f"  It cannot be told from {', '.join(self.tied)} on these prompts.")
        lines.append(
            f"  Break-even: accepted/drafted {best.break_even_fraction:.3f}, measured {best.accepted_fraction:.3f}; "
            f"wasted drafts per emitted token: {best.wasted_per_token:.2f}."
        )
        return "\n".join(lines)


def decide(rows):
    """One `Verdict` per temperature: the arm of highest speed-up, and whether its interval clears plain decoding.

    Notes
    -----
    The best arm is chosen and measured on the same prompts, which flatters it a little. Measure it again on prompts
    of your own before you rely on the second decimal.
    """
    table, verdicts = summary(rows), []
    for temperature, part in rows.groupby("temperature"):
        arms = table[table.temperature == temperature]
        best = arms.loc[arms.speedup.idxmax()]
        resampled = _resampled_speedups(part)
        tied = []
        for _, arm in arms.drop(best.name).iterrows():
            ratios = resampled[arm.drafter, arm.gamma] / resampled[best.drafter, best.gamma]
            if np.nanpercentile(ratios, 97.5) >= 1:
                tied.append("plain decoding" if arm.gamma == 0 else _name(arm))
        deploy = bool(best.gamma > 0 and best.low > 1)
        verdicts.append(Verdict(temperature, best, tied, deploy, part.prompt_id.nunique()))
    return verdicts


def without_loops(rows, loop_percent=LOOP_PERCENT):
    """The rows whose share of repeated 4-grams is at most `loop_percent`."""
    return rows[rows.repeated_4gram_percent <= loop_percent]


def predicted(table):
    """Speed-up of each line of `summary` by the cost model, from measured alpha_hat, draft cost and verify cost.

    The model assumes independent acceptance with one alpha; a round for which the drafter had nothing to propose
    counts as rejected at once. `theory.speedup` is the decoding phase; the prefill, which speculation does not
    change, is added back on both sides.

    Returns
    -------
    Series, aligned with `table`
    """
    speedups = pd.Series(np.nan, index=table.index)
    for _, part in table.groupby("temperature"):
        plain = part[part.gamma == 0].iloc[0]
        step = plain.decode_sec_per_round
        mean_tokens = plain.num_tokens / plain.num_generations
        prefill = max(plain.ttft_sec - step, 0.0)
        for _, arms in part[part.gamma > 0].groupby("drafter"):
            alpha = arms.num_accepted.sum() / (arms.num_tested + arms.num_undrafted).sum()
            for index, arm in arms.iterrows():
                decoding = theory.speedup(alpha, arm.gamma, 0.0, arm.round_cost)
                speedups[index] = (prefill + mean_tokens * step) / (prefill + mean_tokens * step / decoding)
        speedups[part[part.gamma == 0].index] = 1.0
    return speedups


def _name(arm):
    return f"gamma {arm.gamma:g} with {arm.drafter}"


def report(rows):
    """The verdicts as text, and the same without rows that loop."""
    parts = [str(decision) for decision in decide(rows)]
    kept = without_loops(rows)
    dropped = len(rows) - len(kept)
    if dropped == 0:
        parts.append(f"No row has more than {LOOP_PERCENT} % repeated 4-grams, so no loop flatters these figures.")
    else:
        parts.append(f"Without the {dropped} of {len(rows)} rows with more than {LOOP_PERCENT} % repeated 4-grams:")
        parts += [str(decision) for decision in decide(kept)]
    return "\n".join(parts)


def origin(result):
    """One line that names machine, pair and prompts, as every figure's caption needs it."""
    machine, models, settings = result["environment"], result["models"], result["settings"]
    gpus = ", ".join(gpu["name"] for gpu in machine["gpus"])
    device = gpus or f"{machine['processor']}, {machine['num_threads']} threads"
    kinds = {prompt["kind"] for prompt in settings["prompts"].values()}
    return (
        f"{device}; {models['target']['id']} {models['target']['dtype']} with {', '.join(settings['drafters'])}; "
        f"{len(settings['prompts'])} prompts of {len(kinds)} kinds; commit {(result['commit'] or 'unknown')[:7]}"
    )
