"""What a GPU is asked for when one is at hand for a few minutes: `specnb sweep --suite gpu`.

It knows the shapes of published pairs of models, and builds them with random weights: a forward costs what it costs
whatever the weights are. It measures costs only; of acceptance such models say nothing. Read `specnb.measure.costs`
before.
"""

import json
import math
import time
from functools import partial
from itertools import chain

import pandas as pd
import torch

from specnb.measure import results
from specnb.measure.bounded import in_time
from specnb.measure.costs import cost_curve, floor
from specnb.measure.unfinished import Unfinished
from specnb.models import CausalLM, default_dtype
from specnb.timing import gpu_state, peak_memory_bytes, reset_peak_memory

SCHEMA, KIND = "specnb-costs/1", "costs"
ACCEPTANCE = "not measured: the weights are random, only costs are real"
LLAMA = {
    "model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8, "num_attention_heads": 32,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 500000.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}  # fmt: skip
QWEN = {"model_type": "qwen2", "max_position_embeddings": 32768, "rms_norm_eps": 1e-6}
# The config.json of each published model, as far as it decides what a forward costs.
SHAPES = {
    "Llama-3.1-8B": {
        **LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "tie_word_embeddings": False,
        "rope_parameters": {**LLAMA["rope_parameters"], "factor": 8.0},
    },
    "Llama-3.2-1B": {
        **LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "tie_word_embeddings": True,
        "rope_parameters": {**LLAMA["rope_parameters"], "factor": 32.0},
    },
    "Qwen2.5-7B": {
        **QWEN, "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "tie_word_embeddings": False,
    },
    "Qwen2.5-0.5B": {
        **QWEN, "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True,
    },
}  # fmt: skip
HOW = {"sec": "eager forwards", "graph_sec": "the same, replayed as CUDA graphs"}  # by column of the rows
PAIRS = (("Llama-3.1-8B", "Llama-3.2-1B"), ("Qwen2.5-7B", "Qwen2.5-0.5B"))  # (target, draft)
WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 17)
CONTEXTS = (128, 1024, 4096)


def random_model(shape, name, *, device, dtype=None):
    """A `CausalLM` of a config, with the initialisation of its own class; made on the device, nothing is loaded."""
    from transformers import AutoConfig, AutoModelForCausalLM

    device, dtype = torch.device(device), dtype or default_dtype(device)
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    with device, torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape), dtype=dtype)
    return CausalLM(model, name=name)


def run(
    out, *, device, shapes=SHAPES, pairs=PAIRS, widths=WIDTHS, contexts=CONTEXTS, repeats=15, replay=True, dtype=None,
    command=None, restart=False, replace=True, track=iter, seconds=math.inf,
):  # fmt: skip
    """Cost curves of every model of `pairs`, each by itself on the device, and its peak memory, to a result file.

    Parameters
    ----------
    out : path
        Written when all is measured. `<out>.partial` holds the models done so far: the same call goes on with it.
    restart, replace : bool
        Throw an unfinished run of `out` away instead of resuming it; replace the result that stands in `out`.
    replay : bool
        As in `cost_curve`: also as CUDA graphs.
    track : callable
        Wraps the names of the models still to be measured.
    seconds : float
        For the whole call: each model gets its share, and fewer `repeats` where it is short; a row's `n` says how many.

    Returns
    -------
    dict
        `rows`: a line for each model, context and width, with `cost_curve`'s and `floor`'s columns.

    Raises
    ------
    ValueError
        Before anything is measured, as `Unfinished` says.
    """
    end, device = time.monotonic() + seconds, torch.device(device)
    settings = {"pairs": pairs, "widths": widths, "contexts": contexts, "repeats": repeats, "replay": replay}
    settings |= {"device": str(device), "dtype": str(dtype or default_dtype(device)).removeprefix("torch.")}
    header = {**results.header(SCHEMA, command), "acceptance": ACCEPTANCE, "settings": settings}
    with Unfinished(out, header, restart=restart, replace=replace, keys=("key", "value")) as unfinished:
        measured = {entry["key"]: entry["value"] for entry in unfinished.entries}
        left = [name for name in dict.fromkeys(chain(*pairs)) if name not in measured]
        for done, name in enumerate(track(left)):
            now = time.monotonic()
            share = now + (end - now) / (len(left) - done)
            options = (device, widths, contexts, repeats, replay, dtype, share)
            measured[name] = unfinished.once(name, partial(measure, shapes[name], name, *options))
        result = {**unfinished.header, "models": {}, "rows": []}
        for name, (described, rows) in measured.items():
            result["models"][name] = described
            result["rows"] += rows
        result["environment"]["gpus_after"] = gpu_state()
        return unfinished.finish(result)


def load(path):
    """The result of a suite in `path`; a ValueError where it is another file."""
    return results.load(path, KIND, "specnb sweep --suite gpu")


def origin(result):
    """One line that names the machine and the commit."""
    machine = result["environment"]
    device = ", ".join(gpu["name"] for gpu in machine["gpus"]) or machine["processor"]
    dtypes = {model["dtype"] for model in result["models"].values()}
    return f"{device}; {', '.join(sorted(dtypes))}, random weights; commit {(result['commit'] or 'unknown')[:7]}"


def measure(shape, name, device, widths, contexts, repeats, replay, dtype, end=math.inf):
    """(description, rows) of one model, which is made here and let go; `end` as of `in_time`."""
    began = time.monotonic()
    model = random_model(shape, name, device=device, dtype=dtype)
    reset_peak_memory(model)
    in_share = partial(in_time, end=end, together=lambda turn: max(turn, 1))  # The first only warms up.
    curve = cost_curve(model, widths, contexts, repeats=repeats, replay=replay, track=in_share)
    floors = pd.concat([floor(model, widths, context).assign(context=context) for context in contexts])
    rows = curve.merge(floors[["context", "width", "floor_sec"]], on=["context", "width"])
    rows.insert(0, "model", name)
    described = {
        **model.describe(),
        "weights": "random",
        "config": shape,
        "peak_memory_bytes": peak_memory_bytes(model),
        "took_sec": round(time.monotonic() - began, 1),
    }
    return described, json.loads(rows.to_json(orient="records", double_precision=9))


def ratios(rows, target, draft, context, column="sec"):
    """(c, {gamma: v(gamma)}) of a pair from the rows of a suite: by eager forwards, or by replays with "graph_sec"."""
    table = pd.DataFrame(rows)
    table = table[table.context == context].astype({column: float})
    seconds = {name: part.set_index("width")[column] for name, part in table.groupby("model")}
    step = seconds[target][1]
    return seconds[draft][1] / step, {int(width) - 1: sec / step for width, sec in seconds[target].items()}


def cost_table(result, column="sec"):
    """A line a pair and context: c, v(4), v(8) and the acceptance that breaks even at gamma 4."""
    from specnb.theory import break_even_alpha

    lines = []
    for target, draft in result["settings"]["pairs"]:
        for context in result["settings"]["contexts"]:
            cost_ratio, verify_cost = ratios(result["rows"], target, draft, context, column)
            known = not math.isnan(cost_ratio)
            lines.append(
                {"target": target, "draft": draft, "context": context, "cost_ratio": cost_ratio}
                | {f"verify_cost_{gamma}": verify_cost.get(gamma) for gamma in (4, 8)}
                | {"break_even_alpha_4": break_even_alpha(4, cost_ratio, verify_cost.get) if known else None}
            )
    return pd.DataFrame(lines)
