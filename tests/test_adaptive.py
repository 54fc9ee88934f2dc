"""Stopping early changes how long blocks are, never what is emitted; dropping the token that was judged does."""

import numpy as np
import pytest
import torch

from specnb import exact
from specnb.audit.battery import battery
from specnb.drafters import Draft, ModelDrafter, PromptLookup
from specnb.drafters.adaptive import BelowThreshold, CostAware, EarlyStop, Heuristic
from specnb.models import CausalLM, TableModel
from specnb.probs import Sampling
from specnb.rogues import example_draft, example_target
from specnb.sampler import autoregressive, speculative
from tests.conftest import tiny_model

LAW = exact.sequence_law(example_target, 4)
STOPS = {
    "threshold": BelowThreshold(0.45),
    "cost-aware": CostAware(0.2, [1.0, 1.1, 1.3, 1.6, 2.0]),
}


def table_pair():
    return [TableModel(lambda prefix, row=row: row(prefix[1:]), 3) for row in (example_target, example_draft)]


def sampler(wrap, gamma=3):
    target, draft = table_pair()
    drafter = wrap(draft)

    def draw(n):
        generator, ids = torch.Generator().manual_seed(0), np.empty((n, 4), dtype=int)
        for run in range(n):
            ids[run] = speculative(target, drafter, [0], gamma=gamma, max_new_tokens=4, generator=generator).ids
        return ids

    return draw


class DropsTheLast(EarlyStop):
    """The wrong variant: the token that ended the block is taken out of it."""

    def propose(self, *arguments):
        ids, probs, *_ = super().propose(*arguments)
        (gamma,) = arguments[1]
        keep = ids.shape[-1] - (0 < ids.shape[-1] < gamma or self.stop([probs[0, -1, ids[0, -1]].item()]))
        return Draft(ids[:, :keep], probs[:, :keep], [keep])


@pytest.mark.parametrize("stop", STOPS.values(), ids=STOPS)
def test_stopping_after_a_token_that_stays_keeps_the_law(stop):
    found = battery(sampler(lambda draft: EarlyStop(draft, stop)), LAW, n=800)
    assert found.verdict == "pass", f"{found}\n(a false alarm has probability .001)"


def test_stopping_and_dropping_the_token_fails():
    found = battery(sampler(lambda draft: DropsTheLast(draft, BelowThreshold(0.45))), LAW, n=800)
    assert found.verdict == "fail"


def test_the_heuristic_keeps_the_law():
    found = battery(sampler(lambda draft: Heuristic(ModelDrafter(draft), start=2), gamma=4), LAW, n=800)
    assert found.verdict == "pass", f"{found}\n(a false alarm has probability .001)"


def test_a_block_ends_with_the_first_token_below_the_threshold():
    _, draft = table_pair()
    # After (): .2 .3 .5; after token 2: .7 .2 .1. Uniforms choose tokens 2, 0 and then 0 again (.2, after token 0).
    uniforms = torch.tensor([[0.9, 0.1, 0.1, 0.1]], dtype=torch.float64)
    drafter = EarlyStop(draft, BelowThreshold(0.45))
    target, _ = table_pair()
    drafter.begin(1)
    ids, probs, *_ = drafter.propose([[0]], [4], Sampling(), lambda counts: uniforms[:, : max(counts)], target)
    assert ids.tolist() == [[2, 0, 0]] and probs.shape == (1, 3, 3)
    assert probs[0, 2].tolist() == pytest.approx([0.2, 0.3, 0.5])


def test_greedy_confidence_is_the_raw_softmax_not_the_one_hot_row():
    target, draft = CausalLM(tiny_model("Llama")), CausalLM(tiny_model("Llama", layers=1, seed=1))
    drafter = EarlyStop(draft, BelowThreshold(0.99))
    greedy = Sampling(temperature=0)
    generation = speculative(target, drafter, [1, 2, 3], gamma=4, max_new_tokens=12, sampling=greedy)
    assert {r.num_drafted for r in generation.trace.rounds} <= {0, 1}  # a random model is never so sure
    assert generation.ids == autoregressive(target, [1, 2, 3], max_new_tokens=12, sampling=greedy).ids


