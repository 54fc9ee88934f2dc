"""From a table of speed-ups to an answer: deploy this draft length, do not deploy, or cannot tell yet.

It knows frames of `specnb.measure.summary` and the intervals of `specnb.measure.intervals`. It does not know files or
drawing. Read notebook 09.
"""

import math
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from specnb.measure import intervals
from specnb.measure.summary import LOOP_PERCENT, PLAIN, arm_names, at, by_arm, fastest, over_plain, sums, without_loops

WORTH = 1.05  # The least speed-up for which anybody would deploy a draft.
FEW_PROMPTS = 10
MANY_PROMPTS = 1000
CHANCE = 0.84  # Standard errors beyond a bound at which 80 % of the estimates lie on its right side.


@dataclass(frozen=True)
class Answer:
    """The answer for one temperature and batch size.

    Attributes
    ----------
    answer : "deploy", "do not deploy" or "cannot tell"
    drafter, gamma, speedup : the arm of highest speed-up, None where nothing can be compared
    low, high : float or None
        95 % interval of `speedup`. `low` allows for the arm's having been chosen among all; not so where other prompts
        confirmed it.
    num_prompts : int
        How many prompts, or batches, the interval rests on.
    more_prompts : int or None
        About how many more it would take to tell; None where an answer is given, or nothing says how many.
    confirmed : bool
        Whether speed-up and interval come from prompts that did not choose the arm.
    tied : list of str
        The arms that cannot be told from the best.
    best, plain : Series or None
        Their lines of `summary.by_arm`.
    note : str
        Why nothing can be compared, else empty.
    """

    temperature: float
    answer: str
    batch_size: int = 1
    drafter: str | None = None
    gamma: int | None = None
    speedup: float | None = None
    low: float | None = None
    high: float | None = None
    num_prompts: int = 0
    more_prompts: int | None = None
    confirmed: bool = False
    num_arms: int = 0
    worth: float = WORTH
    tied: list = field(default_factory=list)
    best: pd.Series | None = None
    plain: pd.Series | None = None
    note: str = ""

    def to_dict(self):
        """What `specnb report --json` says of it."""
        names = ("temperature", "answer", "drafter", "gamma", "speedup", "low", "high")
        return {name: getattr(self, name) for name in names}

    def __str__(self):
        where = f"{at(self.temperature)}{'' if self.batch_size == 1 else f', batch {self.batch_size}'}: {self.answer}"
        if self.best is None:
            return f"{where}; {self.note}."
        best = self.best
        lines = [
            f"{where}{self._measured()}",
            f"  sec_per_token {best.sec_per_token:.4f}, plain decoding {self.plain.sec_per_token:.4f}; wasted drafts "
            f"per emitted token {best.wasted_per_token:.2f}.",
        ]
        if best.break_even_fraction == best.break_even_fraction:
            measured = f"measured {best.accepted_fraction:.3f}"
            lines.append(f"  Break-even at accepted/drafted {best.break_even_fraction:.3f}, {measured}.")
        if self.tied:
            lines.append(f"  It cannot be told from {', '.join(self.tied)} on these prompts.")
        return "\n".join(lines + self._advice())

    def _measured(self):
        unit = "prompt" if self.batch_size == 1 else "batch"
        units = (
            f"n = {self.num_prompts} {unit if self.num_prompts == 1 else {'prompt': 'prompts'}.get(unit, 'batches')}"
        )
        if self.low is None:
            how = f"{units}, too few for an interval"
        elif self.confirmed:
            how = f"95 % interval {self.low:.2f}-{self.high:.2f}, {units} that did not choose it"
        else:
            among = f", chosen among {self.num_arms}" if self.num_arms > 1 else ""
            how = f"95 % interval {self.low:.2f}-{self.high:.2f}{among}, {units}"
        name, speed = f"gamma {self.gamma} with {self.drafter}", f"{self.speedup:.2f}x as fast as plain decoding"
        if self.answer == "deploy":
            return f" {name}: it is {speed}, prefill included ({how})."
        return f"; the fastest, {name}, is {speed}, prefill included ({how})."

    def _units(self):
        one, several = ("prompt", "prompts") if self.batch_size == 1 else ("batch", "batches")
        return one if self.num_prompts == 1 else several

    def _advice(self):
        if self.answer == "do not deploy":
            return [f"  No draft length reaches {self.worth:g}x: the upper end of every interval lies below it."]
        if self.answer == "cannot tell" and self.more_prompts is None:
            return ["  What was measured on a single prompt shows no spread; measure 14 or more of the kind you serve."]
        if self.answer == "cannot tell":
            more = f"about {self.more_prompts}" if self.more_prompts <= MANY_PROMPTS else f"more than {MANY_PROMPTS:,}"
            return [f"  To tell, it would take {more} more {self._units()} like these, with a chance of 80 %."]
        few = self.num_prompts < FEW_PROMPTS
        return [f"  With fewer than {FEW_PROMPTS} prompts the interval itself is rough; measure more."] if few else []


def decide(rows, confirm=None, *, worth=WORTH):
    """One `Answer` per temperature.

    Parameters
    ----------
    rows : DataFrame
        Of `summary.frame` or `concurrency.frame`: every arm, on the same prompts.
    confirm : DataFrame, optional
        The same of phase "confirm": the chosen arm and plain decoding on other prompts. It counts where it holds the
        arm that `rows` choose, on two prompts or more, and is then all that the interval of this arm rests on.
    worth : float
        At least 1. The answer is "do not deploy" where the upper end of every arm's interval lies below it.

    Raises
    ------
    ValueError
        For a `worth` below 1.
    """
    if not worth >= 1:
        raise ValueError(f"worth must be at least 1, a speed-up anybody would deploy for; got {worth}")
    return [_decide(part, confirm, worth) for _, part in rows.groupby("temperature")]


