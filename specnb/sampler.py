"""The loop: draft a block, verify it in one forward, keep a prefix.

It knows models, drafters and the rule. It does not know files or statistics. `rounds` yields each round as it
happens; `speculative` and `autoregressive` drain it. Plain decoding is the same loop with gamma 0.
"""

import operator

import torch

from specnb.probs import Sampling
from specnb.rule import verify_unchecked
from specnb.timing import RoundClock, peak_memory_bytes, reset_peak_memory
from specnb.trace import Generation, Round, Trace


def autoregressive(target, prompt_ids, *, max_new_tokens, sampling=Sampling(), eos_ids=(), generator=None):
    """Plain decoding, one token a forward: `speculative` with gamma 0 and no drafter."""
    return speculative(
        target,
        None,
        prompt_ids,
        gamma=0,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        eos_ids=eos_ids,
        generator=generator,
    )


def speculative(target, drafter, prompt_ids, *, gamma, max_new_tokens, sampling=Sampling(), eos_ids=(), generator=None):
    """Generate by speculative decoding; the output law is the target's, given exact probabilities.

    Parameters
    ----------
    target : LanguageModel
    drafter : Drafter or None
        None only with gamma 0.
    prompt_ids : list of int, or list of such lists
        A list of lists, even of one, gives a list of `Generation`. More than one prompt is not supported yet.
    gamma : int
        Draft length: a round drafts at most this many tokens, and never more than may still be emitted.
    max_new_tokens : int
    sampling : Sampling
    eos_ids : iterable of int
        Generation ends with the first of these that is emitted; those in the prompt end nothing.
    generator : torch.Generator on the CPU, or a list of one, optional
        Default: a fresh one seeded from the system. The global generator is never touched.

    Returns
    -------
    Generation, or a list of them

    Raises
    ------
    ValueError
        Before any work, for an empty prompt, an id outside the vocabulary, a negative gamma or max_new_tokens, a
        prompt that with max_new_tokens does not fit the target's context, target and draft being one object, or
        vocabularies that differ. Later, for probabilities that are not finite or a draft id of draft probability 0.
    """
    prompt_ids = prompt_ids.tolist() if hasattr(prompt_ids, "tolist") else prompt_ids
    batched = len(prompt_ids) > 0 and getattr(prompt_ids[0], "ndim", int(isinstance(prompt_ids[0], list | tuple))) > 0
    eos_ids = _ids(eos_ids)
    happening = rounds(
        target,
        drafter,
        _only(prompt_ids, "prompts") if batched else prompt_ids,
        gamma=gamma,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        eos_ids=eos_ids,
        generator=_only(generator, "generators") if isinstance(generator, list | tuple) else generator,
    )
    reset_peak_memory(target.device)
    done = list(happening)
    ids = [token for r in done for token in r.ids]
    stop_reason = "eos" if ids and ids[-1] in eos_ids else "length"
    generation = Generation(ids, stop_reason, Trace(gamma, done, peak_memory_bytes(target.device)))
    return [generation] if batched else generation


def rounds(
    target, drafter, prompt_ids, *, gamma, max_new_tokens, sampling=Sampling(), eos_ids=(), generator=None,
    overlaps=False,
):  # fmt: skip
    """Yield each `Round` of `speculative` as it happens, for one prompt. Bad input is refused at the call.

    With `overlaps`, a round also keeps sum min(p, q) at each drafted position, which costs another pass over the
    probabilities and another wait for the device.
    """
    gamma, max_new_tokens = _count("gamma", gamma), _count("max_new_tokens", max_new_tokens)
    prompt = check_prompt(prompt_ids, target, max_new_tokens)
    if gamma and drafter is None:
        raise ValueError(f"gamma is {gamma} but there is no drafter; pass one, or gamma=0 for plain decoding")
    if drafter is not None:
        drafter.reset(target)  # It refuses here what cannot work with this target.
    return _loop(
        target,
        drafter if gamma else None,
        prompt,
        gamma,
        max_new_tokens,
        sampling,
        _ids(eos_ids),
        _uniforms(generator, target.device),
        overlaps,
    )


def _loop(target, drafter, committed, gamma, max_new_tokens, sampling, eos_ids, draw, overlaps):
    clock = RoundClock(target.device)
    clock.start()
    target.reset()
    if drafter is not None:
        drafter.reset(target)
    end = len(committed) + max_new_tokens
    while len(committed) < end:
        # Subtle: ids from the host go over before anything is queued, for a copy behind a queue would wait for it.
        unseen = torch.tensor([committed[target.length :]], device=target.device)  # (1, n)
        block = _block_length(gamma, len(committed), end, drafter)
        draft_ids, draft_probs = _propose(drafter, committed, block, sampling, draw, target)
        num_drafted = draft_ids.shape[-1]
        clock.mark()

        logits = target.forward(torch.cat([unseen, draft_ids], -1), num_logits=num_drafted + 1)
        clock.mark()

        target_probs = _target_probs(sampling, logits, committed, draft_ids)  # (1, num_drafted + 1, vocab)
        verdict = verify_unchecked(target_probs, draft_probs, draft_ids, draw(num_drafted + 1))
        num_accepted, emitted = _read(verdict, target_probs, draft_probs, draft_ids, len(committed))
        emitted = _cut(emitted, eos_ids)
        num_accepted = min(num_accepted, len(emitted))
        committed = committed + emitted

        # The target has read every draft: those not committed are forgotten, and so is the draft's reading of them.
        target.rollback(len(committed) - (num_accepted < len(emitted)))
        if drafter is not None:
            drafter.rollback(target.length)
        kept = tuple(torch.minimum(target_probs[0, :-1], draft_probs[0]).sum(-1).tolist()) if overlaps else ()
        yield Round(num_drafted, num_accepted, len(emitted), *clock.stop(), ids=tuple(emitted), overlaps=kept)
        if emitted[-1] in eos_ids:
            return
        clock.start()


