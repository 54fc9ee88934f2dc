"""A toy language model whose probabilities are written down.

It knows a function from a prefix to probabilities. It does not know transformers. Read `specnb.drafters` next.
"""

import torch

from specnb.models.memory import memory_budget as memory_budget  # offered here too, beside the models it is about


class TableModel:
    """A toy language model given by its next-token probabilities.

    Parameters
    ----------
    next_probs : callable, tuple of ids -> sequence of `vocab_size` probabilities
        Called with prompt and generated ids. Floats, Fractions or a tensor.
    vocab_size : int

    Examples
    --------
    >>> model = TableModel(lambda prefix: [0.5, 0.5] if len(prefix) % 2 else [1.0, 0.0], vocab_size=2)
    >>> model.forward(torch.tensor([[0, 1]]), num_logits=2).exp()
    tensor([[[0.5000, 0.5000],
             [1.0000, 0.0000]]], dtype=torch.float64)
    """

    def __init__(self, next_probs, vocab_size):
        self.next_probs, self.vocab_size = next_probs, vocab_size
        self.context_length, self.device = None, torch.device("cpu")
        self._rows = {}
        self.reset()

    @property
    def length(self):
        return len(self._ids[0]) if self._single else list(map(len, self._ids))

    def reset(self, batch=1):
        self._ids, self._single = [()] * batch, batch == 1

    def forward(self, ids, num_logits, num_new=None):
        new = [row[len(row) - n :] for row, n in zip(ids.tolist(), num_new or [ids.shape[1]] * len(ids), strict=True)]
        self._ids = [seen + tuple(row) for seen, row in zip(self._ids, new, strict=True)]
        return torch.stack(
            [
                torch.stack([self._logits(seen[:end]) for end in range(len(seen) - num_logits + 1, len(seen) + 1)])
                for seen in self._ids
            ]
        )

    def rollback(self, length):
        lengths = [length] if self._single else length
        self._ids = [seen[:kept] for seen, kept in zip(self._ids, lengths, strict=True)]

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
