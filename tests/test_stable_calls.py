"""The names and parameters other projects' tests call; a change here breaks them."""

import importlib
import inspect

import pytest

CALLS = {
    "probs.Sampling": "temperature top_k top_p min_p repetition_penalty logit_bias",
    "probs.Sampling.probs": "self logits prefix_ids",
    "rule.accept_probs": "target_probs draft_probs draft_ids",
    "rule.residual": "target_probs draft_probs",
    "rule.verify": "target_probs draft_probs draft_ids uniforms",
    "exact.round_law": "target draft gamma rule",
    "gof.chi_square": "counts probs *min_expected *alpha",
    "gof.two_sample": "counts_a counts_b *alpha",
    "gof.sample_size": "probs alternative *alpha *power",
    "models.TableModel": "next_probs vocab_size",
    "models.CausalLM.from_pretrained": "name_or_path *device *dtype *device_map",
    "models.load_pair": "name *device *dtype",
    "drafters.ModelDrafter": "model sampling",
    "drafters.PromptLookup": "max_ngram min_ngram",
    "sampler.autoregressive": "target prompt_ids *max_new_tokens *sampling *eos_ids *generator",
    "sampler.speculative": "target drafter prompt_ids *gamma *max_new_tokens *sampling *eos_ids *generator",
    "audit.compare_greedy": "baseline_ids candidate_ids *logits_at *dtype *max_ulps",
    "timing.environment": "",
    "theory.tokens_per_round": "alpha gamma",
    "theory.speedup": "alpha gamma cost_ratio verify_cost",
    "theory.best_gamma": "alpha cost_ratio verify_cost",
}
DEFAULTS = {
    "gof.chi_square": {"min_expected": 5, "alpha": 0.001},
    "gof.sample_size": {"alpha": 0.001, "power": 0.99},
    "models.load_pair": {"name": "smollm2", "device": None, "dtype": None},
    "drafters.PromptLookup": {"max_ngram": 3, "min_ngram": 1},
    "theory.speedup": {"verify_cost": 1.0},
    "theory.best_gamma": {"verify_cost": None},
    "exact.round_law": {"rule": "token"},
}
ATTRIBUTES = {
    "rule.Verdict": "num_accepted next_id",
    "gof.GofResult": "statistic dof p_value n num_pooled verdict",
    "audit.Report": "tested not_tested verdict found settings versions n statistic p_value level smallest_tv",
    "trace.Generation": "ids stop_reason trace",
    "trace.Round": "num_drafted num_accepted num_emitted draft_sec verify_sec other_sec",
    "trace.Trace": "rounds ttft_sec decode_sec draft_sec verify_sec other_sec peak_memory_bytes accepted_histogram "
    "tokens_per_round accepted_fraction alpha_hat survival",
}


def find(name):
    module, *path = name.split(".")
    found = importlib.import_module(f"specnb.{module}")
    for part in path:
        found = getattr(found, part)
    return found


@pytest.mark.parametrize("name", CALLS)
def test_a_call_keeps_its_parameters(name):
    parameters = inspect.signature(find(name)).parameters.values()
    shown = [f"*{p.name}" if p.kind is p.KEYWORD_ONLY else p.name for p in parameters]
    assert shown == CALLS[name].split()
    for parameter, default in DEFAULTS.get(name, {}).items():
        assert inspect.signature(find(name)).parameters[parameter].default == default


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_a_result_keeps_its_attributes(name):
    found = find(name)
    fields = {*getattr(found, "_fields", ()), *getattr(found, "__dataclass_fields__", ()), *dir(found)}
    assert set(ATTRIBUTES[name].split()) <= fields
