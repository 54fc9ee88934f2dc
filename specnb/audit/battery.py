"""Many tests of one sampler, with one false-alarm level for all of them.

It knows samples and the law they ought to have. It does not know how they were drawn. A test of the first token is
blind to what happens after it, so a battery also looks at every later position, at whole sequences, at accepted lengths
and from one draw to the next. Read `specnb.gof` before, and `specnb.rogues` for the samplers that it must catch.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd
from scipy import stats

from specnb.gof import cannot_test, chi_square, rare_cells, result_of, smallest_total_variation


def independence(first, second, *, alpha=0.001):
    """Chi-square test that paired observations are independent: two rounds, or two calls, one after the other.

    Parameters
    ----------
    first, second : array of int, shape `(n,)`
        What was seen in each pair, such as the numbers of drafts accepted in a round and in the next. The pairs
        themselves must be independent of each other: from a single run take some that do not overlap.

    Returns
    -------
    GofResult
        On each side, values so rare that a cell of the table could expect fewer than 5 pairs are merged.

    Examples
    --------
    >>> independence([0, 0, 1, 1] * 25, [0, 1, 0, 1] * 25).verdict
    'pass'
    >>> independence([0, 1] * 50, [0, 1] * 50).verdict
    'fail'
    """
    first, second = np.asarray(first), np.asarray(second)
    if first.ndim != 1 or first.shape != second.shape or np.isnan(first).any() or np.isnan(second).any():
        raise ValueError(
            f"independence takes two lists of numbers, as long as each other: {first.shape}, {second.shape}"
        )
    n, num_pooled, sides = len(first), 0, []
    for values in (first, second):
        _, codes, counts = np.unique(values, return_inverse=True, return_counts=True)
        # A cell expects the product of its margins over n: with margins of sqrt(5 n) at least 5.
        rare = rare_cells(counts, math.sqrt(5 * n))
        num_pooled += len(rare)
        sides.append(np.where(np.isin(codes, rare), -1, codes))
    table = stats.contingency.crosstab(*sides).count
    if min(table.shape) < 2:
        return cannot_test(n, num_pooled)
    found = stats.chi2_contingency(table, correction=False)
    return result_of(found, found.dof, n, num_pooled, alpha)


def holm(p_values):
    """Holm's adjusted p-values: whoever rejects those below a level fails a sound sampler at most that often.

    A NaN (a test that could not be made) stays NaN and counts as a test.

    Examples
    --------
    >>> holm([0.01, 0.04, 0.5]).round(6).tolist()
    [0.03, 0.08, 0.5]
    """
    from statsmodels.stats.multitest import multipletests

    p_values = np.asarray(p_values, dtype=float)
    missing = np.isnan(p_values)
    return np.where(missing, np.nan, multipletests(np.where(missing, 1.0, p_values), method="holm")[1])


@dataclass(frozen=True)
class Battery:
    """Results of `battery`, one for each test, judged together at the level `alpha`."""

    results: dict  # name of the test -> GofResult
    alpha: float

    @cached_property
    def p_holm(self):
        return holm([result.p_value for result in self.results.values()])

    @property
    def table(self):
        """A line for each test: statistic, p-value and Holm's, and what it would have caught.

        `smallest_tv` is the total variation, in the direction hardest to see, that this test at alpha / number of
        tests rejects with 99 % power. Differences inside a pooled cell are invisible to it.
        """
        level = self.alpha / len(self.results)
        lines = [
            {
                "test": name,
                "n": result.n,
                "statistic": result.statistic,
                "dof": result.dof,
                "p_value": result.p_value,
                "p_holm": p_holm,
                "num_pooled": result.num_pooled,
                "smallest_tv": smallest_total_variation(result.n, result.dof + 1, alpha=level),
                "verdict": self._verdict(p_holm),
            }
            for (name, result), p_holm in zip(self.results.items(), self.p_holm, strict=True)
        ]
        return pd.DataFrame(lines)

    def _verdict(self, p_holm):
        return "cannot test" if math.isnan(p_holm) else "fail" if p_holm < self.alpha else "pass"

    @property
    def verdict(self):
        """ "fail" if any test fails, else "cannot test" if any could not be made, else "pass"."""
        found = {self._verdict(p) for p in self.p_holm}
        return next(verdict for verdict in ("fail", "cannot test", "pass") if verdict in found)

    def __str__(self):
        return (
            f"{self.verdict}: {len(self.results)} tests, false-alarm level {self.alpha:g} for all together (Holm)\n"
            f"{self.table.to_string(index=False, float_format=lambda x: f'{x:.4g}')}\n"
            "smallest_tv: smallest total variation, in the worst direction, caught with 99 % power; differences inside "
            "a pooled cell are invisible"
        )


def against(ids, law, *, position=None, alpha=0.001):
    """`chi_square` of whole sequences, or of one position of them, against their law.

    Parameters
    ----------
    ids : int array of shape `(n, length)`, -1 after a stop
    law : dict, tuple of at most `length` ids -> probability; a sequence it does not know is impossible
    position : int, optional
    """
    length = ids.shape[1]
    known = np.array([[*tokens, *[-1] * (length - len(tokens))] for tokens in law])
    looked_at = slice(None) if position is None else [position]
    rows, codes = np.unique(np.concatenate([known, ids])[:, looked_at], axis=0, return_inverse=True)
    mass = np.bincount(codes[: len(law)], [float(mass) for mass in law.values()], minlength=len(rows))
    return chi_square(np.bincount(codes[len(law) :], minlength=len(rows)), mass, alpha=alpha)


def battery(sampler, law, *, n, accepted_law=None, alpha=0.001):
    """Test a sampler against the law of whole sequences.

    Parameters
    ----------
    sampler : callable, n -> ids, or (ids, num_accepted)
        ids: int array of shape `(n, length)`, n independent sequences, -1 after a stop. num_accepted: int array of
        shape `(n, rounds)`, drafts accepted in each round, -1 where none took place.
    law : dict, tuple of at most `length` ids -> probability
        The law of a sequence, as from `exact.sequence_law`; Fractions or floats.
    n : int
    accepted_law : sequence of probabilities, optional
        That of 0, 1, ... drafts accepted in the first round, as from `exact.accepted_law`. Leave it out where the
        sampler may accept by another rule.
    alpha : float
        Probability that a sound sampler fails any of the tests. Fix it beforehand.

    Returns
    -------
    Battery
        "token i": each position alone; "sequence": all positions together; "accepted drafts": the first round;
        "next draw": the first token against that of the next sequence, which a generator seeded anew each time fails.

    Raises
    ------
    ValueError
        For ids of another shape, and a law that does not sum to 1. A sequence the law does not know fails at once.
    """
    drawn = sampler(n)
    ids, accepted = drawn if isinstance(drawn, tuple) else (drawn, None)
    ids, length = np.asarray(ids), max(map(len, law))
    if ids.shape != (n, length):
        raise ValueError(f"the sampler gave ids of shape {ids.shape}; asked were {n} sequences of {length}")
    results = {f"token {i + 1}": against(ids, law, position=i, alpha=alpha) for i in range(length) if length > 1}
    results["sequence"] = against(ids, law, alpha=alpha)
    if accepted_law is not None and accepted is not None:
        counts = np.bincount(np.asarray(accepted)[:, 0], minlength=len(accepted_law))
        results["accepted drafts"] = chi_square(counts, [float(mass) for mass in accepted_law], alpha=alpha)
    results["next draw"] = independence(ids[: n // 2 * 2 : 2, 0], ids[1::2, 0], alpha=alpha)
    return Battery(results, alpha)
