"""The default pair: SmolLM2-135M-Instruct and the draft that ships with the project.

It knows where both are kept. It does not know how they are used. Read `specnb.drafters` next.
"""

from specnb.models.causal import CausalLM
from specnb.models.places import model_folder, shipped, weights_of


def default_target(*, device=None, dtype=None):
    """SmolLM2-135M-Instruct from the cache, its name saying which weights these are."""
    folder = model_folder()
    target = CausalLM.from_pretrained(folder, device=device, dtype=dtype)
    target.name = f"{folder.name} ({weights_of(folder)})"
    return target


def load_pair(name="smollm2", *, device=None, dtype=None):
    """The default target with the draft made for it: `(CausalLM, ModelDrafter, tokenizer)`.

    The draft is kept in `data/smollm2-draft/` (see the card there) and shares the target's embedding. The target needs
    `specnb fetch` once.
    """
    from specnb.drafters import ModelDrafter
    from specnb.drafters.pruned import load_draft

    if name != "smollm2":
        raise ValueError(f"unknown pair {name!r}; the pairs are: 'smollm2'. Load others with CausalLM.from_pretrained")
    target = default_target(device=device, dtype=dtype)
    return target, ModelDrafter(load_draft(shipped("smollm2-draft"), target)), target.tokenizer