def test_the_cost_aware_rule_agrees_with_the_best_constant_length_where_odds_are_constant():
    from specnb.theory import best_gamma, speedup

    for alpha in (0.3, 0.5, 0.7, 0.8, 0.9):
        for cost_ratio in (0.02, 0.05, 0.1, 0.2):
            stop, length = CostAware(cost_ratio), 1
            while not stop([alpha] * length):
                length += 1
            best = max(best_gamma(alpha, cost_ratio), 1)
            tie = speedup(alpha, length, cost_ratio) == pytest.approx(speedup(alpha, best, cost_ratio))
            assert length == best or tie, (alpha, cost_ratio, length, best)


def test_verify_costs_for_the_draft_lengths_of_the_run_are_enough():
    # A full block is not asked whether it wants one more, so v(gamma + 1) need not be known.
    target, draft = table_pair()
    drafter = EarlyStop(draft, CostAware(0.0, [1.0, 1.0, 1.0]))
    trace = speculative(
        target, drafter, [0], gamma=2, max_new_tokens=9, generator=torch.Generator().manual_seed(0)
    ).trace
    assert max(r.num_drafted for r in trace.rounds) == 2


def test_free_drafts_never_stop_and_a_costly_verification_does():
    assert not CostAware(0.0)([0.5, 0.01])
    assert CostAware(0.0, [1.0, 1.0, 9.0])([0.9])
    assert CostAware(0.1, reliability=0.1)([0.9]) and not CostAware(0.1)([0.9])


def test_the_heuristic_follows_its_schedule_and_forgets_between_runs():
    target, draft = CausalLM(tiny_model("Llama")), CausalLM(tiny_model("Llama"))
    greedy, heuristic = Sampling(temperature=0), Heuristic(ModelDrafter(draft), start=2)
    for _ in range(2):
        trace = speculative(target, heuristic, [1, 2, 3], gamma=7, max_new_tokens=40, sampling=greedy).trace
        assert [r.num_drafted for r in trace.rounds][:5] == [2, 4, 6, 7, 7]  # equal models accept everything
    wrong = Heuristic(ModelDrafter(CausalLM(tiny_model("Llama", seed=5))), start=4)
    trace = speculative(target, wrong, [1, 2, 3], gamma=7, max_new_tokens=40, sampling=greedy).trace
    lengths, seen = [4], trace.rounds
    for r in seen[:-4]:
        assert r.num_drafted == min(lengths[-1], 7)
        lengths.append(lengths[-1] + 2 if r.num_accepted == r.num_drafted else max(lengths[-1] - 1, 1))


def test_rounds_without_a_proposal_leave_the_schedule_as_it_was():
    target = CausalLM(tiny_model("Llama"))
    heuristic = Heuristic(PromptLookup(min_ngram=3), start=3)
    trace = speculative(target, heuristic, [1, 2, 3], gamma=8, max_new_tokens=6, sampling=Sampling(temperature=0)).trace
    assert all(r.num_drafted == 0 for r in trace.rounds[:3]) and heuristic._longest == [3]


def test_what_they_are_is_in_a_result_file_and_bad_values_are_refused():
    assert Heuristic(PromptLookup()).describe()["start"] == 5
    model = CausalLM(tiny_model("Llama"))
    assert "threshold=0.4" in EarlyStop(model, BelowThreshold(0.4)).describe()["stop"]
    with pytest.raises(ValueError, match=r"threshold is a probability, got 1.5"):
        BelowThreshold(1.5)
    with pytest.raises(ValueError, match="start must be at least 1"):
        Heuristic(PromptLookup(), start=0)


def test_every_row_of_a_batch_stops_by_its_own_rule_and_drafts_what_it_would_alone():
    target, draft = (
        CausalLM(tiny_model("Llama")),
        CausalLM(tiny_model("Llama", layers=1, seed=1, initializer_range=0.5)),
    )
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
    for drafter in (EarlyStop(draft, BelowThreshold(0.1)), Heuristic(ModelDrafter(draft), start=2)):
        options = {"gamma": 6, "max_new_tokens": 24, "sampling": Sampling()}
        generators = [[torch.Generator().manual_seed(i) for i in range(3)] for _ in range(2)]
        together = speculative(target, drafter, prompts, generator=generators[0], **options)
        for prompt, generator, row in zip(prompts, generators[1], together, strict=True):
            alone = speculative(target, drafter, prompt, generator=generator, **options)
            assert alone.ids == row.ids
            counts = [[(r.num_drafted, r.num_accepted) for r in run.trace.rounds] for run in (alone, row)]
            assert counts[0] == counts[1] and len({drafted for drafted, _ in counts[0]}) > 2
