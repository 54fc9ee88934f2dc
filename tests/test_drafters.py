import pytest
import torch

from specnb.drafters import Draft, Drafter, FirstOf, ModelDrafter, PromptLookup
from specnb.models import CausalLM, TableModel
from specnb.probs import Sampling
from specnb.sampler import rounds, speculative
from tests.conftest import seeded, tiny_model


def uniforms(value):
    return lambda counts: torch.full((1, max(counts)), value, dtype=torch.float64)


@pytest.mark.parametrize(
    ("ids", "max_ngram", "expected"),
    [
        ([5], 3, []),  # a prompt of one token
        ([5, 6], 3, []),  # the n-gram is longer than what comes before it
        ([5, 6, 7, 8, 9, 10, 11, 7, 8], 3, [9, 10, 11, 7]),
        ([1, 2, 3, 1, 2, 4, 1, 2], 3, [4, 1, 2]),  # the latest occurrence
        ([1, 2, 3, 9, 2, 5, 1, 2], 3, [3, 9, 2, 5]),  # the longest n-gram before the latest
        ([1, 2, 3, 9, 2, 5, 1, 2], 1, [5, 1, 2]),
        ([7, 7, 7], 3, [7]),  # not the suffix itself
    ],
)
def test_prompt_lookup_edge_cases(ids, max_ngram, expected):
    # huggingface/transformers PR #46790, PR #27775, PR #31301.
    assert PromptLookup(max_ngram).lookup(ids, 4) == expected


def test_no_match_is_an_empty_proposal_and_not_a_dummy_token():
    target = TableModel(lambda prefix: [0.25] * 4, 4)
    ids, probs, *_ = PromptLookup().propose([[0, 1, 2]], [3], Sampling(), None, target)
    assert ids.shape == (1, 0) and probs.shape == (1, 0, 4)


def test_lookup_probabilities_are_one_hot():
    target = TableModel(lambda prefix: [0.25] * 4, 4)
    ids, probs, *_ = PromptLookup().propose([[0, 1, 2, 0, 1]], [2], Sampling(), None, target)
    assert ids.tolist() == [[2, 0]] and probs.tolist() == [[[0, 0, 1, 0], [1, 0, 0, 0]]]


def test_a_model_drafter_returns_the_probabilities_it_drew_from(tiny):
    # deepseek-ai/DeepSpec #31: drawn in bf16, corrected as if in fp32.
    draft = tiny()
    for sampling in (Sampling(), Sampling(0.5, top_k=5), Sampling(temperature=0), Sampling(repetition_penalty=1.5)):
        drafter = ModelDrafter(draft)
        draft.reset()
        ids, probs, *_ = drafter.propose([[1, 2, 3]], [4], sampling, uniforms(0.4), draft)
        draft.reset()
        logits = draft.forward(torch.tensor([[1, 2, 3, *ids[0, :3].tolist()]]), num_logits=4).logits
        prefixes = [[[1, 2, 3, *ids[0, :i].tolist()] for i in range(4)]]
        assert torch.allclose(probs, sampling.probs(logits, prefixes), atol=1e-12)
        for i in range(4):
            below = probs[0, i, : ids[0, i]].sum()
            assert below <= 0.4 < below + probs[0, i, ids[0, i]] + 1e-12


def test_a_drafter_of_its_own_sampling_is_used_and_stays_exact_when_greedy(tiny):
    target, drafter = tiny(), ModelDrafter(tiny(seed=1), Sampling(temperature=3.0))
    plain = speculative(target, None, [1, 2], gamma=0, max_new_tokens=20, sampling=Sampling(temperature=0))
    drafted = speculative(
        target, drafter, [1, 2], gamma=3, max_new_tokens=20, sampling=Sampling(temperature=0), generator=seeded()
    )
    assert drafted.ids == plain.ids


@pytest.mark.parametrize("temperature", [0, 0.5, 1, 2])
@pytest.mark.parametrize("gamma", [1, 4, 9])
def test_a_draft_equal_to_the_target_is_always_accepted(temperature, gamma):
    """Draft bookkeeping that is wrong while the text is right shows here and nowhere else.

    vllm-project/vllm PR #9730 and PR #26498; z-lab/dflash #74 for the temperatures.
    """
    weights = tiny_model("Llama")
    target, draft = CausalLM(weights), CausalLM(weights)
    generation = speculative(
        target,
        ModelDrafter(draft),
        [1, 2, 3],
        gamma=gamma,
        max_new_tokens=60,
        sampling=Sampling(temperature=temperature),
        generator=seeded(3),
    )
    assert len(generation.trace.rounds) >= 6 and generation.trace.accepted_fraction == 1


def test_the_draft_catches_up_after_rounds_without_drafts():
    # vllm-project/vllm-metal PR #716: K = 0 also skipped feeding committed tokens to the draft.
    weights = tiny_model("Llama")

    class Sometimes(ModelDrafter):
        calls = 0

        def propose(self, *arguments):
            self.calls += 1
            return super().propose(*arguments) if self.calls % 2 else Draft.one_hot([[]], arguments[-1])

    target, drafter = CausalLM(weights), Sometimes(CausalLM(weights))
    sampling = Sampling(temperature=0)
    plain = speculative(target, None, [1, 2, 3], gamma=0, max_new_tokens=30, sampling=sampling)
    mixed = speculative(target, drafter, [1, 2, 3], gamma=3, max_new_tokens=30, sampling=sampling)
    assert mixed.ids == plain.ids and mixed.trace.accepted_fraction == 1
    assert {r.num_drafted for r in mixed.trace.rounds} >= {0, 3}


