"""What every acceptance rule is built from: its verdict, the inverse CDF, and helpers that pick rows and entries.

It knows tensors of probabilities. It does not know which rule uses them. Read `specnb.rule.token` next.
"""

from typing import NamedTuple

import torch


class Verdict(NamedTuple):
    """What the rule decided for one block: both tensors have the block's leading shape and dtype int64."""

    num_accepted: torch.Tensor
    next_id: torch.Tensor


def inverse_cdf(weights, uniforms):
    """First id whose cumulative weight exceeds `uniforms` times the total, never one of weight 0.

    Parameters
    ----------
    weights : Tensor of shape `(..., vocab)`, not negative; need not sum to 1
    uniforms : Tensor of shape `(...)`, in [0, 1)

    Returns
    -------
    int64 Tensor of shape `(...)`

    Examples
    --------
    >>> inverse_cdf(torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0]), torch.tensor(0.5)).item()
    3
    """
    # Subtle: a float32 running sum over 50,000 tokens would bend the tail.
    cumulative = weights.cumsum(-1, dtype=sum_dtype(weights)).contiguous()
    total = cumulative[..., -1:].contiguous()
    first = torch.searchsorted(cumulative, uniforms.to(cumulative.dtype)[..., None] * total, right=True)
    last = torch.searchsorted(cumulative, total)  # The bound for a u so close to 1 that u * total rounds to the total.
    ids = torch.minimum(first, last).clamp(max=weights.shape[-1] - 1)
    if weights.device.type != "cpu":
        # Subtle: a GPU sums in parallel, and its running sum may change in the last bit at an id of weight 0. A draw
        # lands in such a gap with the probability of a rounding error, and then takes the likeliest id instead.
        ids = torch.where(weights.gather(-1, ids) > 0, ids, weights.argmax(-1, keepdim=True))
    return ids[..., 0]


def residual_weights(target_row, draft_row):
    """max(p - q, 0) without dividing by its sum, which `inverse_cdf` does not need; p itself where p = q.

    Examples
    --------
    >>> residual_weights(torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.25, 0.25, 0.5]))
    tensor([0.2500, 0.0000, 0.0000])
    """
    weights = (target_row - draft_row).clamp(min=0)
    return torch.where(weights.sum(-1, keepdim=True) > 0, weights, target_row)


def at(probs, ids):
    """The entry of each row that `ids` names.

    Examples
    --------
    >>> at(torch.tensor([[0.5, 0.25, 0.25], [0.0, 0.75, 0.25]]), torch.tensor([0, 1]))
    tensor([0.5000, 0.7500])
    """
    return probs.gather(-1, ids[..., None].long())[..., 0]


def row_at(probs, position):
    """The row of each block that `position` names: `(..., positions, vocab)` and `(...)` give `(..., vocab)`.

    Examples
    --------
    >>> row_at(torch.tensor([[[1.0, 0.0], [0.25, 0.75]]]), torch.tensor([1]))
    tensor([[0.2500, 0.7500]])
    """
    rows = probs.reshape(-1, *probs.shape[-2:])  # (n, positions, vocab)
    # Indexing copies whole rows, which is faster than a `gather` with an index for every number of them.
    picked = rows[torch.arange(len(rows), device=probs.device), position.reshape(-1)]
    return picked.reshape(*position.shape, probs.shape[-1])


def wide(values, other):
    """`values` in the wider dtype of the two, float32 at least: bfloat16 beside float16 becomes float32."""
    return values.to(torch.promote_types(torch.promote_types(values.dtype, other.dtype), torch.float32))


def sum_dtype(values):
    """The dtype to add `values` up in: float64 wherever the device has it."""
    return torch.float32 if values.device.type == "mps" else torch.float64  # MPS has no float64.
