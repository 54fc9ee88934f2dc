"""Several drafters in turn, one block each.

It knows other drafters. It does not know what they draft from. Read `specnb.drafters.adaptive` next.
"""

import torch

from specnb.drafters.base import Drafter, stacked


class FirstOf(Drafter):
    """Several drafters in turn: the first that proposes anything drafts the block.

    Exact, because the choice is made from the prefix alone and the block comes with its own drafter's probabilities.
    A drafter that is passed over reads what was committed meanwhile when its turn comes.

    Parameters
    ----------
    *drafters : Drafter
    caps : sequence of int or None, optional
        Longest block of each drafter, on top of the run's gamma: what is cheap to draft may draft more.

    Examples
    --------
    >>> FirstOf(PromptLookup(3, min_ngram=2), PromptLookup(1), caps=(None, 2)).describe()["caps"]
    [None, 2]
    """

    def __init__(self, *drafters, caps=None):
        self.drafters, self.caps = drafters, tuple(caps or [None] * len(drafters))
        if not drafters or len(self.caps) != len(drafters) or any(cap is not None and cap < 1 for cap in self.caps):
            raise ValueError(
                f"FirstOf needs at least one drafter and a cap of at least 1, or None, for each; got {len(drafters)} "
                f"drafters with caps {list(self.caps)}"
            )

    @property
    def context_length(self):
        known = [d.context_length for d in self.drafters if d.context_length is not None]
        return min(known, default=None)

    def reset(self, target):
        for drafter in self.drafters:
            drafter.reset(target)

    def begin(self, target, batch):
        for drafter in self.drafters:
            drafter.begin(target, batch)

    def propose_batch(self, prefixes, gammas, sampling, draw, target):
        no_ids = torch.empty(0, dtype=torch.long, device=target.device)
        nothing = no_ids, torch.empty(0, target.vocab_size, device=target.device)
        rows = [nothing] * len(prefixes)
        for drafter, cap in zip(self.drafters, self.caps, strict=True):
            asked = [0 if len(row[0]) else min(gamma, cap or gamma) for gamma, row in zip(gammas, rows, strict=True)]
            if any(asked):
                ids, probs, num_drafted = drafter.propose_batch(prefixes, asked, sampling, draw, target)
                rows = [(ids[i, :n], probs[i, :n]) if n else rows[i] for i, n in enumerate(num_drafted)]
        return stacked(*zip(*rows, strict=True))

    def propose(self, prefix_ids, gamma, sampling, draw, target):
        for drafter, cap in zip(self.drafters, self.caps, strict=True):
            ids, probs = drafter.propose(prefix_ids, min(gamma, cap or gamma), sampling, draw, target)
            if ids.shape[-1]:
                break
        return ids, probs

    def rollback(self, length):
        for drafter in self.drafters:
            drafter.rollback(length)

    def keep(self, rows):
        for drafter in self.drafters:
            drafter.keep(rows)

    def describe(self):
        return {"id": "FirstOf", "drafters": [d.describe() for d in self.drafters], "caps": list(self.caps)}
