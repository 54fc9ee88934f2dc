"""Goodness of fit: do sampled counts match a law?

It knows counts and probabilities. It does not know torch, models or where the counts came from. The statistics are
scipy's and statsmodels'; what is added is what makes them safe here: totals that agree, small cells pooled and kept,
an impossible token that fails at once, and "cannot test" instead of a verdict that means nothing. Read notebook 04
beside it, and `specnb.battery` next: many tests of one sampler at once.
"""

import math
from itertools import chain, combinations
from typing import NamedTuple

import numpy as np
from scipy import optimize, stats


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
    return _fit(counts, probs, min_expected, alpha, "pearson")


def g_test(counts, probs, *, min_expected=5, alpha=0.001):
    """Likelihood-ratio test (G-test) of `counts` against the law `probs`; otherwise as `chi_square`.

    The statistic is 2 sum counts log(counts / expected): 2 n times the Kullback-Leibler divergence from the law.

    Examples
    --------
    >>> round(g_test([520, 290, 190], [0.5, 0.3, 0.2]).statistic, 3)
    1.635
    """
    return _fit(counts, probs, min_expected, alpha, "log-likelihood")


def _fit(counts, probs, min_expected, alpha, statistic):
    counts, probs = _counts("counts", counts), _law("probs", probs)
    if counts.shape != probs.shape:
        raise ValueError(f"counts has shape {counts.shape} and probs {probs.shape}; they must be the same")
    n, possible = int(counts.sum()), probs > 0
    if counts[~possible].any():
        return GofResult(math.inf, 0, 0.0, n, 0, "fail")
    observed, expected, num_pooled = _pool(counts[possible], n * probs[possible], min_expected)
    if len(observed) < 2 or n == 0:
        return cannot_test(n, num_pooled)
    found = stats.power_divergence(observed, expected * (n / expected.sum()), lambda_=statistic)
    return result_of(found, len(observed) - 1, n, num_pooled, alpha)


def cannot_test(n, num_pooled=0):
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
    counts_a, counts_b = _counts("counts_a", counts_a), _counts("counts_b", counts_b)
    if counts_a.shape != counts_b.shape:
        raise ValueError(f"the samples have shapes {counts_a.shape} and {counts_b.shape}; they must be the same")
    n_a, n_b = int(counts_a.sum()), int(counts_b.sum())
    seen = counts_a + counts_b > 0
    if min(n_a, n_b) == 0:
        return cannot_test(n_a + n_b)
    smaller = (counts_a + counts_b)[seen] * (min(n_a, n_b) / (n_a + n_b))  # expected counts in the smaller sample
    pooled_a, _, num_pooled = _pool(counts_a[seen], smaller, 5)
    pooled_b, _, _ = _pool(counts_b[seen], smaller, 5)
    if len(pooled_a) < 2:
        return cannot_test(n_a + n_b, num_pooled)
    found = stats.chi2_contingency(np.stack([pooled_a, pooled_b]), correction=False)
    return result_of(found, found.dof, n_a + n_b, num_pooled, alpha)


def sample_size(probs, alternative, *, alpha=0.001, power=0.99):
    """Draws needed for `chi_square` at level `alpha` to reject with probability `power` if `alternative` is the law.

    From the noncentral chi-square, with the pooling `chi_square` would do: an approximation, coarse where n is small.

    Raises
    ------
    ValueError
        Where the two laws are equal: no number of draws tells them apart.

    Examples
    --------
    >>> sample_size([0.5, 0.3, 0.2], [0.35, 0.39, 0.26])  # resampling from p instead of the residual
    392
    """
    probs, alternative = _two_laws(probs, alternative)
    _require_shares(alpha=alpha, power=power)
    possible = probs > 0
    impossible = alternative[~possible].sum()
    if np.abs(alternative - probs).max() < 1e-12:
        raise ValueError("probs and alternative are the same law: no number of draws tells them apart")

    def rejects(n):
        drawn, expected, _ = _pool(n * alternative[possible], n * probs[possible], 5)
        dof = len(drawn) - 1
        critical, noncentrality = stats.chi2.isf(alpha, dof), ((drawn - expected) ** 2 / expected).sum()
        by_statistic = stats.ncx2.sf(critical, dof, noncentrality) if dof else 0.0
        return max(by_statistic, 1 - (1 - impossible) ** n) >= power  # One draw of an impossible token is enough.

    low, high = 0, 1
    while not rejects(high):
        low, high = high, 2 * high
    while high - low > 1:  # The power grows with n, but for small steps of pooling.
        middle = (low + high) // 2
        low, high = (low, middle) if rejects(middle) else (middle, high)
    return high


