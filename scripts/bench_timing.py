"""The benchmark of the timing laboratory: ceilings, predictions, transformers with the same draft, adaptive lengths."""

import copy
import math
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
from bench_arms import AT_ONE, GREEDY, TOKENS, interval, ours, paired_ratio, row, theirs, tokens_per_sec
from rich.progress import track

from specnb.drafters import FirstOf, PromptLookup
from specnb.drafters.adaptive import CostAware, EarlyStop
from specnb.measure import summary, sweep
from specnb.measure.compare import compare
from specnb.measure.costs import cost_curve
from specnb.measure.prompts import load_prompts
from specnb.models import load_pair
from specnb.rule import verify_unchecked
from specnb.sampler import rounds, speculative

GAMMAS = range(1, 9)
CONTEXT = 128  # Tokens in the cache where costs are measured: about the middle of the prompts' answers.


def suite(once):
    """Rows one by one; what is finished is kept."""
    target, drafter, tokenizer = load_pair()
    prompts = [prompt.encode(tokenizer) for prompt in load_prompts(limit=14)]
    yield from ceilings(once, target, drafter, prompts)
    yield from against_generate(once, target, drafter, prompts)
    yield from cost_aware(once, target, drafter, prompts)
    yield from repeated_sweeps(once, target, drafter)


# ------------------------------------------------------------------------------------------------- the ceiling


def ceilings(once, target, drafter, prompts, gamma=4):
    """Achieved over possible: the time that bare forwards of the same widths take, over that of whole rounds.

    Only rounds with a full block count, the first, with its prefill, left out; each is followed by its bare forwards.
    """
    for title, sampling, bar in (("greedy", GREEDY, 0.95), ("T=1", AT_ONE, 0.90)):
        name = f"tokens/s over the ceiling of bare forwards, gamma {gamma}, {title}"
        ratios = once(name, partial(over_the_ceiling, target, drafter, [prompts[0], *prompts], gamma, sampling))
        yield row(name, interval(ratios[1:]), bar)


def over_the_ceiling(target, drafter, prompts, gamma, sampling):
    """Of each prompt: seconds of bare forwards over those of the rounds they stand beside."""
    ratios = []
    for index, ids in enumerate(track(prompts, description="ceiling")):
        generator = torch.Generator().manual_seed(index)
        pairs = [
            (bare_round(target, drafter.model, gamma), r.total_sec, r.num_drafted)
            for r in rounds(
                target, drafter, ids, gamma=gamma, max_new_tokens=2 * TOKENS, sampling=sampling, generator=generator
            )
        ]
        bare, whole, _ = np.array([pair for pair in pairs[1:] if pair[-1] == gamma]).sum(0)
        ratios.append(bare / whole)
    return ratios


def bare_round(target, draft, gamma):
    """Seconds of gamma draft steps and one verification where the caches stand, taken back; no rule, no sampling."""
    ids = torch.randint(target.vocab_size, (1, gamma + 1))
    lengths = target.length, draft.length
    began = time.perf_counter()
    for _ in range(gamma):
        draft.forward(ids[:, :1], num_logits=1)
    target.forward(ids, num_logits=gamma + 1)
    seconds = time.perf_counter() - began
    for model, length in zip((target, draft), lengths, strict=True):
        model.rollback(length)
    return seconds


# --------------------------------------------------------------------------------------- generate(), same draft


class ScatteredHead(torch.nn.Module):
    """A trimmed output head with the whole vocabulary's shape: -inf for what it cannot propose."""

    def __init__(self, head, output_ids, vocab_size):
        super().__init__()
        self.head, self.output_ids, self.vocab_size = head, output_ids, vocab_size

    def forward(self, hidden):
        kept = self.head(hidden)
        logits = kept.new_full((*kept.shape[:-1], self.vocab_size), -torch.inf)
        logits[..., self.output_ids] = kept
        return logits


def as_assistant(draft, gamma):
    """The shipped draft as a model that `generate(assistant_model=...)` takes: the same weights, constant length."""
    model = copy.copy(draft.model)
    model._modules = {
        **draft.model._modules,
        "lm_head": ScatteredHead(draft.model.lm_head, draft.output_ids, draft.vocab_size),
    }
    model.generation_config = copy.deepcopy(draft.model.generation_config)
    model.generation_config.update(
        num_assistant_tokens=gamma, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
    )
    return model


