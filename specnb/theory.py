"""Closed forms for the speed of speculative decoding.

It knows an acceptance probability, a draft length and two costs in units of one plain target step. It does not know
torch. The functions of `alpha` are those of Leviathan et al. 2023 (arXiv 2211.17192), who make two assumptions. Drafts
are accepted independently with probability `alpha`: `empirical_speedup` does without that. Verifying gamma + 1 tokens
costs no more than one step: `verify_cost` says what it really costs. Read `specnb.measure.answer` next, which compares
with what was measured.
"""

from numbers import Real

MAX_GAMMA = 512  # The search for the best draft length ends here, unless a sequence or dict of costs ends earlier.


def tokens_per_round(alpha, gamma):
    """Expected tokens emitted per round, (1 - alpha^(gamma+1)) / (1 - alpha); equation (1).

    Examples
    --------
    >>> round(tokens_per_round(0.8, 5), 3)
    3.689
    >>> tokens_per_round(1.0, 4)
    5.0
    """
    _check(gamma, alpha)
    # The sum alpha^0 + ... + alpha^gamma equals the quotient, and is also right at alpha 1, where that is 0 / 0.
    return float(sum(alpha**i for i in range(int(gamma) + 1)))


def accepted_length_law(alpha, gamma):
    """Law of the number of drafts accepted in a round: a list of gamma + 1 probabilities.

    Examples
    --------
    >>> [round(prob, 3) for prob in accepted_length_law(0.8, 3)]
    [0.2, 0.16, 0.128, 0.512]
    """
    _check(gamma, alpha)
    return [(1 - alpha) * alpha**i for i in range(int(gamma))] + [alpha ** int(gamma)]


def empirical_speedup(num_accepted, gamma, cost_ratio, verify_cost=1.0):
    """`speedup` from accepted lengths that were seen, without the assumption of independent acceptance.

    Parameters
    ----------
    num_accepted : sequence of int
        Drafts accepted in rounds that each drafted at least `gamma` tokens. A round that accepted more is counted as
        `gamma`, because a round of length `gamma` would have accepted just those.
    gamma, cost_ratio, verify_cost : as in `speedup`

    Notes
    -----
    With another draft length the rounds would begin at other places of the text, where drafts may be easier or harder.
    The prediction does not know that.

    Examples
    --------
    >>> empirical_speedup([4, 0, 4, 0], 2, 0.0)  # independent acceptance with the same mean would give 1.75
    2.0
    """
    if not len(num_accepted):
        raise ValueError("num_accepted is empty: no round to predict from")
    emitted = 1 + sum(min(num, gamma) for num in num_accepted) / len(num_accepted)
    return emitted / _round_cost(gamma, cost_ratio, verify_cost)


def speedup(alpha, gamma, cost_ratio, verify_cost=1.0):
    """Expected speed-up over plain decoding, E(gamma) / (gamma c + v(gamma)).

    Parameters
    ----------
    alpha : float in [0, 1]
        Probability that a draft token is accepted, E[sum min(p, q)].
    gamma : int
    cost_ratio : float
        Time of one draft step over one plain target step (c).
    verify_cost : float, callable of gamma, or sequence or dict indexed by gamma
        Time to verify gamma + 1 tokens over one plain target step (v). With the default 1 this is Theorem 3.8.

    Raises
    ------
    ValueError
        For a value out of its range, and where `verify_cost` has no cost for this gamma.

    Examples
    --------
    >>> round(speedup(0.8, 5, 0.0), 2)  # Table 1 of the paper
    3.69
    >>> round(speedup(0.75, 7, 0.02), 3)  # its Table 2: T5-XXL, EnDe, small draft, T=0
    3.157
    """
    return tokens_per_round(alpha, gamma) / _round_cost(gamma, cost_ratio, verify_cost)


