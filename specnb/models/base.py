"""What the sampler asks of a language model, and whether two models share a vocabulary.

It knows names and vocabularies. It does not know transformers. Read `specnb.models.table` next, the smallest model.
"""

from typing import Protocol

import torch

from specnb.models.memory import memory_budget as memory_budget  # offered here too, beside the models it is about


class LanguageModel(Protocol):
    """What the sampler asks of a model: ids `(batch, n)`, logits `(batch, num_logits, vocab)`; `batch` and `num_new`
    only where it serves more than one prompt at a time."""

    vocab_size: int
    context_length: int | None
    device: torch.device

    @property
    def length(self) -> int:
        """Tokens now in the cache; for a batch a list, one number a row."""

    def reset(self, batch=1) -> None:
        """Empty the cache; what follows comes in so many rows."""

    def forward(self, ids, num_logits, num_new=None) -> torch.Tensor:
        """Append `ids` to the cache and return the logits after each of the last `num_logits` of them.

        Of row b only the last `num_new[b]` ids are real, at least `num_logits`; those before are padding.
        """

    def rollback(self, length) -> None:
        """Forget everything after the first `length` tokens; for a batch a list of lengths."""

    def keep(self, rows) -> None:
        """Go on with these rows of a batch, a list of indices."""


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
