"""The cache of a transformers model, and whether it can be rolled back.

The one place that knows transformers' cache API, which moved between 5.13 and 5.40. It does not know devices, tokens
or drafting. Read `specnb.models` next, which wraps a model around it.

Every token has its own slot, allocated some way ahead: a forward copies no older keys, and a rollback moves a number.
"""

import inspect
from functools import lru_cache, partial

import torch

SLOTS_AT_ONCE = 64


class Cache:
    """Keys and values of one row: the token at position i lies in slot i."""

    def __init__(self, model, places=None):
        from transformers.cache_utils import Cache as TransformersCache

        self._model, self._places = model, places or _OneRow()
        # The layers know the places but not this object: without a cycle their memory is free as soon as it is dropped.
        self._cache = TransformersCache(layer_class_to_replicate=partial(_slot_layer(), self._places))
        self._cache_name = cache_argument(model)
        self._can_keep = "logits_to_keep" in inspect.signature(model.forward).parameters

    @property
    def lengths(self):
        """Tokens kept, one number a row."""
        return self._places.lengths

    @property
    def tensors(self):
        """Keys and values of every layer, as they are now."""
        return [tensor for layer in self._cache.layers for tensor in (layer.keys, layer.values)]

    def forward(self, ids, num_logits, num_new=None, num_behind=None, **options):
        """The model's own output for `ids (1, n)`; one row is never padded, so all its ids are new."""
        self._places.num_slots = self.lengths[0] + ids.shape[1]
        out = self._call(ids, num_logits, **options)
        self._places.lengths = [self._places.num_slots]
        return out

    def _call(self, ids, num_logits, **options):
        if self._can_keep:
            options["logits_to_keep"] = num_logits
            batch, n = ids.shape
            if batch > 1 and num_logits < n:
                # A number takes a view, of rows with gaps between, whose product with the output head is ten times
                # slower on a CPU; indices copy.
                options["logits_to_keep"] = torch.arange(n - num_logits, n, device=ids.device)
        return self._model(input_ids=ids, use_cache=True, **{self._cache_name: self._cache}, **options)

    def rollback(self, lengths):
        self._places.lengths = list(map(min, self.lengths, lengths))


class BatchCache(Cache):
    """Keys and values of several rows of different lengths.

    A forward writes at the positions after each row's length and masks every slot beyond the query's position,
    whatever an earlier, rejected draft has left there.
    """

    def __init__(self, model, batch):
        if "position_ids" not in inspect.signature(model.forward).parameters:
            raise ValueError(
                f"the forward of {type(model).__name__} takes no positions, so the rows of a batch cannot differ in "
                "length; call once for each prompt"
            )
        if model.config._attn_implementation not in ("sdpa", "eager"):
            raise ValueError(
                f"{type(model).__name__} with {model.config._attn_implementation} attention takes no mask of each row; "
                "for batches load it with attn_implementation='sdpa', or call once for each prompt"
            )
        super().__init__(model, _Ragged(batch))

    def forward(self, ids, num_logits, num_new=None, num_behind=None, **options):
        """The model's own output for `ids (batch, n)`, padded as `LanguageModel.forward` says."""
        batch, n = ids.shape
        num_behind = num_behind or [0] * batch
        num_new = num_new or [n] * batch
        first = [n - new - behind for new, behind in zip(num_new, num_behind, strict=True)]
        device, after = ids.device, list(map(sum, zip(self.lengths, num_new, strict=True)))
        before, first, num_new = torch.tensor([self.lengths, first, num_new], device=device)[..., None]  # (batch, 1)
        offset = torch.arange(n, device=device) - first  # (batch, n)
        real = (offset >= 0) & (offset < num_new)
        num_slots = max(after) + 1
        # Padding sees the first slot only, and is written to the last one, which no query sees.
        positions = torch.where(real, before + offset, 0)
        seen = torch.arange(num_slots, device=device) <= positions[..., None]
        mask = torch.zeros(batch, 1, n, num_slots, dtype=self._model.dtype, device=device)
        mask.masked_fill_(~seen[:, None], torch.finfo(self._model.dtype).min)
        self._places.slots, self._places.num_slots = torch.where(real, positions, num_slots - 1), num_slots
        out = self._call(ids, num_logits, attention_mask=mask, position_ids=positions, **options)
        self._places.lengths = after
        return out

    def keep(self, rows):
        self._places.lengths = [self.lengths[row] for row in rows]
        for layer in self._cache.layers:
            layer.keys, layer.values = layer.keys[rows], layer.values[rows]


class _OneRow:
    """Where the keys of a forward go: behind those of the tokens before."""

    def __init__(self):
        self.lengths, self.num_slots = [0], 0

    def write(self, stored, new):
        stored[:, :, self.lengths[0] : self.num_slots] = new


class _Ragged:
    """Where they go in a batch: `slots (batch, n)`."""

    def __init__(self, batch):
        self.lengths, self.num_slots, self.slots = [0] * batch, 0, None

    def write(self, stored, new):
        slots = self.slots.to(stored.device)
        stored[torch.arange(len(slots), device=stored.device)[:, None], :, slots] = new.transpose(1, 2)


@lru_cache(maxsize=1)
def _slot_layer():
    """The class of a layer whose keys are written to given places; made when transformers is there."""
    from transformers.cache_utils import DynamicLayer

    class SlotLayer(DynamicLayer):
        def __init__(self, places):
            super().__init__()
            self.places = places

        def get_seq_length(self):  # Of a batch nobody needs it: positions and mask are given.
            return max(self.places.lengths)

        def update(self, key_states, value_states, *args, **kwargs):
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
                self.keys, self.values = (x[:, :, :0] for x in (key_states, value_states))
            num_slots = self.places.num_slots
            missing = num_slots - self.keys.shape[2]
            if missing > 0:  # Grown by many slots at a time, so that few forwards copy.
                more = -(-missing // SLOTS_AT_ONCE) * SLOTS_AT_ONCE
                self.keys, self.values = (
                    torch.cat([x, x.new_zeros(*x.shape[:2], more, x.shape[-1])], 2) for x in (self.keys, self.values)
                )
            self.places.write(self.keys, key_states)
            self.places.write(self.values, value_states)
            return self.keys[:, :, :num_slots], self.values[:, :, :num_slots]

    return SlotLayer


def cache_argument(model):
    """What `model.forward` calls its cache: "cache" in newer transformers, "past_key_values" before."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def refuse_unless_croppable(model, name, context_length):
    """Raise a ValueError that names why the cache of `model` cannot be rolled back, before the first token."""
    from transformers import DynamicCache

    config = model.config
    if config.is_encoder_decoder:
        raise ValueError(f"{name} is an encoder-decoder model; only decoder-only models are supported")
    layers = DynamicCache(config=config).layers
    kinds = {type(layer).__name__ for layer in layers} - {"DynamicLayer", "DynamicSlidingWindowLayer"}
    windows = [layer.sliding_window for layer in layers if getattr(layer, "is_sliding", False)]
    if windows and (context_length is None or min(windows) < context_length):
        raise ValueError(
            f"{name} has sliding-window attention (sliding_window={min(windows)}, context {context_length}): its "
            "cache drops entries that a rejected draft would need back, so it cannot be rolled back; choose a model "
            "with full attention, or one whose window is as long as its context"
        )
    if kinds or getattr(model, "_is_stateful", False):
        kind = ", ".join(sorted(kinds)) or type(model).__name__
        raise ValueError(
            f"{name} keeps a recurrent state or another cache than plain attention ({kind}): it is not known to roll "
            "back after a rejected draft; choose a model with full attention"
        )
