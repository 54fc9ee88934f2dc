"""Budgets: by hand for published models, and against the live tensors of real runs on a CPU."""

import pytest
import torch
from transformers.integrations import sdpa_attention

from specnb.drafters import ModelDrafter
from specnb.drafters.pruned import PrunedLM
from specnb.measure.live import LiveBytes
from specnb.measure.memory import kv_bytes_per_token, memory_budget
from specnb.measure.shapes import SHAPES
from specnb.models import CausalLM
from specnb.models.cache import cache_argument
from specnb.sampler import speculative
from tests.conftest import seeded, tiny_model


@pytest.mark.parametrize(
    ("name", "params", "layers", "kv_heads", "head_size", "vocab"),
    [
        ("Llama-3.1-8B", 8_030_261_248, 32, 8, 128, 128_256),
        ("Llama-3.2-1B", 1_235_814_400, 16, 8, 64, 128_256),
        ("Qwen2.5-7B", 7_615_616_512, 28, 4, 128, 152_064),
        ("Qwen2.5-0.5B", 494_032_768, 24, 2, 64, 151_936),
    ],
)
def test_published_models_by_hand(name, params, layers, kv_heads, head_size, vocab):
    found = memory_budget(SHAPES[name], context=1000, batch=1, gamma=4).loc["target"]
    assert found.weights_bytes == 2 * params
    assert found.kv_bytes_per_token == 2 * layers * kv_heads * head_size * 2
    assert found.kv_bytes == 1004 * found.kv_bytes_per_token
    assert found.block_bytes == 5 * vocab * (2 + 4 + 4)
    assert memory_budget(SHAPES[name], context=1000, dtype="float32").weights_bytes["target"] == 4 * params


@pytest.mark.parametrize(
    ("config", "per_token"),
    [
        # Falcon-7B shares one head of 64 among 71, StarCoder one of 128 among 48.
        ({"model_type": "falcon", "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71}, 8192),
        ({"model_type": "gpt_bigcode", "n_embd": 6144, "n_layer": 40, "n_head": 48, "multi_query": True}, 20_480),
        ({"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12}, 2 * 12 * 768 * 2),
        ({"model_type": "opt", "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}, 36_864),
        ({"model_type": "mixtral", "num_hidden_layers": 3}, 2 * 3 * 8 * 128 * 2),
    ],
)
def test_what_a_token_leaves_is_taken_from_the_cache_not_from_field_names(config, per_token):
    assert memory_budget(config, context=10).kv_bytes_per_token["target"] == per_token


def test_what_a_token_leaves_in_a_latent_cache_is_what_transformers_keeps():
    """Older versions expand the latent to every head before they keep it, newer ones keep it with its rotary part."""
    from transformers import DynamicCache
    from transformers.models.deepseek_v3 import DeepseekV3Config, DeepseekV3ForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 12}
    dims = {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "n_group": 1}
    config = DeepseekV3Config(vocab_size=97, topk_group=1, num_experts_per_tok=2, **sizes, **heads, **dims)
    kept, model = DynamicCache(), DeepseekV3ForCausalLM(config)
    model(torch.tensor([[1]]), use_cache=True, **{cache_argument(model): kept})
    numbers = sum(layer.keys.numel() + layer.values.numel() for layer in kept.layers)
    assert kv_bytes_per_token(config) == kv_bytes_per_token(model) == 2 * numbers


def test_a_pair_adds_up():
    pair = memory_budget(SHAPES["Llama-3.1-8B"], SHAPES["Llama-3.2-1B"], context=4096, batch=8, gamma=4)
    parts = ["weights_bytes", "kv_bytes_per_token", "kv_bytes", "block_bytes"]
    assert (pair.loc["both", parts] == pair.loc["target", parts] + pair.loc["draft", parts]).all()
    assert pair.layer_bytes["both"] == pair.layer_bytes["target"] == 2 * 32 * 128 * 2 * 4160 * 8
    assert (pair.total_bytes == pair.weights_bytes + pair.kv_bytes + pair.layer_bytes).all()  # above its block here
    assert pair.kv_bytes["target"] == 8 * 4160 * 131_072  # 4096 + 4 and one more, rounded up to 64s
    assert pair.block_bytes["draft"] == 8 * 4 * 128_256 * 4


def test_what_a_pruned_draft_shares_counts_once():
    target = CausalLM(tiny_model("Llama").float())
    draft = PrunedLM(target, [0], range(40))
    found = memory_budget(target, draft, context=10, dtype="float32")
    own = sum(tensor.numel() for tensor in draft.own_state().values()) + 40 * 32  # and its rows of the head
    assert found.weights_bytes["draft"] == 4 * own


@pytest.mark.parametrize("bad", [{"context": 0}, {"context": 5, "batch": 0}, {"context": 5, "gamma": -1}])
def test_bad_sizes_are_refused(bad):
    with pytest.raises(ValueError, match="at least 1"):
        memory_budget(SHAPES["Qwen2.5-0.5B"], **bad)


@pytest.mark.parametrize(
    ("batch", "gamma", "vocab", "prompt", "dtype"),
    [
        (1, 0, 500, 600, "float32"),
        (1, 4, 20_000, 400, "bfloat16"),
        (4, 4, 2_000, 500, "float32"),
        (8, 2, 11, 500, "float32"),
        (2, 0, 50, 700, "float32"),
    ],
)
def test_a_budget_is_within_5_percent_of_the_measured_peak(batch, gamma, vocab, prompt, dtype):
    """Method: bytes of live tensors while whole rounds run, from the second on, so without the prefill."""
    if batch > 1 and not gamma and not hasattr(sdpa_attention, "pack_gqa"):
        pytest.skip("this transformers repeats the keys of a masked step of one token too, which the budget leaves out")
    options = {"vocab_size": vocab, "max_position_embeddings": 1024}
    models = [
        CausalLM(tiny_model("Llama", layers=layers, seed=layers, **options).to(getattr(torch, dtype)))
        for layers in (6, 2)
    ]
    drafter = ModelDrafter(models[1]) if gamma else None
    weights = sum(p.nbytes for model in models[: 1 + bool(gamma)] for p in model.model.parameters())
    prompts = torch.randint(vocab, (batch, prompt), generator=seeded(0)).tolist()
    forward, calls = models[0].forward, []
    with LiveBytes() as live:

        def counted(*arguments, **more):
            calls.append(1)
            if len(calls) == 2:
                live.peak = live.now
            return forward(*arguments, **more)

        models[0].forward = counted
        runs = speculative(
            models[0], drafter, prompts, gamma=gamma, max_new_tokens=20, generator=[seeded(i) for i in range(batch)]
        )
    assert len(calls) > 2 and {len(run.ids) for run in runs} == {20}
    budget = memory_budget(
        models[0], models[1] if gamma else None, context=prompt + 20, batch=batch, gamma=gamma, dtype=dtype
    )
    measured = weights + live.peak
    assert budget.total_bytes["both"] == pytest.approx(measured, rel=0.05)
