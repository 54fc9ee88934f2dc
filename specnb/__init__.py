"""Speculative decoding one can open, run and trust.

Start with `specnb.rule`, the acceptance rule on probability vectors, and `specnb.exact`, the same in fractions;
then `specnb.sampler`, the loop that applies it. Submodules load when they are first used: importing the package
costs nothing, and transformers is imported only when a model or a logits processor is needed.
"""

import importlib

__version__ = "0.1.0"

__all__ = [
    "rule", "exact", "rogues", "probs", "theory", "gof", "trace", "models", "drafters", "sampler", "timing", "measure",
    "audit", "serving",
]  # fmt: skip


def __getattr__(name):
    if name in __all__:
        return importlib.import_module(f"specnb.{name}")
    raise AttributeError(f"module 'specnb' has no attribute {name!r}")
