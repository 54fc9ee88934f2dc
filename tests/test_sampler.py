from collections import Counter
from fractions import Fraction

import pytest
import torch

from specnb import exact, sampler
from specnb.drafters import Draft, Drafter, FirstOf, ModelDrafter, PromptLookup
from specnb.drafters.adaptive import Heuristic
from specnb.gof import chi_square
from specnb.models import CausalLM, TableModel
from specnb.probs import Sampling
from specnb.sampler import autoregressive, rounds, speculative
from tests.conftest import VOCAB, seeded, tiny_model
from tests.test_exact import draft_by_prefix, target_by_prefix

GREEDY = Sampling(temperature=0)


class Fixed(Drafter):
    """Proposes what plain decoding would emit for the first `right` tokens of a block, then something else."""

    def __init__(self, text, right):
        self.text, self.right = text, right

    def propose(self, prefixes, gammas, sampling, draw, target):
        (prefix_ids,), (gamma,) = prefixes, gammas
        ahead = self.text[len(prefix_ids) : len(prefix_ids) + gamma]
        ids = [x if i < self.right else (x + 1) % target.vocab_size for i, x in enumerate(ahead)]
        return Draft.one_hot([ids], target)


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "GPTNeoX"])
@pytest.mark.parametrize("gamma", range(9))
def test_greedy_speculation_equals_plain_decoding_in_float64(tiny, family, gamma):
    target, prompt = tiny(family), [3, 1, 4, 1, 5]
    plain = autoregressive(target, prompt, max_new_tokens=40, sampling=GREEDY)
    drafters = [ModelDrafter(tiny(family, layers=1, seed=1)), ModelDrafter(CausalLM(target.model)), PromptLookup()]
    for drafter in drafters:
        generation = speculative(target, drafter, prompt, gamma=gamma, max_new_tokens=40, sampling=GREEDY)
        assert generation.ids == plain.ids, type(drafter).__name__
    for right in range(gamma + 1):
        drafter = Fixed(prompt + plain.ids, right)
        generation = speculative(target, drafter, prompt, gamma=gamma, max_new_tokens=40, sampling=GREEDY)
        assert generation.ids == plain.ids
        assert all(r.num_accepted == min(right, r.num_drafted) for r in generation.trace.rounds)


def test_plain_decoding_equals_generate(tiny):
    target = tiny()
    ids = target.model.generate(
        torch.tensor([[3, 1, 4]]), attention_mask=torch.ones(1, 3), max_new_tokens=30, do_sample=False, pad_token_id=0
    )
    assert autoregressive(target, [3, 1, 4], max_new_tokens=30, sampling=GREEDY).ids == ids[0, 3:].tolist()


@pytest.mark.parametrize("right", range(5))
def test_cache_lengths_after_any_number_of_accepted_drafts(tiny, right):
    weights = tiny_model("Llama")
    target, draft = CausalLM(weights), CausalLM(tiny_model("Llama", seed=1))
    text = [1, 2, 3, *autoregressive(target, [1, 2, 3], max_new_tokens=40, sampling=GREEDY).ids]

    class Both(Fixed):
        inner = ModelDrafter(draft)

        def begin(self, batch):
            self.inner.begin(batch)

        def propose(self, *arguments):
            self.inner.propose(*arguments)
            return super().propose(*arguments)

        def observe(self, *arguments):
            self.inner.observe(*arguments)

    committed = 3
    for happened in rounds(target, Both(text, right), [1, 2, 3], gamma=4, max_new_tokens=30, sampling=GREEDY):
        committed += happened.num_emitted
        assert target.length == committed - 1  # the newest token was never fed
        assert draft.length <= target.length
        # After a full block the draft lacks its own last token too, which it never fed.
        assert draft.length == committed - 1 - (happened.num_accepted == happened.num_drafted)
        if committed > 25:
            break


