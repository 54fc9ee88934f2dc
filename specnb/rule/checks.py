"""What a rule refuses: rows that are no distribution, ids outside the vocabulary, shapes that do not match.

Each function raises a ValueError that names the argument, the place and the value. It knows tensors. It does not know
the rule. Read `specnb.rule.token` next.
"""

import torch

from specnb.rule.draws import sum_dtype

# A row of probabilities may miss a sum of 1 by this much: a float32 softmax over 262,144 tokens was seen 4e-5 off, and
# no draw notices that.
TOLERANCE = 5e-5


def check_rows(name, probs):
    """Refuse rows that are no distribution.

    Examples
    --------
    >>> check_rows("target_probs", torch.tensor([[0.5, 0.5], [0.5, 0.6]]))
    Traceback (most recent call last):
    ValueError: target_probs row (1,) misses a sum of 1 by 0.1; normalise it first
    """
    if not probs.is_floating_point():
        raise ValueError(f"{name} must be a floating tensor, got {probs.dtype}")
    if probs.ndim < 1 or probs.shape[-1] == 0:
        raise ValueError(f"{name} must have a last dimension of at least one token, got shape {tuple(probs.shape)}")
    # Rows that `expand` repeats share their memory, so one of them is checked for all. The last dimension stays whole,
    # for its sum counts every entry: torch.tensor([1.0]).expand(4) sums to 4.
    probs = probs[tuple(slice(1) if stride == 0 else slice(None) for stride in probs.stride()[:-1])]
    if probs.isnan().any():
        raise ValueError(f"{name} holds NaN at {tuple(probs.isnan().nonzero()[0].tolist())}")
    if (probs < 0).any():
        where = tuple((probs < 0).nonzero()[0].tolist())
        raise ValueError(f"{name} is negative at {where}: {probs[where].item():g}")
    off = (probs.sum(-1, dtype=sum_dtype(probs)) - 1).abs()
    if not (off <= TOLERANCE).all():
        where = tuple((~(off <= TOLERANCE)).nonzero()[0].tolist())
        raise ValueError(f"{name} row {where} misses a sum of 1 by {off[where].item():.3g}; normalise it first")


def check_pair(target_probs, draft_probs):
    """Refuse rows that are no distributions, and two tensors of different shapes."""
    check_rows("target_probs", target_probs)
    check_rows("draft_probs", draft_probs)
    _check_shape("target_probs", target_probs, draft_probs.shape, draft_probs)


def _check_shape(name, values, wanted, draft_probs):
    if tuple(values.shape) != tuple(wanted):
        raise ValueError(
            f"{name} has shape {tuple(values.shape)}; with draft_probs {tuple(draft_probs.shape)} it must be "
            f"{tuple(wanted)}"
        )


def check_ids(draft_ids, draft_probs):
    """Refuse draft ids that are no integers, have the wrong shape, or lie outside the vocabulary."""
    if draft_ids.is_floating_point() or draft_ids.is_complex() or draft_ids.dtype == torch.bool:
        raise ValueError(f"draft_ids must be integers, got {draft_ids.dtype}")
    _check_shape("draft_ids", draft_ids, draft_probs.shape[:-1], draft_probs)
    vocab = draft_probs.shape[-1]
    outside = (draft_ids < 0) | (draft_ids >= vocab)
    if outside.any():
        raise ValueError(f"draft id {draft_ids[outside][0].item()} is outside the vocabulary 0..{vocab - 1}")


def check_block(target_probs, draft_probs, draft_ids, uniforms):
    """Refuse a block that `verify` cannot judge: bad rows, ids or uniforms, or shapes that do not fit each other."""
    if target_probs.ndim < 2 or draft_probs.ndim < 2:
        raise ValueError("target_probs and draft_probs need the dimensions (..., positions, vocab)")
    check_rows("target_probs", target_probs)
    check_rows("draft_probs", draft_probs)
    check_ids(draft_ids, draft_probs)
    *leading, gamma, vocab = draft_probs.shape
    _check_shape("target_probs", target_probs, (*leading, gamma + 1, vocab), draft_probs)
    _check_shape("uniforms", uniforms, (*leading, gamma + 1), draft_probs)
    if not uniforms.is_floating_point():
        raise ValueError(f"uniforms must be a floating tensor, got {uniforms.dtype}")
    inside = (uniforms >= 0) & (uniforms < 1)
    if not inside.all():
        raise ValueError(f"uniforms must lie in [0, 1), got {uniforms[~inside][0].item()}")
