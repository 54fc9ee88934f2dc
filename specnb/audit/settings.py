"""The options of `generate()`: which the expected law knows, which leave it alone, and which make a run lossy.

It knows the options of transformers 5.13.1 to 5.24 by their full names, because a newer version may add one that begins
like a harmless one and is not. It does not know tests. Read `specnb.audit.generate` next.
"""

# What generate() is told on both sides; without top_k=0 it keeps 50 tokens, silently.
SAMPLING = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}


# What generate() does when told nothing. The expected law knows these four options and no others.
UNTOLD = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": None}


# Options that decide how the text is computed, where it ends or what is drafted, but not the law of its tokens.
HARMLESS = frozenset((
    "_commit_hash", "_from_model_config", "transformers_version", "do_sample", "max_length", "max_new_tokens",
    "max_cache_len", "use_cache", "cache_implementation", "disable_compile", "bos_token_id", "eos_token_id",
    "pad_token_id", "output_attentions", "output_hidden_states", "output_logits", "output_scores",
    "is_assistant", "assistant_model", "assistant_tokenizer", "tokenizer", "assistant_confidence_threshold",
    "assistant_early_exit", "assistant_ensemble_weight", "assistant_lookbehind", "target_lookbehind",
    "num_assistant_tokens", "num_assistant_tokens_schedule", "prompt_lookup_num_tokens", "max_matching_ngram_size",
    "speculation_type", "use_mtp",
))  # fmt: skip


# Values with which an option does nothing; configs saved by older versions spell them out.
NEUTRAL = {
    "num_beams": 1, "num_beam_groups": 1, "num_return_sequences": 1, "min_length": 0, "min_new_tokens": 0,
    "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "guidance_scale": 1.0, "length_penalty": 1.0,
    "repetition_penalty": 1.0, "encoder_repetition_penalty": 1.0, "diversity_penalty": 0.0,
    "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0,
}  # fmt: skip


def check_known(target, options):
    """Refuse options, given or in the target's generation config, of which it is not known what they do to the law."""
    said = {**target.generation_config.to_diff_dict(), **options}
    unknown = [name for name in said if name not in HARMLESS and name not in UNTOLD and not _is_off(name, said[name])]
    if unknown:
        given = ", ".join(f"{name}={said[name]!r:.40}" for name in unknown)
        raise ValueError(
            f"the expected law does not know {given}; leave it out of the options, or out of the target's "
            "generation_config"
        )
    if not said.get("do_sample"):
        raise ValueError(
            "the expected law does not know do_sample=False, which is greedy decoding; compare ids with compare_greedy"
        )


def _is_off(name, value):
    return (
        value is None
        or value is False
        or (hasattr(value, "__len__") and not len(value))
        or (name in NEUTRAL and value == NEUTRAL[name])
    )


def lossy_settings(target, assistant, options):
    """What makes a run lossy, or its two sides differ, known before anything is drawn: a list of sentences."""
    sides = {"generate()": options.get, "the target's generation_config": config_of(target).get}
    if assistant is not None:
        sides["the assistant's generation_config"] = config_of(assistant).get
    weights = {side: get("assistant_ensemble_weight") for side, get in sides.items()}
    found = [
        f"assistant_ensemble_weight={weight} in {side}: drafts are verified against a mixture of target and draft"
        for side, weight in weights.items()
        if weight is not None
    ]
    found += [
        f"cache_implementation='quantized' in {side}: the target's keys and values are rounded"
        for side in list(sides)[:2]
        if sides[side]("cache_implementation") == "quantized"
    ]
    ours, theirs = told(target, options), told(assistant, {}) if assistant is not None else told(target, options)
    return found + [
        f"{name} is {ours[name]} for the target and {theirs[name]} for the assistant; set it on both sides"
        for name in UNTOLD
        if ours[name] != theirs[name]
    ]


def told(model, options):
    """Temperature, top_k, top_p and min_p in force: from the options, else the generation config, else `UNTOLD`."""
    said = {**UNTOLD, **{k: v for k, v in config_of(model).items() if v is not None}, **options}
    return {name: said[name] for name in UNTOLD}


def config_of(model):
    return model.generation_config.to_dict()