@pytest.mark.parametrize("gamma", [0, 1, 3, 5])
@pytest.mark.parametrize("extra", [0, 1, 2, "gamma", "gamma+1", "gamma+2"])
def test_exact_lengths_for_small_budgets(tiny, gamma, extra):
    # feifeibear overshoots by up to gamma; romsto divides 0 by 0 at 1 and 2.
    budget = {"gamma": gamma, "gamma+1": gamma + 1, "gamma+2": gamma + 2}.get(extra, extra)
    weights = tiny_model("Llama")
    generation = speculative(
        CausalLM(weights), ModelDrafter(CausalLM(weights)), [1], gamma=gamma, max_new_tokens=budget, generator=seeded()
    )
    assert len(generation.ids) == budget and generation.stop_reason == "length"
    assert sum(r.num_emitted for r in generation.trace.rounds) == budget
    assert budget or not generation.trace.rounds


@pytest.mark.parametrize("position", range(9))
@pytest.mark.parametrize("gamma", [0, 1, 4, 8])
def test_nothing_follows_the_first_end_of_sequence_wherever_it_falls(tiny, gamma, position):
    # huggingface/transformers #47912: the whole block was appended, then only its last token checked.
    weights = tiny_model("Llama")
    target, draft = CausalLM(weights), CausalLM(weights)
    plain = autoregressive(target, [1, 2, 3], max_new_tokens=12, sampling=GREEDY).ids
    eos = plain[position]
    wanted = plain[: plain.index(eos) + 1]
    for drafter in (ModelDrafter(draft), Fixed([1, 2, 3, *plain, 0, 0], 1), PromptLookup()):
        seen = [
            token
            for happened in rounds(
                target, drafter, [1, 2, 3], gamma=gamma, max_new_tokens=12, sampling=GREEDY, eos_ids=[eos, 999]
            )
            for token in happened.ids
        ]
        assert seen == wanted  # what a streamer sees, too
        assert target.length in (2 + len(wanted), 3 + len(wanted))
    generation = speculative(
        target, ModelDrafter(draft), [1, 2, 3], gamma=gamma, max_new_tokens=12, sampling=GREEDY, eos_ids=iter([eos])
    )
    assert generation.ids == wanted and generation.stop_reason == "eos"
    assert sum(r.num_emitted for r in generation.trace.rounds) == len(wanted)


def test_the_end_of_sequence_wins_over_the_length(tiny):
    # sgl-project/sglang #31599, and its mirror: an end beyond the budget is "length".
    target = tiny()
    plain = autoregressive(target, [1, 2, 3], max_new_tokens=8, sampling=GREEDY).ids
    first = plain.index(plain[-1])
    at_limit = autoregressive(target, [1, 2, 3], max_new_tokens=first + 1, sampling=GREEDY, eos_ids=[plain[-1]])
    assert (at_limit.stop_reason, len(at_limit.ids)) == ("eos", first + 1)
    before = autoregressive(target, [1, 2, 3], max_new_tokens=first, sampling=GREEDY, eos_ids=[plain[-1]])
    assert (before.stop_reason, len(before.ids)) == ("length", first)


def test_end_of_sequence_ids_in_the_prompt_end_nothing(tiny):
    generation = autoregressive(tiny(), [1, 2, 1], max_new_tokens=3, sampling=GREEDY, eos_ids=[2])
    assert generation.ids


