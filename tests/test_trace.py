import pytest

from specnb import theory
from specnb.serving.metrics import vllm_metrics
from specnb.trace import Round, Trace

TRACE = Trace(4, [Round(4, 4, 5, 1, 2, 3), Round(4, 1, 2, 1, 1, 1), Round(0, 0, 1, 0, 1, 0), Round(2, 0, 1, 1, 1, 1)])


def test_rates_are_counted_from_rounds():
    assert TRACE.accepted_histogram == [2, 1, 0, 0, 1]
    assert TRACE.tokens_per_round == 9 / 4
    assert TRACE.accepted_fraction == 5 / 10
    assert TRACE.alpha_hat == 5 / 7
    assert TRACE.survival == [2 / 3, 1 / 3, 1 / 2, 1 / 2]


def test_seconds_add_up():
    assert (TRACE.draft_sec, TRACE.verify_sec, TRACE.other_sec) == (3, 5, 5)
    assert TRACE.ttft_sec == 6 and TRACE.decode_sec == 7
    assert TRACE.ttft_sec + TRACE.decode_sec == TRACE.total_sec
    assert TRACE.sec_per_token == 13 / 9
    assert TRACE.decode_sec_per_token == 7 / 4


def test_time_per_token_counts_only_tokens_not_yet_visible():
    # ray-project/llmperf PR #99: one token at 100 ms, then three chunks of four, 40 ms apart.
    chunks = Trace(3, [Round(0, 0, 1, 0, 0.1, 0), *[Round(3, 3, 4, 0, 0.04, 0)] * 3])
    assert chunks.ttft_sec == pytest.approx(0.1)
    assert chunks.decode_sec_per_token == pytest.approx(0.010)


def test_a_block_cut_by_the_end_of_sequence_counts_its_tests_up_to_the_cut():
    # vllm-project/vllm #56101: [d1, d2, EOS, d4, d5, bonus] contributes 3 emitted, not 6.
    cut = Round(5, 3, 3)
    assert cut.num_tested == 3 and cut.sources == ["accepted"] * 3
    recovered = Round(5, 2, 3)
    assert recovered.num_tested == 3 and recovered.sources == ["accepted", "accepted", "recovered"]
    assert Trace(5, [cut]).alpha_hat == 1 and Trace(5, [cut]).accepted_fraction == 3 / 5


def test_sources():
    assert Round(2, 2, 3).sources == ["accepted", "accepted", "bonus"]
    assert Round(0, 0, 1).sources == ["plain"]


def test_nothing_drafted_leaves_rates_undefined():
    # romsto: accepted / drafted was 0 / 0 for very small budgets.
    plain = Trace(0, [Round(0, 0, 1)] * 3)
    assert plain.accepted_fraction is plain.alpha_hat is plain.survival is None
    assert plain.accepted_histogram == [3] and plain.tokens_per_round == 1
    empty = Trace(4)
    assert empty.tokens_per_round is empty.ttft_sec is empty.sec_per_token is empty.decode_sec_per_token is None
    assert empty.accepted_histogram == [0] * 5


def test_six_things_called_acceptance_rate_on_one_run():
    """At i.i.d. alpha .8 and gamma 5, rounds in the proportions of the law: .800, .538, .448, 3.689, .8 .64 .512 ..."""
    counts = [round(100_000 * prob) for prob in theory.accepted_length_law(0.8, 5)]
    rounds = [Round(5, num, num + 1) for num, count in enumerate(counts) for _ in range(count)]
    trace = Trace(5, rounds)
    assert trace.alpha_hat == pytest.approx(0.8, abs=5e-4)
    assert trace.accepted_fraction == pytest.approx(0.538, abs=5e-4)
    assert trace.accepted_per_scored == pytest.approx(0.448, abs=5e-4)
    assert trace.tokens_per_round == pytest.approx(3.689, abs=5e-4)
    assert trace.survival == pytest.approx([0.8, 0.64, 0.512, 0.41, 0.328], abs=5e-4)
    biased = sum(r.num_accepted + 1 for r in rounds) / sum(r.num_drafted + 1 for r in rounds)  # SGLang before PR #23530
    assert biased == pytest.approx(0.615, abs=5e-4)
    exported = vllm_metrics(trace)
    assert exported["mean_acceptance_length"] == trace.tokens_per_round
    assert exported["draft_acceptance_rate"] == trace.accepted_fraction
    assert exported["acceptance_histogram"] == trace.accepted_histogram == counts


def test_rounds_without_drafts_are_no_steps_for_vllm():
    trace = Trace(2, [Round(0, 0, 1), Round(2, 1, 2), Round(0, 0, 1)])
    exported = vllm_metrics(trace)
    assert (exported["per_step_accepted"], exported["per_step_drafted"]) == ([1], [2])
    assert exported["mean_acceptance_length"] == 2 and exported["acceptance_histogram"] == [0, 1, 0]
    assert vllm_metrics(Trace(2, [Round(0, 0, 1)]))["mean_acceptance_length"] is None
