"""Any decoder-only transformers model whose cache can be rolled back, as a `LanguageModel`.

It knows loading, devices and dtypes. It does not know drafting or acceptance. Read `specnb.models.cache` beside it.
"""

from functools import cached_property
from pathlib import Path

import torch

from specnb.models.base import Scores, as_lengths
from specnb.models.cache import BatchCache, Cache, refuse_unless_croppable
from specnb.models.checks import changing_positions, check_forwards
from specnb.models.loading import has_tokenizer, load_weights, plain_errors
from specnb.models.places import file_sha256

DTYPES = ("bfloat16", "float16", "float32", "float64")


class CausalLM:
    """A decoder-only transformers model with its cache.

    Parameters
    ----------
    model : transformers PreTrainedModel
    tokenizer : transformers tokenizer, optional
        Ids above its vocabulary are padding of the embedding: they get probability 0 and are left out of the logits.
    name : str, optional

    Attributes
    ----------
    context_length : int or None
        Tokens that a run may reach. It is shorter than the model's own context where positions are scaled differently
        beyond some length; `context_reason` then says so.

    Raises
    ------
    ValueError
        For a model whose cache cannot be rolled back (sliding window, recurrent state, encoder-decoder), for one whose
        forwards do not agree with each other (see `specnb.models.checks`), and for a tokenizer with more ids than the
        model has embedding rows; all of them when the model is made. At the first batch, for a model whose rows depend
        on their neighbours.
    """

    def __init__(self, model, tokenizer=None, name=None):
        self.model, self.tokenizer = model.eval(), tokenizer
        self.name = name or type(model).__name__
        config = model.config.get_text_config()
        self.vocab_size = config.vocab_size
        if tokenizer is not None:
            self.vocab_size = max(tokenizer.get_vocab().values()) + 1
            if self.vocab_size > config.vocab_size:
                raise ValueError(
                    f"the tokenizer of {self.name} has {self.vocab_size} ids but the model only {config.vocab_size} "
                    "embedding rows; resize the embeddings or remove the added tokens"
                )
        self.context_length, self.context_reason = _context(model, config, self.name)
        self.device = model.get_input_embeddings().weight.device
        refuse_unless_croppable(model, self.name, self.context_length)
        self.batch_refusal = check_forwards(model, self.name)
        self.reset()

    @classmethod
    def from_pretrained(cls, name_or_path, *, device=None, dtype=None, device_map=None):
        """Load a hub id or a local folder; safetensors only, no remote code.

        Parameters
        ----------
        device : str or torch.device, optional
            Default: cuda where there is one, else cpu. mps works as far as PyTorch does (best effort).
        dtype : str or torch.dtype, optional
            Default: bfloat16 where the device multiplies it fast, else float32.
        device_map : optional
            Passed through, for a model too large for one GPU; then `device` is not used.
        """
        from transformers import AutoTokenizer

        device = available_device(device)
        if isinstance(dtype, str) and dtype not in DTYPES:
            raise ValueError(f"unknown dtype {dtype!r}; choose one of {', '.join(DTYPES)}")
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype or default_dtype(device)
        options = {"device_map": device_map} if device_map is not None else {}
        with plain_errors(name_or_path):
            model = load_weights(name_or_path, dtype=dtype, **options)
            tokenizer = AutoTokenizer.from_pretrained(name_or_path) if has_tokenizer(name_or_path) else None
        return cls(model if options else model.to(device), tokenizer, name=str(name_or_path))

    @property
    def eos_ids(self):
        """End-of-sequence ids by the model's generation config, else by its tokenizer."""
        ids = getattr(self.model.generation_config, "eos_token_id", None)
        if ids is None and self.tokenizer is not None:
            ids = self.tokenizer.eos_token_id
        return frozenset() if ids is None else frozenset([ids] if isinstance(ids, int) else ids)

    def describe(self):
        """Which weights these are, for a result file: id, sha256 or revision, dtype, attention, parameters."""
        sha256 = self._sha256
        return {
            "id": Path(self.name).name if sha256 else self.name,
            "sha256": sha256,
            "revision": getattr(self.model.config, "_commit_hash", None),
            "device": self.device.type,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "attention": self.model.config._attn_implementation,
            "num_params": self.model.num_parameters(),
        }

    @cached_property
    def _sha256(self):
        """SHA-256 of each file of weights, read once; None where they came from no folder."""
        source = self.model.config._name_or_path
        files = sorted(Path(source).glob("*.safetensors")) if source and Path(source).is_dir() else []
        return {file.name: file_sha256(file) for file in files} or None

    @property
    def lengths(self):
        return self._cache.lengths

    @property
    def length(self):
        return self.lengths[0] if len(self.lengths) == 1 else self.lengths

    @property
    def cache_tensors(self):
        """Keys and values of every layer, `(batch, heads, slots, head size)`, written in place while slots last."""
        return self._cache.tensors

    def reset(self, batch=1):
        if batch > 1 and self.batch_refusal:
            raise ValueError(self.batch_refusal)
        self._cache, self.run = Cache(self.model) if batch == 1 else BatchCache(self.model, batch), object()

    @torch.inference_mode()
    def forward(self, ids, num_logits, num_new=None, num_behind=None, hidden=False):
        asked = {"output_hidden_states": True} if hidden else {}
        out = self._cache.forward(ids.to(self.device), num_logits, num_new, num_behind, **asked)
        logits = out.logits[:, -num_logits:, : self.vocab_size]
        return Scores(logits, out.hidden_states[-1] if hidden else None)

    def rollback(self, lengths):
        self._cache.rollback(as_lengths(lengths))

    def keep(self, rows):
        self._cache.keep(rows)


def available_device(device=None):
    """The device asked for, else cuda where there is one, else cpu; a ValueError where it is not there."""
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    there = {"cuda": torch.cuda.is_available, "mps": torch.backends.mps.is_available}
    if not there.get(device.type, lambda: True)():
        raise ValueError(f"there is no {device.type} device here that this PyTorch can use; try --device cpu")
    return device


def default_dtype(device):
    """bfloat16 on CUDA from Ampere on and on processors that multiply it, else float32."""
    if torch.device(device).type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    if torch.device(device).type != "cpu":
        return torch.float32
    if hasattr(torch.cpu, "get_capabilities"):
        found = torch.cpu.get_capabilities()
        fast = any(found.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))
    else:  # older releases of torch
        fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if fast else torch.float32


def _context(model, config, name):
    """(tokens that a run may reach, why no more, where the positions are the reason)."""
    longest = getattr(config, "max_position_embeddings", None)
    kind, switch = changing_positions(model) or (None, longest)
    if kind is None or (longest is not None and longest < switch):
        return longest, ""
    return switch, (
        f" (beyond it the position scaling of {name}, {kind}, changes for all tokens of a forward at once, so that "
        "drafts would change the text)"
    )
