"""What a run leaves behind: its rounds, and every rate that is derived from them.

It knows raw counts and seconds. It does not know how they were produced. Rates are computed when they are asked for and
never stored, so a file of rounds can always be counted again. Read `specnb.sampler` next, which makes these.
"""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Round:
    """One round: what was drafted, what was accepted, what was emitted, and how long each phase took.

    `num_accepted` counts the accepted drafts that were emitted. Where an end-of-sequence id cut the block, the tests
    beyond the cut took place too, but they are not counted, because nothing they decided was emitted.
    """

    num_drafted: int
    num_accepted: int
    num_emitted: int
    draft_sec: float = 0.0
    verify_sec: float = 0.0
    other_sec: float = 0.0
    ids: tuple[int, ...] = ()

    @property
    def total_sec(self):
        return self.draft_sec + self.verify_sec + self.other_sec

    @property
    def num_tested(self):
        """How many drafts were tested up to the cut: those accepted, and the one rejected if there was one."""
        rejected = self.num_accepted < self.num_drafted and self.num_emitted > self.num_accepted
        return self.num_accepted + rejected

    @property
    def sources(self):
        """Where each emitted token came from: "accepted", then "recovered", "bonus" or, with no drafts, "plain"."""
        last = "plain" if self.num_drafted == 0 else "bonus" if self.num_accepted == self.num_drafted else "recovered"
        return ["accepted"] * self.num_accepted + [last] * (self.num_emitted - self.num_accepted)


def _sum_over_rounds(name):
    """A property of a `Trace`: the sum of what each of its rounds has under this name."""
    return property(lambda trace: sum(getattr(r, name) for r in trace.rounds))


@dataclass(frozen=True)
class Trace:
    """The rounds of one generation.

    A rate is None where there is nothing to divide by: where nothing was drafted, or there was no round at all.

    Examples
    --------
    >>> trace = Trace(gamma=4, rounds=[Round(4, 4, 5), Round(4, 1, 2), Round(4, 0, 1)])
    >>> trace.accepted_histogram, trace.tokens_per_round
    ([1, 1, 0, 0, 1], 2.6666666666666665)
    >>> trace.accepted_fraction, trace.alpha_hat  # 5 of 12 drafted; 5 of 7 tested
    (0.4166666666666667, 0.7142857142857143)
    """

    gamma: int
    rounds: list[Round] = field(default_factory=list)
    peak_memory_bytes: int | None = None

    num_tokens = _sum_over_rounds("num_emitted")
    num_drafted = _sum_over_rounds("num_drafted")
    num_accepted = _sum_over_rounds("num_accepted")
    num_tested = _sum_over_rounds("num_tested")
    draft_sec = _sum_over_rounds("draft_sec")
    verify_sec = _sum_over_rounds("verify_sec")
    other_sec = _sum_over_rounds("other_sec")
    total_sec = _sum_over_rounds("total_sec")

    @property
    def ttft_sec(self):
        """Time to first token: from submission until the first round's tokens, one or more, are on the host."""
        return self.rounds[0].total_sec if self.rounds else None

    @property
    def decode_sec(self):
        """All the time after the first round."""
        return sum(r.total_sec for r in self.rounds[1:]) if self.rounds else None

    @property
    def decode_sec_per_token(self):
        """`decode_sec` over the tokens emitted in that time: those of all rounds but the first."""
        return _ratio(self.decode_sec, sum(r.num_emitted for r in self.rounds[1:]))

    @property
    def sec_per_token(self):
        """The time of all phases over all tokens emitted, a ratio of sums."""
        return _ratio(self.total_sec, self.num_tokens)

    @property
    def accepted_histogram(self):
        """Entry n says how many rounds accepted n drafts: gamma + 1 counts that sum to the number of rounds."""
        counts = Counter(r.num_accepted for r in self.rounds)
        return [counts[n] for n in range(self.gamma + 1)]

    @property
    def tokens_per_round(self):
        return _ratio(self.num_tokens, len(self.rounds))

    @property
    def accepted_fraction(self):
        """Accepted drafts over drafted ones."""
        return _ratio(self.num_accepted, self.num_drafted)

    @property
    def alpha_hat(self):
        """Accepted drafts over tested ones. It estimates alpha = E[sum min(p, q)]."""
        return _ratio(self.num_accepted, self.num_tested)

    @property
    def accepted_per_scored(self):
        """Accepted drafts over the positions the target scored, as in Figure 1 of Chen et al. 2023 (arXiv 2302.01318).

        A round scores one position more than it drafts.
        """
        return _ratio(self.num_accepted, self.num_drafted + len(self.rounds))

    @property
    def survival(self):
        """Entry i is the share of the rounds drafting more than i tokens in which draft i was accepted.

        It is None at an i that no round reached, and `survival` itself is None where nothing was drafted.
        """
        if not self.num_drafted:
            return None
        reached = [[r for r in self.rounds if r.num_drafted > i] for i in range(self.gamma)]
        return [_ratio(sum(r.num_accepted > i for r in rounds), len(rounds)) for i, rounds in enumerate(reached)]


@dataclass(frozen=True)
class Generation:
    """What was generated: `ids` holds the new tokens only.

    `stop_reason` is "eos" where the last of them is an end-of-sequence id, and "length" where the bound was reached.
    """

    ids: list[int]
    stop_reason: str
    trace: Trace


def _ratio(part, whole):
    return part / whole if whole else None
