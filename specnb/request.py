"""The rows of a run: what is asked for, checked before any work, and each prompt's own randomness.

It knows prompts, counts and generators, and how prompts of a batch stand beside each other. It does not know drafting.
Read `specnb.sampler` next.
"""

import operator
from dataclasses import dataclass

import torch


@dataclass
class Row:
    """One prompt of a run: what is committed, how long it may grow, and where its uniforms come from."""

    index: int
    committed: list
    end: int
    source: torch.Generator

    def block_length(self, gamma, context_length):
        """Draft length of a round: gamma, less what may not be emitted or does not fit the draft's context window.

        What may be emitted fits the target's window: `check_prompt` has seen to it.
        """
        room = [gamma, self.end - len(self.committed) - 1]
        if context_length is not None:
            # The last draft token is never fed to the draft.
            room.append(context_length - len(self.committed) + 1)
        return max(min(room), 0)


def rows_of(prompts, target, max_new_tokens, generator):
    """A `Row` for each prompt; a ValueError for one that cannot be served."""
    rows = []
    for index, (prompt, source) in enumerate(zip(prompts, sources(generator, len(prompts)), strict=True)):
        committed = check_prompt(prompt, target, max_new_tokens)
        rows.append(Row(index, committed, len(committed) + max_new_tokens, source))
    return rows


def check_prompt(prompt_ids, target, max_new_tokens):
    """The prompt as a list of int; a ValueError where it is empty, outside the vocabulary or too long."""
    prompt = [operator.index(token) for token in prompt_ids]
    if not prompt:
        raise ValueError("the prompt is empty; give at least one token, such as the beginning-of-sequence id")
    outside = [token for token in prompt if not 0 <= token < target.vocab_size]
    if outside:
        raise ValueError(f"prompt id {outside[0]} is outside the vocabulary 0..{target.vocab_size - 1}")
    context, reason = target.context_length, getattr(target, "context_reason", "")
    if context is not None and len(prompt) + max_new_tokens > context + 1:  # The newest token needs no position.
        raise ValueError(
            f"a prompt of {len(prompt)} tokens and max_new_tokens={max_new_tokens} do not fit the target's context "
            f"of {context}{reason}; shorten the prompt or ask for at most {max(context + 1 - len(prompt), 0)} tokens"
        )
    return prompt


def as_count(name, value):
    """A whole number, 0 or more; a ValueError for anything else."""
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if number < 0 or isinstance(value, bool):
        raise ValueError(f"{name} must be a whole number, 0 or more, got {value!r}")
    return number


def as_ids(eos_ids):
    return frozenset(operator.index(token) for token in eos_ids)


def sources(generator, num_prompts):
    """A generator for each prompt: the one given for all of them, or those of a list; None is freshly seeded."""
    given = generator if isinstance(generator, list | tuple) else [generator]
    if len(given) not in ({num_prompts} if given is generator else {1}):
        raise ValueError(f"{len(given)} generators were given for {num_prompts} prompts; give one, or one a prompt")
    found = []
    for source in given:
        if source is None:
            source = torch.Generator()
            source.seed()
        if source.device.type != "cpu":
            raise ValueError(f"uniforms are drawn on the CPU; pass torch.Generator(), not one on {source.device}")
        found.append(source)
    return found if given is generator else found * num_prompts


def padded(rows, device):
    """Lists of ids as one tensor `(batch, n)`, shorter ones padded on the left, and how many are real in each.

    Examples
    --------
    >>> padded([[1, 2, 3], [4]], "cpu")
    (tensor([[1, 2, 3],
            [0, 0, 4]]), [3, 1])
    """
    longest = max(map(len, rows))
    return torch.tensor([[0] * (longest - len(row)) + row for row in rows], device=device), list(map(len, rows))


def uniforms_of(rows, counts, device):
    """Uniforms `(batch, n)`, each row's from its own source, .5 where it needs fewer.

    They are float64, drawn on the CPU and moved, so a seed means the same on every device.
    """
    uniforms = torch.full((len(rows), max(counts)), 0.5, dtype=torch.float64)
    for row, count, line in zip(rows, counts, uniforms, strict=True):
        torch.rand(count, dtype=torch.float64, generator=row.source, out=line[:count])
    if device.type == "mps":  # MPS has no float64; rounding must not make a 1.
        return uniforms.float().clamp(max=1 - 2**-24).to(device)
    if device.type == "cuda":
        return uniforms.pin_memory().to(device, non_blocking=True)
    return uniforms.to(device)
