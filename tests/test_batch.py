"""Batches: every row must be what it would be alone, whatever its neighbours' lengths, luck and ends."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from specnb import exact, sampler
from specnb.audit.battery import battery, independence
from specnb.drafters import Draft, Drafter, FirstOf, ModelDrafter, PromptLookup
from specnb.drafters.adaptive import EarlyStop
from specnb.models import CausalLM, TableModel, cache
from specnb.probs import Sampling
from specnb.sampler import autoregressive, speculative
from tests.conftest import VOCAB, seeded, tiny_model
from tests.test_exact import draft_by_prefix, target_by_prefix

GREEDY = Sampling(temperature=0)
PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9, 7, 9], [7, 7, 7], [1, 2, 3, 1, 2], [8, 8], [4], [5, 1, 5, 1]]


def drafters_of(tiny, family, target):
    draft = tiny(family, layers=1, seed=1)
    yield ModelDrafter(draft)
    yield ModelDrafter(CausalLM(target.model))
    yield PromptLookup()
    yield FirstOf(PromptLookup(min_ngram=2), ModelDrafter(draft), caps=(None, 2))


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "GPTNeoX"])
@pytest.mark.parametrize("gamma", range(7))
def test_batched_greedy_equals_each_row_alone_in_float64(tiny, family, gamma):
    target = tiny(family)
    alone = [autoregressive(target, prompt, max_new_tokens=24, sampling=GREEDY).ids for prompt in PROMPTS]
    ends = {alone[1][3], alone[4][9]}  # Some rows end early, some in the middle of a block.
    alone = [autoregressive(target, prompt, max_new_tokens=24, sampling=GREEDY, eos_ids=ends) for prompt in PROMPTS]
    assert len({len(run.ids) for run in alone}) > 2
    for drafter in drafters_of(tiny, family, target):
        for batch in (2, 3, 8):
            runs = speculative(
                target, drafter, PROMPTS[:batch], gamma=gamma, max_new_tokens=24, sampling=GREEDY, eos_ids=ends
            )
            assert [run.ids for run in runs] == [run.ids for run in alone[:batch]], type(drafter).__name__
            assert [run.stop_reason for run in runs] == [run.stop_reason for run in alone[:batch]]


class RightOrWrong(Drafter):
    """Drafts what plain decoding would emit for some prompts, and never that for the others."""

    def __init__(self, texts, right):
        self.texts, self.right = texts, right

    def propose(self, prefixes, gammas, sampling, draw, target):
        return Draft.one_hot([self.ahead(*row) for row in zip(prefixes, gammas, strict=True)], target)

    def ahead(self, prefix_ids, gamma):
        (text,) = (text for text in self.texts if text[: len(prefix_ids)] == prefix_ids)
        ahead = text[len(prefix_ids) : len(prefix_ids) + gamma]
        return ahead if self.texts.index(text) in self.right else [(x + 1) % VOCAB for x in ahead]


@pytest.mark.parametrize("right", [{0}, {1}, {0, 1}, set()])
def test_one_row_accepts_everything_and_the_other_nothing(tiny, right):
    # lucidrains/speculative-decoding #3, transformers #32165: rejected tokens stayed, rows contaminated each other.
    target, prompts = tiny(), PROMPTS[:2]
    plain = [autoregressive(target, prompt, max_new_tokens=20, sampling=GREEDY).ids for prompt in prompts]
    texts = [prompt + ids for prompt, ids in zip(prompts, plain, strict=True)]
    runs = speculative(target, RightOrWrong(texts, right), prompts, gamma=4, max_new_tokens=20, sampling=GREEDY)
    assert [run.ids for run in runs] == plain
    for row, run in enumerate(runs):
        assert run.trace.alpha_hat == (1.0 if row in right else 0.0)


@pytest.mark.parametrize("penalty", [None, 1.3])
def test_a_row_with_its_own_generator_emits_what_it_would_alone(tiny, penalty):
    """And accepts the same drafts in the same rounds: neighbours neither take its uniforms nor cut its blocks."""
    target, sampling = tiny(), Sampling(1.0, repetition_penalty=penalty)
    for drafter in drafters_of(tiny, "Llama", target):
        options = {"gamma": 4, "max_new_tokens": 20, "sampling": sampling, "eos_ids": {6}}
        alone = [speculative(target, drafter, p, generator=seeded(i), **options) for i, p in enumerate(PROMPTS)]
        generators = [seeded(i) for i in range(len(PROMPTS))]
        for run, row in zip(alone, speculative(target, drafter, PROMPTS, generator=generators, **options), strict=True):
            assert row.ids == run.ids, type(drafter).__name__
            counts = [[(r.num_drafted, r.num_accepted, r.ids) for r in x.trace.rounds] for x in (row, run)]
            assert counts[0] == counts[1]


def test_a_row_does_not_change_with_its_neighbours(tiny):
    target, drafter = tiny(), ModelDrafter(tiny(layers=1, seed=1))
    options = {"gamma": 3, "max_new_tokens": 15}
    rows = [
        speculative(target, drafter, prompts, generator=[seeded(9 + i) for i in range(len(prompts))], **options)[0].ids
        for prompts in ([[3, 1, 4], [5]], [[3, 1, 4], [1] * 40, [2, 2]])
    ]
    assert rows[0] == rows[1]


class Ragged(Drafter):
    """Drafts from a table, one token fewer for each place in its row's prompt: blocks of a batch differ in length."""

    def propose(self, prefixes, gammas, sampling, draw, target):
        num_drafted = [max(gamma - prefix[0], 0) for prefix, gamma in zip(prefixes, gammas, strict=True)]
        uniforms, batch, longest = draw(gammas), len(prefixes), max(num_drafted)
        ids, probs = torch.ones(batch, longest, dtype=torch.long), torch.ones(batch, longest, 3, dtype=torch.float64)
        for row, prefix in enumerate(map(list, prefixes)):
            for i in range(num_drafted[row]):
                probs[row, i] = torch.tensor([float(x) for x in draft_by_prefix(tuple(prefix[1:]))])
                cumulative = np.cumsum(probs[row, i].numpy())
                ids[row, i] = int(np.searchsorted(cumulative, uniforms[row, i].item(), side="right"))
                prefix.append(ids[row, i].item())
        return Draft(ids, probs, num_drafted)


