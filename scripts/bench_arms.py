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
    def generate(ids):
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
        return len(generation.ids)

    return _arm(target, figure, generate)


def theirs(target, figure, **options):
    """transformers' `generate()` on the same weights."""

    def generate(ids):
        with torch.inference_mode():
            out = target.model.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                max_new_tokens=TOKENS,
                pad_token_id=0,
                **options,
            )
        return out.shape[1] - len(ids)

    return _arm(target, figure, generate)


def _arm(target, figure, generate):
    """An arm of `generate`, which returns how many tokens it made: `figure(seconds, decoding, tokens, rounds)`.

    A round has one forward of the target; the first reads the prompt, and `decoding` are the seconds after it.
    """
    forwards = []

    def run(ids):
        forwards.clear()
        with target.model.register_forward_hook(lambda *_: forwards.append(time.perf_counter())):
            began = time.perf_counter()
            tokens = generate(ids)
            ended = time.perf_counter()
        return figure(ended - began, ended - forwards[0], tokens, len(forwards))

    return run


def tokens_per_sec(seconds, decoding, tokens, rounds):
    return tokens / seconds


def sec_per_round(seconds, decoding, tokens, rounds):
    """Of the rounds that read no prompt, in which both arms do the same."""
    return decoding / (rounds - 1)


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