def against_generate(once, target, drafter, prompts):
    logs = []
    for gamma in (2, 4, 8):
        for name, sampling, options in (
            ("greedy", GREEDY, {"do_sample": False}),
            ("T=1", AT_ONE, {"do_sample": True, "top_k": 0, "temperature": 1.0}),
        ):
            arms = (
                ours(target, drafter, gamma, sampling, tokens_per_sec),
                theirs(target, tokens_per_sec, assistant_model=as_assistant(drafter.model, gamma), **options),
            )
            title = f"tokens/s over generate() with the same draft, gamma {gamma}, {name}"
            ratios = once(title, partial(paired_ratio, arms, prompts[:7], 2 if sampling is GREEDY else 4))
            logs.append(np.log(ratios))
            yield row(title, interval(ratios))
    rng = np.random.default_rng(0)
    resampled = [np.mean([rng.choice(part, len(part)).mean() for part in logs]) for _ in range(4000)]
    low, high = np.exp(np.percentile(resampled, [2.5, 97.5]))
    mean = math.exp(np.mean([part.mean() for part in logs]))
    yield row("geometric mean of these six", (mean, low, high), 1.05)


# ----------------------------------------------------------------------------------------------- adaptive length


class WithItsWork:
    """A model for `cost_curve` whose forward is timed with what a round does with its logits."""

    def __init__(self, model, forward):
        self.model, self.forward = model, forward

    def __getattr__(self, name):
        return getattr(self.model, name)


def costs(target, drafter, sampling):
    """(c, [v(0), v(1), ...]) by `step_seconds`."""
    return ratios_of(step_seconds(target, drafter, sampling, repeats=10))


def ratios_of(seconds):
    draft_sec, *verify_sec = seconds
    return draft_sec / verify_sec[0], [sec / verify_sec[0] for sec in verify_sec]


def step_seconds(target, drafter, sampling, repeats):
    """Seconds of a draft step, then of verifying 0, 1, ... drafts, one more than is drafted; at `CONTEXT` tokens.

    Draws and the rule are part of them. What the rule is given is made up, for it does the same work whatever it
    accepts.
    """

    def draft(ids, num_logits):
        prefix = [0] * drafter.model.length + ids[0].tolist()
        return drafter.propose([prefix], [1], sampling, uniforms, target).probs

    def verify(ids, num_logits):
        probs = sampling.probs(target.forward(ids, num_logits).logits)
        verify_unchecked(probs, probs[:, 1:], ids[:, ids.shape[1] - num_logits + 1 :], uniforms([num_logits]))
        return probs

    widths, options = range(1, GAMMAS[-1] + 3), {"context_lengths": [CONTEXT], "repeats": repeats}
    verified = cost_curve(WithItsWork(target, verify), widths, **options).sec
    drafted = cost_curve(WithItsWork(drafter.model, draft), [1], **options).sec
    return [drafted[0], *verified]


def uniforms(counts):
    return torch.rand(1, max(counts), dtype=torch.float64)


def reliability_of(target, drafter, prompts, sampling, gamma=4):
    """Accepted drafts over the confidence they had, over all tests but those of the last of a full block."""
    blocks, confidence, accepted = [], 0.0, 0

    def listen(block):
        if len(block) == 1:
            blocks.append(block)  # It grows while its block is drafted.
        return False

    for index, ids in enumerate(prompts):
        blocks.clear()
        trace = speculative(
            target, EarlyStop(drafter.model, listen), ids, gamma=gamma, max_new_tokens=TOKENS, sampling=sampling,
            generator=torch.Generator().manual_seed(index),
        ).trace  # fmt: skip
        for r, block in zip([r for r in trace.rounds if r.num_drafted > 1], blocks, strict=True):
            seen = block[: r.num_tested]
            confidence, accepted = confidence + sum(seen), accepted + min(r.num_accepted, len(seen))
    return accepted / confidence


def cost_aware(once, target, drafter, prompts):
    """The cost-aware rule over the best constant length; both are fitted to the first prompts, quoted on the others."""
    for title, sampling in (("greedy", GREEDY), ("T=1", AT_ONE)):
        work = partial(over_the_best_constant, target, drafter, prompts[:7], prompts[7:], sampling)
        best, cost_ratio, reliability, ratios = once(f"cost-aware length, {title}", work)
        name = (
            f"cost-aware length over constant gamma {best}, {title} (c {cost_ratio:.2f}, reliability {reliability:.2f})"
        )
        yield row(name, interval(ratios), 0.97)


def over_the_best_constant(target, drafter, fitted_on, quoted_on, sampling):
    """(best constant gamma, c, reliability, ratios of tokens/s) of the cost-aware rule and the best constant length."""
    cost_ratio, verify_cost = costs(target, drafter, sampling)
    rates = {}
    for gamma in (1, 2, 3, 4):
        arm = ours(target, drafter, gamma, sampling, tokens_per_sec)
        rates[gamma] = interval([arm(ids) for ids in fitted_on])[0]
    best = max(rates, key=rates.get)
    reliability = reliability_of(target, drafter, fitted_on, sampling)
    rule = EarlyStop(drafter.model, CostAware(cost_ratio, verify_cost, reliability))
    arms = (
        ours(target, rule, GAMMAS[-1], sampling, tokens_per_sec),
        ours(target, drafter, best, sampling, tokens_per_sec),
    )
    return best, float(cost_ratio), float(reliability), paired_ratio(arms, quoted_on, 8)


