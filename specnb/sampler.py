"""The loop: draft a block, verify it in one forward, keep a prefix.

It knows models, drafters and the rule. It does not know files or statistics. `rounds` yields each round as it
happens; `speculative` and `autoregressive` drain it. Plain decoding is the same loop with gamma 0, and one prompt is
a batch of one.
"""

from dataclasses import dataclass

import torch

from specnb.probs import Sampling
from specnb.request import as_count, as_ids, check_prompt, padded, sources
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
        A list of lists, even of one, is a batch and gives a list of `Generation`. Its rows share every forward, and
        each leaves when it has ended.
    gamma : int
        Draft length: a round drafts at most this many tokens, and never more than may still be emitted.
    max_new_tokens : int
        For each prompt.
    sampling : Sampling
    eos_ids : iterable of int
        Generation ends with the first of these that is emitted; those in the prompt end nothing.
    generator : torch.Generator on the CPU, or a list of them, one a prompt, optional
        With a list a row's draws do not depend on its neighbours: it emits what it would alone, up to rounding.
        Default: a fresh one seeded from the system. The global generator is never touched.

    Returns
    -------
    Generation, or a list of them
        In a batch each round has the time of the whole round, for its row waited for all.

    Raises
    ------
    ValueError
        Before any work, for an empty prompt, an id outside the vocabulary, a negative gamma or max_new_tokens, a
        prompt that with max_new_tokens does not fit the target's context, target and draft being one object,
        vocabularies that differ, or a drafter that serves one prompt at a time. Later, for probabilities that are not
        finite or a draft id of draft probability 0.
    """
    prompt_ids = prompt_ids.tolist() if hasattr(prompt_ids, "tolist") else prompt_ids
    batched = len(prompt_ids) > 0 and getattr(prompt_ids[0], "ndim", int(isinstance(prompt_ids[0], list | tuple))) > 0
    prompts, eos_ids = (prompt_ids if batched else [prompt_ids]), as_ids(eos_ids)
    happening = _start(target, drafter, prompts, gamma, max_new_tokens, sampling, eos_ids, generator)
    reset_peak_memory(target.device)
    done = [[] for _ in prompts]
    for index, r in happening:
        done[index].append(r)
    peak = peak_memory_bytes(target.device)
    generations = [_generation(Trace(int(gamma), row, peak), eos_ids) for row in done]
    return generations if batched else generations[0]


def _generation(trace, eos_ids):
    ids = [token for r in trace.rounds for token in r.ids]
    return Generation(ids, "eos" if ids and ids[-1] in eos_ids else "length", trace)


def rounds(
    target, drafter, prompt_ids, *, gamma, max_new_tokens, sampling=Sampling(), eos_ids=(), generator=None,
    overlaps=False,
):  # fmt: skip
    """Yield each `Round` of `speculative` as it happens, for one prompt. Bad input is refused at the call.

    With `overlaps`, a round also keeps sum min(p, q) at each drafted position, which costs another pass over the
    probabilities and another wait for the device.
    """
    happening = _start(
        target, drafter, [prompt_ids], gamma, max_new_tokens, sampling, as_ids(eos_ids), generator, overlaps
    )
    return (r for _, r in happening)


@dataclass
class _Row:
    """One prompt of a run: what is committed, how long it may grow, and where its uniforms come from."""

    index: int
    committed: list
    end: int
    source: torch.Generator


def _start(target, drafter, prompts, gamma, max_new_tokens, sampling, eos_ids, generator, overlaps=False):
    """Refuse what cannot work, then the loop."""
    gamma, max_new_tokens = as_count("gamma", gamma), as_count("max_new_tokens", max_new_tokens)
    rows = []
    for index, (prompt, source) in enumerate(zip(prompts, sources(generator, len(prompts)), strict=True)):
        committed = check_prompt(prompt, target, max_new_tokens)
        rows.append(_Row(index, committed, len(committed) + max_new_tokens, source))
    if gamma and drafter is None:
        raise ValueError(f"gamma is {gamma} but there is no drafter; pass one, or gamma=0 for plain decoding")
    if drafter is not None:
        drafter.begin(target, len(rows))  # It refuses here what cannot work with this target.
    return _loop(target, drafter if gamma else None, rows, gamma, sampling, eos_ids, overlaps)


def _loop(target, drafter, rows, gamma, sampling, eos_ids, overlaps):
    """Yield (index of the row, `Round`) for every row of every round; rows that have ended leave."""
    clock = RoundClock(target.device)
    clock.start()
    alone = len(rows) == 1  # Then a model need not know of batches: lengths are numbers, and nothing is padded.
    target.reset(*([] if alone else [len(rows)]))
    if drafter is not None:
        drafter.begin(target, len(rows))
    while rows and len(rows[0].committed) < rows[0].end:
        done = _round(target, drafter, rows, alone, gamma, sampling, eos_ids, overlaps, clock)
        yield from zip([row.index for row in rows], done, strict=True)
        clock.start()
        going = [i for i, row in enumerate(rows) if len(row.committed) < row.end and row.committed[-1] not in eos_ids]
        if going and len(going) < len(rows):
            for model in (target, drafter):
                if model is not None:
                    model.keep(going)
        rows = [rows[i] for i in going]


def _round(target, drafter, rows, alone, gamma, sampling, eos_ids, overlaps, clock):
    """Draft, verify, commit: one `Round` for each row."""
    # Subtle: ids from the host go over before anything is queued, for a copy behind a queue would wait for it.
    lengths = [target.length] if alone else target.length
    unseen, num_new = padded([row.committed[n:] for row, n in zip(rows, lengths, strict=True)], target.device)
    draft_ids, draft_probs, num_drafted = _propose(drafter, rows, alone, gamma, sampling, target)
    clock.mark()

    longest = draft_ids.shape[-1]
    ragged = {} if alone else {"num_new": [n + longest for n in num_new]}
    logits = target.forward(torch.cat([unseen, draft_ids], -1), num_logits=longest + 1, **ragged)
    clock.mark()

    target_probs = _target_probs(sampling, logits, rows, draft_ids)  # (batch, longest + 1, vocab)
    uniforms, block_lengths = _uniforms(rows, [n + 1 for n in num_drafted], target.device), None
    if min(num_drafted) < longest:
        block_lengths = torch.tensor(num_drafted, device=target.device)
        uniforms[:, -1:] = uniforms.gather(-1, block_lengths[:, None])  # A row's last uniform draws its next id.
    verdict = verify_unchecked(target_probs, draft_probs, draft_ids, uniforms, block_lengths)
    decided = _read(verdict, target_probs, draft_probs, draft_ids, rows, num_drafted)
    lengths, done = [], []
    for row, (num_accepted, emitted) in zip(rows, decided, strict=True):
        emitted = _cut(emitted, eos_ids)
        num_accepted = min(num_accepted, len(emitted))
        row.committed = row.committed + emitted
        # The target has read every draft: those not committed are forgotten, and so is the draft's reading of them.
        lengths.append(len(row.committed) - (num_accepted < len(emitted)))
        done.append((num_accepted, emitted))
    for model in (target, drafter):
        if model is not None:
            model.rollback(lengths[0] if alone else lengths)
    kept = torch.minimum(target_probs[:, :-1], draft_probs).sum(-1).tolist() if overlaps else [[]] * len(rows)
    seconds = clock.stop()
    return [
        Round(drafted, num_accepted, len(emitted), *seconds, ids=tuple(emitted), overlaps=tuple(overlap[:drafted]))
        for drafted, (num_accepted, emitted), overlap in zip(num_drafted, done, kept, strict=True)
    ]


def _block_length(gamma, row, drafter):
    """Draft length of this round: gamma, less what may not be emitted or does not fit the draft's context window.

    What may be emitted fits the target's window: `check_prompt` has seen to it.
    """
    room = [gamma, row.end - len(row.committed) - 1]
    if drafter is not None and drafter.context_length is not None:
        # The last draft token is never fed to the draft.
        room.append(drafter.context_length - len(row.committed) + 1)
    return max(min(room), 0)


def _propose(drafter, rows, alone, gamma, sampling, target):
    """Draft ids `(batch, k)`, their probabilities `(batch, k, vocab)`, 0 for padding, and how many each row drafted.

    k is 0 for a plain step.
    """
    blocks, device = [_block_length(gamma, row, drafter) for row in rows], target.device
    if not any(blocks):
        no_ids = torch.empty(len(rows), 0, dtype=torch.long, device=device)
        return no_ids, torch.empty(len(rows), 0, target.vocab_size, device=device), blocks
    if alone:
        ids, probs = drafter.propose(
            rows[0].committed, blocks[0], sampling, lambda n: _uniforms(rows, [n], device), target
        )
        num_drafted = [ids.shape[-1]]
    else:
        prefixes = [row.committed for row in rows]
        ids, probs, num_drafted = drafter.propose_batch(
            prefixes, blocks, sampling, lambda counts: _uniforms(rows, counts, device), target
        )
    if any(n > block for n, block in zip(num_drafted, blocks, strict=True)) or probs.shape != (
        len(rows), max(num_drafted), target.vocab_size,
    ):  # fmt: skip
        raise ValueError(
            f"{type(drafter).__name__} proposed ids {tuple(ids.shape)} with probabilities {tuple(probs.shape)}; asked "
            f"were ({len(rows)}, k) and ({len(rows)}, k, {target.vocab_size}) with k at most {max(blocks)}"
        )
    ids, probs = ids.to(device), probs.to(device)
    if min(num_drafted) < ids.shape[-1]:
        real = torch.arange(ids.shape[-1], device=device) < torch.tensor(num_drafted, device=device)[:, None]
        ids, probs = ids.where(real, 0), probs.where(real[..., None], 0.0)
    return ids, probs, num_drafted


def _target_probs(sampling, logits, rows, draft_ids):
    if not sampling.needs_prefix:
        return sampling.probs(logits)
    # Subtle: each candidate is penalised by its own prefix, the drafts before it included.
    prefixes = [
        torch.cat([torch.tensor(row.committed, device=draft_ids.device), drafts])
        for row, drafts in zip(rows, draft_ids, strict=True)
    ]
    return sampling.probs(
        logits,
        [
            [prefix[:end] for end in range(len(row.committed), len(prefix) + 1)]
            for row, prefix in zip(rows, prefixes, strict=True)
        ],
    )


def _read(verdict, target_probs, draft_probs, draft_ids, rows, num_drafted):
    """The round's one host synchronisation: (number accepted, ids emitted) of each row, checked."""
    drafted_at = draft_probs.gather(-1, draft_ids[..., None])[..., 0]  # (batch, longest)
    finite = target_probs.sum(-1).isfinite().all(-1) & draft_probs.sum(-1).isfinite().all(-1)
    flags = torch.stack([verdict.num_accepted, verdict.next_id, finite.long()], -1)
    host, longest = torch.cat([flags, (drafted_at > 0).long(), draft_ids], -1).tolist(), draft_ids.shape[-1]
    decided = []
    for row, n, (num_accepted, next_id, is_finite, *both) in zip(rows, num_drafted, host, strict=True):
        could_draw, drafted = both[:n], both[longest : longest + n]
        if not is_finite:
            raise ValueError(
                f"probabilities after {len(row.committed)} tokens are not finite; the model gave NaN or inf logits"
            )
        if not all(could_draw):
            position = could_draw.index(0)
            raise ValueError(
                f"draft id {drafted[position]} at position {position} has draft probability 0: the drafter must return "
                "the probabilities its ids were drawn from"
            )
        decided.append((num_accepted, [*drafted[:num_accepted], next_id]))
    return decided


def _cut(emitted, eos_ids):
    """`emitted` up to and including its first end-of-sequence id."""
    for i, token in enumerate(emitted):
        if token in eos_ids:
            return emitted[: i + 1]
    return emitted


def _uniforms(rows, counts, device):
    """Uniforms `(batch, n)`, each row's from its own source, .5 where it needs fewer.

    They are float64, drawn on the CPU and moved, so a seed means the same on every device.
    """
    uniforms = torch.full((len(rows), max(counts)), 0.5, dtype=torch.float64)
    for row, n, line in zip(rows, counts, uniforms, strict=True):
        torch.rand(n, dtype=torch.float64, generator=row.source, out=line[:n])
    if device.type == "mps":  # MPS has no float64; rounding must not make a 1.
        return uniforms.float().clamp(max=1 - 2**-24).to(device)
    if device.type == "cuda":
        return uniforms.pin_memory().to(device, non_blocking=True)
    return uniforms.to(device)
