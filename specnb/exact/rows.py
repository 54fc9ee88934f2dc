"""One step of the rule in exact fractions, and the law of tokens drawn one by one.

It knows rows of `Fraction`s. It does not know rounds. Read `specnb.exact.rounds` next.
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
    """Law of the token that one step of drafting and verifying emits. The theorem says that it equals `target_row`.

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
    """Joint law of `length` tokens drawn from the target one by one: {tuple of ids: Fraction}, without zeros.

    Examples
    --------
    >>> coin = lambda prefix: [Fraction(1, 4), Fraction(3, 4)]
    >>> {tokens: str(mass) for tokens, mass in sequence_law(coin, 2).items()}
    {(0, 0): '1/16', (0, 1): '3/16', (1, 0): '3/16', (1, 1): '9/16'}
    """
    law = {(): Fraction(1)}
    for _ in range(length):
        law = {
            (*tokens, x): mass * prob
            for tokens, mass in law.items()
            for x, prob in enumerate(row_of("target", target, (*prefix, *tokens)))
            if prob
        }
    return law


def first_tokens(law, num):
    """The law of the first `num` tokens of sequences with `law`.

    Examples
    --------
    >>> [str(mass) for mass in first_tokens({(0, 0): Fraction(1, 3), (0, 1): Fraction(2, 3)}, 1).values()]
    ['1']
    """
    first = {}
    for tokens, mass in law.items():
        first[tokens[:num]] = first.get(tokens[:num], 0) + mass
    return first


def row_of(name, model, prefix):
    """The row that `model` gives after `prefix`, as Fractions; a ValueError where it is no distribution."""
    row = [Fraction(x) for x in model(prefix)]
    if any(x < 0 for x in row) or sum(row) != 1:
        raise ValueError(f"{name} row after {prefix} is no distribution (sum {sum(row)}): {[str(x) for x in row]}")
    return row
