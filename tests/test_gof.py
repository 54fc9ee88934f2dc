import math
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from specnb.gof import (
    chi_square,
    draws_for_total_variation,
    exact_power,
    sample_size,
    smallest_total_variation,
    two_sample,
)

LAW = [0.5, 0.3, 0.2]
POWER_TABLE = [  # wrong rule's law on p=(.5,.3,.2), q=(.2,.3,.5) and the n to reject it, level .001, power .99
    ([0.35, 0.39, 0.26], 392),
    ([0.2, 0.3, 0.5], 56),
    ([0.7, 0.3, 0.0], 126),
    ([0.81, 0.09, 0.10], 91),
    ([0.6, 0.0, 0.4], 68),
    ([0.375, 0.375, 0.25], 564),
    ([0.3, 0.3, 0.4], 126),
]


def test_the_statistic_is_pearsons():
    counts = np.array([520, 290, 190])
    expected = 1000 * np.array(LAW)
    result = chi_square(counts, LAW)
    assert result.statistic == pytest.approx(((counts - expected) ** 2 / expected).sum())
    assert (result.dof, result.n, result.num_pooled, result.verdict) == (2, 1000, 0, "pass")
    assert result.p_value == pytest.approx(stats.chi2.sf(result.statistic, 2))


def test_observed_and_expected_are_not_swapped():
    # scipy's argument order: 39.2 for obs [10, 20, 70] against [30, 30, 40]; swapped it would be 57.9.
    assert chi_square([10, 20, 70], [0.3, 0.3, 0.4]).statistic == pytest.approx(39.1667, abs=1e-3)


def test_float32_probabilities_of_a_large_vocabulary_do_not_raise():
    # scipy #13362: totals must agree to 1.5e-8, which 50,000 float32 probabilities do not.
    rng = np.random.default_rng(0)
    logits = rng.normal(size=50_000).astype(np.float32)
    probs = np.exp(logits) / np.exp(logits).sum(dtype=np.float32)
    counts = rng.multinomial(100_000, probs.astype(np.float64) / probs.astype(np.float64).sum())
    assert chi_square(counts, probs).verdict == "pass"


def test_proportions_are_refused():
    # They would lose n: [.6, .4] against [.5, .5] gives p = .84 where 1000 draws give 2.5e-10.
    with pytest.raises(ValueError, match="not proportions"):
        chi_square([0.6, 0.4], [0.5, 0.5])
    assert chi_square([600, 400], [0.5, 0.5]).p_value == pytest.approx(2.5e-10, rel=0.1)


def test_one_count_on_an_impossible_token_fails_at_any_n():
    assert chi_square([1, 0, 1], [0.5, 0.5, 0.0]).verdict == "fail"
    assert chi_square([0, 1], [1.0, 0.0]).p_value == 0
    assert chi_square([500, 500, 0], [0.5, 0.5, 0.0]).verdict == "pass"


def test_small_cells_are_pooled_and_kept():
    probs = [0.4, 0.4] + [0.002] * 100
    counts = [200, 200] + [1] * 100
    result = chi_square(counts, probs)
    assert (result.num_pooled, result.dof, result.verdict) == (100, 2, "pass")
    moved = chi_square([250, 250] + [0] * 100, probs)  # the whole tail is missing, each cell of it expects one
    assert moved.verdict == "fail"


def test_the_merged_cell_reaches_the_minimum_too():
    result = chi_square([50, 30, 19, 1], [0.5, 0.3, 0.19, 0.01])
    assert (result.num_pooled, result.dof) == (2, 2)


def test_what_cannot_be_tested_says_so():
    for counts, probs in (([3, 2], [0.5, 0.5]), ([7], [1.0]), ([0, 0], [0.5, 0.5])):
        result = chi_square(counts, probs)
        assert result.verdict == "cannot test" and math.isnan(result.p_value)
    assert two_sample([5, 5], [0, 0]).verdict == "cannot test"


def test_nan_never_passes():
    for bad in ([float("nan"), 1], [1, float("nan")]):
        with pytest.raises(ValueError, match="NaN"):
            chi_square(bad, [0.5, 0.5])
        with pytest.raises(ValueError, match="NaN"):
            chi_square([5, 5], bad)
        with pytest.raises(ValueError, match="NaN"):
            two_sample(bad, [5, 5])


@pytest.mark.parametrize("probs", [[0.5, 0.4], [1.2, -0.2], [[0.5, 0.5]]])
def test_what_is_no_law_is_refused(probs):
    with pytest.raises(ValueError, match="probs"):
        chi_square([5, 5], probs)
    with pytest.raises(ValueError, match="shape"):
        chi_square([5, 5, 5], [0.5, 0.5])


@pytest.mark.parametrize(("alternative", "n"), POWER_TABLE)
def test_sample_sizes_of_the_power_table(alternative, n):
    assert sample_size(LAW, alternative) == n


def test_the_softmax_residual_needs_270_draws():
    # Its law is printed to three digits in the table, so it is computed here.
    excess = np.exp(np.maximum(np.array([0.5, 0.3, 0.2]) - np.array([0.2, 0.3, 0.5]), 0))
    law = np.minimum([0.5, 0.3, 0.2], [0.2, 0.3, 0.5]) + 0.3 * excess / excess.sum()
    assert sample_size(LAW, law) == 270