def ragged_texts(n):
    """`n` texts of each of three rows, whose first ids 0, 1 and 2 make their blocks 3, 2 and 1 drafts long."""
    target = TableModel(lambda prefix: target_by_prefix(prefix[1:]), 3)
    generator, options = seeded(4), {"gamma": 3, "max_new_tokens": 3, "sampling": Sampling()}
    runs = [speculative(target, Ragged(), [[0], [1], [2]], generator=generator, **options) for _ in range(n)]
    return np.array([[row.ids for row in run] for run in runs])  # (n, rows, 3)


def test_every_row_of_a_ragged_batch_has_the_target_s_law():
    law, texts = exact.sequence_law(target_by_prefix, 3), ragged_texts(700)
    for row in range(3):
        assert battery(lambda n, row=row: texts[:, row], law, n=700).verdict == "pass", row


def planted(monkeypatch, fault):
    verify, uniforms = sampler.verify_unchecked, sampler.uniforms_of

    def without_lengths(target_probs, draft_probs, draft_ids, uniforms, num_drafted=None):
        return verify(target_probs, draft_probs, draft_ids, uniforms)

    def one_for_all(rows, counts, device):
        drawn = uniforms(rows[:1], [max(counts)], device)
        return drawn.expand(len(rows), -1).clone()

    name, wrong = {
        "padding is tested like a draft": ("verify_unchecked", without_lengths),
        "rows share their uniforms": ("uniforms_of", one_for_all),
    }[fault]
    monkeypatch.setattr(sampler, name, wrong)


