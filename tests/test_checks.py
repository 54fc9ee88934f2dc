"""Models that do not do what a run relies on: refused by name, before the first token; sound ones never are."""

import pytest
import torch
import transformers

from specnb.drafters import ModelDrafter
from specnb.measure.memory import memory_budget
from specnb.models import CausalLM
from specnb.models.checks import check_forwards
from specnb.probs import Sampling
from specnb.sampler import autoregressive, speculative
from tests.conftest import VOCAB, tiny_model

GREEDY = Sampling(temperature=0)
SMALL = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}


def made(config, seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(config).to(dtype)


def phi3(context=4096, **options):
    rope = {**LONGROPE, "original_max_position_embeddings": 48, "rope_theta": 10_000.0}
    sizes = {**SMALL, "num_key_value_heads": 4, "intermediate_size": 48, "pad_token_id": 0, "initializer_range": 0.3}
    return transformers.Phi3Config(
        **sizes, max_position_embeddings=context, original_max_position_embeddings=48, rope_parameters=rope, **options
    )


def llama_with(forward):
    """A Llama whose forward is changed; its class has another name, as a model of somebody else's would."""

    class Changed(transformers.LlamaForCausalLM):
        pass

    torch.manual_seed(0)
    Changed.forward = forward
    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=2, intermediate_size=48, initializer_range=0.3)
    return Changed(config).double()


# The name of the cache that both ends of the supported range take.
pytestmark = pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
sound = transformers.LlamaForCausalLM.forward


def forgetful(self, input_ids, past_key_values=None, use_cache=None, logits_to_keep=0, **options):
    return sound(self, input_ids, use_cache=False, logits_to_keep=logits_to_keep)


def first_position_only(self, input_ids, past_key_values=None, use_cache=None, position_ids=None, **options):
    """Every forward begins at position 0 again."""
    positions = torch.arange(input_ids.shape[1])[None]
    return sound(self, input_ids, past_key_values=past_key_values, use_cache=use_cache, position_ids=positions)


def counts_on(self, input_ids, past_key_values=None, use_cache=None, **options):
    """A state beside the cache, which a rollback does not reach: it counts the rejected draft too."""
    begins = not use_cache or past_key_values.get_seq_length() == 0
    self.seen = input_ids.shape[1] + (0 if begins else self.seen)
    out = sound(self, input_ids, past_key_values=past_key_values, use_cache=use_cache, **options)
    out.logits = out.logits.roll(int(self.seen > 6), -1)
    return out


def crowded(self, input_ids, past_key_values=None, use_cache=None, attention_mask=None, position_ids=None, **options):
    """Experts with a capacity: what a row gets depends on the rows beside it."""
    out = sound(
        self,
        input_ids,
        past_key_values=past_key_values,
        use_cache=use_cache,
        attention_mask=attention_mask,
        position_ids=position_ids,
        **options,
    )
    out.logits = out.logits + out.logits.mean(0, keepdim=True) * (len(input_ids) > 1)
    return out


@pytest.mark.parametrize("forward", [forgetful, first_position_only, counts_on])
def test_a_model_whose_forwards_do_not_agree_is_refused_by_name(forward):
    with pytest.raises(ValueError, match="Changed gives other logits when it goes on from its cache"):
        CausalLM(llama_with(forward))


def test_a_model_that_takes_no_cache_is_refused_by_name():
    config = transformers.OpenAIGPTConfig(**SMALL)
    with pytest.raises(ValueError, match=r"OpenAIGPTLMHeadModel .* its cache .* choose another model"):
        CausalLM(made(config))


def test_a_model_whose_rows_depend_on_their_neighbours_is_refused_for_batches_only():
    target = CausalLM(llama_with(crowded))
    assert len(autoregressive(target, [1, 2, 3], max_new_tokens=4, sampling=GREEDY).ids) == 4
    with pytest.raises(ValueError, match="a row's logits depend on its neighbours"):
        autoregressive(target, [[1, 2, 3], [4]], max_new_tokens=4, sampling=GREEDY)