@pytest.mark.parametrize(("target_window", "draft_window"), [(16, 64), (64, 16), (16, 14), (16, 8)])
def test_a_block_is_clipped_to_both_context_windows(target_window, draft_window):
    # turboderp-org/exllamav2 #274: 4092 + 5 > 4096.
    target = CausalLM(tiny_model("GPTNeoX", max_position_embeddings=target_window))
    draft = CausalLM(tiny_model("GPTNeoX", layers=1, max_position_embeddings=draft_window))
    widest = []
    for model in (target, draft):
        forward = model.forward
        model.forward = lambda ids, *arguments, m=model, f=forward: (
            widest.append((m is target, m.length + ids.shape[1])) or f(ids, *arguments)
        )
    prompt, budget = list(range(12)), target_window - 11 if target_window == 16 else 30
    plain = autoregressive(target, prompt, max_new_tokens=budget, sampling=GREEDY)
    drafted = speculative(target, ModelDrafter(draft), prompt, gamma=5, max_new_tokens=budget, sampling=GREEDY)
    assert drafted.ids == plain.ids and len(plain.ids) == budget
    assert max(n for is_target, n in widest if is_target) <= target_window
    assert max((n for is_target, n in widest if not is_target), default=0) <= draft_window
    with pytest.raises(ValueError, match=f"context of {target_window}"):
        autoregressive(target, prompt, max_new_tokens=target_window, sampling=GREEDY)


def test_the_joint_law_of_a_sequence_is_the_target_s():
    """Three tokens over several rounds, prefix-dependent pair, against exact fractions: n = 6000, level .001.

    A sampler that reuses the acceptance uniform, looks at the wrong row or loses a token moves this law.
    """
    target, draft = TableModel(target_by_prefix, 3), TableModel(draft_by_prefix, 3)
    law = exact.sequence_law(target_by_prefix, 4, prefix=(0,))
    generator = seeded(7)
    seen = Counter(
        tuple(speculative(target, ModelDrafter(draft), [0], gamma=2, max_new_tokens=4, generator=generator).ids)
        for _ in range(6000)
    )
    assert set(seen) <= set(law)
    keys = sorted(law)
    result = chi_square([seen[key] for key in keys], [law[key] for key in keys])
    assert result.verdict == "pass", f"{result}; one false alarm in 1000 seeds"
    # The same counts must reject a wrong sampler's law: resampling from the target instead of the residual.
    wrong = _law_without_residual()
    assert chi_square([seen[key] for key in keys], [wrong.get(key, 0) for key in keys]).verdict == "fail"


def _law_without_residual():
    from_the_target = exact.rule_of(
        extra=lambda target_rows, draft_rows, ids, num: target_rows[-1] if num == len(ids) else target_rows[num]
    )
    law = {}
    shifted = lambda model: lambda prefix: model((0, *prefix))  # noqa: E731
    wrong = exact.round_law(shifted(target_by_prefix), shifted(draft_by_prefix), 2, from_the_target)
    for tokens, mass in wrong.items():
        for x, prob in enumerate(target_by_prefix((0, *tokens))):
            law[(*tokens, x)] = law.get((*tokens, x), Fraction(0)) + mass * prob
    return law


def test_the_first_token_of_a_real_transformer_has_the_target_s_law(tiny):
    target, draft = tiny(), tiny(seed=5)
    sampling = Sampling(temperature=0.3)
    logits = target.forward(torch.tensor([[1, 2, 3]]), num_logits=1).logits
    probs = sampling.probs(logits)[0, 0]
    generator = seeded(11)
    counts = torch.zeros(VOCAB)
    for _ in range(1500):
        ids = speculative(
            target, ModelDrafter(draft), [1, 2, 3], gamma=2, max_new_tokens=3, sampling=sampling, generator=generator
        ).ids
        counts[ids[0]] += 1
    assert chi_square(counts, probs).verdict == "pass", "n = 1500, one false alarm in 1000 seeds"
    draft_probs = sampling.probs(draft.forward(torch.tensor([[1, 2, 3]]), num_logits=1).logits)[0, 0]
    assert chi_square(counts, draft_probs).verdict == "fail"


def test_the_repetition_penalty_sees_each_candidate_s_own_prefix(tiny):
    sampling = Sampling(temperature=0, repetition_penalty=1.8)
    target = tiny()
    plain = autoregressive(target, [1, 2, 3], max_new_tokens=30, sampling=sampling)
    unpenalised = autoregressive(target, [1, 2, 3], max_new_tokens=30, sampling=GREEDY)
    assert plain.ids != unpenalised.ids
    for drafter in (ModelDrafter(CausalLM(target.model)), Fixed([1, 2, 3, *plain.ids], 4)):
        drafted = speculative(target, drafter, [1, 2, 3], gamma=4, max_new_tokens=30, sampling=sampling)
        assert drafted.ids == plain.ids and drafted.trace.accepted_fraction == 1