def test_padding_tested_like_a_draft_is_seen(monkeypatch):
    planted(monkeypatch, "padding is tested like a draft")
    law, texts = exact.sequence_law(target_by_prefix, 3), ragged_texts(700)
    assert battery(lambda n: texts[:, 2], law, n=700).verdict == "fail"


def test_rows_that_share_their_uniforms_are_seen(monkeypatch):
    """Each row alone has the right law; the first tokens of two rows must be independent too."""

    def verdict():
        texts = ragged_texts(700)
        return independence(texts[:, 1, 0], texts[:, 2, 0]).verdict

    assert verdict() == "pass"
    planted(monkeypatch, "rows share their uniforms")
    assert verdict() == "fail"


def test_rows_that_have_ended_leave_the_batch(tiny):
    target, batches = tiny(), []
    ends = {autoregressive(target, PROMPTS[0], max_new_tokens=5, sampling=GREEDY).ids[4]}
    forward = target.forward

    def counted(ids, *arguments, **options):
        batches.append(len(ids))
        return forward(ids, *arguments, **options)

    target.forward = counted
    runs = autoregressive(target, PROMPTS, max_new_tokens=12, sampling=GREEDY, eos_ids=ends)
    lengths = [len(run.ids) for run in runs]
    assert batches == [sum(length > step for length in lengths) for step in range(max(lengths))]
    assert min(lengths) <= 5 < max(lengths) == 12


def test_rejected_drafts_left_in_the_cache_are_never_seen(tiny):
    """Logits after a rollback equal those of a cache that never held anything else; rows may have any lengths."""
    model, fresh = tiny(), tiny()
    model.reset(2)
    model.forward(torch.tensor([[0, 1, 2, 3], [4, 5, 6, 7]]), 1, num_new=[3, 4])
    model.forward(torch.randint(VOCAB, (2, 5), generator=seeded(0)), 1)
    model.rollback([2, 4])
    assert model.length == [2, 4]
    found = model.forward(torch.tensor([[8, 9], [10, 11]]), 2).logits
    for row, ids in enumerate([[1, 2, 8, 9], [4, 5, 6, 7, 10, 11]]):
        fresh.reset()
        assert torch.allclose(found[row], fresh.forward(torch.tensor([ids]), 2).logits[0], atol=1e-12)


def test_padding_is_written_behind_every_row(tiny, monkeypatch):
    """Where two tokens are written to one slot, which of them stays is the device's choice: the last on a CPU."""
    model, write, written = tiny(layers=1), cache._Ragged.write, []
    monkeypatch.setattr(cache._Ragged, "write", lambda self, *new: (written.append(self.slots), write(self, *new)))
    model.reset(2)
    model.forward(torch.tensor([[0, 0, 5], [1, 2, 3]]), 1, num_new=[1, 3])
    model.forward(torch.tensor([[6, 7], [0, 4]]), 1, num_new=[2, 1])
    keys, values = (slots.tolist() for slots in written[::2]), (slots.tolist() for slots in written[1::2])
    assert list(keys) == list(values) == [[[3, 3, 0], [0, 1, 2]], [[1, 2], [4, 3]]]


def test_the_output_head_reads_rows_without_gaps(tiny):
    """Of strided rows the product took ten times as long on a CPU, in every round of a batch with a draft."""
    model, shapes = tiny(), []
    model.model.lm_head.register_forward_pre_hook(
        lambda _, read: shapes.append((read[0].shape[1], read[0].is_contiguous()))
    )
    model.reset(3)
    model.forward(torch.zeros(3, 4, dtype=torch.long), 1)
    model.forward(torch.zeros(3, 2, dtype=torch.long), 1, num_new=[1, 2, 2])
    model.forward(torch.zeros(3, 3, dtype=torch.long), 3)
    assert shapes == [(1, True), (1, True), (3, True)]


