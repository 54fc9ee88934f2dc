"""How many draws a chi-square test needs, and what a passed one has ruled out.

It knows two laws and a number of draws. It does not know samplers. Read notebook 04 beside it.
"""

import math
from itertools import chain, combinations

import numpy as np
from scipy import optimize, stats

from specnb.gof.cells import law_of, pool, same_shape


def sample_size(probs, alternative, *, alpha=0.001, power=0.99):
    """Draws needed for `chi_square` at level `alpha` to reject with probability `power` if `alternative` is the law.

    It comes from the noncentral chi-square, with the pooling that `chi_square` would do. That is an approximation,
    and a coarse one where n is small.

    Raises
    ------
    ValueError
        Where the two laws are equal, because no number of draws tells them apart.

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
        drawn, expected, _ = pool(n * alternative[possible], n * probs[possible], 5)
        dof = len(drawn) - 1
        critical, noncentrality = stats.chi2.isf(alpha, dof), ((drawn - expected) ** 2 / expected).sum()
        by_statistic = stats.ncx2.sf(critical, dof, noncentrality) if dof else 0.0
        return max(by_statistic, 1 - (1 - impossible) ** n) >= power  # One draw of an impossible token is enough.

    low, high = 0, 1
    while not rejects(high):
        low, high = high, 2 * high
    while high - low > 1:  # Bisect: the power grows with n, except for small steps where the pooling changes.
        middle = (low + high) // 2
        low, high = (low, middle) if rejects(middle) else (middle, high)
    return high


def exact_power(probs, alternative, n, *, alpha=0.001):
    """Probability that `chi_square` rejects `n` draws of `alternative`, summed over all outcomes.

    Raises
    ------
    ValueError
        Where there are more than ten million outcomes. There `sample_size` is close enough.

    Examples
    --------
    >>> round(exact_power([0.5, 0.3, 0.2], [0.2, 0.3, 0.5], 56), 3)  # sample_size said 56 for a power of .99
    0.985
    """
    probs, alternative = _two_laws(probs, alternative)
    possible = probs > 0
    missing = alternative[~possible].sum()
    drawn, expected, _ = pool(alternative[possible], n * probs[possible], 5)
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
    _require_shares(total_variation=total_variation, alpha=alpha, power=power)
    missing = lambda n: _power_in_worst_direction(total_variation, n, num_cells, alpha) - power  # noqa: E731
    return math.ceil(optimize.brentq(missing, 0, 1e3 / total_variation**2 * num_cells))


def smallest_total_variation(n, num_cells, *, alpha=0.001, power=0.99):
    """Total variation that `n` draws show with probability `power`, whatever its direction; infinite if none would do.

    This is the inverse of `draws_for_total_variation`, and says what a test that passed has ruled out.

    Examples
    --------
    >>> round(smallest_total_variation(7970, 50), 3)
    0.05
    """
    _require_shares(alpha=alpha, power=power)
    excess = lambda tv: _power_in_worst_direction(tv, n, num_cells, alpha) - power  # noqa: E731
    if num_cells < 2 or n < 1 or excess(1.0) < 0:
        return math.inf
    return float(optimize.brentq(excess, 0.0, 1.0))


def _power_in_worst_direction(total_variation, n, num_cells, alpha):
    """Probability that the test rejects `n` draws whose noncentrality is the least possible, 4 n TV^2."""
    critical = stats.chi2.isf(alpha, num_cells - 1)
    noncentrality = 4 * n * total_variation**2
    return stats.ncx2.sf(critical, num_cells - 1, noncentrality) if noncentrality else alpha


def _two_laws(probs, alternative):
    probs, alternative = law_of("probs", probs), law_of("alternative", alternative)
    same_shape(probs=probs, alternative=alternative)
    return probs, alternative


def _require_shares(**shares):
    for name in (name for name, value in shares.items() if not 0 < value < 1):
        raise ValueError(f"{name} must lie between 0 and 1, got {shares[name]}")
