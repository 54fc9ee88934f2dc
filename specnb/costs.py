"""What a forward costs: time against new tokens and context, and the floor below which no forward can go.

It knows a `LanguageModel` and the clock. It does not know drafting or acceptance; random ids cost what others do. From
two curves come the c and v(gamma) of `specnb.theory`. Read `specnb.timing` before and notebook 08 beside it.
"""

import time

import numpy as np
import pandas as pd
import torch

from specnb.timing import synchronize

BAND = (20, 50, 80)  # Percentiles: a median, and a band that a few disturbed repeats do not move.


def cost_curve(model, widths, context_lengths=(64,), *, repeats=15, seed=0, track=iter):
    """Time of one forward of `widths` new tokens after `context_lengths` tokens in the cache.

    Parameters
    ----------
    model : LanguageModel
    widths, context_lengths : sequences of int, at least 1
    repeats : int
        Each goes once through all contexts, ascending, and in each through all widths in random order; one more, the
        first, warms up and is thrown away.
    track : callable
        Wraps the repeats, such as `rich.progress.track`.

    Returns
    -------
    DataFrame
        A line for each context and width: `context`, `width`, `sec` (median), `low_sec` and `high_sec` (20 and 80 %),
        `n`. Seconds are from the call until the logits are on the device, all of them asked for.

    Raises
    ------
    ValueError
        Where the longest context and the widest forward do not fit the model's context, before anything is timed.
    """
    widths, contexts = sorted(set(widths)), sorted(set(context_lengths))
    _check(model, widths, contexts, repeats)
    generator = torch.Generator().manual_seed(seed)
    seconds = {(context, width): [] for context in contexts for width in widths}
    for repeat in track(range(repeats + 1)):
        model.reset()
        for context in contexts:
            _timed_forward(model, context - model.length, 1, generator)
            for width in (widths[i] for i in torch.randperm(len(widths), generator=generator)):
                taken = _timed_forward(model, width, width, generator)
                model.rollback(context)
                if repeat:
                    seconds[context, width].append(taken)
    lines = []
    for (context, width), taken in seconds.items():
        low, median, high = np.percentile(taken, BAND)
        lines.append(
            {"context": context, "width": width, "sec": median, "low_sec": low, "high_sec": high, "n": repeats}
        )
    return pd.DataFrame(lines)


def _check(model, widths, contexts, repeats):
    if not widths or not contexts or min(widths[0], contexts[0], repeats) < 1:
        raise ValueError("widths, context_lengths and repeats must be at least 1")
    if model.context_length is not None and widths[-1] + contexts[-1] > model.context_length:
        raise ValueError(
            f"{contexts[-1]} tokens in the cache and {widths[-1]} new ones do not fit the context of "
            f"{model.context_length}"
        )


def _timed_forward(model, width, num_logits, generator):
    ids = torch.randint(model.vocab_size, (1, width), generator=generator).to(model.device)
    return _timed(lambda: model.forward(ids, num_logits=num_logits), model.device)


def _timed(work, device):
    synchronize(device)
    began = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - began


def floor(model, widths, context_length=64, *, rates=None):
    """Seconds that no forward of this `CausalLM` can undercut on this device: memory read, and operations done.

    Returns
    -------
    DataFrame
        `width`, `memory_sec` (weights and cached keys and values, each read once, at the bandwidth of a copy),
        `compute_sec` (two operations for each weight and new token, at the rate of a large product) and `floor_sec`,
        the larger. Attention's own operations are left out; at short contexts they are few.
    """
    rates = rates or device_rates(model.device, model.model.dtype)
    read, cached, multiplied = _sizes(model.model)
    lines = []
    for width in widths:
        memory = (read + cached * context_length) / rates["bytes_per_sec"]
        compute = 2 * multiplied * width / rates["operations_per_sec"]
        lines.append({"width": width, "memory_sec": memory, "compute_sec": compute, "floor_sec": max(memory, compute)})
    return pd.DataFrame(lines)


def device_rates(device, dtype, *, megabytes=256, size=2048, repeats=5):
    """Best of a few: bytes a second that a copy reads and writes, operations a second of a square product."""
    source = torch.ones(megabytes * 2**20 // 4, device=device)
    target, square = torch.empty_like(source), torch.ones(size, size, device=device, dtype=dtype)

    def best(work):
        return min([_timed(work, source.device) for _ in range(repeats + 1)][1:])  # The first warms up.

    return {
        "bytes_per_sec": 2 * source.nbytes / best(lambda: target.copy_(source)),
        "operations_per_sec": 2 * size**3 / best(lambda: square @ square),
    }


def _sizes(model):
    """(bytes of weights a step reads, bytes of keys and values per cached token, weights multiplied per new token)."""
    config = model.config.get_text_config()
    embedding = model.get_input_embeddings().weight
    tied = model.get_output_embeddings().weight is embedding
    weights = {
        id(p): p for p in model.parameters() if tied or p is not embedding
    }.values()  # Rows are picked, not read.
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    cached = 2 * config.num_hidden_layers * heads * head * embedding.element_size()
    return sum(p.nbytes for p in weights), cached, sum(p.numel() for p in weights if p.ndim > 1)
