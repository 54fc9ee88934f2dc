"""The seam that every kind of draft is built on.

A drafter knows how to propose the next few tokens and with which probabilities it drew them. It does not know
acceptance. Whatever it proposes, the output law is the target's, as long as the probabilities it returns are those
its ids were drawn from. Read `specnb.drafters.model` next.
"""

import torch


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
        return stacked([ids[0] for ids, _ in rows], [probs[0] for _, probs in rows])

    def rollback(self, length):
        """The round is over: forget everything after the first `length` committed tokens (a list, for a batch)."""

    def keep(self, rows):
        """Go on with these rows of a batch."""

    def describe(self):
        """What this is, for a result file."""
        return {"id": type(self).__name__}


def _one_row(draw, row, n, batch):
    return draw([n if i == row else 0 for i in range(batch)])[row : row + 1]


def stacked(ids, probs):
    """Rows of different lengths in one tensor, zeros behind the shorter: (ids, probs, lengths)."""
    pad, dtype = torch.nn.utils.rnn.pad_sequence, max(probs, key=len).dtype
    return pad(ids, batch_first=True), pad([row.to(dtype) for row in probs], batch_first=True), list(map(len, ids))
