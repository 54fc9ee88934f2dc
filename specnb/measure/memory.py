"""What a pair of models needs in memory, by arithmetic on their configs; nothing is loaded.

It knows configs and counts bytes. It does not know devices. What a process really took is `Trace.peak_memory_bytes`.
"""

import pandas as pd
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from specnb.models.cache import SLOTS_AT_ONCE, Cache
from specnb.models.loading import first_line


def memory_budget(target, draft=None, *, context, batch=1, gamma=0, dtype="bfloat16"):
    """Bytes of weights, cached keys and values, and one block's logits and probabilities.

    Parameters
    ----------
    target, draft : transformers config, its fields as a dict with `model_type`, hub id, local folder, or `CausalLM`
        Of a draft that is loaded, what it shares with a loaded target counts once.
    context : int
        Tokens committed of each row at the end, prompt and answer.
    batch, gamma : int
    dtype : str
        Of weights and cache; probabilities are float32 whatever it is.

    Returns
    -------
    DataFrame
        A line a model, and "both": `weights_bytes`; `kv_bytes_per_token` of one row; `kv_bytes` at the end of a
        round, drafts included; `block_bytes`: logits in `dtype`, and in float32 the rows that are scaled and the
        probabilities made of them; `layer_bytes`: what the attention of one layer needs beside the cache, its keys and
        values repeated for every query head of their group (without drafts only what a growing cache copies at a
        time); `total_bytes`: weights, KV, and the larger of the last two, for they take turns.

    Notes
    -----
    Left out: other activations, of which the prefill of a long prompt needs most, and what an allocator keeps in
    reserve. The cache grows by 64 tokens at a time; that is counted in a batch, where every row has it. Attention with
    a kernel for groups of heads repeats nothing; transformers' does wherever several tokens need a mask, and in older
    versions in a batch's plain steps too.

    Examples
    --------
    >>> llama = {"model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
    ...          "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256}
    >>> int(memory_budget(llama, context=1000).kv_bytes_per_token["target"])  # 2 x 32 layers x 8 heads x 128 x 2 bytes
    131072
    """
    if min(context, batch, gamma + 1) < 1:
        raise ValueError(f"context and batch must be at least 1, gamma 0 or more, got {context}, {batch}, {gamma}")
    item = getattr(torch, dtype).itemsize
    slots = context + gamma
    if batch > 1:
        slots = -(-(slots + 1) // SLOTS_AT_ONCE) * SLOTS_AT_ONCE
    lines, counted = {}, set()
    for name, model, positions, kept in (("target", target, gamma + 1, 2), ("draft", draft, gamma, 1)):
        if model is None:
            continue
        config, num_params, layers, counted = _size_of(model, counted)
        per_token = sum(numbers for numbers, _ in layers) * item
        # Of the target's rows the float32 logits stand beside their probabilities; a draft's are done one by one.
        block = batch * positions * config.vocab_size * (item * (kept == 2) + 4 * kept)
        repeated = max(numbers * (config.num_attention_heads // heads if gamma else 1) for numbers, heads in layers)
        layer = repeated * item * slots * batch // (1 if gamma or batch > 1 else 2)
        lines[name] = {"weights_bytes": num_params * item, "kv_bytes_per_token": per_token}
        lines[name] |= {"kv_bytes": per_token * slots * batch, "block_bytes": block, "layer_bytes": layer}
    table = pd.DataFrame.from_dict(lines, orient="index")
    table.loc["both"] = table.sum()
    table.loc["both", "layer_bytes"] = table.layer_bytes[:-1].max()  # One model works at a time.
    moment = table[["block_bytes", "layer_bytes"]].max(axis=1)
    return table.assign(total_bytes=table.weights_bytes + table.kv_bytes + moment)


def kv_bytes_per_token(model, dtype="bfloat16"):
    """Bytes of keys and values that one token of one row leaves in the cache, over all layers.

    They are counted in the cache of the model itself, after a forward of one token; of a config, in that of an empty
    model. So it does not matter how an architecture names its heads, shares them, or compresses what it keeps.

    Parameters
    ----------
    model : transformers model or config

    Examples
    --------
    >>> from transformers import FalconConfig
    >>> kv_bytes_per_token(FalconConfig(num_hidden_layers=2))  # 2 x 2 layers x one head of 64 x 2 bytes
    512
    """
    layers = _layers_of(model) if hasattr(model, "forward") else _empty_size(model)[1]
    return sum(numbers for numbers, _ in layers) * getattr(torch, dtype).itemsize


@torch.no_grad()
def _layers_of(model):
    """(numbers that a token leaves in it, heads they belong to) of each layer's cache."""
    cache = Cache(model)
    try:
        cache.forward(torch.zeros(1, 1, dtype=torch.long, device=model.get_input_embeddings().weight.device), 1)
    except Exception as error:
        raise ValueError(
            f"what {type(model).__name__} keeps of a token is not known, for a forward of one token fails with this "
            f"cache ({type(error).__name__}: {first_line(error)}); take a model with plain attention"
        ) from error
    pairs = zip(cache.tensors[::2], cache.tensors[1::2], strict=True)  # each (1, heads, slots, size)
    return [(keys.shape[1] * (keys.shape[3] + values.shape[3]), keys.shape[1]) for keys, values in pairs]


def _size_of(model, counted):
    """(config, parameters not `counted` yet, its layers' caches, all counted so far) of whatever describes a model."""
    from transformers import AutoConfig

    if hasattr(model, "model"):  # a CausalLM
        own = {id(p): p.numel() for p in model.model.parameters() if id(p) not in counted}
        config = model.model.config.get_text_config()
        return config, sum(own.values()), _layers_of(model.model), counted | set(own)
    if isinstance(model, dict):
        model = AutoConfig.for_model(**model)
    elif not hasattr(model, "get_text_config"):
        model = AutoConfig.from_pretrained(model)
    return model.get_text_config(), *_empty_size(model), counted


EMPTY_SIZES = {}  # by configuration, for it takes a second to build an empty model


def _empty_size(config):
    """(parameters, layers' caches) of a model that is never given weights."""
    from transformers import AutoModelForCausalLM

    key = config.to_json_string()
    if key not in EMPTY_SIZES:
        with torch.device("meta"):
            # Experts one by one would have to be told which tokens are theirs, which an empty model cannot.
            model = AutoModelForCausalLM.from_config(config, experts_implementation="batched_mm")
        with _Unasked():
            EMPTY_SIZES[key] = model.num_parameters(), _layers_of(model)
    return EMPTY_SIZES[key]


class _Unasked(TorchDispatchMode):
    """An empty model has no values: where its forward asks for one, such as whether a mask is full, it gets a zero."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        asks = function is torch.ops.aten._local_scalar_dense.default
        return 0 if asks else function(*args, **(kwargs or {}))