def choices(rows):
    """{temperature: (drafter, gamma)} of highest speed-up, where anything can be compared."""
    return {
        temperature: found for temperature, part in rows.groupby("temperature") if (found := fastest(over_plain(part)))
    }


def _decide(part, confirm, worth):
    temperature, batch_size = float(part.temperature.iloc[0]), int(part.batch_size.iloc[0])
    ratios = over_plain(part)
    arm = fastest(ratios)
    if arm is None:
        missing = "no plain decoding" if PLAIN not in ratios else "no draft"
        note = f"{missing} was measured there to compare with"
        return Answer(temperature, "cannot tell", batch_size, note=note)
    drafting = {name: ratio for name, ratio in ratios.items() if name[1]}
    again = _measured_again(confirm, part, arm)
    if again is None:
        low, margin = _chosen(drafting, arm)
    else:
        drafting[arm], low = again, _fixed(*again)[0]
        margin = again[0] - low
    bounds = {name: _fixed(*ratio) for name, ratio in drafting.items()}
    speedup, pseudo = drafting[arm]
    tops = [top for _, top in bounds.values()]
    if low is not None and low > 1:
        answer = "deploy"
    else:
        answer = "do not deploy" if all(top is not None and top < worth for top in tops) else "cannot tell"
    unclear = answer == "cannot tell" and low is not None
    table = by_arm(part)
    line = {(row.drafter, row.gamma): row for _, row in table.iterrows()}
    return Answer(
        temperature, answer, batch_size, arm[0], int(arm[1]), float(speedup), low, bounds[arm][1],
        num_prompts=max(1, int((~np.isnan(pseudo)).sum())), confirmed=again is not None, num_arms=len(drafting),
        worth=worth, more_prompts=_more(drafting, bounds, arm, margin, worth) if unclear else None,
        tied=arm_names(_tied(part, arm)), best=line[arm], plain=line[PLAIN],
    )  # fmt: skip


def _fixed(measured, pseudo):
    """(low, high) of one arm, None and None where there is no interval."""
    (low,), (high,) = intervals.fixed(measured, pseudo[:, None])
    return (float(low), float(high)) if low == low else (None, None)


def _chosen(ratios, arm):
    """(low, margin) of one arm for having been chosen among those of `ratios` that two prompts or more speak for."""
    several = [name for name, (_, pseudo) in ratios.items() if (~np.isnan(pseudo)).sum() > 1]
    if arm not in several:
        return None, None
    measured, pseudo = (np.stack([ratios[name][i] for name in several], -1) for i in (0, 1))
    low, margin = (values[several.index(arm)] for values in intervals.chosen(measured, pseudo))
    return float(low), float(margin)


def _measured_again(confirm, part, arm):
    """The arm's speed-up over prompts that did not choose; None where fewer than two of them were measured again."""
    if confirm is None or not len(confirm):
        return None
    others = confirm[(confirm.temperature == part.temperature.iloc[0]) & ~confirm.prompt_id.isin(part.prompt_id)]
    ratio = over_plain(others).get(arm) if len(others) else None
    return ratio if ratio and (~np.isnan(ratio[1])).sum() > 1 else None


def _more(drafting, bounds, arm, margin, worth):
    """About how many more prompts like these give one of the two clear answers, with a chance of 80 %.

    None where an arm is measured on a single prompt. An interval shrinks like one over the root of their number.
    """
    num, needed = (~np.isnan(drafting[arm][1])).sum(), []
    errors = {name: intervals.standard_errors(pseudo[:, None])[0] for name, (_, pseudo) in drafting.items()}
    if (gain := drafting[arm][0] - 1) > 0:
        needed.append(((margin + CHANCE * errors[arm]) / gain) ** 2)
    if all(measured < worth for measured, _ in drafting.values()) and all(top for _, top in bounds.values()):
        halves = {name: bounds[name][1] - drafting[name][0] + CHANCE * errors[name] for name in drafting}
        needed.append(max(half / (worth - drafting[name][0]) for name, half in halves.items()) ** 2)
    return max(1, math.ceil(num * min(needed) - num)) if needed else None


def _tied(part, best):
    """The arms, plain decoding among them, that the best does not clearly beat.

    An arm is set apart only where the best is faster than it by an interval that allows for the best's having been
    chosen among all. So the arm that is truly fastest is set apart wrongly in 2.5 % at most.
    """
    arms, sec, tokens = sums(part)
    tied = []
    for index, arm in enumerate(arms):
        if arm != best:
            measured, pseudo = intervals.speedups(sec, tokens, index)
            others = {name: (measured[i], pseudo[:, i]) for i, name in enumerate(arms) if i != index}
            low, _ = _chosen(others, best)
            if low is None or low <= 1:
                tied.append(arm)
    return tied


def report(rows, confirm=None, *, worth=WORTH):
    """The answers as text, and the same without rows that loop."""
    answers = [str(answer) for answer in decide(rows, confirm, worth=worth)]
    kept = without_loops(rows)
    if len(kept) == len(rows):
        note = f"No row has more than {LOOP_PERCENT} % repeated 4-grams, so no loop flatters these figures."
        return "\n".join([*answers, note])
    note = f"Without the {len(rows) - len(kept)} of {len(rows)} rows with more than {LOOP_PERCENT} % repeated 4-grams:"
    still = decide(kept, None if confirm is None else without_loops(confirm), worth=worth)
    return "\n".join([*answers, note, *map(str, still or ["nothing is left to compare."])])
