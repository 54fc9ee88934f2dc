import gc
import json
import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file

from specnb.models import CausalLM, TableModel, causal, check_same_vocabulary
from tests.conftest import VOCAB, tiny_model

FAMILIES = ["Llama", "Qwen2", "GPTNeoX"]


def tokenizer_of(words):
    """A word-level tokenizer made on the spot: the given words have ids 0, 1, ..."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token=words[0], eos_token=words[1])


WORDS = ["[unk]", "[eos]", *(f"w{i}" for i in range(VOCAB - 2))]


@pytest.mark.parametrize("family", FAMILIES)
def test_one_forward_gives_the_rows_of_many(tiny, family):
    model, ids = tiny(family), torch.randint(VOCAB, (1, 12))
    together = model.forward(ids, num_logits=12).logits
    model.reset()
    alone = torch.cat([model.forward(ids[:, i : i + 1], num_logits=1).logits for i in range(12)], 1)
    assert torch.allclose(together, alone, atol=1e-12) and model.length == 12


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kept", [10, 9, 1, 0])
def test_a_rollback_leaves_the_prefix_bit_identical_and_nothing_else(tiny, family, kept):
    # huggingface/transformers #47433: `crop` raised, removed nothing or emptied the cache, by version.
    model, ids, more = tiny(family), torch.randint(VOCAB, (1, 10)), torch.randint(VOCAB, (1, 3))
    model.forward(ids, num_logits=1)
    before = [tensor[:, :, :kept].clone() for tensor in model.cache_tensors]
    model.rollback(kept)
    assert model.length == kept
    with torch.inference_mode():
        for tensor in model.cache_tensors:
            tensor[:, :, kept:] = torch.nan  # What a rejected draft leaves behind may be anything.
    model.rollback(kept + 5)  # nothing to remove
    assert model.length == kept
    after = model.forward(more, num_logits=3).logits
    assert all(torch.equal(old, new[:, :, :kept]) for old, new in zip(before, model.cache_tensors, strict=True))
    fresh = tiny(family)
    assert torch.allclose(after, fresh.forward(torch.cat([ids[:, :kept], more], 1), num_logits=3).logits, atol=1e-12)


def test_a_cache_grows_past_what_was_allocated_ahead(tiny):
    model, fresh = (tiny(max_position_embeddings=300) for _ in range(2))
    ids = torch.randint(VOCAB, (1, 280))
    for start in range(0, 280, 7):
        last = model.forward(ids[:, start : start + 7], num_logits=7).logits
    assert torch.allclose(last, fresh.forward(ids, num_logits=7).logits, atol=1e-12) and model.length == 280


def test_a_dropped_cache_is_freed_at_once(tiny):
    """Without waiting for the garbage collector: on a GPU a second cache would stand beside it."""
    model = tiny()
    model.forward(torch.randint(VOCAB, (1, 5)), num_logits=1)
    kept = weakref.ref(model.cache_tensors[0])
    gc.disable()
    try:
        model.reset()
        assert kept() is None
    finally:
        gc.enable()


def test_only_the_logits_asked_for_are_computed(tiny):
    # huggingface/transformers #30860: the head ran on every row of the prompt.
    model = tiny()
    widths = []
    model.model.lm_head.register_forward_hook(lambda module, args, output: widths.append(output.shape[1]))
    model.forward(torch.randint(VOCAB, (1, 50)), num_logits=3)
    assert widths == [3]


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("Mistral", {"sliding_window": 8}, "sliding_window=8"),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, "sliding-window"),
    ],
)
def test_a_cache_that_cannot_roll_back_is_refused_by_name(family, options, message):
    # huggingface/transformers PR #48280: rollback needs entries the window has evicted.
    with pytest.raises(ValueError, match=message):
        CausalLM(tiny_model(family, **options), name="windowed")


def test_a_recurrent_state_is_refused_by_name():
    # ml-explore/mlx-lm PR #1109: trimming was a no-op, so rejected drafts stayed.
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, state_size=4)
    with pytest.raises(ValueError, match="recurrent state"):
        CausalLM(MambaForCausalLM(config))


def test_an_encoder_decoder_is_refused_by_name():
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=VOCAB, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    with pytest.raises(ValueError, match="encoder-decoder"):
        CausalLM(T5ForConditionalGeneration(config))


def test_a_local_folder_without_a_tokenizer_loads(tmp_path):
    tiny_model("Llama").save_pretrained(tmp_path)
    model = CausalLM.from_pretrained(tmp_path, dtype="float64")
    assert model.tokenizer is None and model.vocab_size == VOCAB
    assert model.describe()["id"] == tmp_path.name and str(tmp_path.parent) not in json.dumps(model.describe())


def test_padded_embedding_rows_are_left_out(tmp_path):
    # vllm-project/vllm #7252: Qwen2's head is wider than its tokenizer.
    tiny_model("Llama").save_pretrained(tmp_path)
    tokenizer_of(WORDS[:50]).save_pretrained(tmp_path)
    model = CausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert model.vocab_size == 50
    assert model.forward(torch.tensor([[1, 2]]), num_logits=2).logits.shape == (1, 2, 50)


def test_a_tokenizer_with_more_ids_than_embeddings_is_refused():
    # huggingface/transformers #23401: [PAD] was added at id = vocabulary size, an IndexError later.
    with pytest.raises(ValueError, match=f"{VOCAB + 1} ids but the model only {VOCAB}"):
        CausalLM(tiny_model("Llama"), tokenizer_of([*WORDS, "[pad]"]))


def test_vocabularies_are_compared_by_content():
    # ggml-org/llama.cpp PR #3812: same size, two ids swapped.
    swapped = [*WORDS[:5], WORDS[6], WORDS[5], *WORDS[7:]]
    target = CausalLM(tiny_model("Llama"), tokenizer_of(WORDS), name="big")
    check_same_vocabulary(target, CausalLM(tiny_model("Llama"), tokenizer_of(WORDS)))
    with pytest.raises(ValueError, match=r"big .*small .*'w\d' is id \d in one and \d in the other"):
        check_same_vocabulary(target, CausalLM(tiny_model("Llama"), tokenizer_of(swapped), name="small"))


def test_sizes_are_compared_where_a_tokenizer_is_missing():
    with pytest.raises(ValueError, match="61 and 40 tokens"):
        check_same_vocabulary(CausalLM(tiny_model("Llama")), CausalLM(tiny_model("Llama", vocab_size=40)))


def test_a_model_that_is_not_there_is_a_clear_error(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"cannot load the model .*empty.*local folder"):
        CausalLM.from_pretrained(tmp_path / "empty")


def test_weights_that_would_be_unpickled_are_refused(tmp_path):
    model = tiny_model("Llama")
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="safetensors"):
        CausalLM.from_pretrained(tmp_path)


def test_damaged_weights_are_a_clear_error(tmp_path):
    tiny_model("Llama").save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ValueError, match="cannot load the model"):
        CausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda state: state.pop("model.layers.1.mlp.up_proj.weight"),
            r"lacks model\.layers\.1\.mlp\.up_proj\.weight;",
        ),
        (
            lambda state: [state.pop(name) for name in list(state) if "layers.1" in name],
            r"lacks model\.layers\.1\.\S+, \S+, \S+ and 6 more;",
        ),
        (lambda state: state.update({"v_head.weight": torch.ones(2)}), r"has no place for, v_head\.weight;"),
        (lambda state: state.update({"lm_head.weight": torch.ones(7, 32)}), r"has another shape of lm_head\.weight;"),
    ],
)
def test_a_checkpoint_that_does_not_fit_its_architecture_is_refused_by_name(tmp_path, spoil, message):
    """transformers fills what is missing with random numbers, and a sweep would measure those."""
    tiny_model("Llama").save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    spoil(state)
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        ValueError, match=rf"the checkpoint .* does not fit a LlamaForCausalLM: it .*{message} take"
    ) as e:
        CausalLM.from_pretrained(tmp_path)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_that_shares_the_embedding_is_not_missed(tmp_path, tied):
    tiny_model("Llama", tie_word_embeddings=tied).save_pretrained(tmp_path)
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) is not tied
    assert CausalLM.from_pretrained(tmp_path, dtype="float64").vocab_size == VOCAB


@pytest.mark.parametrize(
    ("settings", "package"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes"),
        ({"quant_method": "gptq", "bits": 4}, "optimum"),
        ({"quant_method": "awq", "bits": 4}, "gptqmodel"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}}, "compressed-tensors"),
    ],
)
def test_a_quantised_checkpoint_without_its_library_is_one_line_that_names_the_package(tmp_path, settings, package):
    tiny_model("Llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    with pytest.raises(ValueError, match=f"cannot load the model .*not installed.*{package}") as error:
        CausalLM.from_pretrained(tmp_path)
    assert "\n" not in str(error.value)


def test_weights_are_hashed_once(tmp_path, monkeypatch):
    tiny_model("Llama").save_pretrained(tmp_path)
    model, hashed = CausalLM.from_pretrained(tmp_path), []
    monkeypatch.setattr(causal, "file_sha256", lambda path: hashed.append(path.name) or "0" * 64)
    assert model.describe() == model.describe() and hashed == ["model.safetensors"]


def test_added_tokens_that_fit_the_embedding_are_part_of_the_vocabulary():
    """Ids may have gaps: Llama 3 and Qwen name their special tokens above the others."""
    tokenizer = tokenizer_of(WORDS[:50])
    tokenizer.add_tokens(["<extra>"])
    assert CausalLM(tiny_model("Llama"), tokenizer).vocab_size == 51


def test_an_unknown_dtype_or_a_device_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match="'bf16'; choose one of bfloat16"):
        CausalLM.from_pretrained(tmp_path, dtype="bf16")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="no cuda device"):
            CausalLM.from_pretrained(tmp_path, device="cuda")


def test_a_table_model_checks_its_rows():
    model = TableModel(lambda prefix: [0.5, 0.6], 2)
    with pytest.raises(ValueError, match=r"after \(0,\) must be 2 probabilities"):
        model.forward(torch.tensor([[0]]), num_logits=1)


def test_a_table_model_sees_prompt_and_generated_ids():
    seen = []
    model = TableModel(lambda prefix: seen.append(prefix) or torch.tensor([0.0, 1.0]), 2)
    logits = model.forward(torch.tensor([[1, 0, 1]]), num_logits=2).logits
    assert seen == [(1, 0), (1, 0, 1)] and logits.exp().tolist() == [[[0, 1], [0, 1]]]


@pytest.mark.model
def test_the_fetched_model_is_the_expected_one(smollm2):
    target, _, tokenizer = smollm2
    assert target.vocab_size == 49_152 == len(tokenizer) and target.eos_ids == {2}
    answer = target.model.generate(
        **tokenizer("The capital of France is", return_tensors="pt"), max_new_tokens=3, do_sample=False
    )
    assert "Paris" in tokenizer.decode(answer[0])
