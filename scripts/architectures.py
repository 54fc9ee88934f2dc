"""Try every causal language model of transformers as a tiny random one, and write down what is exact.

`make architectures` does it for all of them in some minutes. Each is built from its own default configuration made
small: vocabulary 97, width 32, 2 layers, 4 heads, float64, weights of range .3. Greedy text with drafts must equal
plain decoding, and each row of a batch must be the text of its prompt alone.
The table goes to data/architectures.json and data/architectures.md.
"""

import json
import sys
import warnings
from datetime import date
from pathlib import Path

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from specnb.drafters import ModelDrafter
from specnb.models import CausalLM
from specnb.probs import Sampling
from specnb.sampler import autoregressive, speculative

FOLDER = Path(__file__).resolve().parents[1] / "data"
SCHEMA = "specnb-architectures/1"
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [9], [2, 6, 5, 3, 5]]
NUM_NEW = 16

# What a configuration calls its sizes, and the size it gets here. Fields that it does not have are left out.
SMALL = {
    97: "vocab_size vocab_size_per_layer_input unpadded_vocab_size",
    32: "hidden_size d_model n_embd embedding_size embedding_dim emb_dim word_embed_proj_dim input_embedding_size "
    "output_embedding_size lru_width attention_hidden_size",
    48: "intermediate_size moe_intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim n_inner dff dim_ff "
    "ffn_hidden_size expert_ffn_hidden_size intermediate_size_mlp shared_expert_intermediate_size d_inner "
    "shared_intermediate_size shared_experts_intermediate_size dense_intermediate_size feed_forward_size "
    "moe_shared_expert_intermediate_size",
    4: "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads attention_heads "
    "num_decoder_attention_heads num_encoder_attention_heads num_experts num_local_experts n_routed_experts "
    "moe_num_experts rotary_dim index_n_heads index_topk o_lora_rank router_hidden_size d_rel swa_num_attention_heads "
    "zero_expert_num adapter_rank",
    2: "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_decoder_layers "
    "num_encoder_layers num_key_value_heads num_kv_heads num_experts_per_tok num_experts_per_token "
    "moe_k moe_topk swa_num_key_value_heads max_window_layers num_query_groups o_groups heads_per_ngram",
    8: "mamba_n_heads mamba_d_head head_dim qk_rope_head_dim v_head_dim qk_nope_head_dim kv_lora_rank q_lora_rank "
    "dim_head d_head d_kv kv_channels index_head_dim swa_head_dim attention_head_dim attention_head_size "
    "hidden_size_per_layer_input query_pre_attn_scalar laurel_rank",
    16: "qk_head_dim",
    1: "n_group topk_group num_expert_group n_shared_experts num_shared_experts first_k_dense_replace prompt_length",
    256: "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions",
    0: "num_kv_shared_layers",
}
SIZES = {name: size for size, names in SMALL.items() for name in names.split()}
UNSET = {"head_dim": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}, "n_shared_experts": 1}
WINDOWS = ("sliding_window", "sliding_window_size", "window_size", "attention_window_size")


SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")
PARTS = ("vision_config", "audio_config", "patcher_config", "depth_decoder_config", "audio_encoder_config")
OF_SEVERAL_PARTS = "it has parts beside a text model, which is tried under its own type where it has one"


def small_config(kind):
    """The default configuration of a model type, with small sizes."""
    default = CONFIG_MAPPING[kind]()
    if not hasattr(default, "vocab_size") or any(hasattr(default, part) for part in PARTS):
        raise ValueError(OF_SEVERAL_PARTS)
    fields = {name: value for name, value in default.to_dict().items() if value is not None}
    fields |= {name: value for name, value in UNSET.items() if getattr(default, name, 0) is None}
    num_layers, context = (getattr(default, name, 0) for name in ("num_hidden_layers", "max_position_embeddings"))
    for name, value in fields.items():
        if name in SIZES and isinstance(value, int):
            fields[name] = SIZES[name]
        if name == "num_key_value_heads" and value == getattr(default, "num_attention_heads", None):
            fields[name] = SIZES["num_attention_heads"]  # Nothing is shared there.
        if name in WINDOWS and value < (context or 0):  # A window that is shorter than the context stays so.
            fields[name] = 8
        if isinstance(value, list | tuple) and len(value) == num_layers:
            fields[name] = _two_of(value)
        if name.endswith("token_id") and isinstance(value, int):
            fields[name] = min(value, 96)
    if "per_layer_config" in fields:
        fields["per_layer_config"] = {}
    del fields["model_type"], fields["transformers_version"]
    return type(default)(**fields | dict.fromkeys(SPECIAL, 96) | {"initializer_range": 0.3, "is_decoder": True})


