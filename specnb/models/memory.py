"""What a pair of models needs in memory, by arithmetic on their configs; nothing is loaded.

It knows configs and counts bytes. It does not know devices. What a process really took is `Trace.peak_memory_bytes`.
"""

import weakref

import pandas as pd
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specnb.models.cache import SLOTS_AT_ONCE


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
        config, num_params, counted = _size_of(model, counted)
        per_token = kv_bytes_per_token(config, dtype)
        # Of the target's rows the float32 logits stand beside their probabilities; a draft's are done one by one.
        block = batch * positions * config.vocab_size * (item * (kept == 2) + 4 * kept)
        heads, kv_heads, _ = _heads(config)
        layer = per_token // config.num_hidden_layers * slots * batch
        layer = layer * heads // kv_heads if gamma else layer if batch > 1 else layer // 2
        lines[name] = {"weights_bytes": num_params * item, "kv_bytes_per_token": per_token}
        lines[name] |= {"kv_bytes": per_token * slots * batch, "block_bytes": block, "layer_bytes": layer}
    table = pd.DataFrame.from_dict(lines, orient="index")
    table.loc["both"] = table.sum()
    table.loc["both", "layer_bytes"] = table.layer_bytes[:-1].max()  # One model works at a time.
    moment = table[["block_bytes", "layer_bytes"]].max(axis=1)
    return table.assign(total_bytes=table.weights_bytes + table.kv_bytes + moment)


def kv_bytes_per_token(config, dtype="bfloat16"):
    """Bytes of keys and values that one token of one row leaves in the cache, over all layers."""
    _, kv_heads, size = _heads(config)
    return 2 * config.num_hidden_layers * kv_heads * size * getattr(torch, dtype).itemsize


def _heads(config):
    """(query heads, key-value heads, numbers in each)."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return heads, kv_heads, getattr(config, "head_dim", None) or config.hidden_size // heads


def _size_of(model, counted):
    """(config, parameters not `counted` yet, all counted so far) of whatever describes a model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if hasattr(model, "model"):  # a CausalLM
        own = {id(p): p.numel() for p in model.model.parameters() if id(p) not in counted}
        return model.model.config.get_text_config(), sum(own.values()), counted | set(own)
    if isinstance(model, dict):
        model = AutoConfig.for_model(**model)
    elif not hasattr(model, "get_text_config"):
        model = AutoConfig.from_pretrained(model)
    with torch.device("meta"):
        return model.get_text_config(), AutoModelForCausalLM.from_config(model).num_parameters(), counted


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors alive that operations have made within it, for devices that do not count themselves.

    Memory that an operation uses inside and gives back is not seen, nor is what was there before.

    Attributes
    ----------
    now, peak : int
        `peak` may be set to `now`, to begin again.

    Examples
    --------
    >>> with LiveBytes() as live:
    ...     kept = [torch.ones(1000) * 2]
    >>> live.now, live.peak  # the ones were let go
    (4000, 8000)
    """

    def __init__(self):
        super().__init__()
        self.now, self.peak, self._alive = 0, 0, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self._alive:
                storage = tensor.untyped_storage()
                self._alive.add(storage._cdata)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        return made

    def _gone(self, key, nbytes):
        self._alive.discard(key)
        self.now -= nbytes
