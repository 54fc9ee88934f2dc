"""The token rule on probability vectors: each draft is accepted or rejected by itself.

It knows probabilities, draft ids and uniforms, batched over any leading dimensions. It does not know logits, models,
or where the uniforms come from. Read `specnb.exact` beside it, which has the same rule in fractions, and
`specnb.sampler` next.

`target_probs` is p and `draft_probs` is q in Leviathan et al. 2023 (arXiv 2211.17192); Chen et al. 2023
(arXiv 2302.01318) write q for the target and p for the draft.
"""

import torch

from specnb.rule.checks import check_block, check_ids, check_pair
from specnb.rule.draws import Verdict, at, inverse_cdf, residual_weights, row_at, wide


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
    check_pair(target_probs, draft_probs)
    check_ids(draft_ids, draft_probs)
    target_at = at(wide(target_probs, draft_probs), draft_ids)
    draft_at = at(wide(draft_probs, target_probs), draft_ids)
    return torch.where(draft_at > 0, (target_at / draft_at).clamp(max=1), (target_at > 0).to(target_at.dtype))


def residual(target_probs, draft_probs):
    """Distribution of the recovered token, norm(max(p - q, 0)).

    Parameters
    ----------
    target_probs, draft_probs : Tensor of shape `(..., vocab)`

    Returns
    -------
    Tensor of shape `(..., vocab)`
        Where p = q no mass is left, and the row is the target's own. A rejection there can only come from rounding, and
        drawing from the target is the one way to keep the output unbiased.

    Raises
    ------
    ValueError
        For shapes that do not match, NaN, negative or unnormalised rows.

    Examples
    --------
    >>> residual(torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.3, 0.1, 0.6]))
    tensor([0.5000, 0.5000, 0.0000])
    """
    check_pair(target_probs, draft_probs)
    target, draft = wide(target_probs, draft_probs), wide(draft_probs, target_probs)
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
        The probabilities that `draft_ids` were really drawn from. The proof needs nothing else of the draft.
    draft_ids : integer Tensor of shape `(..., gamma)`
    uniforms : Tensor of shape `(..., gamma + 1)`, in [0, 1)
        float64 is recommended. Those after a rejection are not used, except the last, which draws `next_id`.

    Returns
    -------
    Verdict
        `num_accepted` (0..gamma) and `next_id`, both of the leading shape. Inputs are never modified.

    Raises
    ------
    ValueError
        For shapes that do not match, NaN, negative or unnormalised rows, uniforms outside [0, 1) and ids out of range.
        Also for a draft id of draft probability 0: the draft cannot have drawn it.

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
    check_block(target_probs, draft_probs, draft_ids, uniforms)
    draft_at = at(draft_probs, draft_ids)
    if (draft_at == 0).any():
        where = (draft_at == 0).nonzero()[0].tolist()
        raise ValueError(
            f"draft id {draft_ids[tuple(where)].item()} at position {where[-1]} has draft probability 0, so the draft "
            "cannot have drawn it; pass the probabilities the ids were really drawn from"
        )
    return verify_unchecked(target_probs, draft_probs, draft_ids, uniforms)


def verify_unchecked(target_probs, draft_probs, draft_ids, uniforms, num_drafted=None):
    """`verify` without its checks, for a caller that made the inputs itself.

    `num_drafted`, of the leading shape, says how many drafts each block really has, so that blocks of different lengths
    fit one batch. The drafts after that many are padding, and the caller gives them rows of zeros in `draft_probs`. A
    block that is accepted as a whole then draws its bonus token from max(p - 0, 0) = p, as it should.

    Examples
    --------
    >>> target = torch.tensor([[0.6, 0.3, 0.1]]).expand(3, 3)
    >>> draft = torch.tensor([[0.2, 0.5, 0.3], [0.0, 0.0, 0.0]])  # one draft and one row of padding
    >>> ids, uniforms = torch.tensor([0, 0]), torch.tensor([0.5, 0.0, 0.7])
    >>> verify_unchecked(target, draft, ids, uniforms, num_drafted=torch.tensor(1))
    Verdict(num_accepted=tensor(1), next_id=tensor(1))
    """
    gamma = draft_ids.shape[-1]
    target_at = at(target_probs[..., :gamma, :], draft_ids)  # (..., gamma), p(x) in Algorithm 1
    draft_at = at(draft_probs, draft_ids)  # (..., gamma), q(x)
    # Multiply in the uniforms' float64 instead of dividing: a float32 quotient just below 1 could round up to 1.
    accepted = uniforms[..., :gamma] * wide(draft_at, target_at) < wide(target_at, draft_at)
    if num_drafted is not None:
        accepted &= torch.arange(gamma, device=accepted.device) < num_drafted[..., None]
    num_accepted = accepted.long().cumprod(-1).sum(-1)  # (...), n in Algorithm 1: the length of the accepted prefix

    weights = row_at(target_probs, num_accepted)  # (..., vocab)
    if gamma:
        # Subtle: after a full block there is no draft row to subtract. The clamp picks the last one, so that the index
        # is valid, and `torch.where` then ignores what came of it.
        draft_row = row_at(draft_probs, num_accepted.clamp(max=gamma - 1))
        recovered = residual_weights(wide(weights, draft_row), wide(draft_row, weights))
        weights = torch.where((num_accepted < gamma)[..., None], recovered, weights)
    return Verdict(num_accepted, inverse_cdf(weights, uniforms[..., -1]))