def test_seeds(tiny):
    # vllm-project/vllm #6038 and the unseeded neighbours.
    target, drafter = tiny(), ModelDrafter(tiny(seed=1))
    before = torch.random.get_rng_state()

    def run(generator=None):
        return speculative(target, drafter, [1, 2], gamma=3, max_new_tokens=25, generator=generator).ids

    assert run(seeded(0)) == run(seeded(0)) != run(seeded(1))
    assert run() != run()
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_round_without_drafts_consumes_the_draws_of_a_plain_step(tiny):
    """Lookup that never matches is plain decoding, to the last id, at any temperature."""

    class Never(PromptLookup):
        def lookup(self, ids, gamma):
            return []

    target = tiny()
    plain = autoregressive(target, [1, 2], max_new_tokens=20, generator=seeded(4))
    assert speculative(target, Never(), [1, 2], gamma=4, max_new_tokens=20, generator=seeded(4)).ids == plain.ids


def test_the_same_objects_serve_many_runs_even_after_one_was_abandoned(tiny):
    # ml-explore/mlx-lm PR #1528: a generation closed early left a corrupt cache.
    target, drafter = tiny(), ModelDrafter(tiny(seed=1))
    wanted = autoregressive(target, [1, 2], max_new_tokens=20, sampling=GREEDY).ids
    abandoned = rounds(target, drafter, [5, 6, 7], gamma=4, max_new_tokens=20, sampling=GREEDY)
    next(abandoned), next(abandoned)
    abandoned.close()
    assert speculative(target, drafter, [1, 2], gamma=4, max_new_tokens=20, sampling=GREEDY).ids == wanted

    forward, calls = target.forward, []
    target.forward = lambda *a, **k: forward(*a, **k) if calls.append(1) or len(calls) < 3 else 1 / 0
    with pytest.raises(ZeroDivisionError):
        speculative(target, drafter, [5, 6], gamma=4, max_new_tokens=20, sampling=GREEDY)
    target.forward = forward
    assert speculative(target, drafter, [1, 2], gamma=4, max_new_tokens=20, sampling=GREEDY).ids == wanted


def test_every_gamma_drafts_what_it_says_in_any_order(tiny):
    # huggingface/transformers PR #28759: an adaptive schedule persisted from call to call.
    weights = tiny_model("Llama")
    target, drafter = CausalLM(weights), ModelDrafter(CausalLM(weights))

    def drafted(gamma):
        generation = speculative(target, drafter, [1], gamma=gamma, max_new_tokens=40, sampling=GREEDY)
        return [r.num_drafted for r in generation.trace.rounds[:-1]]

    forwards = {gamma: drafted(gamma) for gamma in range(1, 9)}
    assert forwards == {gamma: drafted(gamma) for gamma in range(8, 0, -1)}
    assert all(set(lengths) == {gamma} for gamma, lengths in forwards.items())