def _block_length(gamma, num_committed, end, drafter):
    """Draft length of this round: gamma, less what may not be emitted or does not fit the draft's context window.

    What may be emitted fits the target's window: `check_prompt` has seen to it.
    """
    room = [gamma, end - num_committed - 1]
    if drafter is not None and drafter.context_length is not None:
        room.append(drafter.context_length - num_committed + 1)  # The last draft token is never fed to the draft.
    return max(min(room), 0)


def _propose(drafter, committed, block, sampling, draw, target):
    """Draft ids `(1, k)` and their probabilities `(1, k, vocab)`; k is 0 for a plain step."""
    if block == 0:
        no_ids = torch.empty(1, 0, dtype=torch.long, device=target.device)
        return no_ids, torch.empty(1, 0, target.vocab_size, device=target.device)
    ids, probs = drafter.propose(committed, block, sampling, draw, target)
    if ids.shape[-1] > block or probs.shape != (*ids.shape, target.vocab_size):
        raise ValueError(
            f"{type(drafter).__name__} proposed ids {tuple(ids.shape)} with probabilities {tuple(probs.shape)}; asked "
            f"were (1, k) and (1, k, {target.vocab_size}) with k at most {block}"
        )
    return ids.to(target.device), probs.to(target.device)


def _target_probs(sampling, logits, committed, draft_ids):
    if not sampling.needs_prefix:
        return sampling.probs(logits)
    # Subtle: each candidate is penalised by its own prefix, the drafts before it included.
    prefix = torch.cat([torch.tensor(committed, device=draft_ids.device), draft_ids[0]])
    return sampling.probs(logits, [[prefix[:end] for end in range(len(committed), len(prefix) + 1)]])


def _read(verdict, target_probs, draft_probs, draft_ids, num_committed):
    """The round's one host synchronisation: number accepted and ids emitted, checked."""
    drafted_at = draft_probs.gather(-1, draft_ids[..., None])[..., 0]  # (1, num_drafted)
    finite = target_probs.sum(-1).isfinite().all() & draft_probs.sum(-1).isfinite().all()
    flags = torch.stack([verdict.num_accepted[0], verdict.next_id[0], finite.long()])
    host = torch.cat([flags, (drafted_at[0] > 0).long(), draft_ids[0]]).tolist()
    num_accepted, next_id, is_finite = host[:3]
    num_drafted = draft_ids.shape[-1]
    could_draw, drafted = host[3 : 3 + num_drafted], host[3 + num_drafted :]
    if not is_finite:
        raise ValueError(f"probabilities after {num_committed} tokens are not finite; the model gave NaN or inf logits")
    if not all(could_draw):
        position = could_draw.index(0)
        raise ValueError(
            f"draft id {drafted[position]} at position {position} has draft probability 0: the drafter must return the "
            "probabilities its ids were drawn from"
        )
    return num_accepted, [*drafted[:num_accepted], next_id]


def _cut(emitted, eos_ids):
    """`emitted` up to and including its first end-of-sequence id."""
    for i, token in enumerate(emitted):
        if token in eos_ids:
            return emitted[: i + 1]
    return emitted


def _uniforms(generator, device):
    """A source of uniforms `(1, n)`: float64 drawn on the CPU and moved, so a seed means the same on every device."""
    if generator is None:
        generator = torch.Generator()
        generator.seed()
    if generator.device.type != "cpu":
        raise ValueError(f"uniforms are drawn on the CPU; pass torch.Generator(), not one on {generator.device}")

    def draw(n):
        uniforms = torch.rand(1, n, dtype=torch.float64, generator=generator)
        if device.type == "mps":  # MPS has no float64; rounding must not make a 1.
            return uniforms.float().clamp(max=1 - 2**-24).to(device)
        if device.type == "cuda":
            return uniforms.pin_memory().to(device, non_blocking=True)
        return uniforms.to(device)

    return draw


def _only(items, what):
    if len(items) != 1:
        raise ValueError(f"batches of more than one are not supported yet, got {len(items)} {what}; call once for each")
    return items[0]


def _ids(eos_ids):
    return frozenset(operator.index(token) for token in eos_ids)


def check_prompt(prompt_ids, target, max_new_tokens):
    """The prompt as a list of int; a ValueError where it is empty, outside the vocabulary or too long."""
    prompt = [operator.index(token) for token in prompt_ids]
    if not prompt:
        raise ValueError("the prompt is empty; give at least one token, such as the beginning-of-sequence id")
    outside = [token for token in prompt if not 0 <= token < target.vocab_size]
    if outside:
        raise ValueError(f"prompt id {outside[0]} is outside the vocabulary 0..{target.vocab_size - 1}")
    context = target.context_length
    if context is not None and len(prompt) + max_new_tokens > context + 1:  # The newest token needs no position.
        raise ValueError(
            f"a prompt of {len(prompt)} tokens and max_new_tokens={max_new_tokens} do not fit the target's context "
            f"of {context}; shorten the prompt or ask for at most {max(context + 1 - len(prompt), 0)} tokens"
        )
    return prompt


def _count(name, value):
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if number < 0 or isinstance(value, bool):
        raise ValueError(f"{name} must be a whole number, 0 or more, got {value!r}")
    return number
