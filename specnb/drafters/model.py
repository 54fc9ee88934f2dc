"""Drafts by a smaller model of the same vocabulary.

It knows a `LanguageModel` and how its tokens are drawn. It does not know acceptance. Read `specnb.sampler` next.
"""

from dataclasses import asdict

import torch

from specnb.drafters.base import Draft, Drafter
from specnb.models.base import check_same_vocabulary
from specnb.request import padded
from specnb.rule import inverse_cdf


class ModelDrafter(Drafter):
    """Drafts with a smaller model of the same vocabulary.

    Parameters
    ----------
    model : LanguageModel
    sampling : Sampling, optional
        How drafts are drawn; by default as the run samples. Any choice is exact, because the probabilities
        returned are those drawn from.
    """

    def __init__(self, model, sampling=None):
        self.model, self.sampling = model, sampling
        self._checked = None

    @property
    def context_length(self):
        return self.model.context_length

    @property
    def run(self):
        return self.model.run

    def check(self, target, batch):
        if target is self.model:
            raise ValueError("target and draft are the same object and would share a cache; wrap the model twice")
        if self._checked is not target:
            check_same_vocabulary(target, self.model)
            self._checked = target

    def begin(self, batch):
        self.model.reset(batch)

    def propose(self, prefixes, gammas, sampling, draw, target):
        sampling, uniforms = self.sampling or sampling, draw(gammas).to(self.model.device)  # (batch, longest gamma)
        # The first forward also feeds what was committed since the last one, so nothing is missing in the cache.
        unseen = [prefix[length:] for prefix, length in zip(prefixes, self.model.lengths, strict=True)]
        new_ids, num_new = padded(unseen, self.model.device)
        seen = [torch.tensor(ids, device=self.model.device) for ids in prefixes] if sampling.needs_prefix else None
        num_drafted, ids, probs = list(gammas), [], []
        for i in range(max(gammas)):
            logits = self.model.forward(new_ids, 1, num_new).logits[:, 0]  # (batch, vocab)
            probs.append(sampling.probs(logits, seen))
            # A one-hot row is drawn from without a running sum over the vocabulary.
            drawn = probs[-1].max(-1).indices if sampling.is_greedy else inverse_cdf(probs[-1], uniforms[:, i])
            new_ids = drawn[:, None]  # (batch, 1)
            ids.append(new_ids)
            self.shorten(num_drafted, i + 1, logits, new_ids)
            num_new = [int(num > i + 1) for num in num_drafted]  # A row that is done feeds nothing more.
            if not any(num_new):
                break
            if seen is not None:
                seen = [torch.cat(both) for both in zip(seen, new_ids, strict=True)]
        return Draft(torch.cat(ids, -1), torch.stack(probs, -2), num_drafted)

    def shorten(self, num_drafted, num_so_far, logits, new_ids):
        """End the block of a row after the token just drafted, which stays in it, by lowering `num_drafted` in place.

        `EarlyStop` does; here every row drafts all it may.
        """

    def observe(self, committed, num_accepted, scores):
        self.model.rollback([len(ids) - 1 for ids in committed])

    def keep(self, rows):
        self.model.keep(rows)

    def describe(self):
        sampling = {} if self.sampling is None else {"sampling": asdict(self.sampling)}
        return {**self.model.describe(), **sampling}