def test_alibi_that_takes_no_mask_of_each_row_is_refused_for_batches_with_the_true_reason():
    config = transformers.FalconConfig(**SMALL, alibi=True, new_decoder_architecture=False)
    target = CausalLM(made(config))
    assert len(autoregressive(target, [1, 2, 3], max_new_tokens=4, sampling=GREEDY).ids) == 4
    with pytest.raises(ValueError, match=r"FalconForCausalLM cannot decode several prompts.*call once for each"):
        autoregressive(target, [[1, 2, 3], [4]], max_new_tokens=4, sampling=GREEDY)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("initializer_range", [0.02, 1.0])
def test_rounding_is_never_taken_for_a_fault(dtype, initializer_range):
    for family in ("Llama", "GPTNeoX"):
        model = tiny_model(family, layers=4, initializer_range=initializer_range).to(dtype).eval()
        assert check_forwards(model, "sound") is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_forgotten_context_is_found_in_every_dtype(dtype):
    with pytest.raises(ValueError, match="goes on from its cache"):
        CausalLM(llama_with(forgetful).to(dtype))


def test_the_check_leaves_the_global_random_state_alone_and_empty_models_are_not_asked():
    model = tiny_model("Llama")
    state = torch.get_rng_state()
    CausalLM(model)
    assert torch.equal(state, torch.get_rng_state())
    with torch.device("meta"):
        assert check_forwards(transformers.LlamaForCausalLM(model.config), "empty") is None


@pytest.mark.parametrize(
    ("config", "limit", "kind"),
    [
        (phi3(), 48, "longrope"),
        (
            transformers.LlamaConfig(
                **SMALL, max_position_embeddings=48, rope_parameters={"rope_type": "dynamic", "factor": 4.0}
            ),
            48,
            "dynamic",
        ),
    ],
)
def test_position_scaling_that_changes_with_the_length_ends_the_context_where_it_changes(config, limit, kind):
    """Beyond it the longest position of a forward decides over all others: drafts, and neighbours in a batch."""
    target, draft = (CausalLM(made(config, seed)) for seed in (0, 1))
    assert target.context_length == limit
    prompt, short = list(range(1, 21)), [5, 6, 7]
    with pytest.raises(ValueError, match=f"context of {limit}.*ForCausalLM, {kind},.*shorten the prompt"):
        speculative(target, ModelDrafter(draft), prompt, gamma=4, max_new_tokens=60, sampling=GREEDY)
    plain = [autoregressive(target, ids, max_new_tokens=29, sampling=GREEDY).ids for ids in (prompt, short)]
    for drafter in (ModelDrafter(draft), ModelDrafter(CausalLM(target.model))):
        settings = {"gamma": 4, "max_new_tokens": 29, "sampling": GREEDY}
        assert speculative(target, drafter, prompt, **settings).ids == plain[0]
        assert [run.ids for run in speculative(target, drafter, [prompt, short], **settings)] == plain


def test_position_scaling_that_stays_as_it_is_ends_no_context():
    scaled = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}
    config = transformers.LlamaConfig(**SMALL, max_position_embeddings=256, rope_parameters=scaled)
    assert CausalLM(made(config)).context_length == 256


@pytest.mark.parametrize("window", [48, 262_144])
def test_a_window_as_long_as_the_context_hides_nothing(window):
    """Phi-3.5 has one of 262,144 tokens in a context of 131,072."""
    target, draft = (CausalLM(made(phi3(sliding_window=window), seed)) for seed in (0, 1))
    prompts = [[1, 2, 3, 4, 5, 6, 7], [9]]
    plain = [autoregressive(target, ids, max_new_tokens=20, sampling=GREEDY).ids for ids in prompts]
    runs = speculative(target, ModelDrafter(draft), prompts, gamma=3, max_new_tokens=20, sampling=GREEDY)
    assert [run.ids for run in runs] == plain
    with pytest.raises(ValueError, match=r"sliding_window=47, context 48"):
        CausalLM(made(phi3(sliding_window=47)))


def test_an_empty_model_has_a_budget_whatever_its_checks_would_say():
    assert memory_budget(phi3(), context=10).kv_bytes_per_token["target"] == 2 * 2 * 4 * 8 * 2
