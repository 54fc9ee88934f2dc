"""Drafts by copying what followed an earlier occurrence of the last few tokens.

It knows the prefix and nothing else. Read `specnb.sampler` next.
"""

from specnb.drafters.base import Draft, Drafter


class PromptLookup(Drafter):
    """Drafts by copying: what followed the latest earlier occurrence of the last few tokens.

    The longest n-gram, from `max_ngram` tokens down to `min_ngram`, decides. Without a match nothing is proposed and
    the round is a plain step. The choice is deterministic, so its probabilities are one-hot.

    Examples
    --------
    >>> PromptLookup(max_ngram=2).lookup([5, 6, 7, 8, 5, 6], 4)
    [7, 8, 5, 6]
    >>> PromptLookup().lookup([1, 2, 3], 4)
    []
    """

    def __init__(self, max_ngram=3, min_ngram=1):
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(
                f"min_ngram and max_ngram must be at least 1 and in order, got {min_ngram} and {max_ngram}"
            )
        self.max_ngram, self.min_ngram = max_ngram, min_ngram

    def lookup(self, ids, gamma):
        """The copied tokens, at most `gamma`; an empty list without a match."""
        for size in range(min(self.max_ngram, len(ids) - 1), self.min_ngram - 1, -1):
            pattern = ids[-size:]
            for start in range(len(ids) - size - 1, -1, -1):
                if ids[start] == pattern[0] and ids[start : start + size] == pattern:
                    return ids[start + size : start + size + gamma]
        return []

    def propose(self, prefixes, gammas, sampling, draw, target):
        asked = zip(prefixes, gammas, strict=True)
        return Draft.one_hot([self.lookup(prefix, gamma) if gamma else [] for prefix, gamma in asked], target)

    def describe(self):
        ngrams = f"max_ngram={self.max_ngram}" + (f", min_ngram={self.min_ngram}" if self.min_ngram > 1 else "")
        return {"id": f"PromptLookup({ngrams})"}
