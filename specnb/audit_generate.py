"""The installed transformers' `generate()` with drafts: is its sampled law the target's, are its drafts what they say?

It knows how to ask `generate()` for a text and which law the text should have. It does not know how `generate()` works,
but for one seam: `check_candidates` listens to what its candidate generators return. Read `specnb.audit` first.
"""

from contextlib import contextmanager

import numpy as np

from specnb import gof
from specnb.audit import LEVEL, Report, report_of

# What generate() is told on both sides; without top_k=0 it keeps 50 tokens, silently.
SAMPLING = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
# What it does when told nothing; these four are all that the expected law knows of.
UNTOLD = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": None}
# Each path as options of generate(); add one by giving its options under a new name.
PATHS = {
    "plain": lambda assistant, gamma: {},
    "assistant": lambda assistant, gamma: {"assistant_model": assistant},
    "prompt lookup": lambda assistant, gamma: {"prompt_lookup_num_tokens": gamma},
    "early exit": lambda assistant, gamma: {"assistant_early_exit": 1},
}
# Beginnings of fields of a generation config that leave the law as it is. Others are refused: the law is not told them.
HARMLESS = (
    "_from_", "assistant_", "bos_", "cache_", "do_sample", "eos_", "is_assistant", "max_", "num_assistant_", "output_",
    "pad_", "prompt_lookup_", "target_", "tokenizer", "transformers_version", "use_",
)  # fmt: skip
MAX_CELLS = 100_000


def tiny_pair(vocab=32, *, gamma=3, seed=7, eos_id=None, family="Llama", **options):
    """A random target of two layers in float64 and a draft made of its first: `(target, assistant)`.

    They agree to about two thirds, and no token of a small vocabulary is rare. Both generation configs say top_k=0.
    """
    import torch
    import transformers

    def build(layers):
        config = getattr(transformers, f"{family}Config")(
            vocab_size=vocab, num_hidden_layers=layers, hidden_size=32, intermediate_size=32, num_attention_heads=2,
            num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.2,
            bos_token_id=None, eos_token_id=eos_id, pad_token_id=None, **options,
        )  # fmt: skip
        model = getattr(transformers, f"{family}ForCausalLM")(config).double().eval()
        told = {**SAMPLING, "num_assistant_tokens": gamma, "assistant_confidence_threshold": 0.0}
        model.generation_config.update(**told, num_assistant_tokens_schedule="constant")
        return model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        target, assistant = build(2), build(1)
    assistant.load_state_dict(target.state_dict(), strict=False)
    return target, assistant


def lossy_settings(target, assistant, options):
    """What makes a run lossy, or its two sides differ, known before anything is drawn: a list of sentences."""
    sides = {"generate()": options.get, "the target's generation_config": _config(target).get}
    if assistant is not None:
        sides["the assistant's generation_config"] = _config(assistant).get
    weights = {side: get("assistant_ensemble_weight") for side, get in sides.items()}
    found = [
        f"assistant_ensemble_weight={weight} in {side}: drafts are verified against a mixture of target and draft"
        for side, weight in weights.items()
        if weight is not None
    ]
    ours, theirs = told(target, options), told(assistant, {}) if assistant is not None else told(target, options)
    return found + [
        f"{name} is {ours[name]} for the target and {theirs[name]} for the assistant; set it on both sides"
        for name in UNTOLD
        if ours[name] != theirs[name]
    ]


def told(model, options):
    """Temperature, top_k, top_p and min_p in force: from the options, else the generation config, else `UNTOLD`."""
    said = {**UNTOLD, **{k: v for k, v in _config(model).items() if v is not None}, **options}
    return {name: said[name] for name in UNTOLD}


def _config(model):
    return model.generation_config.to_dict()


def joint_law(target, prompt_ids, length, sampling):
    """Exact law of the next `length` tokens, `(vocab ** length,)`, from the target's logits; ids are base-vocab digits.

    After an end-of-sequence id the rest repeats it, so that shorter texts have a cell too.
    """
    import torch

    vocab, ends = target.config.vocab_size, torch.tensor(_eos_ids(target), dtype=torch.long)
    if vocab**length > MAX_CELLS:
        raise ValueError(f"{length} tokens of {vocab} have {vocab**length} outcomes, more than {MAX_CELLS}; take fewer")
    prefixes, law = torch.tensor([list(prompt_ids)]), torch.ones(1, dtype=torch.float64)
    with torch.inference_mode():
        for position in range(length):
            rows = sampling.probs(target(prefixes).logits[:, -1].double())  # (vocab ** position, vocab)
            if position:
                ended = torch.isin(prefixes[:, -1], ends)
                rows[ended] = torch.nn.functional.one_hot(prefixes[ended, -1], vocab).double()
            law = (law[:, None] * rows).flatten()
            each = torch.arange(vocab).repeat(len(prefixes))[:, None]
            prefixes = torch.cat([prefixes.repeat_interleave(vocab, 0), each], 1)
    return law.numpy()


