import json
from collections import Counter
from itertools import product

import pytest
import torch

from specnb.drafters import ModelDrafter
from specnb.drafters.pruned import PrunedLM, load_draft, made_for, save_draft
from specnb.gof import chi_square
from specnb.measure.prompts import load_prompts
from specnb.models import CausalLM
from specnb.models.places import PROJECT
from specnb.probs import Sampling
from specnb.sampler import autoregressive, speculative
from tests.conftest import seeded, tiny_model

PROMPT = [1, 0]


def sequence_law(target, length):
    """Probability of every sequence of `length` tokens after PROMPT, from one forward each."""
    law = {}
    for tokens in product(range(target.vocab_size), repeat=length):
        target.reset()
        probs = target.forward(torch.tensor([[*PROMPT, *tokens]]), num_logits=length + 1).logits[0, :-1].softmax(-1)
        law[tokens] = probs[torch.arange(length), list(tokens)].prod().item()
    return law


class BoastfulDrafter(ModelDrafter):
    """Wrong: says it might have drawn any id, though it drew from a part of them."""

    def propose(self, *arguments):
        draft = super().propose(*arguments)
        return draft._replace(probs=0.7 * draft.probs + 0.3 / draft.probs.shape[-1])


@pytest.mark.parametrize(("drafter", "verdict"), [(ModelDrafter, "pass"), (BoastfulDrafter, "fail")])
def test_a_draft_with_a_trimmed_vocabulary_leaves_the_law_as_it_was(drafter, verdict):
    """Three tokens over several rounds, prefix-dependent, n = 2500, level .001: one false alarm in 1000 seeds."""
    target = CausalLM(tiny_model("Llama", vocab_size=4, initializer_range=0.6))
    draft = PrunedLM(target, [1], [0, 2])
    law = sequence_law(target, 3)
    generator, sampling = seeded(3), Sampling()
    seen = Counter(
        tuple(
            speculative(
                target, drafter(draft), PROMPT, gamma=2, max_new_tokens=3, sampling=sampling, generator=generator
            ).ids
        )
        for _ in range(2500)
    )
    assert any(set(tokens) - {0, 2} for tokens in seen)  # what it never proposes is emitted all the same
    assert chi_square([seen[tokens] for tokens in law], list(law.values())).verdict == verdict


def test_greedy_ids_are_those_of_plain_decoding(tiny):
    target = tiny()
    draft = PrunedLM(target, [0], range(0, 61, 2))
    plain = autoregressive(target, PROMPT, max_new_tokens=20, sampling=Sampling(temperature=0))
    spec = speculative(
        target, ModelDrafter(draft), PROMPT, gamma=4, max_new_tokens=20, sampling=Sampling(temperature=0)
    )
    assert spec.ids == plain.ids


def test_all_layers_and_all_ids_are_the_target_itself(tiny):
    target = tiny()
    draft = PrunedLM(target, [0, 1], range(61))
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    assert torch.equal(draft.forward(ids, 5).logits, target.forward(ids, 5).logits)


def test_logits_of_other_ids_are_minus_infinity_and_the_rest_are_the_head_s(tiny):
    target = tiny()
    draft = PrunedLM(target, [1], [5, 3, 9, 3])
    logits = draft.forward(torch.tensor([[1, 2]]), 1).logits[0, 0]
    assert logits.isfinite().nonzero().flatten().tolist() == [3, 5, 9]
    probs = Sampling(top_k=2).probs(logits)
    assert probs.count_nonzero() == 2 and probs.sum() == pytest.approx(1)


def test_the_embedding_is_held_once_and_the_layers_are_copies(tiny):
    target = tiny()
    draft = PrunedLM(target, [1], [1, 2, 3])
    assert draft.model.get_input_embeddings() is target.model.get_input_embeddings()
    before = target.model.base_model.layers[1].mlp.up_proj.weight.clone()
    draft.model.base_model.layers[0].mlp.up_proj.weight.data.zero_()
    assert torch.equal(target.model.base_model.layers[1].mlp.up_proj.weight, before)


def test_a_draft_comes_back_from_its_folder(tiny, tmp_path):
    target = tiny()
    draft = PrunedLM(target, [1], [5, 3, 9])
    save_draft(draft, tmp_path, made_for(target))
    again = load_draft(tmp_path, target)
    assert again.kept_layers == [1] and again.output_ids.tolist() == [3, 5, 9]
    for name, tensor in draft.own_state().items():
        assert torch.equal(again.own_state()[name], tensor.to(torch.bfloat16).to(tensor.dtype)), name
    described = again.describe()
    assert described["sha256"]["draft.safetensors"] and described["num_output_ids"] == 3


def test_another_vocabulary_is_refused_and_other_weights_are_warned_of(tiny, tmp_path):
    target = tiny()
    identity = made_for(target)
    save_draft(PrunedLM(target, [1], [1, 2]), tmp_path, {**identity, "sha256": {"model.safetensors": "other"}})
    with pytest.warns(UserWarning, match="as exact as ever"):
        load_draft(tmp_path, target)
    with pytest.raises(ValueError, match="vocabulary of"):
        load_draft(tmp_path, tiny(vocab_size=62))
    save_draft(PrunedLM(target, [1], [1, 2]), tmp_path, identity)
    with pytest.raises(ValueError, match="does not fit"):
        load_draft(tmp_path, tiny(num_hidden_layers=2, head_dim=4))


def test_a_folder_without_a_draft_is_named(tiny, tmp_path):
    with pytest.raises(ValueError, match="holds no draft"):
        load_draft(tmp_path, tiny())
    (tmp_path / "config.json").write_text(json.dumps({"kept_layers": [0]}))
    with pytest.raises(ValueError, match="holds no draft"):
        load_draft(tmp_path, tiny())


@pytest.mark.parametrize(
    ("layers", "ids", "message"),
    [([2], [1], "kept layers"), ([], [1], "kept layers"), ([0], [], "output ids"), ([0], [61], "output ids")],
)
def test_parts_the_target_does_not_have_are_refused(tiny, layers, ids, message):
    with pytest.raises(ValueError, match=message):
        PrunedLM(tiny(), layers, ids)


def test_another_architecture_is_refused(tiny):
    with pytest.raises(ValueError, match="built like Llama"):
        PrunedLM(tiny("GPTNeoX"), [0], [1])


def test_qwen_layers_can_be_kept_too(tiny):
    target = tiny("Qwen2")
    draft = PrunedLM(target, [1], range(61))
    assert draft.forward(torch.tensor([[1, 2, 3]]), 2).logits.shape == (1, 2, 61)


@pytest.mark.model
def test_the_shipped_draft_fits_its_target(smollm2):
    target, drafter, tokenizer = smollm2
    draft = drafter.model
    assert draft.model.get_input_embeddings() is target.model.get_input_embeddings()
    assert draft.tokenizer is tokenizer and draft.vocab_size == target.vocab_size == 49152
    assert (PROJECT / "data" / "smollm2-draft" / "draft.safetensors").stat().st_size < 25_000_000
    prompt = next(prompt for prompt in load_prompts() if prompt.kind == "open_chat").encode(tokenizer)
    generation = speculative(target, drafter, prompt, gamma=3, max_new_tokens=32, sampling=Sampling(temperature=0))
    assert generation.trace.alpha_hat > 0.3  # an untrained pair of layers reaches 0.0 (notebook 13)
