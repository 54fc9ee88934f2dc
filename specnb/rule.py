"""The acceptance rule on probability vectors.

It knows probabilities, draft ids and uniforms, batched over any leading dimensions. It does not know logits, models,
or where the uniforms come from. Read `specnb.exact` beside it (the same rule in fractions) and `specnb.sampler` next.

Names: `target_probs` is p and `draft_probs` is q in Leviathan et al. 2023 (arXiv 2211.17192); Chen et al. 2023
(arXiv 2302.01318) write q for the target and p for the draft.
"""

from typing import NamedTuple

import torch

TOLERANCE = 1e-5  # A row of probabilities may miss a sum of 1 by this much.


class Verdict(NamedTuple):
    """What the rule decided for one block: both tensors have the block's leading shape and dtype int64."""

    num_accepted: torch.Tensor
    next_id: torch.Tensor


def accept_probs(target_probs, draft_probs, draft_ids):
    """Probability that each draft token is accepted, min(1, p(x) / q(x)).

    Parameters
    ----------
    target_probs, draft_probs : Tensor of shape `(..., gamma, vocab)`
    draft_ids : integer Tensor of shape `(..., gamma)`

    Returns
    -------
    Tensor of shape `(..., gamma)`; where q(x) is 0 it is 1 if p(x) > 0, else 0.

    Raises
    ------
    ValueError
        For shapes that do not match, ids out of range, NaN, negative or unnormalised rows.

    Examples
    --------
    >>> target, draft = torch.tensor([[0.6, 0.3, 0.1]]), torch.tensor([[0.2, 0.5, 0.3]])
    >>> [round(accept_probs(target, draft, torch.tensor([x])).item(), 4) for x in range(3)]
    [1.0, 0.6, 0.3333]
    """
    _check_rows("target_probs", target_probs)
    _check_rows("draft_probs", draft_probs)
    if target_probs.shape != draft_probs.shape:
        raise ValueError(
            f"target_probs {tuple(target_probs.shape)} and draft_probs {tuple(draft_probs.shape)} "
            "must have the same shape (..., gamma, vocab)"
        )
    _check_ids(draft_ids, draft_probs)
    target_at = _at(_wide(target_probs, draft_probs), draft_ids)
    draft_at = _at(_wide(draft_probs, target_probs), draft_ids)
    return torch.where(draft_at > 0, (target_at / draft_at).clamp(max=1), (target_at > 0).to(target_at.dtype))


def residual(target_probs, draft_probs):
    """Distribution of the recovered token, norm(max(p - q, 0)).

    Parameters
    ----------
    target_probs, draft_probs : Tensor of shape `(..., vocab)`

    Returns
    -------
    Tensor of shape `(..., vocab)`. A row without residual mass (p = q) is the target's own: a rejection there can
    only come from rounding, and the target is the one law that keeps the output unbiased.

    Raises
    ------
    ValueError
        For shapes that do not match, NaN, negative or unnormalised rows.

    Examples
    --------
    >>> residual(torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.3, 0.1, 0.6]))
    tensor([0.5000, 0.5000, 0.0000])
    """
    _check_rows("target_probs", target_probs)
    _check_rows("draft_probs", draft_probs)
    if target_probs.shape != draft_probs.shape:
        raise ValueError(
            f"target_probs {tuple(target_probs.shape)} and draft_probs {tuple(draft_probs.shape)} "
            "must have the same shape (..., vocab)"
        )
    target, draft = _wide(target_probs, draft_probs), _wide(draft_probs, target_probs)
    excess = (target - draft).clamp(min=0)
    mass = excess.sum(-1, keepdim=True)
    return torch.where(mass > 0, excess / mass, target)


