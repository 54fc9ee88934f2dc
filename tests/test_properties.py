"""Hypothesis drives the rule, the probabilities and the sampler against exact fractions and plain decoding."""

from fractions import Fraction

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from specnb import exact
from specnb.drafters import ModelDrafter, PromptLookup
from specnb.models import TableModel
from specnb.probs import Sampling
from specnb.rule import accept_probs, residual, verify
from specnb.sampler import autoregressive, rounds, speculative
from tests.conftest import seeded

settings.register_profile("project", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("project")
GREEDY = Sampling(temperature=0)
UNIFORM = st.integers(0, 2**20 - 1).map(lambda k: Fraction(2 * k + 1, 2**21))


@st.composite
def row(draw, vocab):
    """A distribution over `vocab` tokens with small whole weights: zeros and ties are common."""
    weights = draw(st.lists(st.integers(0, 4), min_size=vocab, max_size=vocab).filter(any))
    return [Fraction(w, sum(weights)) for w in weights]


@st.composite
def prefix_model(draw, vocab):
    """A prefix-dependent model: the row is picked by what the prefix is made of."""
    rows = draw(st.lists(row(vocab), min_size=1, max_size=5))
    step = draw(st.integers(1, 3))
    return lambda prefix: rows[(sum(prefix) * step + len(prefix)) % len(rows)]


@st.composite
def pair(draw, max_vocab=4):
    vocab = draw(st.integers(2, max_vocab))
    return vocab, draw(prefix_model(vocab)), draw(prefix_model(vocab))


def floats(rows):
    return torch.tensor([[float(x) for x in row] for row in rows], dtype=torch.float64)


def reference_verdict(target_rows, draft_rows, ids, uniforms):
    """Algorithm 1 read aloud in fractions; None where a threshold is too close to a uniform for floats to decide."""
    for position, (x, u) in enumerate(zip(ids, uniforms, strict=False)):
        product, wanted = u * draft_rows[position][x], target_rows[position][x]
        if abs(product - wanted) < Fraction(1, 10**9):
            return None
        if not product < wanted:
            return position, inverse_cdf(exact.residual(target_rows[position], draft_rows[position]), uniforms[-1])
    return len(ids), inverse_cdf(target_rows[-1], uniforms[-1])


def inverse_cdf(probs, u):
    total = Fraction(0)
    for token, prob in enumerate(probs):
        total += prob
        if abs(total - u) < Fraction(1, 10**9):
            return None
        if total > u:
            return token
    raise AssertionError


@given(st.data())
@settings(max_examples=200)
def test_verify_agrees_with_the_algorithm_in_fractions(data):
    vocab, gamma = data.draw(st.integers(2, 5)), data.draw(st.integers(0, 4))
    target_rows = [data.draw(row(vocab)) for _ in range(gamma + 1)]
    draft_rows = [data.draw(row(vocab)) for _ in range(gamma)]
    ids = [data.draw(st.sampled_from([x for x in range(vocab) if draft[x]])) for draft in draft_rows]
    uniforms = [data.draw(UNIFORM) for _ in range(gamma + 1)]
    expected = reference_verdict(target_rows, draft_rows, ids, uniforms)
    assume(expected is not None and expected[1] is not None)
    verdict = verify(
        floats(target_rows),
        floats(draft_rows).reshape(gamma, vocab),
        torch.tensor(ids, dtype=torch.long),
        torch.tensor([float(u) for u in uniforms], dtype=torch.float64),
    )
    assert verdict == expected
    assert target_rows[verdict.num_accepted][verdict.next_id] > 0


@given(st.integers(2, 6).flatmap(lambda vocab: st.tuples(row(vocab), row(vocab))))
def test_accepted_and_recovered_mass_add_up_to_the_target(rows):
    target, draft = floats(rows)
    ids = torch.arange(len(target))
    accepted = draft * accept_probs(target.expand(len(ids), -1), draft.expand(len(ids), -1), ids)
    assert torch.allclose(accepted + (1 - accepted.sum()) * residual(target, draft), target, atol=1e-12)
    assert exact.step_law(*rows) == rows[0]


@given(pair(), st.integers(0, 3))
@settings(max_examples=40)
def test_a_round_is_lossless_for_any_rational_pair(models, gamma):
    _, target, draft = models
    assert exact.round_law(target, draft, gamma) == exact.sequence_law(target, gamma + 1)
    assert sum(exact.accepted_law(target, draft, gamma)) == 1


@given(
    st.lists(st.integers(-3, 3), min_size=2, max_size=12),
    st.sampled_from([0, 1e-6, 0.3, 1.0, 2.0]),
    st.one_of(st.none(), st.integers(1, 12)),
    st.one_of(st.none(), st.floats(0.05, 1.0)),
    st.one_of(st.none(), st.floats(0.0, 0.9)),
)
def test_probabilities_are_a_distribution_whatever_is_configured(logits, temperature, top_k, top_p, min_p):
    scores = torch.tensor(logits, dtype=torch.float64)
    probs = Sampling(temperature, top_k, top_p, min_p).probs(scores)
    assert (probs >= 0).all() and abs(probs.sum() - 1) < 1e-9
    assert probs[scores == scores.max()].max() == probs.max() > 0  # top-p may keep any one of several maxima
    if temperature < 1e-5:
        assert probs.max() == 1 and probs.argmax() == logits.index(max(logits))
    elif top_k is not None:
        kth = sorted(logits, reverse=True)[min(top_k, len(logits)) - 1]
        assert all(probs[i] == 0 for i, logit in enumerate(logits) if logit < kth)


@given(
    pair(),
    st.integers(0, 5),
    st.integers(0, 12),
    st.sets(st.integers(0, 3), max_size=2),
    st.booleans(),
    st.lists(st.integers(0, 1), min_size=1, max_size=4),
)
@settings(max_examples=120)
def test_greedy_speculation_is_plain_decoding(models, gamma, budget, eos_ids, lookup, prompt):
    vocab, target_rows, draft_rows = models
    target, drafter = TableModel(target_rows, vocab), PromptLookup()
    if not lookup:
        drafter = ModelDrafter(TableModel(draft_rows, vocab))
    options = {"max_new_tokens": budget, "sampling": GREEDY, "eos_ids": eos_ids}
    plain = autoregressive(target, prompt, **options)
    drafted = speculative(target, drafter, prompt, gamma=gamma, **options)
    assert (drafted.ids, drafted.stop_reason) == (plain.ids, plain.stop_reason)
    assert sum(r.num_emitted for r in drafted.trace.rounds) == len(drafted.ids) <= budget


@given(pair(), st.integers(0, 5), st.integers(1, 12), st.sets(st.integers(0, 3), max_size=2), st.integers(0, 999))
@settings(max_examples=120)
def test_bookkeeping_of_sampled_runs(models, gamma, budget, eos_ids, seed):
    """Nothing impossible is emitted, nothing follows an end, and the caches hold the committed prefix."""
    vocab, target_rows, draft_rows = models
    target, drafter = TableModel(target_rows, vocab), ModelDrafter(TableModel(draft_rows, vocab))
    prompt, ids = [0, 1], []
    for happened in rounds(
        target, drafter, prompt, gamma=gamma, max_new_tokens=budget, eos_ids=eos_ids, generator=seeded(seed)
    ):
        ids += happened.ids
        assert happened.num_emitted == len(happened.ids) == len(happened.sources)
        assert happened.num_accepted <= happened.num_drafted <= min(gamma, budget - len(ids) + happened.num_emitted - 1)
        newest_was_fed = happened.num_accepted == happened.num_emitted
        assert target.length == len(prompt) + len(ids) - (not newest_was_fed)
        assert drafter.model.length <= target.length
        assert [tuple(prompt + ids)[: target.length]] == target._ids
        assert [tuple(prompt + ids)[: drafter.model.length]] == drafter.model._ids
    for i, token in enumerate(ids):
        assert target_rows(tuple(prompt + ids[:i]))[token] > 0
        assert token not in eos_ids or i == len(ids) - 1
    assert len(ids) == budget or ids[-1] in eos_ids


@given(pair(), st.integers(1, 4), st.integers(0, 99))
@settings(max_examples=30)
def test_a_draft_equal_to_the_target_never_fails(models, gamma, seed):
    vocab, rows, _ = models
    run = speculative(
        TableModel(rows, vocab),
        ModelDrafter(TableModel(rows, vocab)),
        [0],
        gamma=gamma,
        max_new_tokens=15,
        generator=seeded(seed),
    )
    assert run.trace.accepted_fraction == 1