def test_a_list_of_one_prompt_gives_a_list_of_one_generation(tiny):
    target = tiny()
    alone = autoregressive(target, [1, 2], max_new_tokens=5, generator=seeded(1))
    (listed,) = autoregressive(target, [[1, 2]], max_new_tokens=5, generator=[seeded(1)])
    assert listed.ids == alone.ids == autoregressive(
        target, torch.tensor([1, 2]), max_new_tokens=5, generator=seeded(1)
    ).ids  # fmt: skip
    assert (
        autoregressive(target, [1, 2], max_new_tokens=5, generator=seeded(1), eos_ids=torch.tensor([alone.ids[0]])).ids
        == alone.ids[:1]
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_ids": []}, "prompt is empty"),
        ({"prompt_ids": [[]]}, "prompt is empty"),
        ({"prompt_ids": [VOCAB]}, f"prompt id {VOCAB} is outside"),
        ({"prompt_ids": [-1]}, "prompt id -1"),
        ({"gamma": -1}, "gamma must be"),
        ({"gamma": 2.5}, "gamma must be"),
        ({"max_new_tokens": -1}, "max_new_tokens must be"),
        ({"drafter": None}, "no drafter"),
        ({"max_new_tokens": 1000}, "do not fit the target's context of 128"),
    ],
)
def test_bad_input_is_refused_before_any_work(tiny, options, message):
    target = tiny()
    target.forward = None
    arguments = {"prompt_ids": [1], "gamma": 2, "max_new_tokens": 4, "drafter": PromptLookup(), **options}
    with pytest.raises(ValueError, match=message):
        speculative(target, arguments.pop("drafter"), arguments.pop("prompt_ids"), **arguments)


def test_logits_that_are_not_finite_are_an_error_and_not_a_token(tiny):
    target = tiny()
    target.model.lm_head.weight.data[3] = float("nan")
    with pytest.raises(ValueError, match="after 2 tokens are not finite"):
        autoregressive(target, [1, 2], max_new_tokens=4)


def test_each_round_asks_for_gamma_plus_one_rows_whatever_the_prompt(tiny):
    target, asked = tiny(), []
    forward = target.forward
    target.forward = lambda ids, num_logits, *more: asked.append(num_logits) or forward(ids, num_logits, *more)
    speculative(target, ModelDrafter(tiny(seed=1)), [1] * 90, gamma=3, max_new_tokens=20, generator=seeded())
    assert max(asked) == 4 and asked[0] == 4


def test_phases_sum_to_the_wall_time(tiny):
    import time

    target, drafter = tiny(layers=6), ModelDrafter(tiny())
    began = time.perf_counter()
    trace = speculative(target, drafter, [1, 2], gamma=3, max_new_tokens=60, generator=seeded()).trace
    wall = time.perf_counter() - began
    assert trace.total_sec == pytest.approx(trace.draft_sec + trace.verify_sec + trace.other_sec)
    assert trace.total_sec <= wall and trace.peak_memory_bytes is None


def runs_in_turn(first, second):
    """The texts of two generators of rounds, asked by turns; what one of them is refused with ends it."""
    texts, refused = [[], []], []
    going = [(0, first), (1, second)]
    while going:
        for which, happening in list(going):
            try:
                texts[which] += next(happening).ids
            except StopIteration:
                going.remove((which, happening))
            except RuntimeError as error:
                refused.append((which, str(error)))
                going.remove((which, happening))
    return texts, refused


@pytest.mark.parametrize("gamma", [0, 3])
def test_of_two_runs_in_turn_on_one_target_the_stale_one_is_refused_and_the_other_is_right(tiny, gamma):
    target, drafters = tiny(), [ModelDrafter(tiny(layers=1, seed=seed)) for seed in (1, 2)]
    options = {"gamma": gamma, "max_new_tokens": 12, "sampling": GREEDY}
    right = [speculative(target, drafters[0], prompt, **options).ids for prompt in ([1, 2], [4, 3])]
    first, second = (rounds(target, d, p, **options) for d, p in zip(drafters, ([1, 2], [4, 3]), strict=True))
    texts, refused = runs_in_turn(first, second)
    assert texts[1] == right[1] and texts[0] == right[0][: len(texts[0])]
    assert [which for which, _ in refused] == [0] and "another run has begun on the same target" in refused[0][1]


def shared(kind, draft):
    model = ModelDrafter(draft)
    return {"model": model, "first of": FirstOf(PromptLookup(), model), "heuristic": Heuristic(model)}[kind], model


