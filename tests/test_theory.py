import numpy as np
import pandas as pd
import pytest

from specnb import theory
from specnb.theory import best_gamma, break_even_alpha, operations_factor, speedup, tokens_per_round

# Leviathan et al. 2023, Table 1 (c = c_hat = 0): alpha, gamma -> operations, speed.
TABLE_1 = [
    (0.6, 2, 1.53, 1.96),
    (0.7, 3, 1.58, 2.53),
    (0.8, 2, 1.23, 2.44),
    (0.8, 5, 1.63, 3.69),
    (0.9, 2, 1.11, 2.71),
    (0.9, 10, 1.60, 6.86),
]
# Its Tables 2 and 4, T5-XXL: gamma, alpha, c -> Theorem 3.8 at the printed values, and its best gamma.
TABLE_2 = [
    (7, 0.75, 0.02, 3.157, 9),
    (7, 0.80, 0.04, 3.251, 9),
    (7, 0.82, 0.11, 2.497, 6),
    (7, 0.62, 0.02, 2.258, 6),
    (5, 0.68, 0.04, 2.347, 6),
    (3, 0.71, 0.11, 1.934, 4),
    (5, 0.65, 0.02, 2.402, 7),
    (5, 0.73, 0.04, 2.619, 7),
    (3, 0.74, 0.11, 2.025, 4),
    (5, 0.53, 0.02, 1.891, 5),
    (3, 0.55, 0.04, 1.803, 4),
    (3, 0.56, 0.11, 1.541, 3),
]
FIGURE_3 = {
    0.01: [5, 7, 9, 14, 24],
    0.02: [4, 6, 8, 11, 19],
    0.05: [3, 4, 6, 8, 13],
    0.1: [2, 3, 4, 6, 10],
    0.2: [1, 2, 3, 4, 7],
}


@pytest.mark.parametrize(("alpha", "gamma", "operations", "speed"), TABLE_1)
def test_table_1(alpha, gamma, operations, speed):
    assert speedup(alpha, gamma, 0.0) == pytest.approx(speed, abs=0.005)
    assert operations_factor(alpha, gamma, 0.0) == pytest.approx(operations, abs=0.005)


@pytest.mark.parametrize(("gamma", "alpha", "cost_ratio", "speed", "best"), TABLE_2)
def test_tables_2_and_4(gamma, alpha, cost_ratio, speed, best):
    assert speedup(alpha, gamma, cost_ratio) == pytest.approx(speed, abs=0.0006)
    assert best_gamma(alpha, cost_ratio) == best


@pytest.mark.parametrize("cost_ratio", FIGURE_3)
def test_figure_3(cost_ratio):
    assert [best_gamma(alpha, cost_ratio) for alpha in (0.5, 0.6, 0.7, 0.8, 0.9)] == FIGURE_3[cost_ratio]


def test_corollary_3_9_some_gamma_pays_iff_alpha_exceeds_the_cost():
    assert best_gamma(0.3, 0.31) == 0
    assert best_gamma(0.32, 0.31) >= 1
    assert speedup(0.5, 1, 0.2) == pytest.approx(1.5 / 1.2)


def test_expected_tokens_are_a_truncated_geometric_sum():
    # ggml-org/llama.cpp #3649: not K times alpha.
    assert tokens_per_round(0.8, 4) == pytest.approx(3.3616)
    assert tokens_per_round(0.8, 8) == pytest.approx(4.3289, abs=1e-4)
    assert tokens_per_round(0.0, 5) == 1 and tokens_per_round(1.0, 5) == 6


def test_the_verify_cost_may_be_a_number_a_sequence_or_a_callable():
    costs = [1.0, 1.0, 1.05, 1.3, 1.6, 2.0]
    for gamma in range(6):
        wanted = tokens_per_round(0.7, gamma) / (gamma * 0.1 + costs[gamma])
        for form in (costs[gamma], np.float64(costs[gamma]), costs, np.array(costs), costs.__getitem__):
            assert speedup(0.7, gamma, 0.1, form) == pytest.approx(wanted)
    assert best_gamma(0.7, 0.1, costs) == 2 < best_gamma(0.7, 0.1)
    assert best_gamma(0.7, 0.1, lambda gamma: 1 + 0.2 * gamma) == best_gamma(0.7, 0.3)


COSTS = {0: 1.0, 1: 1.1, 4: 1.3}


