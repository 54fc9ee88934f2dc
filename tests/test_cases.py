"""Faults from the field that need a whole run to show: the smallest pair on which each was, or would be, seen.

What a module test covers already is listed in tests/README.md. Levels and n are fixed here: level .001, so one false
alarm in 1000 seeds a test; the wrong law beside each is rejected by the same counts.
"""

import pytest
import torch

from specnb.drafters import Draft, Drafter, ModelDrafter
from specnb.gof import chi_square, sample_size
from specnb.models import TableModel
from specnb.probs import Sampling
from specnb.sampler import autoregressive, speculative
from tests.conftest import seeded

TARGET, DRAFT = [0.5, 0.3, 0.2], [0.6, 0.3, 0.1]


def constant(probs):
    return TableModel(lambda prefix: probs, len(probs))


def first_tokens(n, target_probs, drafter, seed=0, gamma=1, sampling=Sampling()):
    """Counts of the first token over n independent runs."""
    target, generator = constant(target_probs), seeded(seed)
    counts = torch.zeros(len(target_probs))
    for _ in range(n):
        run = speculative(
            target, drafter, [0], gamma=gamma, max_new_tokens=gamma + 1, sampling=sampling, generator=generator
        )
        counts[run.ids[0]] += 1
    return counts


class ArgmaxWithSoftmax(Drafter):
    """The fault itself: the most probable token, reported with the whole distribution."""

    def propose(self, *_):
        return Draft(torch.tensor([[0]]), torch.tensor([[DRAFT]], dtype=torch.float64), [1])


def test_a_greedy_draft_in_a_sampled_run_reports_one_hot_probabilities():
    # jaymody/speculative-sampling #3, huggingface/transformers #32867: argmax draft, softmax q.
    wrong = [5 / 6, 0, 1 / 6]
    n = 2 * sample_size(TARGET, wrong)
    greedy_draft = ModelDrafter(constant(DRAFT), Sampling(temperature=0))
    assert chi_square(first_tokens(n, TARGET, greedy_draft), TARGET).verdict == "pass"
    faulty = first_tokens(n, TARGET, ArgmaxWithSoftmax())
    assert chi_square(faulty, TARGET).verdict == "fail"
    assert chi_square(faulty, wrong).verdict == "pass"  # it is this fault, and no other


def test_the_nucleus_holds_on_both_sides():
    # vllm-project/vllm #9834: the draft was processed, the target scored raw; tokens 2 and 3 then appear.
    drafter = ModelDrafter(constant([0.5, 0.5, 0, 0]))
    counts = first_tokens(400, [0.5, 0.3, 0.15, 0.05], drafter, sampling=Sampling(top_p=0.75))
    assert chi_square(counts, [0.625, 0.375, 0, 0]).verdict == "pass" and counts[2] == counts[3] == 0
    raw = first_tokens(400, [0.5, 0.3, 0.15, 0.05], drafter)
    assert chi_square(raw, [0.625, 0.375, 0, 0]).verdict == "fail"


def test_greedy_means_the_target_s_first_choice_though_the_draft_s_token_is_likelier_under_it():
    # jaymody/speculative-sampling #9: un-tempered, p/q = .3/.2 accepts token 0 always; the target's first is token 1.
    run = speculative(
        constant([0.3, 0.5, 0.2]),
        ModelDrafter(constant([0.4, 0.3, 0.3])),
        [0],
        gamma=2,
        max_new_tokens=6,
        sampling=Sampling(temperature=0),
    )
    assert run.ids == [1] * 6 and run.trace.accepted_fraction == 0


@pytest.mark.parametrize("drafted", [False, True])
def test_sampling_is_sampling_with_and_without_drafts(drafted):
    # EricLBuehler/mistral.rs PR #2424: the speculative path returned the mode. 4000 draws, about 1820 of token 0.
    probs = torch.tensor([2, 1.5, 1, 0.5]).softmax(-1)
    drafter = ModelDrafter(constant(probs.tolist())) if drafted else None
    counts = first_tokens(4000, probs.tolist(), drafter, gamma=int(drafted))
    assert chi_square(counts, probs).verdict == "pass" and 1710 < counts[0] < 1930
    assert chi_square(counts, torch.tensor([2, 1.5, 1, 0.5]).div(0.8).softmax(-1)).verdict == "fail"  # T = .8


def test_two_positions_are_accepted_independently():
    # feifeibear: the same u at every position; at ratios .5, .5 both pass with .5 instead of .25. n = 1000.
    target, drafter = constant([0.25, 0.75, 0.0]), ModelDrafter(constant([0.5, 0.0, 0.5]), Sampling(temperature=0))
    generator, counts = seeded(1), [0, 0, 0]
    for _ in range(1000):
        run = speculative(target, drafter, [0], gamma=2, max_new_tokens=3, generator=generator)
        counts[run.trace.rounds[0].num_accepted] += 1
    assert chi_square(counts, [0.75, 0.1875, 0.0625]).verdict == "pass"
    assert chi_square(counts, [0.75, 0.0, 0.25]).verdict == "fail"


def test_the_law_still_holds_after_several_rounds():
    # romsto 41668c8: right in round one, wrong afterwards. The seventh token of runs with gamma 2, n = 1500.
    rows = [[0.7, 0.2, 0.1], [0.1, 0.6, 0.3], [0.3, 0.3, 0.4]]
    target = TableModel(lambda prefix: rows[prefix[-1]], 3)
    drafter, generator = ModelDrafter(TableModel(lambda prefix: rows[(prefix[-1] + 1) % 3], 3)), seeded(2)
    counts = torch.zeros(3)
    for _ in range(1500):
        ids = speculative(target, drafter, [0], gamma=2, max_new_tokens=7, generator=generator).ids
        counts[ids[6]] += 1
    transition = torch.tensor(rows, dtype=torch.float64)
    assert chi_square(counts, torch.linalg.matrix_power(transition, 7)[0]).verdict == "pass"
    assert chi_square(counts, transition[0]).verdict == "fail"


def test_a_tie_at_the_top_k_threshold_keeps_both_sides_equal():
    # k = 2 on [2, 2, 2, 1] keeps three tokens; draft and target go through the same processor, so all is accepted.
    logits = torch.tensor([2.0, 2.0, 2.0, 1.0])
    assert (Sampling(top_k=2).probs(logits) > 0).sum() == 3
    probs = logits.softmax(-1).tolist()
    run = speculative(
        constant(probs),
        ModelDrafter(constant(probs)),
        [0],
        gamma=3,
        max_new_tokens=40,
        sampling=Sampling(top_k=2),
        generator=seeded(),
    )
    assert run.trace.accepted_fraction == 1 and 3 not in run.ids


def test_bf16_logits_are_sampled_and_compared_in_float32():
    # deepseek-ai/DeepSpec #31: drawn from a bf16 softmax, corrected as if from a float32 one.
    logits = torch.randn(32_000, generator=seeded()).bfloat16()
    ours, rounded = Sampling().probs(logits), logits.softmax(-1).float()
    assert ours.dtype == torch.float32 and 0.5 * (ours - rounded).abs().sum() > 1e-4
    assert torch.equal(ours, logits.float().softmax(-1))


def test_an_unknown_pad_token_needs_no_pad_and_warns_of_nothing(tiny, capfd):
    # huggingface/transformers #23401: decoder-only tokenizers often define no pad token.
    autoregressive(tiny(), [1, 2, 3], max_new_tokens=4, sampling=Sampling(temperature=0))
    assert capfd.readouterr().err == ""
