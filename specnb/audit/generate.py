"""Does the installed transformers' `generate()` keep the target's law when it drafts, and are its drafts what they say?

It knows how to ask `generate()` for a text and which law the text should have. It does not know how `generate()` works,
with one exception: `check_candidates` listens to what its candidate generators return. Read `specnb.audit` first.
"""

from contextlib import contextmanager

import numpy as np

from specnb import gof
from specnb.audit import LEVEL, Report, report_of
from specnb.audit.settings import SAMPLING, check_known, lossy_settings, told
from specnb.audit.tiny import eos_ids_of, joint_law, tiny_pair

# Each path as options of generate(). To add a path, give its options under a new name.
PATHS = {
    "plain": lambda assistant, gamma: {},
    "assistant": lambda assistant, gamma: {"assistant_model": assistant},
    "prompt lookup": lambda assistant, gamma: {"prompt_lookup_num_tokens": gamma},
    "early exit": lambda assistant, gamma: {"assistant_early_exit": 1},
}


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
        Default: `tiny_pair(vocab, gamma=gamma)`. Keep vocab ** length small, because every outcome is enumerated.
    seed : int
        Of torch's global generator, which `generate()` draws from; its state is put back.
    options : dict, optional
        More options of `generate()`, on top of `settings.SAMPLING`; None leaves one out.
    generate : callable, (target, input_ids, **options) -> ids `(1, n)`, optional
        Another engine in the place of the target's own.
    track : callable
        Wraps the iterable of calls, such as `rich.progress.track`.

    Returns
    -------
    Report
        By `gof.chi_square`. Where a setting is lossy by design or differs between the two sides, the verdict is "not
        lossless by its settings" and nothing is drawn.

    Raises
    ------
    ValueError
        Before any call, for an unknown path and for an option of which the audit does not know what it does to the law.
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
        counts[_cell(ids, length, target.config.vocab_size, eos_ids_of(target))] += 1
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

    It listens to the candidate generator during `n` calls of `generate()` and counts the first candidate of each call
    against softmax of the logits returned with it, which is what the verifier takes for q. Parameters are as in
    `audit_transformers`. A generator that needs the target's outputs drafts from the second round on, after another
    prefix each time. It is then tested against the mean of its rows, which can only make the test less strict.

    `planted` is a fault to put between generator and verifier, so as to see the check fail: a callable from (candidate
    ids, logits) to the same, changed. Where no logits are returned the verdict is "cannot test": the verifier then
    compares drafts with the target's own draws, which is lossless whatever the draft.
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
    check_known(target, settings)
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
