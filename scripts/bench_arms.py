"""What the benchmarks share: arms that are timed in pairs, and ratios with their intervals."""

import time

import numpy as np
import torch

from specnb.probs import Sampling
from specnb.sampler import speculative

TOKENS = 32
GREEDY, AT_ONE = Sampling(temperature=0), Sampling(temperature=1.0)


def interval(values, statistic=lambda x: np.exp(np.mean(np.log(x))), resamples=4000):
    """(value, low, high): a statistic, by default the geometric mean, with its 95 % bootstrap interval."""
    values = np.asarray(values, dtype=float)
    chosen = values[np.random.default_rng(0).integers(len(values), size=(resamples, len(values)))]
    low, high = np.percentile([statistic(x) for x in chosen], [2.5, 97.5])
    return float(statistic(values)), float(low), float(high)


def row(name, measured, bar=None, *, at_least=True):
    """A line of the table: the end of the interval that must clear the bar is the low one for `at_least`.

    Without a bar it is shown and nothing is asked of it.
    """
    value, low, high = (round(float(number), 4) for number in measured)
    line = {"name": name, "value": value, "low": low, "high": high}
    if bar is None:
        return {**line, "bar": None, "holds": None}
    holds = low >= bar if at_least else high <= bar
    return {**line, "bar": f"{'>=' if at_least else '<='} {bar:g}", "holds": bool(holds)}


def paired_ratio(arms, prompts, repeats):
    """Run both arms on every prompt in turn, the order swapped each time; returns the ratios first / second.

    An arm is a function of a prompt that returns a cost or rate; the first call of each is thrown away.
    """
    for arm in arms:
        arm(prompts[0])
    ratios = []
    for turn in range(repeats):
        for index, prompt in enumerate(prompts):
            order = (0, 1) if (turn + index) % 2 == 0 else (1, 0)
            measured = {which: arms[which](prompt) for which in order}
            ratios.append(measured[0] / measured[1])
    return ratios


def ours(target, drafter, gamma, sampling, figure, seed=0):
    def run(ids):
        began = time.perf_counter()
        generation = speculative(
            target,
            drafter,
            ids,
            gamma=gamma,
            max_new_tokens=TOKENS,
            sampling=sampling,
            eos_ids=target.eos_ids,
            generator=torch.Generator().manual_seed(seed),
        )
        return figure(time.perf_counter() - began, len(generation.ids), len(generation.trace.rounds))

    return run


def theirs(target, figure, **options):
    """transformers' `generate()` on the same weights; rounds are the target's forwards."""
    calls = []
    target.model.register_forward_hook(lambda *_: calls.append(1))

    def run(ids):
        calls.clear()
        began = time.perf_counter()
        with torch.inference_mode():
            out = target.model.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                max_new_tokens=TOKENS,
                pad_token_id=0,
                **options,
            )
        return figure(time.perf_counter() - began, out.shape[1] - len(ids), len(calls))

    return run


def tokens_per_sec(seconds, tokens, rounds):
    return tokens / seconds


def sec_per_round(seconds, tokens, rounds):
    return seconds / rounds


def random_draft(target):
    """Two random layers of width 192 over the target's vocabulary: what a draft costs, whatever it accepts."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=target.vocab_size,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=3,
        max_position_embeddings=2048,
        eos_token_id=sorted(target.eos_ids),
    )
    return LlamaForCausalLM(config).to(target.model.dtype)
