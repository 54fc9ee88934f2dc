"""A draft made of parts of its target: a few layers, the embedding, and the output rows of some ids.

It knows how such a draft is put together, kept in a folder and loaded beside its target, with which it shares the
embedding. It does not know how one is trained: that is `scripts/distill.py`. Read notebook 13.
"""

import copy
import hashlib
import json
import warnings
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from specnb.models import CausalLM
from specnb.models.places import file_sha256

SCHEMA = "specnb-draft/1"


class PrunedLM(CausalLM):
    """Some layers of a target, which proposes only among `output_ids`.

    Its logits are over the target's whole vocabulary, `-inf` for an id that is not among them. So its probabilities are
    those it draws from, and the rule stays exact: what the draft can never propose comes from the residual.

    Parameters
    ----------
    target : CausalLM
        Of the Llama family: `base_model` has `embed_tokens`, `layers`, `norm`, `rotary_emb`.
    kept_layers : list of int
        The target's layers to keep, in order.
    output_ids : list of int or Tensor
        Ids the draft may propose.

    Raises
    ------
    ValueError
        For another architecture, layers or ids the target does not have, or none of them.
    """

    def __init__(self, target, kept_layers, output_ids, name=None):
        device = target.device
        self.kept_layers = [int(layer) for layer in kept_layers]
        self.output_ids = torch.as_tensor(output_ids, dtype=torch.long, device=device).unique()  # ascending
        _check_parts(target, self.kept_layers, self.output_ids)
        model = _assemble(target.model, self.kept_layers, self.output_ids)
        super().__init__(model, target.tokenizer, name=name or f"{len(self.kept_layers)} layers of {target.name}")
        self.vocab_size = target.vocab_size

    @torch.inference_mode()
    def forward(self, ids, num_logits, num_new=None, num_behind=None, hidden=False):
        scores = super().forward(ids, num_logits, num_new, num_behind, hidden)
        kept = scores.logits  # (batch, num_logits, len(output_ids))
        logits = kept.new_full((*kept.shape[:-1], self.vocab_size), -torch.inf)
        logits[..., self.output_ids] = kept
        return scores._replace(logits=logits)

    def own_state(self):
        """What is not the target's: weights of the kept layers and of the norm, by name."""
        base = self.model.base_model
        state = {f"layers.{name}": tensor for name, tensor in base.layers.state_dict().items()}
        return state | {f"norm.{name}": tensor for name, tensor in base.norm.state_dict().items()}

    def describe(self):
        return {
            **super().describe(),
            "id": self.name,
            "sha256": self.sha256,
            "num_params": sum(tensor.numel() for tensor in self.own_state().values()),
            "num_shared_params": self.model.get_input_embeddings().weight.numel(),
            "kept_layers": self.kept_layers,
            "num_output_ids": len(self.output_ids),
        }

    sha256 = None  # of the file it was loaded from


