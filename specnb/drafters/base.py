"""The seam that every kind of draft is built on.

A drafter knows how to propose the next few tokens and with which probabilities it drew them. It does not know
acceptance. Whatever it proposes, the output law is the target's, as long as the probabilities it returns are those
its ids were drawn from. Read `specnb.drafters.model` next.
"""

from typing import NamedTuple

import torch


class Draft(NamedTuple):
    """What a drafter proposes for every row of a batch.

    Attributes
    ----------
    ids : int64 Tensor of shape `(batch, k)`
    probs : Tensor of shape `(batch, k, vocab)`
        Row i of a prompt is the distribution its id i was drawn from, one-hot for a deterministic choice.
    num_drafted : list of int
        How many of its k ids each row really drafted. The rest is padding, and so is its probability.
    parents : None
        None says that the drafts of a row are a chain, each the continuation of the one before.
    """

    ids: torch.Tensor
    probs: torch.Tensor
    num_drafted: list[int]
    parents: None = None

    @classmethod
    def one_hot(cls, rows, target):
        """The draft of a deterministic drafter: `rows` are lists of the ids it chose, each with probability 1.

        Examples
        --------
        >>> from specnb.models import TableModel
        >>> Draft.one_hot([[1], []], TableModel(None, vocab_size=2)).num_drafted
        [1, 0]
        """
        num_drafted = list(map(len, rows))
        padded = [[*row, *[0] * (max(num_drafted) - len(row))] for row in rows]
        ids = torch.tensor(padded, dtype=torch.long, device=target.device)
        probs = torch.zeros(*ids.shape, target.vocab_size, device=target.device)
        return cls(ids, probs.scatter_(-1, ids[..., None], 1.0), num_drafted)


class Drafter:
    """The seam: subclass it and write `propose`.

    A run calls `check` once, before any work, then `begin`, and then `propose` and `observe` in every round.
    """

    context_length = None  # longest prefix it can read, in tokens; None: any
    reads_hidden = False  # whether `observe` needs the target's hidden states
    run = None  # A drafter that remembers anything puts a new object here whenever a run begins.

    def check(self, target, batch):
        """Refuse, with a ValueError, what cannot work with this target or with so many rows."""

    def begin(self, batch):
        """A run of so many rows begins: forget everything."""

    def propose(self, prefixes, gammas, sampling, draw, target):
        """Propose at most `gammas[row]` tokens after each of the `prefixes`.

        Parameters
        ----------
        prefixes : list of lists of int
            Everything committed so far in each row, prompt included.
        gammas : list of int
            At least one of them is above 0; a row with 0 drafts nothing.
        sampling : Sampling
            The run's.
        draw : callable, list of counts -> float64 Tensor `(batch, largest count)` of uniforms in [0, 1)
            The run's randomness: so many uniforms from each row's own source. A deterministic drafter does not call it.
        target : LanguageModel
            For its vocabulary size and device.

        Returns
        -------
        Draft
        """
        raise NotImplementedError

    def observe(self, committed, num_accepted, scores):
        """The round is over: forget what was rejected, and learn nothing that changes the law.

        Parameters
        ----------
        committed : list of lists of int
            Everything committed by now in each row. Nobody has fed the last id of a row to any model yet.
        num_accepted : list of int
            How many of its drafts each row has kept.
        scores : Scores
            The target's of this round, with hidden states where `reads_hidden` asks for them.
        """

    def keep(self, rows):
        """Go on with these rows of a batch, a list of indices."""

    def describe(self):
        """What this is, for a result file."""
        return {"id": type(self).__name__}


def filled(draft, more):
    """`draft`, with the rows of `more` wherever it drafted nothing.

    Where one of the two serves every row, it is handed on as it is. Otherwise the narrower one is padded.
    """
    empty = [num == 0 for num in draft.num_drafted]
    if all(empty) or not any(more.num_drafted):
        return more if all(empty) else draft
    width = max(draft.ids.shape[1], more.ids.shape[1])
    pad = torch.nn.functional.pad
    ids = [pad(one.ids, (0, width - one.ids.shape[1])) for one in (more, draft)]
    probs = [pad(one.probs, (0, 0, 0, width - one.probs.shape[1])) for one in (more, draft)]
    taken = torch.tensor(empty, device=draft.ids.device)[:, None]
    num_drafted = [more.num_drafted[row] if none else draft.num_drafted[row] for row, none in enumerate(empty)]
    longest = max(num_drafted)
    return Draft(torch.where(taken, *ids)[:, :longest], torch.where(taken[..., None], *probs)[:, :longest], num_drafted)
