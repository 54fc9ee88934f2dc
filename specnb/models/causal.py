"""Any decoder-only transformers model whose cache can be rolled back, as a `LanguageModel`.

It knows loading, devices and dtypes. It does not know drafting or acceptance. Read `specnb.models.cache` beside it.
"""

from pathlib import Path

import torch
from safetensors import SafetensorError

from specnb.models.base import Scores, as_lengths
from specnb.models.cache import BatchCache, Cache, refuse_unless_croppable
from specnb.models.fetch import file_sha256, quiet
from specnb.models.memory import memory_budget as memory_budget  # offered here too, beside the models it is about

DTYPES = ("bfloat16", "float16", "float32", "float64")


class CausalLM:
    """A decoder-only transformers model with its cache.

    Parameters
    ----------
    model : transformers PreTrainedModel
    tokenizer : transformers tokenizer, optional
        Ids above its vocabulary are padding of the embedding: they get probability 0 and are left out of the logits.
    name : str, optional

    Raises
    ------
    ValueError
        For a model whose cache cannot be rolled back (sliding window, recurrent state, encoder-decoder), named before
        the first token, and for a tokenizer with more ids than the model has embedding rows.
    """

    def __init__(self, model, tokenizer=None, name=None):
        self.model, self.tokenizer = model.eval(), tokenizer
        self.name = name or type(model).__name__
        refuse_unless_croppable(model, self.name)
        config = model.config.get_text_config()
        self.vocab_size = config.vocab_size
        if tokenizer is not None:
            self.vocab_size = max(tokenizer.get_vocab().values()) + 1
            if self.vocab_size > config.vocab_size:
                raise ValueError(
                    f"the tokenizer of {self.name} has {self.vocab_size} ids but the model only {config.vocab_size} "
                    "embedding rows; resize the embeddings or remove the added tokens"
                )
        self.context_length = getattr(config, "max_position_embeddings", None)
        self.device = model.get_input_embeddings().weight.device
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
        from transformers import AutoModelForCausalLM, AutoTokenizer

        device = available_device(device)
        if isinstance(dtype, str) and dtype not in DTYPES:
            raise ValueError(f"unknown dtype {dtype!r}; choose one of {', '.join(DTYPES)}")
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype or default_dtype(device)
        options = {"device_map": device_map} if device_map is not None else {}
        try:
            with quiet():
                model = AutoModelForCausalLM.from_pretrained(
                    name_or_path, dtype=dtype, use_safetensors=True, trust_remote_code=False, **options
                )
                tokenizer = AutoTokenizer.from_pretrained(name_or_path) if _has_tokenizer(name_or_path) else None
        except (OSError, ValueError, SafetensorError) as error:
            raise ValueError(
                f"cannot load the model {str(name_or_path)!r}: it must be a local folder with config.json and "
                f"safetensors weights, or a model id on a hub that is reachable from here. {_first_line(error)}"
            ) from error
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
        source = self.model.config._name_or_path
        files = sorted(Path(source).glob("*.safetensors")) if source and Path(source).is_dir() else []
        return {
            "id": Path(self.name).name if files else self.name,
            "sha256": {file.name: file_sha256(file) for file in files} or None,
            "revision": getattr(self.model.config, "_commit_hash", None),
            "device": self.device.type,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "attention": self.model.config._attn_implementation,
            "num_params": self.model.num_parameters(),
        }

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


TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


def _has_tokenizer(name_or_path):
    folder = Path(name_or_path)
    return not folder.is_dir() or any((folder / name).exists() for name in TOKENIZER_FILES)


def _first_line(error):
    return (str(error).strip().splitlines() or [""])[0]
