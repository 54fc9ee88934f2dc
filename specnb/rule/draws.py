"""What every acceptance rule is built from: its verdict, the inverse CDF, and picking rows and entries.

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
    last = torch.searchsorted(cumulative, total)  # for u so close to 1 that its product rounds to the total
    ids = torch.minimum(first, last).clamp(max=weights.shape[-1] - 1)
    if weights.device.type != "cpu":
        # Subtle: sums made in parallel need not stand still, to the last bit, over an id of weight 0; the odds of
        # landing on one are those of a rounding error, and it then gives way to the likeliest id.
        ids = torch.where(weights.gather(-1, ids) > 0, ids, weights.argmax(-1, keepdim=True))
    return ids[..., 0]


def residual_weights(target_row, draft_row):
    weights = (target_row - draft_row).clamp(min=0)
    return torch.where(weights.sum(-1, keepdim=True) > 0, weights, target_row)


def at(probs, ids):
    return probs.gather(-1, ids[..., None].long())[..., 0]


def row_at(probs, position):
    rows = probs.reshape(-1, *probs.shape[-2:])  # (n, positions, vocab); picked whole, for a gather moves each number
    picked = rows[torch.arange(len(rows), device=probs.device), position.reshape(-1)]
    return picked.reshape(*position.shape, probs.shape[-1])


def wide(values, other):
    dtype = torch.promote_types(torch.promote_types(values.dtype, other.dtype), torch.float32)
    return values.to(dtype)


def sum_dtype(values):
    return torch.float32 if values.device.type == "mps" else torch.float64  # MPS has no float64.