def audit_transformers(
    path, *, n=20_000, target=None, assistant=None, prompt_ids=(3, 1, 2, 3, 1), vocab=32, length=2, gamma=3, seed=0,
    level=LEVEL, options=None, generate=None, track=iter,
):  # fmt: skip
    """Test the law of the first `length` tokens of `generate()` against the target's own.

    Parameters
    ----------
    path : str
        A key of `PATHS`: "assistant", "prompt lookup", "early exit", or "plain", the control.
    n, length : int
        Calls, each one text, and how many of its first tokens are counted, together as one cell.
    target, assistant : transformers models, optional
        Default: `tiny_pair(vocab, gamma=gamma)`. Keep vocab ** length small: the law is enumerated.
    seed : int
        Of torch's global generator, which `generate()` draws from; its state is put back.
    options : dict, optional
        More options of `generate()`, over `SAMPLING`; None leaves one out.
    generate : callable, (target, input_ids, **options) -> ids `(1, n)`, optional
        Another engine in the place of the target's own.
    track : callable
        Wraps the iterable of calls, such as `rich.progress.track`.

    Returns
    -------
    Report
        By `gof.chi_square`; "not lossless by its settings", before any call, where a setting is lossy by design or
        differs between the two sides.
    """
    from specnb.probs import Sampling

    target, assistant, prompt_ids, settings = _prepare(path, target, assistant, prompt_ids, vocab, gamma, options)
    about = {
        "tested": f"generate() ({path}): the first {length} sampled tokens have the law of the target's logits",
        "not_tested": "greedy equality; later tokens; other prompts, models and versions",
        "settings": _shown(path, target, assistant, settings, seed),
    }
    speculates_with = settings.get("assistant_model") or (target if path == "early exit" else None)
    if lossy := lossy_settings(target, speculates_with, settings):
        return Report(verdict="not lossless by its settings", found="; ".join(lossy), n=0, **about)
    law = joint_law(target, prompt_ids, length, Sampling(**told(target, settings)))
    counts = np.zeros(len(law), dtype=int)
    settings["max_new_tokens"] = length + gamma  # so that no block is cut short before the last token counted
    for ids in _texts(generate, target, prompt_ids, settings, n, seed, track):
        counts[_cell(ids, length, target.config.vocab_size, _eos_ids(target))] += 1
    result = gof.chi_square(counts, law, alpha=level)
    found = f"{n} texts, {np.count_nonzero(counts)} of {len(law)} outcomes seen, {result.num_pooled} pooled into one"
    if counts[law == 0].any():
        found += f"; {counts[law == 0].sum()} of an outcome the target never gives"
    return report_of(result, found, level, **about)


def check_candidates(
    path="assistant", *, n=2_000, target=None, assistant=None, prompt_ids=(3, 1, 2, 3, 1), vocab=64, gamma=3, seed=0,
    level=LEVEL, options=None, planted=None, track=iter,
):  # fmt: skip
    """Contract check: is the q a candidate generator returns the q its first candidate was drawn from?

    Listens to the candidate generator of `n` calls of `generate()`. The first candidate of each is counted against
    softmax of the logits returned with it, which is what the verifier takes for q. Parameters as in
    `audit_transformers`. A generator that needs the target's outputs first drafts in the second round, after another
    prefix each time: it is tested against the mean of its rows, which can only make the test less strict.

    `planted`, (candidate ids, logits) -> the same, changed, is a fault between generator and verifier, to see the check
    fail. The verdict is "cannot test" where no logits are returned: the verifier then compares drafts with the target's
    own draws, which is lossless whatever the draft.
    """
    target, assistant, prompt_ids, settings = _prepare(path, target, assistant, prompt_ids, vocab, gamma, options)
    size = target.config.vocab_size
    drafts, counts, mean, num_impossible = [], np.zeros(size, dtype=int), np.zeros(size), 0
    settings["max_new_tokens"] = gamma + 2
    with _listening(target, drafts, planted):
        for _ in _texts(None, target, prompt_ids, settings, n, seed, track):
            pass
    with_logits = [(first, probs) for first, probs in drafts if probs is not None]
    for first, probs in with_logits:
        counts[first] += 1
        mean += probs / len(with_logits)
        num_impossible += probs[first] == 0
    about = {
        "tested": f"the first candidate of {path} was drawn from softmax of the logits returned with it",
        "not_tested": "later candidates; what the verifier does with them",
        "settings": _shown(path, target, assistant, settings, seed),
    }
    if not with_logits:
        found = f"{len(drafts)} drafts without logits, {len({first for first, _ in drafts})} different first candidates"
        return report_of(gof.cannot_test(len(drafts)), found, level, **about)
    result = gof.chi_square(counts, mean, alpha=level)
    if num_impossible:
        result = result._replace(verdict="fail", statistic=np.inf, p_value=0.0)
    found = (
        f"{len(with_logits)} drafts, {np.count_nonzero(counts)} different first candidates, {num_impossible} of "
        f"probability 0; the logits returned give {np.count_nonzero(mean)} of {size} tokens a probability"
    )
    return report_of(result, found, level, **about)