def save_draft(draft, folder, identity, how=None):
    """Write `draft.safetensors` (bfloat16: own weights, output ids) and `config.json`.

    `identity` is that of its target, from `made_for`; `how` says with which text, command and commit it was made.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in draft.own_state().items()}
    save_file({**state, "output_ids": draft.output_ids.int().cpu()}, folder / "draft.safetensors")
    config = {"schema": SCHEMA, "kept_layers": draft.kept_layers, "made_for": identity, "how": how}
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def is_draft(folder):
    """Whether `folder` holds a draft of this kind."""
    return (Path(folder) / "draft.safetensors").exists()


def load_draft(folder, target):
    """The `PrunedLM` kept in `folder`, beside a target that lends it the embedding.

    Raises
    ------
    ValueError
        For a folder that holds none, and for a target of another vocabulary or shape.

    Warns
    -----
    UserWarning
        Where the target's weights are not those the draft was made for: the output is as exact as ever, acceptance
        may be lower.
    """
    folder = Path(folder)
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        state = load_file(folder / "draft.safetensors", device=str(target.device))
        kept_layers, identity, output_ids = config["kept_layers"], config["made_for"], state.pop("output_ids")
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{folder} holds no draft made by scripts/distill.py: {error}") from error
    found = made_for(target)
    if found["vocabulary_sha256"] != identity["vocabulary_sha256"]:
        raise ValueError(
            f"the draft in {folder.name} was made for the vocabulary of {identity['id']}; {target.name} has another "
            "one, in which the same ids mean other tokens. Make one for it: make draft ARGS='--target ...'"
        )
    draft = PrunedLM(target, kept_layers, output_ids, name=folder.name)
    for name, tensor in draft.own_state().items():
        if name not in state or state[name].shape != tensor.shape:
            raise ValueError(
                f"the draft in {folder.name} does not fit {target.name}: {name} is missing or of another shape"
            )
    _set_own_state(draft, state)
    draft.sha256 = {"draft.safetensors": file_sha256(folder / "draft.safetensors")}
    if found["sha256"] != identity["sha256"]:
        warnings.warn(
            f"the draft in {folder.name} was made for {identity['id']} with other weights than these: the output is as "
            "exact as ever, but fewer drafts may be accepted",
            stacklevel=2,
        )
    return draft


def made_for(target):
    """What a draft's config says of its target: name, SHA-256 of its weights (None where they came from no folder)
    and of its vocabulary by content, every token with its id (of its size alone without a tokenizer)."""
    described = target.describe()
    vocabulary = target.vocab_size if target.tokenizer is None else sorted(target.tokenizer.get_vocab().items())
    return {
        "id": described["id"],
        "sha256": described["sha256"],
        "vocab_size": target.vocab_size,
        "vocabulary_sha256": hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest(),
    }


def _check_parts(target, kept_layers, output_ids):
    base = target.model.base_model
    missing = [part for part in ("embed_tokens", "layers", "norm", "rotary_emb") if not hasattr(base, part)]
    if missing:
        raise ValueError(f"{target.name} has no {', '.join(missing)}: only models built like Llama can be pruned here")
    num_layers = len(base.layers)
    if not kept_layers or not all(0 <= layer < num_layers for layer in kept_layers):
        raise ValueError(f"kept layers must be some of 0..{num_layers - 1} of {target.name}, got {kept_layers}")
    if len(output_ids) == 0 or output_ids[0] < 0 or output_ids[-1] >= target.vocab_size:
        raise ValueError(f"output ids must be some of 0..{target.vocab_size - 1}, got {len(output_ids)} ids")


def _assemble(model, kept_layers, output_ids):
    """A model of the same class with copies of the kept layers, the embedding itself and a part of the head."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers, config.tie_word_embeddings = len(kept_layers), False
    config._name_or_path = ""  # It came from no folder of its own.
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[layer] for layer in kept_layers]
    with torch.device("meta"):
        pruned = type(model)(config)
    theirs, base = model.base_model, pruned.base_model
    base.embed_tokens, base.rotary_emb = theirs.embed_tokens, theirs.rotary_emb
    base.norm = copy.deepcopy(theirs.norm)
    for position, layer in enumerate(kept_layers):
        weights = {name: tensor.clone() for name, tensor in theirs.layers[layer].state_dict().items()}
        base.layers[position].load_state_dict(weights, assign=True)
    head = model.get_output_embeddings()
    if getattr(head, "bias", None) is not None:
        raise ValueError(f"{type(model).__name__} has an output bias; that is not supported here")
    pruned.lm_head = torch.nn.Linear(head.in_features, len(output_ids), bias=False, device="meta")
    pruned.lm_head.weight = torch.nn.Parameter(head.weight.detach()[output_ids], requires_grad=False)
    return pruned


def _set_own_state(draft, state):
    for part in ("layers", "norm"):
        module = getattr(draft.model.base_model, part)
        dtype = next(module.parameters()).dtype
        own = {name.removeprefix(f"{part}."): x.to(dtype) for name, x in state.items() if name.startswith(f"{part}.")}
        module.load_state_dict(own, assign=True)
