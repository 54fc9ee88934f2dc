"""What a wrong sampler is made of: a rule with its law, a way to run it, and an example to run it on.

It knows rows of fractions. It does not know torch. Read `specnb.rogues.gallery` next.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cache

import numpy as np

from specnb import exact
from specnb.exact import cut_at


def example_target(prefix):
    """Three tokens whose law depends on the last token and on the position.

    Examples
    --------
    >>> [str(x) for x in example_target(())]
    ['1/2', '3/10', '1/5']
    """
    rows = [[5, 3, 2], [1, 6, 3], [4, 4, 2]]
    row, turn = rows[prefix[-1]] if prefix else rows[0], len(prefix) % 2
    return [Fraction(x, 10) for x in row[turn:] + row[:turn]]


def example_draft(prefix):
    rows = [[2, 3, 5], [3, 3, 4], [7, 2, 1]]
    return [Fraction(x, 10) for x in (rows[prefix[-1]] if prefix else rows[0])]


@dataclass(frozen=True)
class Rogue:
    """A named rule.

    `exposed_by` is the cheapest test that rejects it: "first token" (chi-square on one draw), "round" (the joint law of
    one round), "sequence" (that of several rounds), or None for an innocent. `intended`, if given, turns the raw target
    into the one the sampler was asked for.
    """

    name: str
    mirrors: str
    rule: Callable
    exposed_by: str | None
    intended: Callable | None = None

    @property
    def lossless(self):
        return self.exposed_by is None

    def law(self, target, draft, gamma, length):
        """Joint law of `length` tokens it emits."""
        return exact.generation_law(target, draft, gamma, length, self.rule)

    def right_law(self, target, length):
        """The law it ought to have."""
        return exact.sequence_law(self.target(target), length)

    def sampler(self, target, draft, gamma, length):
        return sampler_of(self.rule, target, draft, gamma, length)

    def target(self, target):
        return target if self.intended is None else lambda prefix: self.intended(target(prefix))


def sampler_of(rule, target, draft, gamma, length, eos_ids=()):
    """A sampler that runs `rule` round by round. A test is given what it draws; `exact.generation_law` is its law.

    Returns
    -------
    callable, (n, numpy Generator) -> (ids, num_accepted)
        For n independent runs: ids `(n, length)`, -1 after a stop, and the drafts accepted in each round `(n, length)`,
        -1 where no round took place. A round is one draw among the rule's outcomes after what that run has committed.
    """

    @cache
    def outcomes(left, seen):
        found = list(rule(target, draft, min(gamma, left - 1), seen))
        mass = np.array([float(outcome.mass) for outcome in found])
        return found, mass / mass.sum()

    def draw(n, rng):
        ids, num_accepted = (np.full((n, length), -1) for _ in range(2))
        running = {((), ((), ())): np.arange(n)}  # (ids emitted, what the models have seen) -> which runs
        for turn in range(length):
            going_on = {}
            for (tokens, seen), runs in running.items():
                found, mass = outcomes(length - len(tokens), seen)
                chosen = rng.choice(len(found), size=len(runs), p=mass)
                for i in np.unique(chosen):
                    these, emitted = runs[chosen == i], cut_at((*tokens, *found[i].tokens), eos_ids)
                    ids[these, : len(emitted)], num_accepted[these, turn] = emitted, found[i].num_accepted
                    if len(emitted) < length and emitted[-1] not in eos_ids:
                        going_on.setdefault((emitted, found[i].seen), []).append(these)
            running = {state: np.concatenate(parts) for state, parts in going_on.items()}
        return ids, num_accepted

    return draw
