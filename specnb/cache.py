"""The cache of a transformers model, and whether it can be rolled back.

The one place that knows transformers' cache API, which moved between 5.13 and 5.40. It does not know devices, tokens
or drafting. Read `specnb.models` next, which wraps a model around it.
"""

import inspect


class Cache:
    """transformers' dynamic cache, from 5.13 to current: argument name, crop convention, logits to keep."""

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

    def forward(self, ids, num_logits):
        options = {"logits_to_keep": num_logits} if self._can_keep else {}
        return self._model(input_ids=ids, use_cache=True, **{self._cache_name: self._cache}, **options).logits

    def rollback(self, length):
        if length < self.length:
            # Subtle: a positive argument once meant the length to keep and is refused today; a negative one has
            # always meant the number of tokens to remove.
            self._cache.crop(length - self.length)
            if self.length != length:
                raise RuntimeError(f"the cache holds {self.length} tokens after a rollback to {length}")


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