def test_sample_size_where_the_alternative_leaves_the_support():
    assert sample_size([0.5, 0.5, 0], [0.5, 0.4, 0.1]) == math.ceil(math.log(0.01) / math.log(0.9))
    assert sample_size([0.5, 0.5, 0], [0.9, 0.1 - 1e-6, 1e-6]) == sample_size([0.5, 0.5], [0.9, 0.1])
    assert sample_size([1.0, 0.0], [0.0, 1.0]) == 1
    with pytest.raises(ValueError, match="same law"):
        sample_size(LAW, LAW)


def test_the_level_is_kept_and_the_power_reached():
    """2,000 repeats at n = 392: false alarms of the right law at level .05, rejections of the wrong one at .001.

    Binomial 99.99 % limits around 2000 x .05 are 63..139; the power at this n is .99 (n = 2000, at least .98).
    """
    rng = np.random.default_rng(1)
    right = sum(chi_square(c, LAW, alpha=0.05).verdict == "fail" for c in rng.multinomial(392, LAW, size=2000))
    wrong = rng.multinomial(392, POWER_TABLE[0][0], size=2000)
    assert 63 <= right <= 139, right
    assert sum(chi_square(c, LAW).verdict == "fail" for c in wrong) >= 1960


def test_two_samples_of_one_law_pass_and_of_two_laws_fail():
    rng = np.random.default_rng(2)
    probs = rng.dirichlet(np.full(200, 0.3))
    same = two_sample(rng.multinomial(5000, probs), rng.multinomial(20_000, probs))
    assert same.verdict == "pass" and same.num_pooled > 0
    other = np.roll(probs, 1)
    assert two_sample(rng.multinomial(5000, probs), rng.multinomial(20_000, other)).verdict == "fail"


def test_fractions_are_welcome():
    assert chi_square([60, 30, 10], [Fraction(6, 10), Fraction(3, 10), Fraction(1, 10)]).statistic == 0


@pytest.mark.parametrize(
    "alternative, n, power",
    [
        ([0.2, 0.3, 0.5], 56, 0.985),
        ([0.3, 0.3, 0.4], 126, 0.982),
        ([0.7, 0.3, 0.0], 56, 1.0),
        ([0.81, 0.09, 0.1], 79, 0.992),
        ([0.6, 0.0, 0.4], 33, 1.0),
        ([0.5, 0.3, 0.2], 50, 0.001),
    ],
)
def test_exact_powers_of_the_power_table(alternative, n, power):
    assert exact_power(LAW, alternative, n) == pytest.approx(power, abs=0.0008)


def test_the_exact_power_is_the_sum_over_all_outcomes():
    probs, alternative, n = [0.7, 0.3, 0.0], [0.5, 0.45, 0.05], 20
    total = sum(
        stats.multinomial.pmf([i, j, n - i - j], n, alternative)
        for i in range(n + 1)
        for j in range(n + 1 - i)
        if chi_square([i, j, n - i - j], probs, alpha=0.01).verdict == "fail"
    )
    assert exact_power(probs, alternative, n, alpha=0.01) == pytest.approx(total)


def test_an_enumeration_too_long_says_what_to_use():
    with pytest.raises(ValueError, match="use sample_size"):
        exact_power([0.1] * 10, [0.1] * 10, 1000)


@pytest.mark.parametrize("tv, cells, n", [(0.05, 50, 7970), (0.05, 2000, 36994)])
def test_draws_for_a_total_variation_in_the_worst_direction(tv, cells, n):
    assert draws_for_total_variation(tv, cells) == n
    assert smallest_total_variation(n, cells) == pytest.approx(tv, rel=1e-4)


def test_the_worst_direction_is_half_of_the_mass_and_every_other_is_easier():
    # Four equal cells, TV .1: spread over half of the mass it takes the predicted n, on one cell fewer draws.
    even, n = [0.25] * 4, draws_for_total_variation(0.1, 4)
    assert abs(sample_size(even, [0.3, 0.3, 0.2, 0.2]) - n) <= 1
    assert sample_size(even, [0.35, 0.65 / 3, 0.65 / 3, 0.65 / 3]) < 0.8 * n


def test_no_total_variation_is_claimed_that_would_not_be_caught():
    assert smallest_total_variation(3, 1000) == math.inf
    assert smallest_total_variation(1000, 1) == math.inf
    with pytest.raises(ValueError, match="total_variation must lie between 0 and 1, got 1.5"):
        draws_for_total_variation(1.5, 10)


def test_a_sample_size_counts_the_cells_that_are_pooled():
    # 1,000 cells of which a law differs in the rare ones only: while they are pooled the difference is invisible.
    probs = np.r_[0.9, np.full(1000, 0.0001)]
    alternative = np.r_[0.9, np.repeat([0.00015, 0.00005], 500)]
    n = sample_size(probs, alternative)
    assert 0.0001 * n >= 5
    rng = np.random.default_rng(0)
    caught = sum(chi_square(rng.multinomial(n, alternative), probs).verdict == "fail" for _ in range(50))
    assert caught >= 45, "power .99: fewer than 45 of 50 has probability below 1e-4"
