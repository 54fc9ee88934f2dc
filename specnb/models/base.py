"""What the sampler asks of a language model, and whether two models share a vocabulary.

It knows names and vocabularies. It does not know transformers. Read `specnb.models.table` next, the smallest model.
"""

from typing import NamedTuple, Protocol

import torch


class Scores(NamedTuple):
    """What a forward gives.

    Attributes
    ----------
    logits : Tensor of shape `(batch, num_logits, vocab)`
    hidden : Tensor of shape `(batch, n, width)`, or None where it was not asked for
        The last hidden state at every id of the forward, before the output head.
    """

    logits: torch.Tensor
    hidden: torch.Tensor | None = None


class LanguageModel(Protocol):
    """What the sampler asks of a model. Every run is a batch: lengths come as lists, one prompt is a batch of one."""

    vocab_size: int
    context_length: int | None
    device: torch.device
    run: object  # Every `reset` puts a new one here, so that a run notices when another has begun on this model.

    @property
    def lengths(self) -> list[int]:
        """Tokens now in the cache, one number a row."""

    @property
    def length(self) -> int:
        """The same for one row as a number; for several rows it is `lengths`."""

    def reset(self, batch=1) -> None:
        """Empty the cache; what follows comes in so many rows."""

    def forward(self, ids, num_logits, num_new=None, num_behind=None, hidden=False) -> Scores:
        """Append ids to the cache and score the last `num_logits` of them.

        Parameters
        ----------
        ids : int64 Tensor of shape `(batch, n)`
        num_new, num_behind : lists of int, one number a row, optional
            A row may hold padding before its `num_new` real ids and `num_behind` places of padding after them. Padding
            never reaches the cache, and its logits mean nothing. By default every id is real.
        hidden : bool
            Whether the last hidden states are wanted too.
        """

    def rollback(self, lengths) -> None:
        """Forget everything after the first so many tokens of each row; a single number does for one row."""

    def keep(self, rows) -> None:
        """Go on with these rows of a batch, a list of indices."""


def as_lengths(lengths):
    """Lengths as a list: a single number is that of a batch of one."""
    return [lengths] if isinstance(lengths, int) else lengths


def check_same_vocabulary(target, draft):
    """Raise a ValueError unless both models mean the same token by every id; sizes alone where one has no tokenizer."""
    theirs, ours = getattr(target, "tokenizer", None), getattr(draft, "tokenizer", None)
    names = f"target {_tokenizer_name(target)} and draft {_tokenizer_name(draft)}"
    if theirs is not None and ours is not None and theirs is not ours:
        vocab_a, vocab_b = theirs.get_vocab(), ours.get_vocab()
        if vocab_a != vocab_b:
            token = next(t for t in (*vocab_a, *vocab_b) if vocab_a.get(t) != vocab_b.get(t))
            raise ValueError(
                f"{names} do not share a vocabulary: {token!r} is id {vocab_a.get(token)} in one and "
                f"{vocab_b.get(token)} in the other; choose a draft of the target's family, or PromptLookup"
            )
    if target.vocab_size != draft.vocab_size:
        raise ValueError(
            f"{names} have vocabularies of {target.vocab_size} and {draft.vocab_size} tokens; they must share one"
        )


def _tokenizer_name(model):
    tokenizer = getattr(model, "tokenizer", None)
    name = getattr(model, "name", type(model).__name__)
    return f"{name} ({type(tokenizer).__name__})" if tokenizer is not None else f"{name} (no tokenizer)"
