"""What a forward costs: time against new tokens and context, and the floor below which no forward can go.

It knows a `LanguageModel` and the clock. It does not know drafting or acceptance; random ids cost what others do. From
two curves come the c and v(gamma) of `specnb.theory`. Read `specnb.timing` before and notebook 08 beside it.
"""

import time
import warnings

import numpy as np
import pandas as pd
import torch

from specnb.measure.memory import kv_bytes_per_token
from specnb.timing import recorded_event, synchronize

BAND = (20, 50, 80)  # Percentiles: a median, and a band that a few disturbed repeats do not move.


def cost_curve(model, widths, context_lengths=(64,), *, batch=1, repeats=15, replay=False, seed=0, track=iter):
    """Time of one forward of `widths` new tokens after `context_lengths` tokens in the cache.

    Parameters
    ----------
    model : LanguageModel
    widths, context_lengths : sequences of int, at least 1
    batch : int
        Rows of each forward: `widths` new tokens in every one of them.
    repeats : int
        Each goes once through all contexts, ascending, and in each through all widths in random order; one more, the
        first, warms up and is thrown away.
    replay : bool
        Also time each forward as the replay of a CUDA graph, in turn with the other: what the device needs when
        nothing waits for Python. For one row of a `CausalLM` on CUDA.
    track : callable
        Wraps the repeats, such as `rich.progress.track`, and may end them early, after two.

    Returns
    -------
    DataFrame
        A line for each context and width: `context`, `width`, `sec` (median), `low_sec` and `high_sec` (20 and 80 %),
        `n`, `graph_sec` (median; NaN without `replay`, or where the forward cannot be captured). `sec` is from the call
        until all logits are on the device, by events on CUDA, else by the host's clock; what it is above `graph_sec`
        is launch overhead.

    Raises
    ------
    ValueError
        Where the longest context and the widest forward do not fit the model's context, and for a replay on another
        device than CUDA or of a batch, before anything is timed.
    """
    widths, contexts = sorted(set(widths)), sorted(set(context_lengths))
    _check(model, widths, contexts, batch, repeats, replay)
    generator = torch.Generator().manual_seed(seed)
    seconds = {(context, width): ([], []) for context in contexts for width in widths}
    recorded = {(c, w): _record(model, c, w, generator) for c, w in seconds} if replay else {}
    for repeat in track(range(repeats + 1)):
        model.reset(*([] if batch == 1 else [batch]))
        for before, context in zip([0, *contexts], contexts, strict=False):
            # As far as the widest forward will read, and back: none that is timed finds the cache full.
            _timed_forward(model, batch, context - before + widths[-1], 1, generator)
            model.rollback(context if batch == 1 else [context] * batch)
            for width in (widths[i] for i in torch.randperm(len(widths), generator=generator)):
                taken = _timed_forward(model, batch, width, width, generator)
                model.rollback(context if batch == 1 else [context] * batch)
                graph, _ = recorded.get((context, width), (None, None))
                replayed = np.nan if graph is None else _timed(graph.replay, model.device)
                if repeat:
                    for kept, sec in zip(seconds[context, width], (taken, replayed), strict=True):
                        kept.append(sec)
    lines = []
    for (context, width), (taken, replayed) in seconds.items():
        low, median, high = np.percentile(taken, BAND)
        line = {"context": context, "width": width, "sec": median, "low_sec": low, "high_sec": high, "n": len(taken)}
        lines.append({**line, "graph_sec": np.median(replayed)})
    return pd.DataFrame(lines)


def _check(model, widths, contexts, batch, repeats, replay):
    if not widths or not contexts or min(widths[0], contexts[0], batch, repeats) < 1:
        raise ValueError("widths, context_lengths, batch and repeats must be at least 1")
    if model.context_length is not None and widths[-1] + contexts[-1] > model.context_length:
        raise ValueError(
            f"{contexts[-1]} tokens in the cache and {widths[-1]} new ones do not fit the context of "
            f"{model.context_length}"
        )
    if replay and model.device.type != "cuda":
        raise ValueError(f"only a forward on CUDA can be replayed as a graph, the model is on {model.device.type}")
    if replay and batch > 1:
        raise ValueError(f"the cache of a batch cannot be replayed as a graph; batch is {batch}, give 1 or no replay")


def _record(model, context, width, generator):
    """(CUDA graph of one forward, what it reads and must be kept beside it); (None, None) where it cannot be captured.

    Each starts from a cache of its own, for a recorded forward is not run, and leaves keys that were never computed.
    """
    model.reset()
    _timed_forward(model, 1, context, 1, generator)
    ids = _random_ids(model, 1, width, generator)
    model.forward(ids, num_logits=width)  # The first call of a shape tunes and allocates.
    model.rollback(context)
    reads, graph = (ids, *model.cache_tensors), torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(model.device)):
            model.forward(ids, num_logits=width)
    except RuntimeError as error:
        warnings.warn(f"a forward of {width} tokens cannot be captured in a CUDA graph: {error}", stacklevel=3)
        graph = reads = None
    model.reset()
    return graph, reads


def _random_ids(model, batch, width, generator):
    return torch.randint(model.vocab_size, (batch, width), generator=generator).to(model.device)


def _timed_forward(model, batch, width, num_logits, generator):
    ids = _random_ids(model, batch, width, generator)
    return _timed(lambda: model.forward(ids, num_logits=num_logits), model.device)


def _timed(work, device):
    synchronize(device)
    if device.type == "cuda":
        began = recorded_event(device)
        work()
        ended = recorded_event(device)
        ended.synchronize()
        return began.elapsed_time(ended) / 1000  # CUDA events count milliseconds.
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
    embedding = model.get_input_embeddings().weight
    tied = model.get_output_embeddings().weight is embedding
    # Of an embedding that is no output head, a few rows are picked and the rest is not read.
    weights = {id(p): p for p in model.parameters() if tied or p is not embedding}.values()
    cached = kv_bytes_per_token(model, str(embedding.dtype).removeprefix("torch."))
    return sum(p.nbytes for p in weights), cached, sum(p.numel() for p in weights if p.ndim > 1)
