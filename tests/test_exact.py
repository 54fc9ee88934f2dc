from fractions import Fraction as F

import pytest

from specnb import exact

PAIRS = {
    "one residual atom": ([F(6, 10), F(3, 10), F(1, 10)], [F(2, 10), F(5, 10), F(3, 10)]),
    "two residual atoms": ([F(1, 2), F(3, 10), F(1, 5)], [F(3, 10), F(1, 10), F(3, 5)]),
    "equal": ([F(1, 2), F(1, 3), F(1, 6)], [F(1, 2), F(1, 3), F(1, 6)]),
    "disjoint": ([F(1), F(0), F(0)], [F(0), F(1, 2), F(1, 2)]),
}


def target_by_prefix(prefix):
    weights = [1 + (sum(prefix) + 2 * len(prefix) + k * k) % 4 for k in range(3)]
    weights[len(prefix) % 3] *= len(prefix) != 2  # a zero after two tokens
    return [F(w, sum(weights)) for w in weights]


def draft_by_prefix(prefix):
    weights = [(3 * sum(prefix) + len(prefix) + k) % 5 for k in range(3)]
    return [F(w, sum(weights)) for w in weights]


@pytest.mark.parametrize("name", PAIRS)
def test_one_step_emits_the_target_exactly(name):
    target, draft = PAIRS[name]
    assert exact.step_law(target, draft) == target


def test_the_numbers_of_the_worked_example():
    target, draft = PAIRS["one residual atom"]
    accepted = [q * exact.accept_prob(target, draft, x) for x, q in enumerate(draft)]
    assert accepted == [F(2, 10), F(3, 10), F(1, 10)]
    assert 1 - sum(accepted) == F(4, 10)
    assert exact.residual(target, draft) == [1, 0, 0]
    assert sum(x > 0 for x in exact.residual(*PAIRS["two residual atoms"])) == 2


@pytest.mark.parametrize("gamma", [0, 1, 2, 3, 4])
def test_a_round_emits_the_law_of_the_target_for_a_prefix_dependent_pair(gamma):
    law = exact.round_law(target_by_prefix, draft_by_prefix, gamma)
    assert law == exact.sequence_law(target_by_prefix, gamma + 1)
    assert sum(law.values()) == 1


def test_a_wrong_residual_is_not_lossless(monkeypatch):
    """The equality above can fail: resampling from the target instead of the residual does it."""
    monkeypatch.setattr("specnb.exact.rounds.residual", lambda target, draft: list(target))
    assert exact.round_law(target_by_prefix, draft_by_prefix, 2) != exact.sequence_law(target_by_prefix, 3)


@pytest.mark.parametrize(("gamma", "expected"), [(1, F(2, 3)), (2, F(10, 9)), (3, F(38, 27)), (4, F(130, 81))])
def test_expected_accepted_length_of_sun_et_al(gamma, expected):
    # arXiv 2403.10444, the token rule's column of its worked example.
    law = exact.accepted_law(lambda _: [F(1, 3), F(2, 3)], lambda _: [F(2, 3), F(1, 3)], gamma)
    assert sum(n * mass for n, mass in enumerate(law)) == expected
    assert sum(law) == 1 and len(law) == gamma + 1


def test_bad_rows_and_rules_are_named():
    with pytest.raises(ValueError, match="unknown rule 'best'"):
        exact.round_law(target_by_prefix, draft_by_prefix, 1, rule="best")
    with pytest.raises(ValueError, match="gamma must be 0 or more"):
        exact.round_law(target_by_prefix, draft_by_prefix, -1)
    with pytest.raises(ValueError, match=r"target row after \(\)"):
        exact.round_law(lambda _: [F(1, 2), F(1, 3)], draft_by_prefix, 1)


@pytest.mark.parametrize("gamma", [0, 1, 2, 4])
def test_tokens_of_repeated_rounds_have_the_target_s_law(gamma):
    assert exact.generation_law(target_by_prefix, draft_by_prefix, gamma, 5) == exact.sequence_law(target_by_prefix, 5)


def test_nothing_follows_a_stop_id_in_the_law_of_repeated_rounds():
    law = exact.generation_law(target_by_prefix, draft_by_prefix, 3, 5, eos_ids={2})
    right = {}
    for tokens, mass in exact.sequence_law(target_by_prefix, 5).items():
        kept = exact.cut_at(tokens, {2})
        right[kept] = right.get(kept, 0) + mass
    assert law == right and any(len(tokens) < 5 for tokens in law)


def test_a_rule_made_of_a_wrong_part_has_another_law():
    always = exact.rule_of(accept=lambda *_: F(1))
    assert exact.round_law(target_by_prefix, draft_by_prefix, 2, always) != exact.sequence_law(target_by_prefix, 3)
    assert exact.accepted_law(target_by_prefix, draft_by_prefix, 2, always) == [0, 0, 1]
    with pytest.raises(ValueError, match="unknown rule 'block'"):
        exact.round_law(target_by_prefix, draft_by_prefix, 2, "block")


def scrambled(vocab, seed, zeros):
    """A model whose rows depend on the whole prefix, with a token of probability 0 in every second row if `zeros`."""

    def model(prefix):
        state = seed
        for token in prefix:
            state = (state * 31 + 7 * token + 3) % 1009
        weights = [1 + (state * (k + 2) + k * k) % 7 for k in range(vocab)]
        weights[state % vocab] *= not (zeros and (state + len(prefix)) % 2)
        return [F(weight, sum(weights)) for weight in weights]

    return model


@pytest.mark.parametrize("seed, zeros", [(1, False), (2, False), (5, True), (11, True), (17, True), (23, True)])
@pytest.mark.parametrize("vocab, gamma", [(v, g) for v in (2, 3, 4) for g in (1, 2, 3, 4) if v**g <= 100])
def test_laws_are_equal_as_fractions(vocab, gamma, seed, zeros):
    target, draft = scrambled(vocab, seed, zeros), scrambled(vocab, seed + 100, zeros)
    assert exact.round_law(target, draft, gamma) == exact.sequence_law(target, gamma + 1)
    assert sum(exact.accepted_law(target, draft, gamma)) == 1


@pytest.mark.parametrize("seed, zeros", [(1, False), (5, True)])
def test_four_tokens_four_drafts(seed, zeros):
    test_laws_are_equal_as_fractions(4, 4, seed, zeros)


def test_six_tokens_of_repeated_rounds_of_four_drafts():
    target, draft = scrambled(3, 5, True), scrambled(3, 9, True)
    assert exact.generation_law(target, draft, 4, 6) == exact.sequence_law(target, 6)
    wrong = exact.rule_of(accept=lambda target_row, draft_row, token: target_row[token])
    assert exact.generation_law(target, draft, 4, 6, wrong) != exact.sequence_law(target, 6)