def _two_of(values):
    """Two layers that show as many kinds as there are."""
    others = [value for value in values if value != values[0]]
    return [values[0], (others or values)[0]]


def small_model(kind, *, seed=0):
    """A random model of a type in transformers' mapping of causal language models, with two layers."""
    config = small_config(kind)
    config._experts_implementation = "eager"  # The others multiply no float64.
    torch.manual_seed(seed)
    return getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind])(config).double().eval()


def verdict_of(kind):
    """(verdict, reason): "exact", "exact, single rows only", "refused", "wrong", or "not tried"."""
    try:
        target, draft = small_model(kind), small_model(kind, seed=1)
    except Exception as error:
        return "not tried", " ".join(str(error).split())[:200]
    try:
        target, drafter = CausalLM(target), ModelDrafter(CausalLM(draft))
        alone = [_text(target, None, prompt) for prompt in PROMPTS]
        if [_text(target, drafter, prompt) for prompt in PROMPTS] != alone:
            return "wrong", "greedy text with drafts differs from plain decoding"
    except ValueError as error:
        return "refused", str(error)
    try:
        exact = _text(target, drafter, PROMPTS) == alone and _text(target, None, PROMPTS) == alone
    except ValueError as error:
        return "exact, single rows only", str(error)
    return ("exact", "") if exact else ("wrong", "rows of a batch differ from the text of their prompts alone")


def _text(target, drafter, prompt):
    settings = {"max_new_tokens": NUM_NEW, "sampling": Sampling(temperature=0)}
    run = (
        autoregressive(target, prompt, **settings)
        if drafter is None
        else speculative(target, drafter, prompt, gamma=3, **settings)
    )
    return [row.ids for row in run] if isinstance(run, list) else run.ids


def markdown(found):
    """The table for readers, from what the JSON file holds."""
    lines = [
        "# Architectures tried",
        "",
        f"Every type of causal language model in transformers {found['transformers']}, as a tiny random model, on "
        f"{found['created']}. `make architectures` writes this table again.",
        "",
        "| verdict | types |",
        "|---|---|",
    ]
    verdicts = [row["verdict"] for row in found["rows"]]
    lines += [f"| {verdict} | {verdicts.count(verdict)} |" for verdict in dict.fromkeys(sorted(verdicts))]
    lines += ["", "| type | verdict | reason |", "|---|---|---|"]
    lines += [f"| `{row['type']}` | {row['verdict']} | {row['reason'].replace('|', '/')} |" for row in found["rows"]]
    return "\n".join(lines) + "\n"


def main(kinds):
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    rows = []
    for kind in kinds:
        verdict, reason = verdict_of(kind)
        rows.append({"type": kind, "verdict": verdict, "reason": reason})
        print(f"{kind}: {verdict}", flush=True)
    found = {"schema": SCHEMA, "command": "make architectures", "created": str(date.today())}
    found |= {"transformers": transformers.__version__, "torch": torch.__version__, "rows": rows}
    (FOLDER / "architectures.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    (FOLDER / "architectures.md").write_text(markdown(found), encoding="utf-8")
    wrong = [row["type"] for row in rows if row["verdict"] == "wrong"]
    sys.exit(f"accepted, but not exact: {', '.join(wrong)}" if wrong else 0)


if __name__ == "__main__":
    main(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
