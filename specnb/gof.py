"""Goodness of fit: do sampled counts match a law?

It knows counts and probabilities. It does not know torch, models or where the counts came from. The statistics are
scipy's; what is added is what makes them safe here: totals that agree, small cells pooled and kept, an impossible
token that fails at once, and "cannot test" instead of a verdict that means nothing. Read notebook 01 first.
"""

import math
from typing import NamedTuple

import numpy as np


class GofResult(NamedTuple):
    """Outcome of a test; `verdict` is "pass", "fail" or "cannot test", `num_pooled` the cells merged into one."""

    statistic: float
    dof: int
    p_value: float
    n: int
    num_pooled: int
    verdict: str


def chi_square(counts, probs, *, min_expected=5, alpha=0.001):
    """Pearson's chi-square test of `counts` against the law `probs`.

    Cells whose expected count is below `min_expected` are merged into one, smallest first, until the merged cell
    reaches it too; the merged cell is kept, so the tail is tested as a whole.

    Parameters
    ----------
    counts : array of int, shape `(vocab,)`
        How often each token was seen: counts, not proportions.
    probs : array of float, shape `(vocab,)`
        The law; it is renormalised in float64, because scipy refuses totals that differ by 1.5e-8.
    min_expected : float
    alpha : float
        Level of the test, the odds of failing a correct sampler. Fix it beforehand.

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
    counts, probs = _counts("counts", counts), _law("probs", probs)
    if counts.shape != probs.shape:
        raise ValueError(f"counts has shape {counts.shape} and probs {probs.shape}; they must be the same")
    n = int(counts.sum())
    if counts[probs == 0].any():
        return GofResult(math.inf, 0, 0.0, n, 0, "fail")
    observed, expected, num_pooled = _pool(counts[probs > 0], n * probs[probs > 0], min_expected)
    if len(observed) < 2 or n == 0:
        return GofResult(math.nan, 0, math.nan, n, num_pooled, "cannot test")
    from scipy import stats

    statistic, p_value = stats.chisquare(observed, expected * (n / expected.sum()))
    verdict = "pass" if p_value >= alpha else "fail"
    return GofResult(float(statistic), len(observed) - 1, float(p_value), n, num_pooled, verdict)


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
    counts_a, counts_b = _counts("counts_a", counts_a), _counts("counts_b", counts_b)
    if counts_a.shape != counts_b.shape:
        raise ValueError(f"the samples have shapes {counts_a.shape} and {counts_b.shape}; they must be the same")
    n_a, n_b = int(counts_a.sum()), int(counts_b.sum())
    seen = counts_a + counts_b > 0
    if min(n_a, n_b) == 0:
        return GofResult(math.nan, 0, math.nan, n_a + n_b, 0, "cannot test")
    smaller = (counts_a + counts_b)[seen] * (min(n_a, n_b) / (n_a + n_b))  # expected counts in the smaller sample
    pooled_a, _, num_pooled = _pool(counts_a[seen], smaller, 5)
    pooled_b, _, _ = _pool(counts_b[seen], smaller, 5)
    if len(pooled_a) < 2:
        return GofResult(math.nan, 0, math.nan, n_a + n_b, num_pooled, "cannot test")
    from scipy import stats

    result = stats.chi2_contingency(np.stack([pooled_a, pooled_b]), correction=False)
    verdict = "pass" if result.pvalue >= alpha else "fail"
    return GofResult(float(result.statistic), int(result.dof), float(result.pvalue), n_a + n_b, num_pooled, verdict)


def sample_size(probs, alternative, *, alpha=0.001, power=0.99):
    """Draws needed for `chi_square` at level `alpha` to reject with probability `power` if `alternative` is the law.

    From the noncentral chi-square distribution with noncentrality n * sum((alternative - probs)^2 / probs) and no
    pooling. An approximation: where n is small, compute the power by enumeration.

    Raises
    ------
    ValueError
        Where the two laws are equal: no number of draws tells them apart.

    Examples
    --------
    >>> sample_size([0.5, 0.3, 0.2], [0.35, 0.39, 0.26])  # resampling from p instead of the residual
    392
    """
    from scipy import stats

    probs, alternative = _law("probs", probs), _law("alternative", alternative)
    if probs.shape != alternative.shape:
        raise ValueError(f"probs has shape {probs.shape} and alternative {alternative.shape}; they must be the same")
    if not (0 < alpha < 1 and 0 < power < 1):
        raise ValueError(f"alpha and power must lie between 0 and 1, got {alpha} and {power}")
    possible = probs > 0
    impossible = alternative[~possible].sum()
    dof = int(possible.sum()) - 1
    critical = stats.chi2.isf(alpha, max(dof, 1))
    per_draw = ((alternative - probs)[possible] ** 2 / probs[possible]).sum()
    if per_draw < 1e-20:
        raise ValueError("probs and alternative are the same law: no number of draws tells them apart")

    def rejects(n):
        by_statistic = stats.ncx2.sf(critical, dof, n * per_draw) if dof else 0.0
        return max(by_statistic, 1 - (1 - impossible) ** n) >= power  # One draw of an impossible token is enough.

    low, high = 0, 1
    while not rejects(high):
        low, high = high, 2 * high
    while high - low > 1:  # The power grows with n, so n is found by bisection.
        middle = (low + high) // 2
        low, high = (low, middle) if rejects(middle) else (middle, high)
    return high


def _pool(counts, expected, min_expected):
    """Merge the cells of smallest expected count; returns counts, expected counts and how many cells were merged."""
    order = np.argsort(expected, kind="stable")
    sizes = expected[order]
    num_pooled = int((sizes < min_expected).sum())
    while 0 < num_pooled < len(sizes) and sizes[:num_pooled].sum() < min_expected:
        num_pooled += 1
    if num_pooled == 0:
        return counts, expected, 0
    merged, kept = order[:num_pooled], order[num_pooled:]
    return (
        np.append(counts[kept], counts[merged].sum()),
        np.append(expected[kept], expected[merged].sum()),
        num_pooled,
    )


def _counts(name, values):
    counts = np.asarray(values, dtype=np.float64)
    if counts.ndim != 1 or len(counts) == 0:
        raise ValueError(f"{name} must be a list of counts, got shape {counts.shape}")
    if np.isnan(counts).any():
        raise ValueError(f"{name} holds NaN")
    if (counts < 0).any() or (counts % 1 != 0).any():
        wrong = counts[(counts < 0) | (counts % 1 != 0)][0]
        raise ValueError(f"{name} must be whole numbers, 0 or more, not proportions; got {wrong:g}")
    return counts


def _law(name, values):
    probs = np.asarray(values, dtype=np.float64)
    if probs.ndim != 1 or len(probs) == 0:
        raise ValueError(f"{name} must be a list of probabilities, got shape {probs.shape}")
    if np.isnan(probs).any():
        raise ValueError(f"{name} holds NaN")
    if (probs < 0).any():
        raise ValueError(f"{name} is negative: {probs.min():g}")
    if abs(probs.sum() - 1) > 1e-5:
        raise ValueError(f"{name} must sum to 1, got {probs.sum():.8g}")
    return probs / probs.sum()
