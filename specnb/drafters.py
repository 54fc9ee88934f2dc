"""Where drafts come from.

A drafter knows how to propose the next few tokens and with which probabilities it drew them. It does not know
acceptance. Whatever it proposes, the output law is the target's, as long as the probabilities it returns are those
its ids were drawn from. Read `specnb.sampler` next.
"""

from dataclasses import asdict

import torch

from specnb.models import check_same_vocabulary
from specnb.probs import first_maximum
from specnb.rule import inverse_cdf


class Drafter:
    """The seam: subclass it and write `propose`."""

    context_length = None  # longest prefix it can read, in tokens; None: any

    def reset(self, target):
        """A run with `target` begins: refuse what cannot work, forget everything. May be called twice."""

    def propose(self, prefix_ids, gamma, sampling, draw, target):
        """Propose at most `gamma` tokens after `prefix_ids`.

        Parameters
        ----------
        prefix_ids : list of int
            Everything committed so far, prompt included.
        gamma : int, at least 1
        sampling : Sampling
            The run's.
        draw : callable, n -> float64 Tensor `(1, n)` of uniforms in [0, 1)
            The run's randomness; a deterministic drafter does not call it.
        target : LanguageModel
            For its vocabulary size and device.

        Returns
        -------
        ids : int64 Tensor of shape `(1, k)`, 0 <= k <= gamma
        probs : Tensor of shape `(1, k, vocab)`
            Row i is the distribution id i was drawn from, one-hot for a deterministic choice.
        """
        raise NotImplementedError

    def rollback(self, length):
        """The round is over: forget everything after the first `length` committed tokens."""

    def describe(self):
        """What this is, for a result file."""
        return {"id": type(self).__name__}


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

    def reset(self, target):
        if target is self.model:
            raise ValueError("target and draft are the same object and would share a cache; wrap the model twice")
        if self._checked is not target:
            check_same_vocabulary(target, self.model)
            self._checked = target
        self.model.reset()

    def propose(self, prefix_ids, gamma, sampling, draw, target):
        sampling = self.sampling or sampling
        uniforms = draw(gamma).to(self.model.device)  # (1, gamma)
        new_ids = torch.tensor([prefix_ids[self.model.length :]], device=self.model.device)
        prefix = torch.tensor(prefix_ids, device=self.model.device) if sampling.needs_prefix else None
        ids, probs = [], []
        for i in range(gamma):
            # The first forward also feeds what the target committed since, so nothing is ever missing in the cache.
            logits = self.model.forward(new_ids, num_logits=1)[:, 0]  # (1, vocab)
            probs.append(sampling.probs(logits, None if prefix is None else prefix[None]))
            # A one-hot row is drawn from without a running sum over the vocabulary.
            drawn = first_maximum(probs[-1]) if sampling.is_greedy else inverse_cdf(probs[-1], uniforms[:, i])
            new_ids = drawn[:, None]  # (1, 1)
            ids.append(new_ids)
            if i + 1 < gamma and self.ends_block(i, logits, new_ids):
                break
            if sampling.needs_prefix:
                prefix = torch.cat([prefix, new_ids[0]])
        return torch.cat(ids, -1), torch.stack(probs, -2)

    def ends_block(self, position, logits, new_ids):
        """Whether to stop after the token just drafted, which stays in the block; `specnb.adaptive` says when."""
        return False

    def rollback(self, length):
        self.model.rollback(length)

    def describe(self):
        sampling = {} if self.sampling is None else {"sampling": asdict(self.sampling)}
        return {**self.model.describe(), **sampling}


class PromptLookup(Drafter):
    """Drafts by copying: what followed the latest earlier occurrence of the last few tokens.

    The longest n-gram, from `max_ngram` tokens down to `min_ngram`, decides. Without a match nothing is proposed and
    the round is a plain step. The choice is deterministic, so its probabilities are one-hot.

    Examples
    --------
    >>> PromptLookup(max_ngram=2).lookup([5, 6, 7, 8, 5, 6], 4)
    [7, 8, 5, 6]
    >>> PromptLookup().lookup([1, 2, 3], 4)
    []
    """

    def __init__(self, max_ngram=3, min_ngram=1):
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(
                f"min_ngram and max_ngram must be at least 1 and in order, got {min_ngram} and {max_ngram}"
            )
        self.max_ngram, self.min_ngram = max_ngram, min_ngram

    def lookup(self, ids, gamma):
        """The copied tokens, at most `gamma`; an empty list without a match."""
        for size in range(min(self.max_ngram, len(ids) - 1), self.min_ngram - 1, -1):
            pattern = ids[-size:]
            for start in range(len(ids) - size - 1, -1, -1):
                if ids[start] == pattern[0] and ids[start : start + size] == pattern:
                    return ids[start + size : start + size + gamma]
        return []

    def propose(self, prefix_ids, gamma, sampling, draw, target):
        ids = torch.tensor([self.lookup(prefix_ids, gamma)], dtype=torch.long, device=target.device)
        probs = torch.zeros(*ids.shape, target.vocab_size, device=target.device)
        return ids, probs.scatter_(-1, ids[..., None], 1.0)

    def describe(self):
        ngrams = f"max_ngram={self.max_ngram}" + (f", min_ngram={self.min_ngram}" if self.min_ngram > 1 else "")
        return {"id": f"PromptLookup({ngrams})"}


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

    def propose(self, prefix_ids, gamma, sampling, draw, target):
        for drafter, cap in zip(self.drafters, self.caps, strict=True):
            ids, probs = drafter.propose(prefix_ids, min(gamma, cap or gamma), sampling, draw, target)
            if ids.shape[-1]:
                break
        return ids, probs

    def rollback(self, length):
        for drafter in self.drafters:
            drafter.rollback(length)

    def describe(self):
        return {"id": "FirstOf", "drafters": [d.describe() for d in self.drafters], "caps": list(self.caps)}
