"""How long to draft, decided while drafting or from one round to the next; the output law stays the target's.

A stopping rule may look at everything drafted so far, the newest token included, as long as that token stays in the
block. Dropping it because it looked bad is what biases the output: the tokens that remain were then not drawn from the
probabilities reported ("low-confidence draft discarded" in `specnb.rogues`). It does not know models. Read
`specnb.drafters` before.
"""

from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Any

from specnb.drafters import Drafter, ModelDrafter
from specnb.theory import verify_cost_at


class EarlyStop(ModelDrafter):
    """A model that ends a block early, after a token that stays in it.

    Parameters
    ----------
    model : LanguageModel
    stop : callable, list of the block's confidences so far -> bool
        A confidence is the probability of a drafted token by the raw softmax of the draft's logits, before any
        processor, as transformers reads it; under greedy decoding the processed one would always be 1. Reading it
        waits for the device. A block that has its full length is not asked about.
    sampling : Sampling, optional, as for `ModelDrafter`
    """

    def __init__(self, model, stop, sampling=None):
        super().__init__(model, sampling)
        self.stop = stop

    def shorten(self, num_drafted, num_so_far, logits, new_ids):
        if num_so_far == 1:
            self._confidences = [[] for _ in num_drafted]
        newest = logits.float().softmax(-1).gather(-1, new_ids)[:, 0].tolist()
        for row, (confidences, confidence) in enumerate(zip(self._confidences, newest, strict=True)):
            if num_drafted[row] > num_so_far:
                confidences.append(confidence)
                if self.stop(confidences):
                    num_drafted[row] = num_so_far

    def describe(self):
        return {**super().describe(), "stop": str(self.stop)}


@dataclass(frozen=True)
class BelowThreshold:
    """Stop after a token of less confidence: `assistant_confidence_threshold` of transformers, .4 by default there.

    Examples
    --------
    >>> stop = BelowThreshold(0.4)
    >>> stop([0.9]), stop([0.9, 0.3])
    (False, True)
    """

    threshold: float

    def __post_init__(self):
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold is a probability, got {self.threshold}")

    def __call__(self, confidences):
        return confidences[-1] < self.threshold


@dataclass(frozen=True)
class CostAware:
    """Stop when one more draft would buy no more per unit of time than the block so far.

    Parameters
    ----------
    cost_ratio, verify_cost : as in `theory.speedup`, measured
    reliability : float
        Probability that a draft is accepted, over its confidence; 1 takes confidences at their word.

    Notes
    -----
    With a_i the estimated probability that draft i is accepted, n drafts
    emit 1 + sum of prod(a_1..a_i) tokens at a cost of n c + v(n). The
    next draft is expected to be as likely as the mean of those so far; it adds prod(a_1..a_n) times that, and costs
    c + v(n+1) - v(n). Drafting stops where that ratio is no better than the one of the whole block.

    Examples
    --------
    >>> stop = CostAware(cost_ratio=0.1, verify_cost=lambda gamma: 1 + 0.05 * gamma)
    >>> stop([0.9]), stop([0.9, 0.9, 0.1])
    (False, True)
    """

    cost_ratio: float
    verify_cost: Any = 1.0
    reliability: float = 1.0

    def __call__(self, confidences):
        chances = [min(self.reliability * confidence, 1.0) for confidence in confidences]
        num, reached = len(chances), list(accumulate(chances, mul))
        here, further = (verify_cost_at(self.verify_cost, gamma) for gamma in (num, num + 1))
        gain = reached[-1] * sum(chances) / num
        return gain * (num * self.cost_ratio + here) <= (1 + sum(reached)) * (self.cost_ratio + further - here)


class Heuristic(Drafter):
    """The old schedule of transformers: two drafts more after a block accepted whole, one less after another.

    Each run begins with `start` again ("heuristic_transient" there); the run's gamma is the most.

    Parameters
    ----------
    drafter : Drafter
    start : int
    """

    def __init__(self, drafter, start=5):
        if start < 1:
            raise ValueError(f"start must be at least 1, got {start}")
        self.drafter, self.start = drafter, start

    @property
    def context_length(self):
        return self.drafter.context_length

    @property
    def reads_hidden(self):
        return self.drafter.reads_hidden

    @property
    def run(self):
        return self._run, self.drafter.run

    def check(self, target, batch):
        self.drafter.check(target, batch)

    def begin(self, batch):
        self._run, self._longest, self._num_drafted = object(), [self.start] * batch, [0] * batch
        self.drafter.begin(batch)

    def propose(self, prefixes, gammas, sampling, draw, target):
        asked = list(map(min, gammas, self._longest))
        draft = self.drafter.propose(prefixes, asked, sampling, draw, target)
        self._num_drafted = draft.num_drafted
        return draft

    def observe(self, committed, num_accepted, scores):
        self.drafter.observe(committed, num_accepted, scores)
        for row, (drafted, accepted) in enumerate(zip(self._num_drafted, num_accepted, strict=True)):
            if drafted:  # A round in which the row drafted nothing says nothing.
                self._longest[row] = self._longest[row] + 2 if accepted == drafted else max(self._longest[row] - 1, 1)
        self._num_drafted = [0] * len(committed)

    def keep(self, rows):
        self._longest, self._num_drafted = [self._longest[row] for row in rows], [0] * len(rows)
        self.drafter.keep(rows)

    def describe(self):
        return {"id": "Heuristic", "start": self.start, "drafter": self.drafter.describe()}