def verify(target_probs, draft_probs, draft_ids, uniforms):
    """Apply the rule to one block of drafts.

    Position i is accepted iff every position before it is and `u_i * q(x_i) < p(x_i)`, strictly. The last uniform
    draws `next_id` by inverse CDF: from the residual at the first rejected position (a recovered token), or from
    the target's last row when all were accepted (the bonus token).

    Parameters
    ----------
    target_probs : Tensor of shape `(..., gamma + 1, vocab)`
    draft_probs : Tensor of shape `(..., gamma, vocab)`
        The probabilities `draft_ids` were really drawn from: the proof needs nothing else of the draft.
    draft_ids : integer Tensor of shape `(..., gamma)`
    uniforms : Tensor of shape `(..., gamma + 1)`, in [0, 1)
        float64 is recommended; those after a rejection are not used, but for the last.

    Returns
    -------
    Verdict
        `num_accepted` (0..gamma) and `next_id`, both of the leading shape. Inputs are never modified.

    Raises
    ------
    ValueError
        For shapes that do not match, NaN, negative or unnormalised rows, uniforms outside [0, 1), ids out of range,
        and for a draft id of draft probability 0, which the draft cannot have drawn.

    Notes
    -----
    Algorithm 1 of Leviathan et al. 2023 (arXiv 2211.17192). Sums run in float64 where the device has it.

    Examples
    --------
    >>> target = torch.tensor([[0.6, 0.3, 0.1], [0.6, 0.3, 0.1]])
    >>> draft = torch.tensor([[0.2, 0.5, 0.3]])
    >>> verify(target, draft, torch.tensor([1]), torch.tensor([0.7, 0.5]))  # 0.7 * 0.5 >= 0.3: rejected
    Verdict(num_accepted=tensor(0), next_id=tensor(0))
    >>> verify(target, draft, torch.tensor([1]), torch.tensor([0.5, 0.7]))  # accepted, then a bonus token
    Verdict(num_accepted=tensor(1), next_id=tensor(1))
    """
    _check_block(target_probs, draft_probs, draft_ids, uniforms)
    draft_at = _at(draft_probs, draft_ids)
    if (draft_at == 0).any():
        where = (draft_at == 0).nonzero()[0].tolist()
        raise ValueError(
            f"draft id {draft_ids[tuple(where)].item()} at position {where[-1]} has draft probability 0, so the draft "
            "cannot have drawn it; pass the probabilities the ids were really drawn from"
        )
    return verify_unchecked(target_probs, draft_probs, draft_ids, uniforms)


def verify_unchecked(target_probs, draft_probs, draft_ids, uniforms, num_drafted=None):
    """`verify` without its checks, for a caller that made the inputs itself.

    `num_drafted`, of the leading shape, is for blocks of different lengths in one batch: what follows the first so many
    drafts is padding, whose draft probabilities must be 0. Then what is left of p there is p, the bonus token's law.
    """
    gamma = draft_ids.shape[-1]
    target_at = _at(target_probs[..., :gamma, :], draft_ids)  # (..., gamma), p(x) in Algorithm 1
    draft_at = _at(draft_probs, draft_ids)  # (..., gamma), q(x)
    # The product is taken in the uniforms' float64: dividing in float32 could round a ratio below 1 up to 1.
    accepted = uniforms[..., :gamma] * _wide(draft_at, target_at) < _wide(target_at, draft_at)
    if num_drafted is not None:
        accepted &= torch.arange(gamma, device=accepted.device) < num_drafted[..., None]
    num_accepted = accepted.long().cumprod(-1).sum(-1)  # (...), n in Algorithm 1: the length of the accepted prefix

    weights = _row(target_probs, num_accepted)  # (..., vocab)
    if gamma:
        # Subtle: after a full block there is no draft row to subtract; the last one is taken and then not used.
        draft_row = _row(draft_probs, num_accepted.clamp(max=gamma - 1))
        recovered = _residual_weights(_wide(weights, draft_row), _wide(draft_row, weights))
        weights = torch.where((num_accepted < gamma)[..., None], recovered, weights)
    return Verdict(num_accepted, inverse_cdf(weights, uniforms[..., -1]))


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
    cumulative = weights.cumsum(-1, dtype=_sum_dtype(weights)).contiguous()
    total = cumulative[..., -1:].contiguous()
    first = torch.searchsorted(cumulative, uniforms.to(cumulative.dtype)[..., None] * total, right=True)
    last = torch.searchsorted(cumulative, total)  # for u so close to 1 that its product rounds to the total
    ids = torch.minimum(first, last).clamp(max=weights.shape[-1] - 1)
    if weights.device.type != "cpu":
        # Subtle: sums made in parallel need not stand still, to the last bit, over an id of weight 0; the odds of
        # landing on one are those of a rounding error, and it then gives way to the likeliest id.
        ids = torch.where(weights.gather(-1, ids) > 0, ids, weights.argmax(-1, keepdim=True))
    return ids[..., 0]


