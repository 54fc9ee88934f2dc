"""Several drafters in turn, one block each.

It knows other drafters. It does not know what they draft from. Read `specnb.drafters.adaptive` next.
"""

import torch

from specnb.drafters.base import Draft, Drafter, filled


class FirstOf(Drafter):
    """Several drafters in turn: in each row the first that proposes anything drafts the block.

    Exact, because the choice is made from the prefix alone and the block comes with its own drafter's probabilities.
    A drafter that is passed over reads what was committed meanwhile when its turn comes.

    Parameters
    ----------
    *drafters : Drafter
    caps : sequence of int or None, optional
        Longest block of each drafter, on top of the run's gamma: what is cheap to draft may draft more.

    Examples
    --------
    >>> from specnb.drafters.lookup import PromptLookup
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

    @property
    def reads_hidden(self):
        return any(drafter.reads_hidden for drafter in self.drafters)

    @property
    def run(self):
        return tuple(drafter.run for drafter in self.drafters)

    def check(self, target, batch):
        for drafter in self.drafters:
            drafter.check(target, batch)

    def begin(self, batch):
        for drafter in self.drafters:
            drafter.begin(batch)

    def propose(self, prefixes, gammas, sampling, draw, target):
        no_ids = torch.empty(len(prefixes), 0, dtype=torch.long, device=target.device)
        draft = Draft(no_ids, torch.empty(*no_ids.shape, target.vocab_size, device=target.device), [0] * len(prefixes))
        for drafter, cap in zip(self.drafters, self.caps, strict=True):
            asked = [
                0 if drafted else min(gamma, cap or gamma)
                for gamma, drafted in zip(gammas, draft.num_drafted, strict=True)
            ]
            if any(asked):
                draft = filled(draft, drafter.propose(prefixes, asked, sampling, draw, target))
        return draft

    def observe(self, committed, num_accepted, scores):
        for drafter in self.drafters:
            drafter.observe(committed, num_accepted, scores)

    def keep(self, rows):
        for drafter in self.drafters:
            drafter.keep(rows)

    def describe(self):
        return {"id": "FirstOf", "drafters": [d.describe() for d in self.drafters], "caps": list(self.caps)}
