"""The cache of a transformers model, and whether it can be rolled back.

The one place that knows transformers' cache API, which moved between 5.13 and 5.40. It does not know devices, tokens
or drafting. Read `specnb.models` next, which wraps a model around it.
"""

import inspect
from functools import lru_cache

import torch

SLOTS_AT_ONCE = 64


class Cache:
    """transformers' dynamic cache of one row, from 5.13 to current: argument name, crop convention, logits to keep."""

    def __init__(self, model):
        from transformers import DynamicCache

        self._model = model
        self._cache = DynamicCache(config=model.config)
        self._cache_name = cache_argument(model)
        self._can_keep = "logits_to_keep" in inspect.signature(model.forward).parameters

    @property
    def length(self):
        return int(self._cache.get_seq_length())

    @property
    def tensors(self):
        """Keys and values of every layer, as they are now."""
        return [tensor for layer in self._cache.layers for tensor in (layer.keys, layer.values)]

    def forward(self, ids, num_logits, num_new=None):  # One row is never padded: all its ids are new.
        options = {"logits_to_keep": num_logits} if self._can_keep else {}
        return self._model(input_ids=ids, use_cache=True, **{self._cache_name: self._cache}, **options).logits

    def rollback(self, length):
        if length < self.length:
            # Subtle: a positive argument once meant the length to keep and is refused today; a negative one has
            # always meant the number of tokens to remove.
            self._cache.crop(length - self.length)
            if self.length != length:
                raise RuntimeError(f"the cache holds {self.length} tokens after a rollback to {length}")


class BatchCache:
    """A cache of several rows of different lengths: every token has its own slot, so a rollback moves no data.

    Row b's token at position i lies in slot i. A forward writes its keys at the positions after the row's length and
    masks every slot beyond the query's position, whatever an earlier, rejected draft has left there.
    """

    def __init__(self, model, batch):
        from transformers.cache_utils import Cache as TransformersCache

        config, parameters = model.config.get_text_config(), inspect.signature(model.forward).parameters
        if "position_ids" not in parameters or model.config._attn_implementation not in ("sdpa", "eager"):
            raise ValueError(
                f"{type(model).__name__} with {model.config._attn_implementation} attention takes no positions or no "
                "mask of each row; for batches load it with attn_implementation='sdpa', or call once for each prompt"
            )
        self._model, self.length = model, [0] * batch
        self._layers = [_slot_layer()() for _ in range(config.num_hidden_layers)]
        self._cache, self._cache_name = TransformersCache(layers=self._layers), cache_argument(model)
        self._can_keep = "logits_to_keep" in parameters
        self._longest = getattr(config, "max_position_embeddings", None)

    def forward(self, ids, num_logits, num_new=None):
        """`ids (batch, n)`, the last `num_new[b]` of a row real and those before them padding; None: all are real."""
        batch, n = ids.shape
        num_new = [n] * batch if num_new is None else num_new
        device = ids.device
        before = torch.tensor([self.length, [n - new for new in num_new]], device=device)[..., None]  # (2, batch, 1)
        offset = torch.arange(n, device=device) - before[1]  # (batch, n), negative for padding
        num_slots = max(length + new for length, new in zip(self.length, num_new, strict=True)) + 1
        # Padding is written to the last slot, which no query sees.
        slots = torch.where(offset < 0, num_slots - 1, before[0] + offset)
        seen = torch.arange(num_slots, device=device) <= torch.where(offset < 0, 0, slots)[..., None]
        lowest = torch.finfo(self._model.dtype).min
        mask = torch.zeros(batch, 1, n, num_slots, dtype=self._model.dtype, device=device)
        mask.masked_fill_(~seen[:, None], lowest)
        positions = slots if self._longest is None else slots.clamp(max=self._longest - 1)
        for layer in self._layers:
            layer.slots, layer.num_slots = slots, num_slots
        kept = {"logits_to_keep": num_logits} if self._can_keep else {}
        logits = self._model(
            input_ids=ids,
            use_cache=True,
            attention_mask=mask,
            position_ids=positions,
            **{self._cache_name: self._cache},
            **kept,
        ).logits
        self.length = [length + new for length, new in zip(self.length, num_new, strict=True)]
        return logits

    def rollback(self, length):
        self.length = list(map(min, self.length, length))

    def keep(self, rows):
        self.length = [self.length[row] for row in rows]
        for layer in self._layers:
            layer.keep(rows)


@lru_cache(maxsize=1)
def _slot_layer():
    """The class of a layer whose keys are written to given slots; made when transformers is there."""
    from transformers.cache_utils import DynamicLayer

    class SlotLayer(DynamicLayer):
        def update(self, key_states, value_states, *args, **kwargs):
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
                self.keys, self.values = (x[:, :, :0] for x in (key_states, value_states))
            missing = self.num_slots - self.keys.shape[2]
            if missing > 0:  # Grown by many slots at a time, so that few forwards copy.
                more = -(-missing // SLOTS_AT_ONCE) * SLOTS_AT_ONCE
                self.keys, self.values = (
                    torch.cat([x, x.new_zeros(*x.shape[:2], more, x.shape[-1])], 2) for x in (self.keys, self.values)
                )
            rows = torch.arange(len(self.slots), device=self.slots.device)[:, None]
            self.keys[rows, :, self.slots] = key_states.transpose(1, 2)
            self.values[rows, :, self.slots] = value_states.transpose(1, 2)
            return self.keys[:, :, : self.num_slots], self.values[:, :, : self.num_slots]

        def keep(self, rows):
            self.keys, self.values = self.keys[rows], self.values[rows]

    return SlotLayer


def cache_argument(model):
    """What `model.forward` calls its cache: "cache" in newer transformers, "past_key_values" before."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def refuse_unless_croppable(model, name):
    """Raise a ValueError that names why the cache of `model` cannot be rolled back, before the first token."""
    from transformers import DynamicCache

    config = model.config
    if config.is_encoder_decoder:
        raise ValueError(f"{name} is an encoder-decoder model; only decoder-only models are supported")
    kinds = {type(layer).__name__ for layer in DynamicCache(config=config).layers} - {"DynamicLayer"}
    if any("Sliding" in kind for kind in kinds):
        window = getattr(config.get_text_config(), "sliding_window", None)
        raise ValueError(
            f"{name} has sliding-window attention (sliding_window={window}): its cache drops entries that a rejected "
            "draft would need back, so it cannot be rolled back; choose a model with full attention"
        )
    if kinds or getattr(model, "_is_stateful", False):
        kind = ", ".join(sorted(kinds)) or type(model).__name__
        raise ValueError(
            f"{name} keeps a recurrent state or another cache than plain attention ({kind}): it is not known to roll "
            "back after a rejected draft; choose a model with full attention"
        )
