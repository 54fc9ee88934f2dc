"""A toy language model whose probabilities are written down.

It knows a function from a prefix to probabilities. It does not know transformers. Read `specnb.drafters` next.
"""

import torch

from specnb.models.base import Scores, as_lengths


class TableModel:
    """A toy language model given by its next-token probabilities.

    It is asked only about prefixes that occur: about padding of a batch it is never asked.

    Parameters
    ----------
    next_probs : callable, tuple of ids -> sequence of `vocab_size` probabilities
        Called with prompt and generated ids. Floats, Fractions or a tensor.
    vocab_size : int

    Examples
    --------
    >>> model = TableModel(lambda prefix: [0.5, 0.5] if len(prefix) % 2 else [1.0, 0.0], vocab_size=2)
    >>> model.forward(torch.tensor([[0, 1]]), num_logits=2).logits.exp()
    tensor([[[0.5000, 0.5000],
             [1.0000, 0.0000]]], dtype=torch.float64)
    """

    def __init__(self, next_probs, vocab_size):
        self.next_probs, self.vocab_size = next_probs, vocab_size
        self.context_length, self.device = None, torch.device("cpu")
        self._rows = {}
        self.reset()

    @property
    def lengths(self):
        return list(map(len, self._ids))

    @property
    def length(self):
        return self.lengths[0] if len(self._ids) == 1 else self.lengths

    def reset(self, batch=1):
        self._ids, self.run = [()] * batch, object()

    def forward(self, ids, num_logits, num_new=None, num_behind=None, hidden=False):
        if hidden:
            raise ValueError("a TableModel has no hidden states; take a CausalLM as the target of this drafter")
        batch, n = ids.shape
        logits = torch.zeros(batch, num_logits, self.vocab_size, dtype=torch.float64)
        for row, line in enumerate(ids.tolist()):
            end = n - (num_behind[row] if num_behind else 0)
            start = end - num_new[row] if num_new else 0
            before, self._ids[row] = self._ids[row], self._ids[row] + tuple(line[start:end])
            for i in range(max(start, n - num_logits), end):
                logits[row, i - n] = self._logits(before + tuple(line[start : i + 1]))
        return Scores(logits)

    def rollback(self, lengths):
        self._ids = [seen[:kept] for seen, kept in zip(self._ids, as_lengths(lengths), strict=True)]

    def keep(self, rows):
        self._ids = [self._ids[row] for row in rows]

    def _logits(self, prefix):
        if prefix not in self._rows:
            probs = torch.tensor([float(x) for x in self.next_probs(prefix)], dtype=torch.float64)
            if len(probs) != self.vocab_size or not (probs >= 0).all() or abs(probs.sum() - 1) > 1e-5:
                raise ValueError(
                    f"next_probs after {prefix} must be {self.vocab_size} probabilities, got {probs.tolist()}"
                )
            self._rows[prefix] = probs.log()
        return self._rows[prefix]