def test_rows_fill_their_context_window_each_by_itself():
    """One row drafts to the last position while another still has room."""
    models = [CausalLM(tiny_model("Llama", seed=seed, max_position_embeddings=16)) for seed in (0, 1)]
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8], [9, 10]]
    options = {"max_new_tokens": 9, "sampling": GREEDY}
    alone = [autoregressive(models[0], prompt, **options).ids for prompt in prompts]
    assert [run.ids for run in speculative(models[0], ModelDrafter(models[1]), prompts, gamma=5, **options)] == alone


def test_a_batch_is_timed_as_a_whole(tiny):
    runs = speculative(tiny(), PromptLookup(), PROMPTS[:3], gamma=2, max_new_tokens=6, sampling=GREEDY)
    first = [run.trace.rounds[0] for run in runs]
    assert len({(r.draft_sec, r.verify_sec, r.other_sec) for r in first}) == 1
    assert all(run.trace.num_tokens == 6 for run in runs)


def occurring(law, width):
    """A `TableModel` that knows only prefixes whose neighbours differ, and raises for any other."""

    def next_probs(prefix):
        if any(a == b for a, b in pairwise(prefix)):
            raise KeyError(prefix)
        return [0.0 if x == prefix[-1] else law / (width - 1) for x in range(width)]

    return TableModel(next_probs, width)


@pytest.mark.parametrize("draft", ["model", "lookup", "first of both", "early stop"])
def test_a_batch_never_asks_a_model_about_padding(draft):
    """Rows of different lengths, some without drafts, some ended: a table of what can occur is enough."""
    target, model = occurring(1.0, 4), ModelDrafter(occurring(1.0, 4))
    drafter = {
        "model": model,
        "lookup": PromptLookup(),
        "first of both": FirstOf(PromptLookup(min_ngram=2), model, caps=(None, 2)),
        "early stop": EarlyStop(model.model, lambda confidences: len(confidences) % 2),
    }[draft]
    prompts = [[2, 1], [0], [1, 0, 1, 0, 1], [3, 2, 1, 0, 3, 2, 1]]
    options = {"gamma": 4, "max_new_tokens": 11, "eos_ids": {3}}
    generators = [[seeded(i) for i in range(4)] for _ in range(2)]
    together = speculative(target, drafter, prompts, generator=generators[0], **options)
    alone = [
        speculative(target, drafter, p, generator=g, **options) for p, g in zip(prompts, generators[1], strict=True)
    ]
    assert [run.ids for run in together] == [run.ids for run in alone]
    assert len({len(run.ids) for run in together}) > 1


def test_a_model_that_takes_no_mask_or_position_of_each_row_is_refused_by_name(tiny):
    target = tiny()
    target.model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="LlamaForCausalLM with flash_attention_2 attention takes no"):
        autoregressive(target, [[1], [2]], max_new_tokens=2)


def test_bad_batches_are_refused(tiny):
    target = tiny()
    with pytest.raises(ValueError, match="3 generators were given for 2 prompts"):
        autoregressive(target, [[1], [2]], max_new_tokens=2, generator=[seeded()] * 3)
    with pytest.raises(ValueError, match="2 generators were given for 1 prompts"):
        autoregressive(target, [1], max_new_tokens=2, generator=[seeded()] * 2)
    with pytest.raises(ValueError, match="prompt is empty"):
        autoregressive(target, [[1], []], max_new_tokens=2)
    with pytest.raises(ValueError, match=f"prompt id {VOCAB} is outside"):
        autoregressive(target, [[1], [VOCAB]], max_new_tokens=2)


def test_one_unseeded_row_leaves_the_others_as_they_are(tiny):
    # vllm-project/vllm #11123: one request without a seed corrupted the whole batch.
    target = tiny()
    options = {"max_new_tokens": 10}
    rows = autoregressive(target, PROMPTS[:3], generator=[seeded(1), None, seeded(2)], **options)
    for row, seed in ((0, 1), (2, 2)):
        assert rows[row].ids == autoregressive(target, PROMPTS[row], generator=seeded(seed), **options).ids
