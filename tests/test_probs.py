import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList

from specnb.probs import Sampling
from tests.conftest import tiny_model

LOGITS = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()


def test_plain_sampling_is_softmax_in_float32_or_wider():
    for dtype, wanted in (
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ):
        probs = Sampling().probs(torch.randn(3, 5, 11).to(dtype))
        assert probs.dtype == wanted and probs.shape == (3, 5, 11)
        assert torch.allclose(probs.sum(-1), torch.ones(3, 5, dtype=wanted))


def test_tokens_outside_the_nucleus_have_probability_exactly_zero():
    # vllm-project/vllm #9834: the target was scored without top_p.
    assert torch.allclose(Sampling(top_p=0.75).probs(LOGITS), torch.tensor([0.625, 0.375, 0.0, 0.0]))
    assert Sampling(top_p=0.75).probs(LOGITS)[2:].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-6])
def test_temperatures_below_the_threshold_are_greedy_and_the_first_maximum_wins(temperature):
    logits = torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 1.0]])
    assert Sampling(temperature=temperature).probs(logits).tolist() == [[0, 1, 0], [1, 0, 0]]


@pytest.mark.parametrize("temperature", [1e-4, 1e-3])
def test_small_temperatures_give_no_nan(temperature):
    probs = Sampling(temperature=temperature).probs(torch.randn(4, 1000, dtype=torch.bfloat16) * 30)
    assert probs.isfinite().all() and torch.allclose(probs.sum(-1), torch.ones(4))


def test_bias_and_penalty_still_apply_at_temperature_zero():
    logits = torch.tensor([1.0, 3.0, 2.9])
    assert Sampling(temperature=0, logit_bias={1: -1.0}).probs(logits).argmax() == 2
    assert Sampling(temperature=0, repetition_penalty=2.0).probs(logits, [1]).argmax() == 2
    assert Sampling(logit_bias={1: float("-inf")}).probs(logits)[1] == 0


def test_each_row_is_penalised_by_its_own_prefix():
    logits = torch.zeros(1, 3, 4) + torch.tensor([1.0, 1.0, 1.0, 1.0])
    probs = Sampling(repetition_penalty=2.0).probs(logits, [[[0], [0, 1], [0, 1, 2]]])
    for row, seen in enumerate(([0], [0, 1], [0, 1, 2])):
        low = [i for i in range(4) if probs[0, row, i] < probs[0, row, 3] - 1e-9]
        assert low == seen
    flat = Sampling(repetition_penalty=2.0).probs(logits[0], [[0], torch.tensor([0, 1]), [0, 1, 2]])
    assert torch.equal(flat, probs[0])


def test_the_law_is_that_of_generate():
    """The processors that transformers itself builds from a generation config, on the same logits."""
    model = tiny_model("Llama")
    prefix, logits = [3, 4, 5, 4], torch.randn(1, 61, dtype=torch.float64)
    config = GenerationConfig(
        do_sample=True,
        temperature=0.7,
        top_k=20,
        top_p=0.9,
        min_p=0.02,
        repetition_penalty=1.3,
        sequence_bias={(7,): 2.0, (4,): -1.5},
    )
    theirs = model._get_logits_processor(config, input_ids_seq_length=4, logits_processor=LogitsProcessorList())
    ours = Sampling(0.7, 20, 0.9, 0.02, 1.3, {7: 2.0, 4: -1.5})
    expected = theirs(torch.tensor([prefix]), logits.clone()).softmax(-1)
    assert torch.allclose(ours.probs(logits, [prefix]), expected, atol=1e-12)
    assert (expected == 0).any()


def test_logits_are_never_modified():
    # vllm-project/vllm PR #30846: processors wrote into the caller's tensor.
    logits = torch.randn(2, 9)
    before = logits.clone()
    for sampling in (
        Sampling(0.5, 3, 0.8, 0.1, 1.5, {1: 2.0}),
        Sampling(0, repetition_penalty=1.5, logit_bias={1: -1.0}),
        Sampling(),
    ):
        sampling.probs(logits, [[1, 2], [3]])
        assert torch.equal(logits, before)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_k": -1},
        {"top_k": 2.5},
        {"temperature": None},
        {"top_p": 1.5},
        {"min_p": -0.1},
        {"repetition_penalty": 0},
        {"logit_bias": {3: float("nan")}},
        {"logit_bias": {-1: 1.0}},
        {"temperature": "warm"},
    ],
)
def test_values_out_of_range_are_refused_by_name(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        Sampling(**options)


def test_a_missing_prefix_or_an_unknown_biased_id_is_refused():
    with pytest.raises(ValueError, match="prefix_ids"):
        Sampling(repetition_penalty=1.2).probs(LOGITS)
    with pytest.raises(ValueError, match="nested 1 deep"):
        Sampling(repetition_penalty=1.2).probs(LOGITS[None], [1])
    with pytest.raises(ValueError, match="2 prefixes for 1 rows"):
        Sampling(repetition_penalty=1.2).probs(LOGITS[None], [[1], [2]])
    with pytest.raises(ValueError, match="token 4"):
        Sampling(logit_bias={4: 1.0}).probs(LOGITS)


def test_a_row_of_nan_stays_visible():
    for bad in (float("nan"), float("inf")):
        logits = torch.tensor([[0.0, bad, 1.0]])
        assert Sampling(temperature=0).probs(logits).isnan().any()
        assert Sampling().probs(logits).isnan().any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("vocab", [1, 7, 256, 1000, 49152])
def test_greedy_takes_the_first_maximum_also_of_ties_infinities_and_nan(vocab, dtype):
    generator = torch.Generator().manual_seed(vocab)
    scores = torch.randint(-3, 3, (40, vocab), generator=generator).to(dtype)  # full of ties
    scores[1, vocab // 2 :] = torch.inf
    scores[2] = -torch.inf
    scores[3, vocab // 3] = torch.nan
    first = [vocab // 3 if row.isnan().any() else (row == row.max()).nonzero()[0, 0] for row in scores]
    rows, places = Sampling(temperature=0).probs(scores).ne(0).nonzero(as_tuple=True)  # NaN is not 0 either
    assert rows.tolist() == list(range(40)) and places.tolist() == first