@pytest.mark.parametrize("kind", ["model", "first of", "heuristic"])
def test_a_drafter_shared_by_two_runs_is_refused_to_the_stale_one(tiny, kind):
    """Whether it is the same drafter, a part of it, or another one around the same model."""
    targets, draft = (tiny(), tiny(seed=3)), tiny(layers=1, seed=1)
    options = {"gamma": 3, "max_new_tokens": 12, "sampling": GREEDY}
    plain = autoregressive(targets[1], [4, 3], max_new_tokens=12, sampling=GREEDY).ids
    outer, part = shared(kind, draft)
    for other in (outer, part, ModelDrafter(draft)):
        texts, refused = runs_in_turn(
            rounds(targets[0], outer, [1, 2, 1, 2], **options), rounds(targets[1], other, [4, 3], **options)
        )
        assert texts[1] == plain and [which for which, _ in refused] == [0]


def test_an_abandoned_run_writes_nothing_and_a_batch_or_a_bare_reset_makes_a_run_stale(tiny):
    target = tiny()
    options = {"max_new_tokens": 12, "sampling": GREEDY}
    plain = autoregressive(target, [4, 3], **options).ids
    abandoned = rounds(target, None, [1, 2], gamma=0, **options)
    next(abandoned)
    later = rounds(target, None, [4, 3], gamma=0, **options)
    text = [*next(later).ids]
    abandoned.close()
    assert text + [token for r in later for token in r.ids] == plain
    for meanwhile in (lambda: autoregressive(target, [[5], [6, 7]], **options), target.reset):
        stale = rounds(target, None, [1, 2], gamma=0, **options)
        next(stale)
        meanwhile()
        with pytest.raises(RuntimeError, match="finish one before the other begins"):
            next(stale)


def test_a_run_s_peak_memory_does_not_hold_the_caches_of_the_run_before(tiny, monkeypatch):
    target, drafter = tiny(), ModelDrafter(tiny(layers=1, seed=1))
    options = {"gamma": 2, "sampling": GREEDY}
    speculative(target, drafter, [1] * 60, max_new_tokens=4, **options)
    left = []
    held = lambda model: sum(tensor.numel() for tensor in model.cache_tensors)  # noqa: E731
    assert held(target) and held(drafter.model)
    monkeypatch.setattr(sampler, "reset_peak_memory", lambda *parts: left.append((held(target), held(drafter.model))))
    speculative(target, drafter, [1], max_new_tokens=4, **options)
    assert left == [(0, 0)]


def test_hidden_states_are_handed_out_only_where_they_are_asked_for(tiny):
    class Reads(PromptLookup):
        reads_hidden, widths = True, ()

        def observe(self, committed, num_accepted, scores):
            self.widths += (scores.hidden.shape,)

    target, drafter = tiny(), Reads()
    run = speculative(target, FirstOf(drafter), [1, 2, 1, 2], gamma=2, max_new_tokens=6, sampling=GREEDY)
    fed = [r.num_drafted + (4 if i == 0 else 1) for i, r in enumerate(run.trace.rounds)]
    assert drafter.widths[0] == (1, fed[0], 32) and len(drafter.widths) == len(run.trace.rounds)
    assert target.forward(torch.tensor([[3]]), 1).hidden is None
    with pytest.raises(ValueError, match="no hidden states"):
        speculative(TableModel(target_by_prefix, 3), Reads(), [0, 1, 0], gamma=2, max_new_tokens=4)


@pytest.mark.model
def test_greedy_speculation_on_the_real_model_in_float32(smollm2):
    """float32 on one prompt; bf16 is not owed equality, because rows of different widths round differently."""
    from specnb.models import load_pair

    wide, drafter, tokenizer = load_pair(device="cpu", dtype="float32")
    ids = tokenizer("one two three four one two three", add_special_tokens=False)["input_ids"]
    plain = autoregressive(wide, ids, max_new_tokens=24, sampling=GREEDY, eos_ids=wide.eos_ids)
    drafted = speculative(wide, drafter, ids, gamma=5, max_new_tokens=24, sampling=GREEDY, eos_ids=wide.eos_ids)
    assert drafted.ids == plain.ids and drafted.trace.tokens_per_round > 1
