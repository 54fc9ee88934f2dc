import itertools
from fractions import Fraction

import pytest
import torch

from specnb import exact
from specnb.rule import accept_probs, inverse_cdf, residual, verify

TARGET = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
DRAFT = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
ALMOST_ONE = 1 - 2**-53


def block(target_rows, draft_rows, ids, uniforms):
    as_float = [torch.tensor(rows, dtype=torch.float64) for rows in (target_rows, draft_rows)]
    return verify(*as_float, torch.tensor(ids), torch.tensor(uniforms, dtype=torch.float64))


def test_acceptance_and_residual_of_the_three_token_example():
    ids = torch.arange(3)
    accept = accept_probs(TARGET.expand(3, 3), DRAFT.expand(3, 3), ids)
    assert torch.allclose(accept, torch.tensor([1, 0.6, 1 / 3], dtype=torch.float64))
    assert torch.allclose(residual(TARGET, DRAFT), torch.tensor([1.0, 0, 0], dtype=torch.float64))


def test_one_step_emits_the_target_by_enumeration_over_a_grid_of_uniforms():
    """Uniforms on a grid whose cell borders are the exact thresholds: the law of `verify` without sampling."""
    law = torch.zeros(3, dtype=torch.float64)
    grid = (torch.arange(300, dtype=torch.float64) + 0.5) / 300
    for x in range(3):
        uniforms = torch.stack(torch.meshgrid(grid, grid, indexing="ij"), -1).reshape(-1, 2)
        n = len(uniforms)
        verdict = verify(TARGET.expand(n, 2, 3), DRAFT.expand(n, 1, 3), torch.full((n, 1), x), uniforms)
        first = torch.where(verdict.num_accepted == 1, x, verdict.next_id)
        law += DRAFT[x] * torch.bincount(first, minlength=3) / n
    assert torch.allclose(law, TARGET, atol=1e-12)


def test_acceptance_is_strict():
    # u * q < p: with p = 0 even u = 0 must reject, and u * q == p rejects.
    rejected = block([[0.0, 1.0], [1.0, 0.0]], [[1.0, 0.0]], [0], [0.0, 0.5])
    assert rejected.num_accepted == 0 and rejected.next_id == 1
    assert block([[0.25, 0.75], [1, 0]], [[0.5, 0.5]], [0], [0.5, 0.5]).num_accepted == 0
    assert block([[0.25, 0.75], [1, 0]], [[0.5, 0.5]], [0], [0.4999, 0.5]).num_accepted == 1