class Claims(Drafter):
    """Proposes fixed ids with fixed probabilities, whatever was asked."""

    def __init__(self, ids, probs):
        self.ids, self.probs = torch.tensor([ids]), torch.tensor([probs])

    def propose(self, *_):
        return Draft(self.ids, self.probs, [self.ids.shape[1]])


@pytest.mark.parametrize(
    ("ids", "probs", "message"),
    [
        ([0], [[0.0, 1.0]], "id 0 at position 0 has draft probability 0"),
        ([1, 0], [[0.0, 1.0], [0.0, 1.0]], "id 0 at position 1"),
        ([1, 1, 1], [[0.5, 0.5]] * 3, "at most 2"),
        ([1], [[0.3, 0.3, 0.4]], r"proposed ids \(1, 1\) with probabilities \(1, 1, 3\)"),
        ([1], [[float("nan"), 1.0]], "not finite"),
    ],
)
def test_a_drafter_that_breaks_the_contract_is_named(ids, probs, message):
    target = TableModel(lambda prefix: [0.5, 0.5], 2)
    with pytest.raises(ValueError, match=message):
        speculative(target, Claims(ids, probs), [0], gamma=2, max_new_tokens=8, generator=seeded())


def test_target_and_draft_must_not_be_one_object(tiny):
    model = tiny()
    for gamma in (0, 2):
        with pytest.raises(ValueError, match="same object"):
            rounds(model, ModelDrafter(model), [1], gamma=gamma, max_new_tokens=4)


def test_a_bad_ngram_length_is_refused():
    with pytest.raises(ValueError, match="max_ngram"):
        PromptLookup(0)
    with pytest.raises(ValueError, match="2 and 1"):
        PromptLookup(1, min_ngram=2)


def test_the_shortest_ngram_that_counts_can_be_set():
    ids = [1, 2, 3, 9, 2]
    assert PromptLookup(3).lookup(ids, 2) == [3, 9] and PromptLookup(3, min_ngram=2).lookup(ids, 2) == []
    assert PromptLookup(3, min_ngram=2).lookup([1, 2, 3, 9, 1, 2], 2) == [3, 9]


def test_the_first_of_several_drafters_that_proposes_anything_drafts_the_block(tiny):
    target, draft = tiny(), tiny(seed=5)
    both = FirstOf(PromptLookup(2, min_ngram=2), ModelDrafter(draft))
    both.begin(1)
    ids, probs, *_ = both.propose([[4, 5, 6, 4, 5]], [3], Sampling(), uniforms(0.3), target)
    assert ids.tolist() == [[6, 4, 5]] and probs.max(-1).values.tolist() == [[1, 1, 1]]
    ids, probs, *_ = both.propose([[4, 5, 6, 7]], [3], Sampling(), uniforms(0.3), target)
    alone, alone_probs, *_ = ModelDrafter(tiny(seed=5)).propose([[4, 5, 6, 7]], [3], Sampling(), uniforms(0.3), target)
    assert torch.equal(ids, alone) and torch.equal(probs, alone_probs)
    assert both.context_length == 128 and len(both.describe()["drafters"]) == 2
    capped = FirstOf(PromptLookup(2, min_ngram=2), ModelDrafter(tiny(seed=5)), caps=(None, 1))
    capped.begin(1)
    assert capped.propose([[4, 5, 6, 4, 5]], [3], Sampling(), uniforms(0.3), target)[0].shape == (1, 3)
    assert capped.propose([[4, 5, 6, 7]], [3], Sampling(), uniforms(0.3), target)[0].tolist() == alone[:, :1].tolist()
    for drafters, caps in (((), None), ((both,), (0,)), ((both,), (1, 2))):
        with pytest.raises(ValueError, match="at least one"):
            FirstOf(*drafters, caps=caps)


def test_a_drafter_that_was_passed_over_catches_up(tiny):
    """Greedy ids are plain decoding's, though lookup and model draft by turns; the model drafts as it would alone."""
    target = tiny(initializer_range=0.3)
    greedy = Sampling(temperature=0)
    plain = speculative(target, None, [1, 2, 3, 1, 2], gamma=0, max_new_tokens=40, sampling=greedy).ids
    model = ModelDrafter(CausalLM(target.model))
    turns = []

    class Sometimes(PromptLookup):
        def propose(self, prefixes, *arguments):
            turns.append(len(turns))
            return super().propose(prefixes if len(turns) % 2 else [[]], *arguments)

    generation = speculative(
        target, FirstOf(Sometimes(), model), [1, 2, 3, 1, 2], gamma=3, max_new_tokens=40, sampling=greedy
    )
    assert generation.ids == plain
    # Draft and target are the same weights: every block the model drafts is accepted whole, so it missed nothing.
    drafted_by_model = [r for i, r in enumerate(generation.trace.rounds) if i % 2 == 1 and r.num_drafted == 3]
    assert drafted_by_model and all(r.num_accepted == r.num_drafted for r in drafted_by_model)
