"""Drafts by a smaller model of the same vocabulary.

It knows a `LanguageModel` and how its tokens are drawn. It does not know acceptance. Read `specnb.sampler` next.
"""

from dataclasses import asdict

import torch

from specnb.drafters.base import Drafter
from specnb.models import check_same_vocabulary
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

    serves_batches = True

    def __init__(self, model, sampling=None):
        self.model, self.sampling = model, sampling
        self._checked = None

    @property
    def context_length(self):
        return self.model.context_length

    def reset(self, target):
        if target is self.model:
            raise ValueError("target and draft are the same object and would share a cache; wrap the model twice")
        if self._checked is not target:
            check_same_vocabulary(target, self.model)
            self._checked = target
        self.model.reset()

    def begin(self, target, batch):
        super().begin(target, batch)
        if batch > 1:
            self.model.reset(batch)

    def propose(self, prefix_ids, gamma, sampling, draw, target):
        new_ids = torch.tensor([prefix_ids[self.model.length :]], device=self.model.device)
        return self._draft([prefix_ids], new_ids, {}, gamma, sampling, draw(gamma))

    def propose_batch(self, prefixes, gammas, sampling, draw, target):
        unseen = [prefix[length:] for prefix, length in zip(prefixes, self.model.length, strict=True)]
        new_ids, num_new = padded(unseen, self.model.device)
        uniforms = draw(gammas)
        # Rows that may draft less ride along to the longest block, and what they draft beyond theirs is padding.
        ids, probs = self._draft(prefixes, new_ids, {"num_new": num_new}, max(gammas), sampling, uniforms)
        return ids, probs, gammas

    def _draft(self, prefixes, new_ids, ragged, gamma, sampling, uniforms):
        sampling, uniforms = self.sampling or sampling, uniforms.to(self.model.device)  # (batch, gamma)
        prefixes = [torch.tensor(p, device=self.model.device) for p in prefixes] if sampling.needs_prefix else None
        ids, probs = [], []
        for i in range(gamma):
            # The first forward also feeds what the target committed since, so nothing is ever missing in the cache.
            logits = self.model.forward(new_ids, num_logits=1, **ragged)[:, 0]  # (batch, vocab)
            probs.append(sampling.probs(logits, prefixes))
            # A one-hot row is drawn from without a running sum over the vocabulary.
            drawn = probs[-1].max(-1).indices if sampling.is_greedy else inverse_cdf(probs[-1], uniforms[:, i])
            new_ids, ragged = drawn[:, None], {}  # (batch, 1)
            ids.append(new_ids)
            if i + 1 < gamma and self.ends_block(i, logits, new_ids):
                break
            if prefixes is not None:
                prefixes = [torch.cat(both) for both in zip(prefixes, new_ids, strict=True)]
        return torch.cat(ids, -1), torch.stack(probs, -2)

    def ends_block(self, position, logits, new_ids):
        """Whether to stop after the token just drafted, which stays in the block. `EarlyStop` decides it."""
        return False

    def rollback(self, length):
        self.model.rollback(length)

    def keep(self, rows):
        self.model.keep(rows)

    def describe(self):
        sampling = {} if self.sampling is None else {"sampling": asdict(self.sampling)}
        return {**self.model.describe(), **sampling}
