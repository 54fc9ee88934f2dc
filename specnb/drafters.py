"""Where drafts come from.

A drafter knows how to propose the next few tokens and with which probabilities it drew them. It does not know
acceptance. Whatever it proposes, the output law is the target's, as long as the probabilities it returns are those
its ids were drawn from. Read `specnb.sampler` next.
"""

from dataclasses import asdict

import torch

from specnb.models import check_same_vocabulary
from specnb.request import padded
from specnb.rule import inverse_cdf


class Drafter:
    """The seam: subclass it and write `propose`."""

    context_length = None  # longest prefix it can read, in tokens; None: any
    serves_batches = False  # One that remembers nothing from round to round may say True; others write `propose_batch`.

    def reset(self, target):
        """A run with `target` begins: refuse what cannot work, forget everything. May be called twice."""

    def begin(self, target, batch):
        """A run of `batch` prompts begins."""
        if batch > 1 and not self.serves_batches:
            raise ValueError(
                f"{type(self).__name__} serves one prompt at a time, not {batch}; take a ModelDrafter or PromptLookup"
            )
        self.reset(target)

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

    def propose_batch(self, prefixes, gammas, sampling, draw, target):
        """`propose` for every row of a batch; here each by itself, for a drafter that remembers nothing.

        `draw` takes how many uniforms each row needs and returns `(batch, most)`.

        Returns
        -------
        (ids, probs, num_drafted)
            As of `propose`, of shapes `(batch, k)` and `(batch, k, vocab)`, and how many of its k each row drafted:
            what follows those is padding.
        """
        rows = [
            self.propose(prefix, gamma, sampling, lambda n, i=i: _one_row(draw, i, n, len(prefixes)), target)
            for i, (prefix, gamma) in enumerate(zip(prefixes, gammas, strict=True))
        ]
        return _stacked([ids[0] for ids, _ in rows], [probs[0] for _, probs in rows])

    def rollback(self, length):
        """The round is over: forget everything after the first `length` committed tokens (a list, for a batch)."""

    def keep(self, rows):
        """Go on with these rows of a batch."""

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
        """Whether to stop after the token just drafted, which stays in the block; `specnb.adaptive` says when."""
        return False

    def rollback(self, length):
        self.model.rollback(length)

    def keep(self, rows):
        self.model.keep(rows)

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

    serves_batches = True

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
        return _stacked(*zip(*rows, strict=True))

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


def _one_row(draw, row, n, batch):
    return draw([n if i == row else 0 for i in range(batch)])[row : row + 1]


def _stacked(ids, probs):
    """Rows of different lengths in one tensor, zeros behind the shorter: (ids, probs, lengths)."""
    pad, dtype = torch.nn.utils.rnn.pad_sequence, max(probs, key=len).dtype
    return pad(ids, batch_first=True), pad([row.to(dtype) for row in probs], batch_first=True), list(map(len, ids))
