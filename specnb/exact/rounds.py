"""Whole rounds in exact fractions, by enumeration, for any rule put together from its parts.

It knows a target and a draft as functions from a prefix (a tuple of ids) to a list of `Fraction`s. It does not know
torch, sampling or rounding: what it returns can be compared with `==`. Read `specnb.rule` beside it.
"""

from fractions import Fraction
from itertools import accumulate, pairwise
from operator import mul
from typing import NamedTuple

from specnb.exact.rows import accept_prob, residual, row_of, sequence_law


class Outcome(NamedTuple):
    """One way a round can go: what it emits, how many drafts it accepts, and how probable that is.

    `seen` holds what the target and the draft will have read when the next round begins.
    """

    tokens: tuple
    num_accepted: int
    mass: Fraction
    seen: tuple  # (the target's prefix, the draft's prefix), which a faulty rule may let differ


def rule_of(*, accept=accept_prob, drawn=list, survival=None, extra=None, seen=None, cut=None):
    """A rule for one round, put together from its parts.

    Without arguments it is the rule of Leviathan et al. 2023. `specnb.rogues` replaces one part at a time.

    Parameters
    ----------
    accept : callable, (target row, draft row, token) -> probability of passing the test
    drawn : callable, draft row -> row the tokens are really drawn from
    survival : callable, list of probabilities -> list of them
        From the probabilities of passing each test to those of accepting at least 0, 1, 2, ... drafts. By default the
        tests are independent.
    extra : callable, (target rows, draft rows, ids, num_accepted) -> row of the token emitted after the accepted ones
        None where no token is emitted. By default it is the residual after a rejection, else the bonus row.
    seen : callable, (prefix, ids, num_accepted, extra token) -> (target's prefix, draft's prefix) of the next round
    cut : callable, (draft rows, ids) -> how many of the drafts are tested at all; all of them by default

    Returns
    -------
    callable, (target, draft, gamma, (target's prefix, draft's prefix)) -> iterator of `Outcome`
    """
    survival, extra, seen = survival or _independent, extra or _residual_or_bonus, seen or _committed
    cut = cut or (lambda draft_rows, ids: len(ids))

    def rule(target, draft, gamma, before):
        for ids, mass, draft_rows in _blocks(draft, gamma, before[1], drawn):
            ids = ids[: cut(draft_rows, ids)]
            target_rows = [row_of("target", target, before[0] + ids[:i]) for i in range(len(ids) + 1)]
            passes = [accept(*rows) for rows in zip(target_rows, draft_rows, ids)]  # noqa: B905 (one row more)
            at_least = [*survival(passes), Fraction(0)]
            for num, (here, more) in enumerate(pairwise(at_least)):
                if here == more:
                    continue
                added = extra(target_rows, draft_rows, ids, num)
                for x, prob in enumerate(added) if added is not None else [(None, Fraction(1))]:
                    if prob:
                        tokens = ids[:num] if x is None else (*ids[:num], x)
                        yield Outcome(tokens, num, mass * (here - more) * prob, seen(before, ids, num, tokens))

    return rule


def _blocks(draft, gamma, prefix, drawn):
    """Every block of drafts there can be: (ids, probability that they are drawn, the draft's rows).

    Examples
    --------
    >>> half = lambda prefix: [Fraction(1, 2), Fraction(1, 2)]
    >>> [(ids, str(mass)) for ids, mass, rows in _blocks(half, 2, (), list)]
    [((0, 0), '1/4'), ((0, 1), '1/4'), ((1, 0), '1/4'), ((1, 1), '1/4')]
    """
    blocks = [((), Fraction(1), [])]
    for _ in range(gamma):
        blocks = [
            ((*ids, x), mass * prob, [*rows, row])
            for ids, mass, rows in blocks
            for row in [row_of("draft", draft, (*prefix, *ids))]
            for x, prob in enumerate(drawn(row))
            if prob
        ]
    return blocks


def _independent(passes):
    """Accepting at least n drafts takes n tests in a row: [1/2, 1/3] -> [1, 1/2, 1/6]."""
    return list(accumulate(passes, mul, initial=Fraction(1)))


def _residual_or_bonus(target_rows, draft_rows, ids, num_accepted):
    bonus = num_accepted == len(ids)
    return target_rows[-1] if bonus else residual(target_rows[num_accepted], draft_rows[num_accepted])


def _committed(before, ids, num_accepted, tokens):
    return before[0] + tokens, before[1] + tokens


TOKEN_RULE = rule_of()


def generation_law(target, draft, gamma, length, rule=TOKEN_RULE, eos_ids=()):
    """Joint law of `length` tokens that repeated rounds emit, with all their rejections, bonus tokens and stops.

    A round drafts one token less than may still be emitted, at most, as the sampler does. Nothing follows an id of
    `eos_ids`. The rule is lossless iff the result equals `sequence_law(target, length)`, cut at the first of them.

    Examples
    --------
    >>> target = lambda prefix: [Fraction(1, 3), Fraction(2, 3)]
    >>> draft = lambda prefix: [Fraction(2, 3), Fraction(1, 3)]
    >>> generation_law(target, draft, 2, 5) == sequence_law(target, 5)
    True
    """
    law, pending = {}, [{} for _ in range(length + 1)]
    pending[0][(), ((), ())] = Fraction(1)
    for done in range(length + 1):
        for (tokens, seen), mass in pending[done].items():
            if done == length or (tokens and tokens[-1] in eos_ids):
                law[tokens] = law.get(tokens, 0) + mass
                continue
            for outcome in rule(target, draft, min(gamma, length - done - 1), seen):
                key = cut_at((*tokens, *outcome.tokens), eos_ids), outcome.seen
                later = pending[len(key[0])]
                later[key] = later.get(key, 0) + mass * outcome.mass
    return law


def cut_at(tokens, eos_ids):
    """`tokens` up to and including the first of `eos_ids`: (4, 2, 7) with 2 among them -> (4, 2)."""
    return next((tokens[: i + 1] for i, x in enumerate(tokens) if x in eos_ids), tokens)


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
    rule : "token" or a rule made by `rule_of`
        "token" is the token-by-token rule of Leviathan et al. 2023.

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
    law = {}
    for outcome in _outcomes(target, draft, gamma, rule):
        for rest, prob in sequence_law(target, gamma + 1 - len(outcome.tokens), outcome.tokens).items():
            tokens = outcome.tokens + rest
            law[tokens] = law.get(tokens, 0) + outcome.mass * prob
    return law


def accepted_law(target, draft, gamma, rule="token"):
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
    for outcome in _outcomes(target, draft, gamma, rule):
        law[outcome.num_accepted] += outcome.mass
    return law


def _outcomes(target, draft, gamma, rule):
    if isinstance(rule, str) and rule != "token":
        raise ValueError(f"unknown rule {rule!r}; the rules are: 'token', or one made by rule_of")
    if gamma < 0:
        raise ValueError(f"gamma must be 0 or more, got {gamma}")
    yield from (TOKEN_RULE if rule == "token" else rule)(target, draft, gamma, ((), ()))
