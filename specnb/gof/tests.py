"""Goodness of fit: do sampled counts match a law?

It knows counts and probabilities. It does not know torch, models or where the counts came from. The statistics are
scipy's. This file makes them safe to use here: totals agree, small cells are pooled and kept, an impossible token fails
at once, and the verdict is "cannot test" where any other would mean nothing. Read `specnb.gof.power` next.
"""

import math
from typing import NamedTuple

import numpy as np
from scipy import stats

from specnb.gof.cells import counts_of, law_of, pool, same_shape


class GofResult(NamedTuple):
    """Outcome of a test: `verdict` is "pass", "fail" or "cannot test"; `num_pooled` cells were merged into one."""

    statistic: float
    dof: int
    p_value: float
    n: int
    num_pooled: int
    verdict: str


def chi_square(counts, probs, *, min_expected=5, alpha=0.001):
    """Pearson's chi-square test of `counts` against the law `probs`.

    Cells whose expected count is below `min_expected` are merged into one, smallest first, until that cell reaches it
    too. The merged cell is kept, so that the tail is tested as a whole.

    Parameters
    ----------
    counts : array of int, shape `(vocab,)`
        How often each token was seen: counts, not proportions.
    probs : array of float, shape `(vocab,)`
        The law. It is renormalised in float64, because scipy refuses totals that differ by 1.5e-8.
    min_expected : float
    alpha : float
        Level of the test: the probability of failing a correct sampler. Fix it beforehand.

    Returns
    -------
    GofResult
        A count on a token of probability 0 is "fail" at any n. With fewer than two cells left after pooling the
        verdict is "cannot test" and the p-value NaN.

    Raises
    ------
    ValueError
        For NaN, negative or fractional counts, shapes that differ, or probabilities that miss a sum of 1 by 1e-5.

    Notes
    -----
    Differences inside the merged cell are invisible. Draws must be independent: take one position a run.

    Examples
    --------
    >>> chi_square([520, 290, 190], [0.5, 0.3, 0.2]).verdict
    'pass'
    >>> chi_square([3, 0, 1], [0.5, 0.5, 0.0]).verdict  # token 2 is impossible
    'fail'
    """
    counts, probs = counts_of("counts", counts), law_of("probs", probs)
    same_shape(counts=counts, probs=probs)
    n, possible = int(counts.sum()), probs > 0
    if counts[~possible].any():
        return GofResult(math.inf, 0, 0.0, n, 0, "fail")
    observed, expected, num_pooled = pool(counts[possible], n * probs[possible], min_expected)
    if len(observed) < 2 or n == 0:
        return cannot_test(n, num_pooled)
    found = stats.chisquare(observed, expected * (n / expected.sum()))
    return result_of(found, len(observed) - 1, n, num_pooled, alpha)


def cannot_test(n, num_pooled=0):
    """The `GofResult` of a test that could not be made."""
    return GofResult(math.nan, 0, math.nan, n, num_pooled, "cannot test")


def result_of(found, dof, n, num_pooled, alpha):
    """A `GofResult` from what a scipy test returned."""
    verdict = "pass" if found.pvalue >= alpha else "fail"
    return GofResult(float(found.statistic), int(dof), float(found.pvalue), n, num_pooled, verdict)


def two_sample(counts_a, counts_b, *, alpha=0.001):
    """Chi-square test that two samples come from one law, for samplers whose law is unknown.

    Cells whose expected count is below 5 in either sample are merged, smallest first.

    Examples
    --------
    >>> two_sample([510, 290, 200], [1020, 580, 400]).verdict
    'pass'
    >>> two_sample([510, 290, 200], [200, 290, 510]).verdict
    'fail'
    """
    counts_a, counts_b = counts_of("counts_a", counts_a), counts_of("counts_b", counts_b)
    same_shape(counts_a=counts_a, counts_b=counts_b)
    n_a, n_b = int(counts_a.sum()), int(counts_b.sum())
    seen = counts_a + counts_b > 0
    if min(n_a, n_b) == 0:
        return cannot_test(n_a + n_b)
    smaller = (counts_a + counts_b)[seen] * (min(n_a, n_b) / (n_a + n_b))  # expected counts in the smaller sample
    pooled_a, _, num_pooled = pool(counts_a[seen], smaller, 5)
    pooled_b, _, _ = pool(counts_b[seen], smaller, 5)
    if len(pooled_a) < 2:
        return cannot_test(n_a + n_b, num_pooled)
    found = stats.chi2_contingency(np.stack([pooled_a, pooled_b]), correction=False)
    return result_of(found, found.dof, n_a + n_b, num_pooled, alpha)