def operations_factor(alpha, gamma, operations_ratio):
    """Arithmetic operations per token over plain decoding, Theorem 3.11; `operations_ratio` is the paper's c-hat.

    Examples
    --------
    >>> round(operations_factor(0.8, 5, 0.0), 2)  # Table 1 of the paper
    1.63
    """
    return (gamma * operations_ratio + gamma + 1) / tokens_per_round(alpha, gamma)


def best_gamma(alpha, cost_ratio, verify_cost=None):
    """Draft length with the highest expected `speedup`; 0 where none beats plain decoding, the smallest wins ties.

    The search covers every gamma from 0 to the last that a sequence or dict of verify costs has, else to 512.

    Examples
    --------
    >>> [best_gamma(alpha, 0.05) for alpha in (0.5, 0.6, 0.7, 0.8, 0.9)]  # Figure 3 of the paper
    [3, 4, 6, 8, 13]
    >>> best_gamma(0.1, 0.2)
    0
    """
    cost = 1.0 if verify_cost is None else verify_cost
    unbounded = callable(cost) or isinstance(cost, Real)
    longest = MAX_GAMMA if unbounded else max(cost.keys() if hasattr(cost, "keys") else range(len(cost)), default=0)
    return max(range(longest + 1), key=lambda gamma: speedup(alpha, gamma, cost_ratio, cost))


def break_even_alpha(gamma, cost_ratio, verify_cost=1.0):
    """The alpha at which speculation with `gamma` is exactly as fast as plain decoding; None where no alpha reaches it.

    Examples
    --------
    >>> round(break_even_alpha(4, 0.1), 3)
    0.287
    >>> break_even_alpha(4, 1.5) is None
    True
    """
    from scipy.optimize import brentq

    _check(gamma)
    if gamma == 0 or speedup(1.0, gamma, cost_ratio, verify_cost) < 1:
        return None
    if speedup(0.0, gamma, cost_ratio, verify_cost) >= 1:
        return 0.0
    return float(brentq(lambda alpha: speedup(alpha, gamma, cost_ratio, verify_cost) - 1, 0.0, 1.0))


def _round_cost(gamma, cost_ratio, verify_cost):
    _check(gamma)
    if cost_ratio < 0:
        raise ValueError(f"cost_ratio must be 0 or more, got {cost_ratio}")
    return gamma * cost_ratio + verify_cost_at(verify_cost, int(gamma))


def verify_cost_at(verify_cost, gamma):
    """The cost of verifying gamma + 1 tokens, from a number, a callable, or a sequence or dict by gamma.

    Raises
    ------
    ValueError
        Where there is none for this gamma, or it is not above 0.

    Examples
    --------
    >>> verify_cost_at([1.0, 1.1, 1.3], 2)
    1.3
    >>> verify_cost_at({0: 1.0, 4: 1.3}, 2)
    Traceback (most recent call last):
    ValueError: verify_cost has nothing for gamma 2; it has gamma 0, 4
    """
    if isinstance(verify_cost, Real):
        cost = verify_cost
    else:
        try:
            cost = verify_cost(gamma) if callable(verify_cost) else verify_cost[gamma]
        except LookupError:
            cost = None
    if cost is None:
        raise ValueError(f"verify_cost has nothing for gamma {gamma}; {_gammas_of(verify_cost)}")
    if not cost > 0:
        raise ValueError(f"verify_cost must be above 0, got {cost} at gamma {gamma}")
    return cost


def _gammas_of(verify_cost):
    """Which gammas there is a cost for, in words; a bound method such as `costs.get` tells of the `costs` it is of."""
    costs = getattr(verify_cost, "__self__", verify_cost)
    if not hasattr(costs, "__len__"):
        return "a callable must answer for every gamma it may be asked about"
    gammas = sorted(costs.keys()) if hasattr(costs, "keys") else range(len(costs))
    return f"it has gamma {', '.join(map(str, gammas))}" if len(gammas) else "it is empty"


def _check(gamma, alpha=0.0):
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha is a probability, got {alpha}")
    if gamma < 0 or gamma != int(gamma):
        raise ValueError(f"gamma must be a whole number, 0 or more, got {gamma}")