def test_only_the_prefix_before_the_first_rejection_counts():
    # vllm-project/vllm PR #2658 and transformers PR #28508: [T, F, T, T] is 1, not 3 and not 4.
    target = [[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]
    verdict = block(target, [[0.5, 0.5]] * 4, [0, 0, 0, 0], [0.1] * 5)
    assert verdict.num_accepted == 1 and verdict.next_id == 1


def test_the_recovered_token_comes_from_the_row_of_the_rejection():
    # romsto used row -1 for every rejection: here each row has a support of its own.
    eye = torch.eye(5, dtype=torch.float64)
    for position in range(4):
        target = eye.clone()
        ids = [i if i < position else 4 for i in range(4)]
        draft = [[1.0 if token == x else 0.0 for token in range(5)] for x in ids]
        verdict = block(target.tolist(), draft, ids, [0.5] * 5)
        assert (verdict.num_accepted, verdict.next_id) == (position, position)


def test_the_bonus_comes_from_the_last_target_row():
    target = [[1.0, 0, 0], [0, 1.0, 0], [0, 0, 1.0]]
    assert block(target, [[1.0, 0, 0], [0, 1.0, 0]], [0, 1], [0.9, 0.9, 0.1]) == (2, 2)


@pytest.mark.parametrize("row", [[1.0, 0.0, 0.0], [0.5, 0.3, 0.2]])
def test_a_residual_without_mass_is_the_target(row):
    # jaymody/speculative-sampling #5: dividing by its sum of zero gave NaN.
    row = torch.tensor(row)
    assert torch.equal(residual(row, row), row)
    large = torch.randn(50_000).softmax(-1)
    assert torch.equal(residual(large, large), large)  # to the last bit, though its sum is not quite 1


def test_the_residual_is_normalised_and_not_a_softmax():
    # huggingface/transformers PR #28508.
    target, draft = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    assert torch.allclose(residual(target, draft), torch.tensor([0.75, 0.25, 0.0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_inverse_cdf_never_lands_on_a_token_of_probability_zero_or_past_the_end(dtype):
    weights = torch.tensor([0, 0.1, 0, 0.2, 0, 0.7, 0, 0], dtype=dtype)
    uniforms = torch.tensor([0.0, 1e-300, 0.1, 0.3, 0.5, ALMOST_ONE], dtype=torch.float64)
    ids = inverse_cdf(weights.expand(6, 8), uniforms)
    assert set(ids.tolist()) <= {1, 3, 5} and ids[0] == 1 and ids[-1] == 5
    total_rounds_up = torch.tensor([0.1] * 3 + [0.0], dtype=dtype)
    assert inverse_cdf(total_rounds_up, torch.tensor(ALMOST_ONE, dtype=torch.float64)) == 2


def test_the_inverse_cdf_is_exact_in_the_tail_of_a_large_vocabulary():
    """A float32 running sum near 1 moves in steps of 6e-8: it would skip two of three tokens of this tail."""
    weights = torch.tensor([0.999, *[2e-8] * 50_000])
    borders = weights.double().cumsum(-1)
    ids = torch.cat([torch.arange(1, 50_001, 997), torch.arange(49_900, 50_001)])
    uniforms = (borders[ids] - 1e-8) / borders[-1]
    assert torch.equal(inverse_cdf(weights.expand(len(ids), -1), uniforms), ids)


def test_any_leading_shape_and_any_strides():
    torch.manual_seed(0)
    target = torch.rand(2, 3, 5, 7).softmax(-1)
    draft = torch.rand(2, 3, 4, 7).softmax(-1)
    ids, uniforms = torch.randint(7, (2, 3, 4)), torch.rand(2, 3, 5, dtype=torch.float64)
    together = verify(target, draft, ids, uniforms)
    for i, j in itertools.product(range(2), range(3)):
        alone = verify(target[i, j], draft[i, j], ids[i, j], uniforms[i, j])
        assert (together.num_accepted[i, j], together.next_id[i, j]) == alone
    strided = verify(target.transpose(-1, -2).contiguous().transpose(-1, -2), draft.flip(0).flip(0), ids, uniforms)
    assert torch.equal(strided.next_id, together.next_id)
    assert together.num_accepted.unique().numel() > 1


def views(values):
    """The same numbers in other layouts: transposed, strided, reversed twice, and expanded where they are all alike."""
    wide = torch.empty(*values.shape[:-1], 2 * values.shape[-1])
    wide[..., ::2], wide[..., 1::2] = values, 9.0
    yield from (values, values.transpose(0, -1).contiguous().transpose(0, -1), wide[..., ::2], values.flip(-1).flip(-1))
    for dim in range(values.ndim):
        if (values == values.narrow(dim, 0, 1)).all():
            yield values.narrow(dim, 0, 1).expand(values.shape)


@pytest.mark.parametrize("row", [[0.25] * 4, [1.0] * 4, [1.0], [0.1, 0.2, 0.3, 0.4], [0.5, 0.6], [2.0, -1.0]])
def test_the_checks_say_the_same_of_a_row_however_it_lies_in_memory(row):
    # An expanded row of ones sums to the number of tokens, and an expanded quarter over four tokens is a distribution.
    right = min(row) >= 0 and sum(row) == pytest.approx(1)
    seen = list(views(torch.tensor([[row] * 3] * 2)))
    assert len(seen) == 7 if len(set(row)) == 1 else len(seen) == 6
    for target in seen:
        draft, ids = target[:, :2], torch.zeros(2, 2, dtype=torch.long)
        for call in (
            lambda: accept_probs(target, target, torch.zeros(2, 3, dtype=torch.long)),  # noqa: B023
            lambda: residual(target, target),  # noqa: B023
            lambda: verify(target, draft, ids, torch.full((2, 3), 0.5)),  # noqa: B023
        ):
            if right:
                call()
            else:
                with pytest.raises(ValueError, match="misses a sum of 1|is negative"):
                    call()


def test_inputs_are_not_modified():
    # vllm-project/vllm-ascend PR #2881.
    arguments = [TARGET.expand(2, 3).clone(), DRAFT[None].clone(), torch.tensor([1]), torch.tensor([0.9, 0.2])]
    before = [x.clone() for x in arguments]
    verify(*arguments)
    assert all(torch.equal(a, b) for a, b in zip(arguments, before, strict=True))


def test_gamma_zero_draws_from_the_target():
    empty = torch.empty(0, 3, dtype=torch.float64)
    for u, wanted in ((0.0, 0), (0.59, 0), (0.61, 1), (0.95, 2)):
        verdict = verify(TARGET[None], empty, torch.empty(0, dtype=torch.long), torch.tensor([u]))
        assert verdict == (0, wanted)


def test_half_precision_rows_are_compared_in_float32():
    draft = torch.tensor([[0.25, 0.75]], dtype=torch.bfloat16)
    target = torch.tensor([[0.125, 0.875], [1, 0]], dtype=torch.float16)
    assert verify(target, draft, torch.tensor([0]), torch.tensor([0.499, 0.5], dtype=torch.float64)).num_accepted == 1
    assert accept_probs(target[:1], draft, torch.tensor([0])).dtype == torch.float32


def test_a_draft_that_cannot_have_drawn_its_id():
    target, draft = torch.tensor([[0.5, 0.5], [0.5, 0.5]]), torch.tensor([[0.0, 1.0]])
    assert accept_probs(target[:1], draft, torch.tensor([0])) == 1
    assert accept_probs(torch.tensor([[0.0, 1.0]]), draft, torch.tensor([0])) == 0
    with pytest.raises(ValueError, match="id 0 at position 0 has draft probability 0"):
        verify(target, draft, torch.tensor([0]), torch.tensor([0.5, 0.5]))


GOOD = {
    "target_probs": torch.tensor([[0.5, 0.5], [0.5, 0.5]]),
    "draft_probs": torch.tensor([[0.5, 0.5]]),
    "draft_ids": torch.tensor([0]),
    "uniforms": torch.tensor([0.5, 0.5]),
}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("target_probs", torch.tensor([[0.5, 0.5]]), r"must be \(2, 2\)"),
        ("target_probs", torch.tensor([[0.5, float("nan")], [0.5, 0.5]]), "NaN at"),
        ("target_probs", torch.tensor([[1.5, -0.5], [0.5, 0.5]]), "negative"),
        ("target_probs", torch.tensor([[0.5, 0.4999], [0.5, 0.5]]), "misses a sum of 1"),
        ("target_probs", torch.tensor([[1, 0], [1, 0]]), "floating"),
        ("draft_probs", torch.tensor([[0.5, 0.6]]), "draft_probs row"),
        ("draft_probs", torch.tensor([0.5, 0.5]), "dimensions"),
        ("draft_ids", torch.tensor([2]), "id 2 is outside the vocabulary 0..1"),
        ("draft_ids", torch.tensor([-1]), "id -1"),
        ("draft_ids", torch.tensor([0.0]), "integers"),
        ("draft_ids", torch.tensor([0, 0]), "shape"),
        ("uniforms", torch.tensor([0.5]), "uniforms has shape"),
        ("uniforms", torch.tensor([0.5, 1.0]), r"\[0, 1\)"),
        ("uniforms", torch.tensor([float("nan"), 0.5]), r"\[0, 1\)"),
    ],
)
def test_bad_input_is_named(name, value, message):
    verify(**GOOD)
    with pytest.raises(ValueError, match=message):
        verify(**{**GOOD, name: value})


def test_rows_may_miss_one_by_rounding():
    target = GOOD["target_probs"] * (1 + 9e-6)
    verify(**{**GOOD, "target_probs": target})


def test_the_rule_in_floats_agrees_with_the_rule_in_fractions():
    rows = [(6, 3, 1), (2, 5, 3), (0, 1, 9), (10, 0, 0), (4, 4, 2)]
    for target, draft in itertools.product(rows, rows):
        fractions = [[Fraction(x, 10) for x in row] for row in (target, draft)]
        floats = [torch.tensor(row, dtype=torch.float64) / 10 for row in (target, draft)]
        wanted = [float(x) for x in exact.residual(*fractions)]
        assert torch.allclose(residual(*floats), torch.tensor(wanted, dtype=torch.float64))
        for x in range(3):
            ours = accept_probs(floats[0][None], floats[1][None], torch.tensor([x]))
            assert ours.item() == pytest.approx(float(exact.accept_prob(*fractions, x)))


@pytest.mark.parametrize("scale", [0.1, 1.0, 3.0, 8.0])
def test_rows_of_a_float32_softmax_over_a_large_vocabulary_are_accepted(scale):
    logits = scale * torch.randn(4, 262_144, generator=torch.Generator().manual_seed(0))
    probs = logits.softmax(-1)
    assert verify(probs, probs[:3], torch.tensor([1, 2, 3]), torch.zeros(4)).num_accepted == 3
    with pytest.raises(ValueError, match="misses a sum of 1"):
        verify(1.0001 * probs, probs[:3], torch.tensor([1, 2, 3]), torch.zeros(4))
