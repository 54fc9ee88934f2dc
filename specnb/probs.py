"""From logits to the probabilities the configured sampler would use.

No other part of the core looks at logits. It knows temperature, top-k, top-p, min-p, repetition penalty and logit
bias. Each is applied by transformers' own logits processor, in the order of `generate()`, so that a sampled token has
the law that library gives it. It does not know models or devices. Read `specnb.rule` next, which takes what this
returns.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch

GREEDY_BELOW = 1e-5  # Temperatures below this are greedy, everywhere.


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen from logits.

    Parameters
    ----------
    temperature : float
        0, or anything below 1e-5, is greedy: it takes the most probable token, the first of several that tie.
    top_k : int or None
        Keep the k most probable tokens, and those that tie with the last of them. None or 0 keeps all of them, whereas
        `generate(do_sample=True)` keeps 50 unless told otherwise.
    top_p, min_p : float in [0, 1] or None
    repetition_penalty : float above 0 or None
        Divides the logits (multiplies negative ones) of ids that occur in the prefix.
    logit_bias : dict or None
        {token id: number added to its logit}; `-inf` bans a token.

    Raises
    ------
    ValueError
        For a value outside its range, naming it.

    Examples
    --------
    >>> logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    >>> Sampling(top_p=0.75).probs(logits)
    tensor([0.6250, 0.3750, 0.0000, 0.0000])
    >>> Sampling(temperature=0).probs(torch.tensor([1.0, 3.0, 3.0]))
    tensor([0., 1., 0.])
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict | None = None

    def __post_init__(self):
        temperature = math.nan if self.temperature is None else self.temperature
        _require("temperature", temperature, lambda x: 0 <= x < math.inf, "0 (greedy) or a finite number above")
        _require("top_k", self.top_k, lambda x: x >= 0 and x == int(x), "a whole number; None or 0 keeps all tokens")
        _require("top_p", self.top_p, lambda x: 0 <= x <= 1, "between 0 and 1")
        _require("min_p", self.min_p, lambda x: 0 <= x <= 1, "between 0 and 1")
        _require("repetition_penalty", self.repetition_penalty, lambda x: 0 < x < math.inf, "a finite number above 0")
        for token, bias in (self.logit_bias or {}).items():
            _require(f"logit_bias of token {token!r}", bias, lambda x: x < math.inf, "finite, or -inf for a ban")
            _require("a key of logit_bias", token, lambda x: x >= 0 and x == int(x), "a token id, 0 or more")

    @property
    def is_greedy(self):
        return self.temperature < GREEDY_BELOW

    @property
    def needs_prefix(self):
        """Whether `probs` needs the ids before each row."""
        return self.repetition_penalty not in (None, 1.0)

    def probs(self, logits, prefix_ids=None):
        """Next-token probabilities.

        Parameters
        ----------
        logits : Tensor of shape `(..., vocab)`; never modified
        prefix_ids : ids, or nested lists of ids, optional
            The ids before each row, prompt included. Only the repetition penalty reads them. For logits `(vocab,)` give
            one list, for `(n, vocab)` n lists or tensors, and for more dimensions lists nested as deep.

        Returns
        -------
        Tensor of the same shape; float32, float64 for float64 logits. Rows sum to 1; at temperature 0 they are one-hot.

        Raises
        ------
        ValueError
            For a missing or mismatched prefix where one is needed, or a biased id outside the vocabulary.
        """
        vocab = logits.shape[-1]
        flat, dtype = logits.reshape(-1, vocab), torch.promote_types(logits.dtype, torch.float32)  # (rows, vocab)
        # Plain greedy only looks for the maximum, which is the same in any dtype, so nothing is copied for it.
        if not self.is_greedy or self.logit_bias or self.needs_prefix:
            flat = flat.to(dtype)
        if self.logit_bias:
            flat = _bias_processor(tuple(self.logit_bias.items()), vocab, flat.device)(None, flat)
        if self.needs_prefix:
            flat = self._penalise(flat, prefix_ids, logits.ndim)
        if self.is_greedy:
            return _one_hot(flat, dtype).reshape(logits.shape)
        for warper in self._warpers():
            flat = warper(None, flat)
        return flat.softmax(-1).reshape(logits.shape)

    def _penalise(self, flat, prefix_ids, ndim):
        if prefix_ids is None:
            raise ValueError("a repetition penalty needs prefix_ids, the ids before each row")
        prefixes = _flatten(prefix_ids, ndim - 1)
        if len(prefixes) != len(flat):
            raise ValueError(f"prefix_ids holds {len(prefixes)} prefixes for {len(flat)} rows of logits")
        from transformers import RepetitionPenaltyLogitsProcessor

        penalise = RepetitionPenaltyLogitsProcessor(float(self.repetition_penalty))
        ids = [torch.as_tensor(prefix, dtype=torch.long, device=flat.device)[None] for prefix in prefixes]
        return torch.cat([penalise(*pair) for pair in zip(ids, flat.split(1), strict=True)])

    def _warpers(self):
        """The processors of transformers that this sampling needs, in the order of `generate()`.

        A plain softmax needs none, and then transformers is not imported.
        """
        wanted = [
            ("TemperatureLogitsWarper", float(self.temperature), self.temperature != 1),
            ("TopKLogitsWarper", int(self.top_k or 0), self.top_k),
            ("TopPLogitsWarper", self.top_p, self.top_p is not None and self.top_p < 1),
            ("MinPLogitsWarper", self.min_p, self.min_p),
        ]
        if not any(used for *_, used in wanted):
            return []
        import transformers

        return [getattr(transformers, name)(value) for name, value, used in wanted if used]


@lru_cache(maxsize=16)
def _bias_processor(biases, vocab, device):
    """The bias processor of transformers, which is kept because it builds a table on the device at its first call."""
    from transformers import SequenceBiasLogitsProcessor

    for token, _ in biases:
        if token >= vocab:
            raise ValueError(f"logit_bias names token {token}, outside the vocabulary 0..{vocab - 1}")
    return SequenceBiasLogitsProcessor({(int(token),): float(bias) for token, bias in biases})


def _one_hot(scores, dtype):
    """Probability 1 for the highest score of each row, the first of several that tie.

    Examples
    --------
    >>> _one_hot(torch.tensor([[1.0, 3.0, 3.0], [1.0, float("nan"), 2.0]]), torch.float32)
    tensor([[0., 1., 0.],
            [0., nan, 0.]])
    """
    # `max` finds the first of several that tie, and NaN before all else. `argmax` does too, but takes twice as long in
    # bfloat16 on a CPU.
    top, first = scores.max(-1, keepdim=True)
    # Subtle: top - top is 0 where the row is sound and NaN where its maximum is NaN or infinite. The NaN stays in the
    # row for the caller to notice.
    return torch.zeros_like(scores, dtype=dtype).scatter_(-1, first, (top - top + 1).to(dtype))


def _flatten(prefixes, depth):
    """A list of prefixes, one for each row of logits, from lists nested `depth` deep.

    Examples
    --------
    >>> _flatten([[[5], [5, 7]], [[1], [1, 2]]], 2)  # for logits of shape (2, 2, vocab)
    [[5], [5, 7], [1], [1, 2]]
    """
    rows = [prefixes]
    for _ in range(depth):
        rows = [inner for row in rows for inner in row]
    if not all(hasattr(row, "__len__") for row in rows):
        raise ValueError(f"prefix_ids must be nested {depth} deep, a list of ids for each row of logits")
    return rows


def _require(name, value, holds, wanted):
    if value is None:
        return
    try:
        fine = not isinstance(value, bool) and not math.isnan(value) and holds(value)
    except (TypeError, ValueError, OverflowError):
        fine = False
    if not fine:
        raise ValueError(f"{name} must be {wanted}; got {value!r}")