@pytest.mark.parametrize(
    ("verify_cost", "there"),
    [
        (COSTS, "it has gamma 0, 1, 4"),
        (COSTS.get, "it has gamma 0, 1, 4"),
        (COSTS.__getitem__, "it has gamma 0, 1, 4"),
        (lambda gamma: COSTS.get(gamma), "a callable must answer"),
        (pd.Series(COSTS), "it has gamma 0, 1, 4"),
        ([1.0, 1.1], "it has gamma 0, 1"),
        (np.array([1.0, 1.1]), "it has gamma 0, 1"),
        ([1.0, 1.1].__getitem__, "it has gamma 0, 1"),
        ([1.0, 1.1, None, 1.3], "it has gamma 0, 1, 2, 3"),
        ({}, "it is empty"),
        ([], "it is empty"),
    ],
)
def test_a_verify_cost_that_lacks_a_gamma_is_named_with_those_that_are_there(verify_cost, there):
    wanted = f"nothing for gamma {{}}; {there}"
    for call in (speedup, break_even_alpha):
        arguments = (0.7, 2) if call is speedup else (2,)
        with pytest.raises(ValueError, match=wanted.format(2)):
            call(*arguments, 0.1, verify_cost)
    with pytest.raises(ValueError, match=wanted.format(2)):
        theory.empirical_speedup([2, 0], 2, 0.1, verify_cost)
    if there != "it is empty" and not isinstance(verify_cost, list | np.ndarray):
        with pytest.raises(ValueError, match=wanted.format(2)):
            best_gamma(0.7, 0.1, verify_cost)


def test_a_verify_cost_may_be_a_dict_and_a_gamma_a_whole_float():
    for verify_cost in (COSTS, pd.Series(COSTS), [1.0, 1.1, 1.1, 1.2, 1.3]):
        assert speedup(0.7, 4.0, 0.1, verify_cost) == speedup(0.7, 4, 0.1, 1.3)
    assert best_gamma(0.9, 0.01, {0: 1.0, 1: 1.1, 2: 1.2}) == best_gamma(0.9, 0.01, [1.0, 1.1, 1.2]) == 2


def test_the_smallest_gamma_wins_ties():
    assert best_gamma(0.0, 0.0) == 0
    assert best_gamma(1.0, 1.0) == 0


def test_break_even_is_where_the_speed_up_is_one():
    for gamma in (1, 4, 8):
        alpha = break_even_alpha(gamma, 0.1, 1.2)
        assert speedup(alpha, gamma, 0.1, 1.2) == pytest.approx(1)
    assert break_even_alpha(0, 0.1) is None and break_even_alpha(1, 1.5) is None
    assert break_even_alpha(3, 0.0) == 0


@pytest.mark.parametrize(
    "call",
    [
        lambda: tokens_per_round(1.2, 3),
        lambda: tokens_per_round(float("nan"), 3),
        lambda: tokens_per_round(0.5, -1),
        lambda: speedup(0.5, 2, -0.1),
        lambda: speedup(0.5, 2, 0.1, 0.0),
        lambda: speedup(0.5, 2, 0.1, [1.0]),
        lambda: theory.empirical_speedup([1], -1, 0.1, [1.0, 1.1]),
        lambda: theory.accepted_length_law(0.5, 1.5),
    ],
)
def test_values_out_of_range_are_refused(call):
    with pytest.raises(ValueError):
        call()


def test_the_accepted_length_law_has_the_mean_of_equation_1():
    for alpha, gamma in ((0.0, 3), (0.62, 7), (1.0, 4), (0.5, 0)):
        law = theory.accepted_length_law(alpha, gamma)
        assert len(law) == gamma + 1 and sum(law) == pytest.approx(1)
        mean = sum(num * prob for num, prob in enumerate(law))
        assert 1 + mean == pytest.approx(theory.tokens_per_round(alpha, gamma))


def test_an_empirical_process_predicts_what_independence_cannot():
    # Half of the rounds accept everything, half nothing: alpha_hat is .8, and long drafts pay more than it says.
    seen = [4, 0] * 50
    alpha_hat = 4 / 5
    assert theory.empirical_speedup(seen, 1, 0.1) < theory.speedup(alpha_hat, 1, 0.1)
    assert theory.empirical_speedup(seen, 4, 0.1, [1.0, 1.1, 1.2, 1.3, 1.4]) == pytest.approx(3 / 1.8)
    rng = np.random.default_rng(0)
    independent = (rng.random((50_000, 6)) < 0.7).cumprod(1).sum(1).tolist()
    assert theory.empirical_speedup(independent, 6, 0.1) == pytest.approx(theory.speedup(0.7, 6, 0.1), rel=0.01)
    with pytest.raises(ValueError, match="num_accepted is empty"):
        theory.empirical_speedup([], 2, 0.1)
