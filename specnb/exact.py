"""The acceptance rule in exact fractions, by enumeration.

It knows a target and a draft as functions from a prefix (a tuple of ids) to a list of `Fraction`s. It does not know
torch, sampling or rounding: what it returns can be compared with `==`. Read `specnb.rule` beside it.
"""

from fractions import Fraction


def accept_prob(target_row, draft_row, token):
    """Probability that `token`, drawn from the draft, is accepted: min(1, p(x) / q(x)).

    Examples
    --------
    >>> target = [Fraction(6, 10), Fraction(3, 10), Fraction(1, 10)]
    >>> draft = [Fraction(2, 10), Fraction(5, 10), Fraction(3, 10)]
    >>> [str(accept_prob(target, draft, x)) for x in range(3)]
    ['1', '3/5', '1/3']
    """
    if draft_row[token] == 0:
        return Fraction(target_row[token] > 0)
    return min(Fraction(1), target_row[token] / draft_row[token])


def residual(target_row, draft_row):
    """Law of the recovered token, norm(max(p - q, 0)); the target itself where p = q.

    Examples
    --------
    >>> half, third = Fraction(1, 2), Fraction(1, 3)
    >>> [str(x) for x in residual([half, half, Fraction(0)], [third, third, third])]
    ['1/2', '1/2', '0']
    """
    excess = [max(target - draft, Fraction(0)) for target, draft in zip(target_row, draft_row, strict=True)]
    total = sum(excess)
    return [x / total for x in excess] if total else list(target_row)


def step_law(target_row, draft_row):
    """Law of the token one draft-and-verify step emits; equal to `target_row`, which is the theorem.

    Examples
    --------
    >>> target = [Fraction(6, 10), Fraction(3, 10), Fraction(1, 10)]
    >>> draft = [Fraction(2, 10), Fraction(5, 10), Fraction(3, 10)]
    >>> step_law(target, draft) == target
    True
    """
    accepted = [draft * accept_prob(target_row, draft_row, x) for x, draft in enumerate(draft_row)]
    rejected = 1 - sum(accepted)
    return [kept + rejected * rest for kept, rest in zip(accepted, residual(target_row, draft_row), strict=True)]


def sequence_law(target, length, prefix=()):
    """Joint law of `length` tokens drawn from the target one by one: {tuple of ids: Fraction}, without zeros."""
    law = {(): Fraction(1)}
    for _ in range(length):
        law = {
            (*tokens, x): mass * prob
            for tokens, mass in law.items()
            for x, prob in enumerate(_row("target", target, (*prefix, *tokens)))
            if prob
        }
    return law


def round_law(target, draft, gamma, rule="token"):
    """Joint law of the tokens one round emits, continued with the target to gamma + 1 tokens.

    A round emits its accepted drafts and one more token, so between 1 and gamma + 1. Continuing a short round with
    the target gives every outcome the same length; the rule is lossless iff the result equals
    `sequence_law(target, gamma + 1)`.

    Parameters
    ----------
    target, draft : callable, tuple of ids -> list of Fraction
        Next-token probabilities after a prefix; the round starts from the prefix ().
    gamma : int
        Draft length, 0 or more.
    rule : {"token"}
        The token-by-token rule of Leviathan et al. 2023.

    Returns
    -------
    dict[tuple[int, ...], Fraction]
        Keys of mass 0 are absent; the values sum to 1.

    Raises
    ------
    ValueError
        For an unknown rule, a negative gamma, or a row that is no distribution.

    Examples
    --------
    >>> target = lambda prefix: [Fraction(1, 3), Fraction(2, 3)]
    >>> draft = lambda prefix: [Fraction(2, 3), Fraction(1, 3)]
    >>> round_law(target, draft, 2) == sequence_law(target, 3)
    True
    """
    if rule != "token":
        raise ValueError(f"unknown rule {rule!r}; the rules are: 'token'")
    if gamma < 0:
        raise ValueError(f"gamma must be 0 or more, got {gamma}")
    law = {}
    for tokens, mass in _emitted_law(target, draft, gamma):
        for rest, prob in sequence_law(target, gamma + 1 - len(tokens), tokens).items():
            outcome = tokens + rest
            law[outcome] = law.get(outcome, 0) + mass * prob
    return law


def accepted_law(target, draft, gamma):
    """Law of the number of accepted drafts in one round: a list of gamma + 1 `Fraction`s.

    Examples
    --------
    >>> target = lambda prefix: [Fraction(1, 3), Fraction(2, 3)]
    >>> draft = lambda prefix: [Fraction(2, 3), Fraction(1, 3)]
    >>> law = accepted_law(target, draft, 2)  # E[accepted] = 10/9, Sun et al. (arXiv 2403.10444)
    >>> str(sum(n * mass for n, mass in enumerate(law)))
    '10/9'
    """
    law = [Fraction(0)] * (gamma + 1)
    for tokens, mass in _emitted_law(target, draft, gamma):
        law[len(tokens) - 1] += mass
    return law


def _emitted_law(target, draft, gamma, accepted=()):
    """Every (tokens emitted, mass) of a round that has accepted `accepted` so far; an outcome may come twice."""
    target_row = _row("target", target, accepted)
    if len(accepted) == gamma:
        yield from (((*accepted, x), prob) for x, prob in enumerate(target_row) if prob)  # the bonus token
        return
    draft_row = _row("draft", draft, accepted)
    kept = [prob * accept_prob(target_row, draft_row, x) for x, prob in enumerate(draft_row)]
    for x, mass in enumerate(kept):
        if mass:
            for tokens, rest in _emitted_law(target, draft, gamma, (*accepted, x)):
                yield tokens, mass * rest
    rejected = 1 - sum(kept)
    if rejected:
        for x, prob in enumerate(residual(target_row, draft_row)):
            if prob:
                yield (*accepted, x), rejected * prob  # the recovered token


def _row(name, model, prefix):
    row = [Fraction(x) for x in model(prefix)]
    if any(x < 0 for x in row) or sum(row) != 1:
        raise ValueError(f"{name} row after {prefix} is no distribution (sum {sum(row)}): {[str(x) for x in row]}")
    return row
