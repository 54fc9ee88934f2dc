"""The loop: draft a block, verify it in one forward, keep a prefix.

It knows models, drafters and the rule. It does not know files or statistics. `rounds` yields each round as it
happens; `speculative` and `autoregressive` drain it. Plain decoding is the same loop with gamma 0, and one prompt is
a batch of one.
"""

import torch

from specnb.drafters.base import Draft
from specnb.probs import Sampling
from specnb.request import as_count, as_ids, padded, rows_of, uniforms_of
from specnb.rule import verify_unchecked
from specnb.timing import RoundClock, peak_memory_bytes, reset_peak_memory
from specnb.trace import Generation, Round, Trace


def autoregressive(target, prompt_ids, *, max_new_tokens, sampling=Sampling(), eos_ids=(), generator=None):
    """Plain decoding, one token a forward: `speculative` with gamma 0 and no drafter."""
    same = {"max_new_tokens": max_new_tokens, "sampling": sampling, "eos_ids": eos_ids, "generator": generator}
    return speculative(target, None, prompt_ids, gamma=0, **same)


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
        prompt that with max_new_tokens does not fit the target's context, target and draft being one object, or
        vocabularies that differ. Later, for probabilities that are not finite or a draft id of draft probability 0.
    RuntimeError
        Where another run has begun on the same model or drafter before this one was over.
    """
    prompt_ids = prompt_ids.tolist() if hasattr(prompt_ids, "tolist") else prompt_ids
    batched = len(prompt_ids) > 0 and getattr(prompt_ids[0], "ndim", int(isinstance(prompt_ids[0], list | tuple))) > 0
    prompts, eos_ids = (prompt_ids if batched else [prompt_ids]), as_ids(eos_ids)
    run = _Run(target, drafter, prompts, gamma, max_new_tokens, sampling, eos_ids, generator)
    done = [[] for _ in prompts]
    for index, r in run.rounds():
        done[index].append(r)
    peak = peak_memory_bytes(target, drafter)
    generations = [_generation(Trace(run.gamma, row, peak), eos_ids) for row in done]
    return generations if batched else generations[0]


def _generation(trace, eos_ids):
    ids = [token for r in trace.rounds for token in r.ids]
    return Generation(ids, "eos" if ids and ids[-1] in eos_ids else "length", trace)


def rounds(target, drafter, prompt_ids, *, gamma, max_new_tokens, sampling=Sampling(), eos_ids=(), generator=None):
    """Yield each `Round` of `speculative` as it happens, for one prompt. Bad input is refused at the call."""
    run = _Run(target, drafter, [prompt_ids], gamma, max_new_tokens, sampling, as_ids(eos_ids), generator)
    return (r for _, r in run.rounds())


class _Run:
    """A run: its models, its rows and how they are sampled. What cannot work is refused when it is made."""

    def __init__(self, target, drafter, prompts, gamma, max_new_tokens, sampling, eos_ids, generator):
        self.gamma = as_count("gamma", gamma)
        self.rows = rows_of(prompts, target, as_count("max_new_tokens", max_new_tokens), generator)
        if self.gamma and drafter is None:
            raise ValueError(f"gamma is {gamma} but there is no drafter; pass one, or gamma=0 for plain decoding")
        if drafter is not None:
            drafter.check(target, len(prompts))
        self.target, self.drafter = target, drafter if self.gamma else None
        self.sampling, self.eos_ids, self.device = sampling, eos_ids, target.device

    def rounds(self):
        """Yield (index of the row, `Round`) for every row of every round; rows that have ended leave."""
        clock = RoundClock(self.device)
        clock.start()
        self._begin()
        while self.rows and len(self.rows[0].committed) < self.rows[0].end:
            self._check_still_ours()
            done = self._round(clock)
            yield from zip([row.index for row in self.rows], done, strict=True)
            clock.start()
            self._leave()

    def _begin(self):
        """Empty the caches, so that those of an earlier run are not in this one's peak; from here on they are ours."""
        self.target.reset(len(self.rows))
        if self.drafter is not None:
            self.drafter.begin(len(self.rows))
        reset_peak_memory(self.target, self.drafter)
        self._ours = self._owners()

    def _owners(self):
        return getattr(self.target, "run", None), getattr(self.drafter, "run", None)

    def _check_still_ours(self):
        """A model has one cache. What another run has written there meanwhile must not be read by this one."""
        if self._owners() != self._ours:
            raise RuntimeError(
                "another run has begun on the same target or drafter before this one was over, and they would share a "
                "cache; finish one before the other begins, or wrap the model a second time for it"
            )

    def _leave(self):
        """Rows that have all their tokens, or ended with an end-of-sequence id, leave the batch."""
        rows = enumerate(self.rows)
        going = [i for i, row in rows if len(row.committed) < row.end and row.committed[-1] not in self.eos_ids]
        if going and len(going) < len(self.rows):
            self.target.keep(going)
            if self.drafter is not None:
                self.drafter.keep(going)
        self.rows = [self.rows[i] for i in going]

    def _round(self, clock):
        """Draft, verify, commit: one `Round` for each row."""
        # Copy the ids before launching kernels: a later copy would wait for them.
        committed = zip(self.rows, self.target.lengths, strict=True)
        unseen, num_new = padded([row.committed[length:] for row, length in committed], self.device)
        draft = self._propose()
        clock.mark()
        scores = self._score(unseen, num_new, draft)
        clock.mark()
        target_probs = self._target_probs(scores.logits, draft.ids)  # (batch, longest + 1, vocab)
        decided = self._read(self._verify(target_probs, draft), target_probs, draft)
        done = [self._commit(row, *kept) for row, kept in zip(self.rows, decided, strict=True)]
        # The target has read every draft. It forgets those that were not kept, and so does the drafter.
        self.target.rollback([length for _, _, length in done])
        num_accepted = [num for num, _, _ in done]
        if self.drafter is not None:
            self.drafter.observe([row.committed for row in self.rows], num_accepted, scores)
        seconds = clock.stop()
        return [
            Round(drafted, accepted, len(emitted), *seconds, ids=tuple(emitted))
            for drafted, (accepted, emitted, _) in zip(draft.num_drafted, done, strict=True)
        ]

    def _propose(self):
        """The round's `Draft`, checked, its padding of id 0 and probability 0; without any drafts for a plain step."""
        window = None if self.drafter is None else self.drafter.context_length
        blocks, batch = [row.block_length(self.gamma, window) for row in self.rows], len(self.rows)
        if not any(blocks):
            no_ids = torch.empty(batch, 0, dtype=torch.long, device=self.device)
            return Draft(no_ids, torch.empty(batch, 0, self.target.vocab_size, device=self.device), blocks)
        prefixes = [row.committed for row in self.rows]
        draw = lambda counts: uniforms_of(self.rows, counts, self.device)  # noqa: E731
        ids, probs, num_drafted, parents = self.drafter.propose(prefixes, blocks, self.sampling, draw, self.target)
        longest, vocab = max(num_drafted), self.target.vocab_size
        too_many = any(num > block for num, block in zip(num_drafted, blocks, strict=True))
        if too_many or ids.shape != (batch, longest) or probs.shape != (batch, longest, vocab) or parents is not None:
            raise ValueError(
                f"{type(self.drafter).__name__} proposed ids {tuple(ids.shape)} with probabilities {tuple(probs.shape)}"
                f"{'' if parents is None else ' as a tree'}; asked were chains of ({batch}, k) and "
                f"({batch}, k, {vocab}) with k at most {max(blocks)}"
            )
        ids, probs = ids.to(self.device), probs.to(self.device)
        if min(num_drafted) < longest:
            lengths = torch.tensor(num_drafted, device=self.device)[:, None]
            real = torch.arange(longest, device=self.device) < lengths
            ids, probs = ids.where(real, 0), probs.where(real[..., None], 0.0)
        return Draft(ids, probs, num_drafted)

    def _score(self, unseen, num_new, draft):
        """One forward of the target over what it has not read yet and the drafts."""
        longest, asked = draft.ids.shape[-1], {}
        if self.drafter is not None and self.drafter.reads_hidden:
            asked["hidden"] = True
        if min(draft.num_drafted) < longest:
            asked["num_behind"] = [longest - num for num in draft.num_drafted]
        num_new = [new + drafted for new, drafted in zip(num_new, draft.num_drafted, strict=True)]
        return self.target.forward(torch.cat([unseen, draft.ids], -1), longest + 1, num_new, **asked)

    def _target_probs(self, logits, draft_ids):
        if not self.sampling.needs_prefix:
            return self.sampling.probs(logits)
        # Subtle: each candidate is penalised by its own prefix, the drafts before it included.
        prefixes = []
        for row, drafts in zip(self.rows, draft_ids, strict=True):
            whole = torch.cat([torch.tensor(row.committed, device=self.device), drafts])
            prefixes.append([whole[:end] for end in range(len(row.committed), len(whole) + 1)])
        return self.sampling.probs(logits, prefixes)

    def _verify(self, target_probs, draft):
        """The rule on this round's rows, whose blocks may have different lengths."""
        uniforms, lengths = uniforms_of(self.rows, [num + 1 for num in draft.num_drafted], self.device), None
        if min(draft.num_drafted) < draft.ids.shape[-1]:
            lengths = torch.tensor(draft.num_drafted, device=self.device)
            uniforms[:, -1:] = uniforms.gather(-1, lengths[:, None])  # A row's last uniform draws its next id.
        return verify_unchecked(target_probs, draft.probs, draft.ids, uniforms, lengths)

    def _read(self, verdict, target_probs, draft):
        """The round's one host synchronisation: (number accepted, ids emitted) of each row, checked."""
        drafted_at = draft.probs.gather(-1, draft.ids[..., None])[..., 0]  # (batch, longest)
        finite = target_probs.sum(-1).isfinite().all(-1) & draft.probs.sum(-1).isfinite().all(-1)
        flags = torch.stack([verdict.num_accepted, verdict.next_id, finite.long()], -1)
        longest = draft.ids.shape[-1]
        host, decided = torch.cat([flags, (drafted_at > 0).long(), draft.ids], -1).tolist(), []
        for row, num, line in zip(self.rows, draft.num_drafted, host, strict=True):
            num_accepted, next_id, is_finite, *both = line
            could_draw, drafted = both[:num], both[longest : longest + num]
            if not is_finite:
                raise ValueError(
                    f"probabilities after {len(row.committed)} tokens are not finite; the model gave NaN or inf logits"
                )
            if not all(could_draw):
                position = could_draw.index(0)
                raise ValueError(
                    f"draft id {drafted[position]} at position {position} has draft probability 0: the drafter must "
                    "return the probabilities its ids were drawn from"
                )
            decided.append((num_accepted, [*drafted[:num_accepted], next_id]))
        return decided

    def _commit(self, row, num_accepted, emitted):
        """Append what was emitted, up to its first end-of-sequence id.

        Returns
        -------
        (num_accepted, emitted, length)
            Drafts that were accepted and emitted, all ids that were, and how many tokens the target has rightly read:
            all that are committed, less the last where it is no draft.
        """
        end = next((i + 1 for i, token in enumerate(emitted) if token in self.eos_ids), len(emitted))
        emitted, num_accepted = emitted[:end], min(num_accepted, end)
        row.committed = row.committed + emitted
        return num_accepted, emitted, len(row.committed) - (num_accepted < end)