# ---------------------------------------------------------------------------------------------------- predictions


def predictions(once, num_prompts=14):
    """Predicted from alpha_hat, c and v(gamma) of the same run, against measured: speed-up of the decoding phase."""
    target, drafter, _ = load_pair()
    result, spent = once("sweep with costs", partial(sweep_with_costs, target, drafter, num_prompts))
    spent = dict(zip((GREEDY.temperature, AT_ONE.temperature), spent, strict=True))
    table = summary.by_arm(summary.frame(result))
    errors = {"v measured": [], "Theorem 3.8": []}
    measured = []
    for temperature, part in table[table.gamma > 0].groupby("temperature"):
        alpha = part.num_accepted.sum() / part.num_tested.sum()
        cost_ratio, verify_cost = ratios_of(np.median(spent[temperature], axis=0))
        for arm in part.itertuples():
            measured.append(arm.tokens_per_round / arm.round_cost)
            drafted = arm.num_drafted_later / arm.num_later_rounds  # last blocks are clipped
            emitted = (1 - alpha ** (drafted + 1)) / (1 - alpha)
            v = np.interp(drafted, range(len(verify_cost)), verify_cost)
            for which, cost in (("v measured", v), ("Theorem 3.8", 1.0)):
                errors[which].append(emitted / (drafted * cost_ratio + cost) / measured[-1] - 1)
            predicted = 1 + errors["v measured"][-1]
            yield row(f"predicted over measured speed-up, gamma {arm.gamma}, T={temperature:g}", (predicted,) * 3)
    measured = np.array(measured)
    for which, bars in (("v measured", (0.05, 0.10)), ("Theorem 3.8", (None, None))):
        found = np.array(errors[which])
        for statistic, what, bar in ((np.median, "median", bars[0]), (np.max, "worst", bars[1])):
            value = interval(np.abs(found), statistic)
            yield row(f"prediction with {which}: {what} absolute error", value, bar, at_least=False)
        explained = 1 - ((found * measured) ** 2).sum() / ((measured - measured.mean()) ** 2).sum()
        yield row(f"prediction with {which}: R squared", (explained,) * 3)


def sweep_with_costs(target, drafter, num_prompts):
    """(result of a sweep, step seconds at each temperature): the costs are measured before every prompt of the sweep.

    So a drift of the machine is in both.
    """
    spent = [], []

    def with_costs(steps):
        block = None
        for step in track(steps, description="sweep"):
            if step["block"] != block:
                block = step["block"]
                for kept, sampling in zip(spent, (GREEDY, AT_ONE), strict=True):
                    kept.append([float(sec) for sec in step_seconds(target, drafter, sampling, repeats=2)])
            yield step

    temperatures = [GREEDY.temperature, AT_ONE.temperature]
    return one_sweep(target, {drafter.model.name: drafter}, GAMMAS, temperatures, num_prompts, with_costs), spent


def one_sweep(target, drafters, gammas, temperatures, num_prompts, tracked=partial(track, description="sweep")):
    with tempfile.TemporaryDirectory() as folder:
        return sweep.run(
            target, drafters, load_prompts(limit=num_prompts), out=Path(folder) / "sweep.json", gammas=gammas,
            temperatures=temperatures, max_new_tokens=24, track=tracked,
        )  # fmt: skip


def repeated_sweeps(once, target, drafter):
    """Two runs of one sweep: does the 99.9 % interval of the difference of their best arms hold 0?"""
    drafters = {"lookup+draft": FirstOf(PromptLookup(min_ngram=2), drafter, caps=(None, 2)), "draft": drafter}
    again = partial(one_sweep, target, drafters, (1, 2, 4, 8), [0.0, 1.0], 14)
    first, second = (summary.frame(once(name, again)) for name in ("first sweep", "second sweep"))
    differences = compare(first, second, level=0.999)
    for temperature, part in differences.groupby("temperature"):
        best = part.loc[part.speedup_a.idxmax()]
        line = row(
            f"two sweeps, T={temperature:g}: difference of the speed-up of {best.drafter} gamma {best.gamma}, 99.9 %",
            (best.difference, best.low, best.high),
        )
        yield {**line, "bar": "contains 0", "holds": bool(not best.differs)}
