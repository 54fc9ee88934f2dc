"""Right samplers pass the battery, every wrong one fails it, and what a test has seen is said."""

import math
from fractions import Fraction

import numpy as np
import pytest

from specnb import exact
from specnb.audit.battery import battery, holm, independence
from specnb.rogues import INNOCENTS, ROGUES, example_draft, example_target, sampler_of

LENGTH, GAMMA = 4, 2
PAIR = (example_target, example_draft)
RIGHT = exact.sequence_law(example_target, LENGTH)


def drawn(rogue, seed=0):
    draw, rng = rogue.sampler(*PAIR, GAMMA, LENGTH), np.random.default_rng(seed)
    return lambda n: draw(n, rng)


def right(seed=0, **options):
    draw, rng = sampler_of(exact.TOKEN_RULE, *PAIR, GAMMA, LENGTH, **options), np.random.default_rng(seed)
    return lambda n: draw(n, rng)


def test_the_right_sampler_passes_and_says_what_it_would_have_caught():
    found = battery(right(), RIGHT, n=4000, accepted_law=exact.accepted_law(*PAIR, GAMMA))
    assert found.verdict == "pass", f"{found}\n(a false alarm has probability .001)"
    assert list(found.table.test) == [*(f"token {i}" for i in (1, 2, 3, 4)), "sequence", "accepted drafts", "next draw"]
    # By hand: noncentrality 4 n TV^2 over 3 cells, at .001 / 7 and 99 % power.
    from scipy import stats

    tv = found.table.smallest_tv[0]
    power = stats.ncx2.sf(stats.chi2.isf(0.001 / 7, 2), 2, 4 * 4000 * tv**2)
    assert power == pytest.approx(0.99, abs=1e-6)
    assert "false-alarm level 0.001" in str(found) and "pooled cell are invisible" in str(found)


@pytest.mark.parametrize("rogue", ROGUES, ids=lambda rogue: rogue.name)
def test_a_wrong_sampler_fails(rogue):
    # At n = 4000 each is caught with a probability of more than .9999: see data/exactness.
    assert battery(drawn(rogue), rogue.right_law(example_target, LENGTH), n=4000).verdict == "fail"


@pytest.mark.parametrize("rogue", INNOCENTS, ids=lambda rogue: rogue.name)
def test_an_innocent_passes(rogue):
    found = battery(drawn(rogue), rogue.right_law(example_target, LENGTH), n=4000)
    assert found.verdict == "pass", f"{found}\n(a false alarm has probability .001)"


def test_a_sampler_that_accepts_by_another_rule_fails_on_accepted_drafts_alone():
    law = exact.accepted_law(*PAIR, GAMMA)
    slower = battery(drawn(INNOCENTS[2]), RIGHT, n=4000, accepted_law=law)
    assert slower.verdict == "fail"
    assert list(slower.table.test[slower.table.verdict == "fail"]) == ["accepted drafts"]


def test_a_generator_seeded_anew_for_each_draw_fails_the_test_of_the_next_draw_alone():
    # A law test is blind to it where the seeds are many; the pairs of draws are not.
    draw = sampler_of(exact.TOKEN_RULE, *PAIR, GAMMA, LENGTH)

    def sampler(n):
        ids, accepted = draw(n // 2, np.random.default_rng(1))
        return np.repeat(ids, 2, axis=0), np.repeat(accepted, 2, axis=0)

    table = battery(sampler, RIGHT, n=4000).table.set_index("test")
    assert table.verdict["next draw"] == "fail"
    assert table.verdict["token 1"] == "pass"


def test_uniforms_reused_in_the_next_round_fail_the_independence_of_accepted_lengths():
    # The same pair after every prefix, so that rounds are independent; 20,000 pairs of rounds.
    rng, ratios = np.random.default_rng(0), np.array([0.6, 0.6])
    first = (rng.random((20_000, 2)) < ratios).cumprod(-1)
    fresh = (rng.random((20_000, 2)) < ratios).cumprod(-1)
    assert independence(first.sum(-1), fresh.sum(-1)).verdict == "pass"
    half = np.where(rng.random((20_000, 1)) < 0.1, first, fresh)  # one round in ten takes the uniforms of the last
    assert independence(first.sum(-1), half.sum(-1)).verdict == "fail"


def test_rounds_of_the_right_sampler_are_independent_where_the_pair_does_not_depend_on_the_prefix():
    target, draft = example_target(()), example_draft(())
    draw = sampler_of(exact.TOKEN_RULE, lambda _: target, lambda _: draft, 1, 6)
    accepted = draw(5000, np.random.default_rng(0))[1]
    assert independence(accepted[:, 0], accepted[:, 1]).verdict == "pass", "a false alarm has probability .001"


def test_independence_merges_rare_values_and_says_when_it_cannot_test():
    rng = np.random.default_rng(0)
    result = independence(rng.integers(0, 2, 1000), np.r_[[7, 8, 9], rng.integers(0, 2, 997)])
    assert (result.num_pooled, result.verdict) == (4, "pass")  # 3 rare ones need a frequent one to reach 71
    assert independence([1] * 100, [0, 1] * 50).verdict == "cannot test"
    assert math.isnan(independence([], []).p_value)
    with pytest.raises(ValueError, match="as long as each other"):
        independence([1, 2], [1])
    with pytest.raises(ValueError):
        independence([1.0, math.nan], [1.0, 2.0])


def test_holm_by_hand_and_a_nan_never_passes():
    assert holm([0.04, 0.01, 0.03]).tolist() == pytest.approx([0.06, 0.03, 0.06])
    adjusted = holm([0.01, math.nan])
    assert adjusted[0] == pytest.approx(0.02) and math.isnan(adjusted[1])
    certain = battery(lambda n: np.zeros((n, 1), int), {(0,): 1.0}, n=100)
    assert certain.verdict == "cannot test"


def test_the_family_level_is_kept_where_single_tests_would_alarm():
    # 60 batteries of 6 tests at level .2, which the family keeps: 23 alarms are exceeded with probability 5e-4.
    alarms, singles, rng = 0, 0, np.random.default_rng(3)
    draw = sampler_of(exact.TOKEN_RULE, *PAIR, GAMMA, LENGTH)
    for _ in range(60):
        found = battery(lambda n: draw(n, rng), RIGHT, n=1500, alpha=0.2)
        alarms += found.verdict == "fail"
        singles += min(result.p_value for result in found.results.values()) < 0.2
    assert 0 < alarms <= 23
    assert singles > 1.5 * alarms


def test_stopped_sequences_are_compared_with_what_they_are():
    law = exact.generation_law(*PAIR, GAMMA, LENGTH, eos_ids=(2,))
    assert battery(right(eos_ids=(2,)), law, n=4000).verdict == "pass", "a false alarm has probability .001"
    assert battery(right(), law, n=4000).verdict == "fail"  # going on after the stop


def test_a_sequence_the_law_does_not_know_fails_at_once():
    found = battery(lambda n: np.full((n, 1), 2), {(0,): Fraction(1, 2), (1,): Fraction(1, 2)}, n=1)
    assert found.results["sequence"].verdict == "fail"


def test_ids_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"asked were 10 sequences of 4"):
        battery(lambda n: np.zeros((n, 3), int), RIGHT, n=10)