def exact_power(probs, alternative, n, *, alpha=0.001):
    """Probability that `chi_square` rejects `n` draws of `alternative`, summed over all outcomes.

    Raises
    ------
    ValueError
        Where there are more than ten million outcomes; `sample_size` is close there.

    Examples
    --------
    >>> round(exact_power([0.5, 0.3, 0.2], [0.2, 0.3, 0.5], 56), 3)  # sample_size said 56 for a power of .99
    0.985
    """
    probs, alternative = _two_laws(probs, alternative)
    possible = probs > 0
    missing = alternative[~possible].sum()
    drawn, expected, _ = _pool(alternative[possible], n * probs[possible], 5)
    num_outcomes = math.comb(n + len(drawn) - 1, n)
    if num_outcomes > 10_000_000:
        raise ValueError(f"{n} draws over {len(drawn)} cells have {num_outcomes:.3g} outcomes; use sample_size there")
    if len(drawn) < 2 or missing == 1:
        return float(1 - (1 - missing) ** n)
    places = combinations(range(n + len(drawn) - 1), len(drawn) - 1)  # stars and bars
    bars = np.fromiter(chain.from_iterable(places), dtype=np.int64).reshape(num_outcomes, -1)
    ends = np.column_stack([np.full(len(bars), -1), bars, np.full(len(bars), n + len(drawn) - 1)])
    counts = np.diff(ends) - 1  # (outcomes, cells)
    rejected = ((counts - expected) ** 2 / expected).sum(-1) > stats.chi2.isf(alpha, len(drawn) - 1)
    passed = stats.multinomial.pmf(counts[~rejected], n, drawn / drawn.sum()).sum()
    return float(1 - (1 - missing) ** n * passed)


def draws_for_total_variation(total_variation, num_cells, *, alpha=0.001, power=0.99):
    """Draws after which `chi_square` over `num_cells` rejects any law so far off, in the direction hardest to see.

    The noncentrality is at least 4 n TV^2, with equality where the deviation is spread, in proportion, over cells that
    hold half of the mass. Differences inside a pooled cell are invisible at any n.

    Examples
    --------
    >>> draws_for_total_variation(0.05, 50)
    7970
    """
    from statsmodels.stats.power import GofChisquarePower

    _require_shares(total_variation=total_variation, alpha=alpha, power=power)
    solve = GofChisquarePower().solve_power  # Its effect size is the square root of the noncentrality of one draw.
    return math.ceil(solve(effect_size=2 * total_variation, n_bins=num_cells, alpha=alpha, power=power))


def smallest_total_variation(n, num_cells, *, alpha=0.001, power=0.99):
    """Total variation that `n` draws show with probability `power`, whatever its direction; infinite where none would.

    The inverse of `draws_for_total_variation`: what a passed test has ruled out.

    Examples
    --------
    >>> round(smallest_total_variation(7970, 50), 3)
    0.05
    """
    from statsmodels.stats.power import GofChisquarePower

    _require_shares(alpha=alpha, power=power)
    reached = GofChisquarePower().power
    excess = lambda tv: reached(2 * tv, n, alpha, num_cells) - power  # noqa: E731
    if num_cells < 2 or n < 1 or excess(1.0) < 0:
        return math.inf
    return float(optimize.brentq(excess, 0.0, 1.0))


def _two_laws(probs, alternative):
    probs, alternative = _law("probs", probs), _law("alternative", alternative)
    if probs.shape != alternative.shape:
        raise ValueError(f"probs has shape {probs.shape} and alternative {alternative.shape}; they must be the same")
    return probs, alternative


def _require_shares(**shares):
    for name in (name for name, value in shares.items() if not 0 < value < 1):
        raise ValueError(f"{name} must lie between 0 and 1, got {shares[name]}")


def _pool(counts, expected, min_expected):
    """Merge the cells of smallest expected count; returns counts, expected counts and how many cells were merged."""
    merged = rare_cells(expected, min_expected)
    if len(merged) == 0:
        return counts, expected, 0
    kept = np.delete(np.arange(len(expected)), merged)
    return (
        np.append(counts[kept], counts[merged].sum()),
        np.append(expected[kept], expected[merged].sum()),
        len(merged),
    )


def rare_cells(sizes, minimum):
    """Indices of the cells below `minimum`, and of as many of the next larger as it takes to reach it together."""
    order = np.argsort(sizes, kind="stable")
    num = int((sizes < minimum).sum())
    while 0 < num < len(sizes) and sizes[order[:num]].sum() < minimum:
        num += 1
    return order[:num]


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
