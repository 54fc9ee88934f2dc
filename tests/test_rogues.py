"""Every wrong sampler is rejected by its named test; what looks wrong and is not passes all of them."""

import math
from fractions import Fraction

import numpy as np
import pytest

from specnb import exact
from specnb.gof import chi_square, sample_size
from specnb.rogues import INNOCENTS, ROGUES, example_draft, example_target, top_k, top_p

TARGET, DRAFT = [Fraction(x, 10) for x in (5, 3, 2)], [Fraction(x, 10) for x in (2, 3, 5)]
BY_NAME = {rogue.name: rogue for rogue in ROGUES}
# FACTS: (law of the first token on the pair above, n for power .99 at level .001), from the noncentral chi-square.
FIRST_TOKEN = {
    "recovered from the target": ("7/20 39/100 13/50", 392),
    "always accept": ("1/5 3/10 1/2", 56),
    "accept iff the target likes it at least as much": ("7/10 3/10 0", 126),
    "accept with the target's probability, then the residual": ("81/100 9/100 1/10", 91),
    "argmax draft, softmax probabilities": ("3/5 0 2/5", 68),
    "top-k draft, raw probabilities": ("3/8 3/8 1/4", 564),
    "lenience 1/2": ("3/10 3/10 2/5", 126),
}


def laws(rogue, level):
    """(law the sampler has, law it ought to have) as seen by a test of that level."""
    if level == "first token":
        return exact.first_tokens(rogue.law(example_target, example_draft, 2, 3), 1), rogue.right_law(example_target, 1)
    length = 3 if level == "round" else 4
    return rogue.law(example_target, example_draft, 2, length), rogue.right_law(example_target, length)


@pytest.mark.parametrize("name", FIRST_TOKEN)
def test_the_laws_and_sample_sizes_of_the_power_table(name):
    law = exact.first_tokens(BY_NAME[name].law(lambda _: TARGET, lambda _: DRAFT, 1, 2), 1)
    row = [law.get((x,), Fraction(0)) for x in range(3)]
    expected, n = FIRST_TOKEN[name]
    assert " ".join(map(str, row)) == expected
    assert sample_size([float(x) for x in TARGET], [float(x) for x in row]) == n


def test_the_softmax_of_the_clamped_difference():
    law = exact.first_tokens(
        BY_NAME["softmax of the clamped difference"].law(lambda _: TARGET, lambda _: DRAFT, 1, 2), 1
    )
    assert [round(float(law[x,]), 3) for x in range(3)] == [0.321, 0.39, 0.29]


@pytest.mark.parametrize("rogue", ROGUES, ids=lambda rogue: rogue.name)
def test_a_wrong_law_is_wrong_at_the_level_named_and_at_none_before(rogue):
    for level in ("first token", "round", "sequence"):
        wrong, right = laws(rogue, level)
        assert sum(wrong.values()) == 1
        if level == rogue.exposed_by:
            assert wrong != right
            return
        if not (rogue.name.startswith("target cache") and level == "round"):  # three tokens can take two rounds
            assert wrong == right, level


@pytest.mark.parametrize("rogue", ROGUES, ids=lambda rogue: rogue.name)
def test_counts_of_a_wrong_sampler_are_rejected(rogue):
    """Level .001, n for power .99999 and no cell pooled: it is missed by less than one seed in 100,000."""
    wrong, right = laws(rogue, rogue.exposed_by)
    keys = sorted({*wrong, *right})
    right_probs, wrong_probs = ([float(law.get(key, 0)) for key in keys] for law in (right, wrong))
    smallest = min(prob for prob in right_probs if prob)
    n = max(sample_size(right_probs, wrong_probs, power=0.99999), math.ceil(5 / smallest))
    generator = np.random.default_rng(0)
    assert chi_square(generator.multinomial(n, wrong_probs), right_probs).verdict == "fail"
    # The test is no machine that always fails: the right sampler passes it at the same n, but for one seed in 1000.
    assert chi_square(generator.multinomial(n, right_probs), right_probs).verdict == "pass"


@pytest.mark.parametrize("innocent", INNOCENTS, ids=lambda rogue: rogue.name)
@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_an_innocent_is_lossless_to_the_last_fraction(innocent, gamma):
    assert innocent.lossless
    assert innocent.law(example_target, example_draft, gamma, 5) == innocent.right_law(example_target, 5)


def test_what_innocents_cost():
    """Accepted drafts a round, of two: the right rule's, and those of samplers as exact as it."""
    costs = {
        rogue.name: sum(
            n * mass for n, mass in enumerate(exact.accepted_law(example_target, example_draft, 2, rogue.rule))
        )
        for rogue in INNOCENTS
    }
    right = sum(n * mass for n, mass in enumerate(exact.accepted_law(example_target, example_draft, 2)))
    assert costs["no bonus token"] == right
    others = [cost for name, cost in costs.items() if name != "no bonus token"]
    assert all(0 < cost < right for cost in others)


def test_every_rogue_names_the_fault_it_mirrors():
    assert len(ROGUES) >= 12 and len(BY_NAME) == len(ROGUES)
    assert all(rogue.mirrors and not rogue.lossless for rogue in ROGUES)


def test_truncations_by_hand():
    row = [Fraction(x, 10) for x in (2, 5, 3)]
    assert top_k(row) == [0, Fraction(5, 8), Fraction(3, 8)]
    assert top_p(row, Fraction(1, 2)) == [0, 1, 0] and top_p(row, Fraction(3, 4)) == top_k(row)