def _prepare(path, target, assistant, prompt_ids, vocab, gamma, options):
    """Models, prompt and the options of generate(); a ValueError for what the expected law does not know."""
    if path not in PATHS:
        raise ValueError(f"unknown path {path!r}; the paths are: {', '.join(map(repr, PATHS))}")
    if target is None:
        target, made = tiny_pair(vocab, gamma=gamma)
        assistant = made if assistant is None else assistant
    if path == "assistant" and assistant is None:
        raise ValueError("the path 'assistant' with a target of your own needs an assistant too")
    settings = {**SAMPLING, **PATHS[path](assistant, gamma), **(options or {})}
    settings = {name: value for name, value in settings.items() if value is not None}
    named = {**target.generation_config.to_diff_dict(), **settings}
    unknown = [name for name in named if named[name] and not name.startswith(HARMLESS) and name not in UNTOLD]
    if unknown or not settings.get("do_sample"):
        raise ValueError(f"the expected law does not know {', '.join(unknown) or 'do_sample=False'}; leave it out")
    return target, assistant, [token % target.config.vocab_size for token in prompt_ids], settings


def _texts(generate, target, prompt_ids, settings, n, seed, track):
    """New ids of `n` calls, independent draws of torch's global generator, seeded here and put back."""
    import torch

    prompt = torch.tensor([prompt_ids])
    with torch.random.fork_rng(devices=[]), torch.inference_mode(), _without_warnings():
        torch.manual_seed(seed)
        for _ in track(range(n)):
            ids = (generate or type(target).generate)(
                target, prompt, attention_mask=torch.ones_like(prompt), **settings
            )
            yield ids[0, len(prompt_ids) :].tolist()


def _cell(ids, length, vocab, ends):
    """Place of the first `length` ids in the joint law; a text that ended early repeats its last id."""
    ids = ids[:length]
    if len(ids) < length and not (ids and ids[-1] in ends):
        raise RuntimeError(f"the engine returned {len(ids)} new tokens where {length} were asked for: {ids}")
    return np.ravel_multi_index([*ids, *ids[-1:] * (length - len(ids))], [vocab] * length)


def _eos_ids(target):
    ids = target.generation_config.eos_token_id
    return [] if ids is None else [ids] if isinstance(ids, int) else ids


@contextmanager
def _listening(target, drafts, planted):
    """While it lasts, the first draft of each call of generate() is noted: (first candidate, its probabilities)."""
    make = target._get_candidate_generator

    def made(*args, **kwargs):
        generator = make(*args, **kwargs)
        ask, heard = generator.get_candidates, []

        def listen(input_ids, **more):
            ids, logits = ask(input_ids, **more)
            if planted is not None and ids.shape[1] > input_ids.shape[1]:
                ids, logits = planted(ids, logits)
            if ids.shape[1] > input_ids.shape[1] and not heard:
                heard.append(True)
                probs = None if logits is None else logits[0, 0].double().softmax(-1).cpu().numpy()
                drafts.append((int(ids[0, input_ids.shape[1]]), probs))
            return ids, logits

        generator.get_candidates = listen
        return generator

    target._get_candidate_generator = made
    try:
        yield
    finally:
        del target._get_candidate_generator


@contextmanager
def _without_warnings():
    from transformers.utils import logging

    before = logging.get_verbosity()
    try:
        yield logging.set_verbosity_error()
    finally:
        logging.set_verbosity(before)


def _shown(path, target, assistant, settings, seed):
    shown = {name: value for name, value in settings.items() if isinstance(value, int | float | str)}
    models = {"target": type(target).__name__, "vocab": target.config.vocab_size, "dtype": str(target.dtype)[6:]}
    drafts = getattr(getattr(assistant, "generation_config", None), "num_assistant_tokens", None)
    return {"path": path, **models, **shown, "num_assistant_tokens": drafts, "seed": seed}
