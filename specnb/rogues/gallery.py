"""A gallery of wrong samplers, and of some that look wrong and are not.

Each is a rule of `specnb.exact` with one part replaced: it can be run, and its law is known to the last fraction. Each
names the fault that it mirrors and the cheapest test that exposes it. It knows rows of fractions. It does not know
torch. A test of exactness is worth something if it rejects the wrong samplers and passes the innocent ones.
"""

import math
from fractions import Fraction
from itertools import accumulate

from specnb import exact
from specnb.exact import residual, rule_of
from specnb.rogues.base import Rogue

HALF = Fraction(1, 2)


KEPT_MASS = Fraction(3, 4)  # Of top-p here.


def one_hot(row):
    """All mass on the first most probable token."""
    first = max(range(len(row)), key=lambda x: row[x])
    return [Fraction(x == first) for x in range(len(row))]


def top_k(row, num=2):
    """The `num` most probable tokens, renormalised; the first of those that tie."""
    return _only(row, sorted(range(len(row)), key=lambda x: -row[x])[:num])


def top_p(row, mass=KEPT_MASS):
    """The fewest most probable tokens whose mass reaches `mass`, renormalised."""
    order = sorted(range(len(row)), key=lambda x: -row[x])
    reached = list(accumulate(row[x] for x in order))
    return _only(row, order[: 1 + sum(total < mass for total in reached)])


def _only(row, kept):
    total = sum(row[x] for x in kept)
    return [row[x] / total if x in kept else Fraction(0) for x in range(len(row))]


def _after_rejection(recover):
    """Part `extra` of a rule: `recover(target row, draft row, rejected id)` after a rejection, else the bonus."""

    def extra(target_rows, draft_rows, ids, num):
        return target_rows[-1] if num == len(ids) else recover(target_rows[num], draft_rows[num], ids[num])

    return extra


def _softmax_of_excess(target_row, draft_row, rejected):
    weights = [Fraction(math.exp(max(t - d, 0))) for t, d in zip(target_row, draft_row, strict=True)]
    return [weight / sum(weights) for weight in weights]


def _without(target_row, draft_row, rejected):
    """The target without the rejected token."""
    return _only(target_row, [x for x in range(len(target_row)) if x != rejected])


def _with_target_probability(target_row, draft_row, token):
    return target_row[token]


def _bonus_of_an_earlier_row(target_rows, draft_rows, ids, num):
    if num == len(ids):
        return target_rows[max(num - 1, 0)]
    return residual(target_rows[num], draft_rows[num])


def _residual_of_the_first(target_rows, draft_rows, ids, num):
    return target_rows[-1] if num == len(ids) else residual(target_rows[0], draft_rows[0])


def _no_bonus(target_rows, draft_rows, ids, num):
    if num == len(ids) and ids:
        return None
    return target_rows[num] if not ids else residual(target_rows[num], draft_rows[num])


def _bonus_not_committed(before, ids, num, tokens):
    kept = tokens[:-1] if ids and num == len(ids) else tokens
    return before[0] + kept, before[1] + kept


def _target_keeps_the_rejected(before, ids, num, tokens):
    stale = ids[num : num + 1]
    return before[0] + tokens[:num] + stale + tokens[num:], before[1] + tokens


def _drop_low_confidence(draft_rows, ids):
    low = (i for i, x in enumerate(ids) if draft_rows[i][x] < Fraction(3, 10))
    return next(low, len(ids))


def _first_row_only(rule):
    """Top-p on the row of the first position of a block, the others raw."""

    def wrong(target, draft, gamma, before):
        first = len(before[0])
        processed = lambda prefix: top_p(target(prefix)) if len(prefix) == first else target(prefix)  # noqa: E731
        yield from rule(processed, draft, gamma, before)

    return wrong


def _processed(rule, process):
    return lambda target, draft, gamma, before: rule(lambda prefix: process(target(prefix)), draft, gamma, before)


ROGUES = (
    Rogue(
        "recovered from the target",
        "romsto, skip_sample_adjustment",
        rule_of(extra=_after_rejection(lambda target_row, draft_row, rejected: target_row)),
        "first token",
    ),
    Rogue("always accept", "transformers PR #28508 thread", rule_of(accept=lambda *_: Fraction(1)), "first token"),
    Rogue(
        "softmax of the clamped difference",
        "transformers PR #28508",
        rule_of(extra=_after_rejection(_softmax_of_excess)),
        "first token",
    ),
    Rogue(
        "accept iff the target likes it at least as much",
        "folklore",
        rule_of(accept=lambda target_row, draft_row, x: Fraction(target_row[x] >= draft_row[x])),
        "first token",
    ),
    Rogue(
        "accept with the target's probability, then the residual",
        "mlx-swift-lm #459",
        rule_of(accept=_with_target_probability),
        "first token",
    ),
    Rogue(
        "argmax draft, softmax probabilities",
        "transformers #32867, jaymody #3",
        rule_of(drawn=one_hot),
        "first token",
    ),
    Rogue("top-k draft, raw probabilities", "transformers #47932", rule_of(drawn=top_k), "first token"),
    Rogue(
        "lenience 1/2",
        "Leviathan et al. 2023, A.5: lossy by design",
        rule_of(accept=lambda target_row, draft_row, x: min(Fraction(1), target_row[x] / (HALF * draft_row[x]))),
        "first token",
    ),
    Rogue("top-p draft, raw probabilities", "the mirror image of an innocent", rule_of(drawn=top_p), "first token"),
    Rogue(
        "low-confidence draft discarded after it was sampled",
        "drafting stopped by confidence, the token dropped; no public thread known",
        rule_of(cut=_drop_low_confidence),
        "first token",
    ),
    Rogue(
        "one uniform for all positions",
        "vllm fork PR #209, feifeibear",
        rule_of(survival=lambda passes: list(accumulate(passes, min, initial=Fraction(1)))),
        "round",
    ),
    Rogue(
        "bonus from an earlier row",
        "an index off by one; no public thread known",
        rule_of(extra=_bonus_of_an_earlier_row),
        "round",
    ),
    Rogue(
        "residual of the first position",
        "recovery from the wrong row, romsto 53922df",
        rule_of(extra=_residual_of_the_first),
        "round",
    ),
    Rogue(
        "processors at the first position only",
        "target scored with default sampling, as in vllm #9834",
        _first_row_only(exact.TOKEN_RULE),
        "round",
        top_p,
    ),
    Rogue("bonus emitted but not committed", "gpt-fast, vllm PR #9730", rule_of(seen=_bonus_not_committed), "sequence"),
    Rogue(
        "target cache off by one after a rejection",
        "aprender PR #2014, mlx-lm PR #1528",
        rule_of(seen=_target_keeps_the_rejected),
        "sequence",
    ),
)


INNOCENTS = (
    Rogue("no bonus token", "-", rule_of(extra=_no_bonus), None),
    Rogue("top-p on the target only", "-", _processed(exact.TOKEN_RULE, top_p), None, top_p),
    Rogue(
        "accept with the target's probability, else the target without it",
        "-",
        rule_of(accept=_with_target_probability, extra=_after_rejection(_without)),
        None,
    ),
    Rogue(
        "accept iff the target's own draw equals the draft, emit that draw",
        "llama.cpp's default",
        rule_of(accept=_with_target_probability, extra=_after_rejection(_without)),
        None,
    ),
)