def _residual_weights(target_row, draft_row):
    weights = (target_row - draft_row).clamp(min=0)
    return torch.where(weights.sum(-1, keepdim=True) > 0, weights, target_row)


def _at(probs, ids):
    return probs.gather(-1, ids[..., None].long())[..., 0]


def _row(probs, position):
    rows = probs.reshape(-1, *probs.shape[-2:])  # (n, positions, vocab); picked whole, for a gather moves each number
    picked = rows[torch.arange(len(rows), device=probs.device), position.reshape(-1)]
    return picked.reshape(*position.shape, probs.shape[-1])


def _wide(values, other):
    dtype = torch.promote_types(torch.promote_types(values.dtype, other.dtype), torch.float32)
    return values.to(dtype)


def _sum_dtype(values):
    return torch.float32 if values.device.type == "mps" else torch.float64  # MPS has no float64.


def _check_rows(name, probs):
    if not probs.is_floating_point():
        raise ValueError(f"{name} must be a floating tensor, got {probs.dtype}")
    if probs.ndim < 1 or probs.shape[-1] == 0:
        raise ValueError(f"{name} must have a last dimension of at least one token, got shape {tuple(probs.shape)}")
    # An expanded dimension holds the same numbers many times: they are checked once.
    probs = probs[tuple(slice(1) if stride == 0 else slice(None) for stride in probs.stride())]
    if probs.isnan().any():
        raise ValueError(f"{name} holds NaN at {tuple(probs.isnan().nonzero()[0].tolist())}")
    if (probs < 0).any():
        where = tuple((probs < 0).nonzero()[0].tolist())
        raise ValueError(f"{name} is negative at {where}: {probs[where].item():g}")
    off = (probs.sum(-1, dtype=_sum_dtype(probs)) - 1).abs()
    if not (off <= TOLERANCE).all():
        where = tuple((~(off <= TOLERANCE)).nonzero()[0].tolist())
        raise ValueError(f"{name} row {where} misses a sum of 1 by {off[where].item():.3g}; normalise it first")


def _check_ids(draft_ids, draft_probs):
    if draft_ids.is_floating_point() or draft_ids.is_complex() or draft_ids.dtype == torch.bool:
        raise ValueError(f"draft_ids must be integers, got {draft_ids.dtype}")
    if draft_ids.shape != draft_probs.shape[:-1]:
        raise ValueError(
            f"draft_ids has shape {tuple(draft_ids.shape)}, but draft_probs {tuple(draft_probs.shape)} "
            f"asks for {tuple(draft_probs.shape[:-1])}"
        )
    vocab = draft_probs.shape[-1]
    outside = (draft_ids < 0) | (draft_ids >= vocab)
    if outside.any():
        raise ValueError(f"draft id {draft_ids[outside][0].item()} is outside the vocabulary 0..{vocab - 1}")


def _check_block(target_probs, draft_probs, draft_ids, uniforms):
    if target_probs.ndim < 2 or draft_probs.ndim < 2:
        raise ValueError("target_probs and draft_probs need the dimensions (..., positions, vocab)")
    _check_rows("target_probs", target_probs)
    _check_rows("draft_probs", draft_probs)
    _check_ids(draft_ids, draft_probs)
    *leading, gamma, vocab = draft_probs.shape
    for name, shape, wanted in (
        ("target_probs", target_probs.shape, (*leading, gamma + 1, vocab)),
        ("uniforms", uniforms.shape, (*leading, gamma + 1)),
    ):
        if tuple(shape) != wanted:
            raise ValueError(
                f"{name} has shape {tuple(shape)}; with draft_probs {tuple(draft_probs.shape)} it must be {wanted}"
            )
    if not uniforms.is_floating_point():
        raise ValueError(f"uniforms must be a floating tensor, got {uniforms.dtype}")
    inside = (uniforms >= 0) & (uniforms < 1)
    if not inside.all():
        raise ValueError(f"uniforms must lie in [0, 1), got {uniforms[~inside][0].item()}")
