"""What a run left behind: rounds, and every rate derived from them.

It knows raw counts and seconds. It does not know how they were produced. Rates are properties and never stored, so a
file of rounds can always be counted again. Read `specnb.sampler` next, which makes these.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Round:
    """One round: what was drafted, what survived, what was emitted, and how long each phase took.

    `num_accepted` counts accepted drafts that were emitted. Where an end-of-sequence id cut the block, the tests
    beyond the cut are not counted: they took place, but nobody could have used them. `overlaps` is sum min(p, q) at
    each drafted position, where `rounds` was asked to keep it.
    """

    num_drafted: int
    num_accepted: int
    num_emitted: int
    draft_sec: float = 0.0
    verify_sec: float = 0.0
    other_sec: float = 0.0
    ids: tuple[int, ...] = ()
    overlaps: tuple[float, ...] = ()

    @property
    def total_sec(self):
        return self.draft_sec + self.verify_sec + self.other_sec

    @property
    def num_tested(self):
        """Acceptance tests up to the cut: the accepted ones, and the rejection if there was one."""
        rejected = self.num_accepted < self.num_drafted and self.num_emitted > self.num_accepted
        return self.num_accepted + rejected

    @property
    def sources(self):
        """Where each emitted token came from: "accepted", then "recovered", "bonus" or, with no drafts, "plain"."""
        last = "plain" if self.num_drafted == 0 else "bonus" if self.num_accepted == self.num_drafted else "recovered"
        return ["accepted"] * self.num_accepted + [last] * (self.num_emitted - self.num_accepted)


@dataclass(frozen=True)
class Trace:
    """The rounds of one generation. Rates are None where they have no denominator: nothing drafted, no round.

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

    @property
    def num_tokens(self):
        return sum(r.num_emitted for r in self.rounds)

    @property
    def draft_sec(self):
        return sum(r.draft_sec for r in self.rounds)

    @property
    def verify_sec(self):
        return sum(r.verify_sec for r in self.rounds)

    @property
    def other_sec(self):
        return sum(r.other_sec for r in self.rounds)

    @property
    def total_sec(self):
        return sum(r.total_sec for r in self.rounds)

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
        """`decode_sec` over the tokens that were not yet visible when it began."""
        later = self.num_tokens - self.rounds[0].num_emitted if self.rounds else 0
        return self.decode_sec / later if later else None

    @property
    def sec_per_token(self):
        """All phases over all tokens emitted, a ratio of sums."""
        return self.total_sec / self.num_tokens if self.num_tokens else None

    @property
    def accepted_histogram(self):
        """`histogram[n]` = rounds with n accepted drafts; gamma + 1 counts that sum to the number of rounds."""
        counts = [0] * (self.gamma + 1)
        for r in self.rounds:
            counts[r.num_accepted] += 1
        return counts

    @property
    def tokens_per_round(self):
        return self.num_tokens / len(self.rounds) if self.rounds else None

    @property
    def accepted_fraction(self):
        """Accepted drafts over drafted ones."""
        return _ratio(sum(r.num_accepted for r in self.rounds), sum(r.num_drafted for r in self.rounds))

    @property
    def alpha_hat(self):
        """Accepted drafts over acceptance tests, the estimate of alpha = E[sum min(p, q)]."""
        return _ratio(sum(r.num_accepted for r in self.rounds), sum(r.num_tested for r in self.rounds))

    @property
    def alpha_uncensored(self):
        """Mean of sum min(p, q) over all drafted positions, where it was kept; None where it was not.

        `alpha_hat` counts a test only where every draft before was accepted. This counts the others too: their prefix
        holds a draft that the target rejected.
        """
        overlaps = [overlap for r in self.rounds for overlap in r.overlaps]
        return _ratio(sum(overlaps), len(overlaps))

    @property
    def accepted_per_scored(self):
        """Accepted drafts over positions the target scored, one more than were drafted: Chen et al. 2023, Figure 1."""
        return _ratio(sum(r.num_accepted for r in self.rounds), sum(r.num_drafted + 1 for r in self.rounds))

    def vllm_metrics(self):
        """The same rounds under the names of vLLM's per-request metrics; rounds that drafted nothing are no steps.

        Examples
        --------
        >>> trace = Trace(gamma=2, rounds=[Round(2, 2, 3), Round(2, 0, 1), Round(0, 0, 1)])
        >>> trace.vllm_metrics()["mean_acceptance_length"]
        2.0
        """
        steps = [r for r in self.rounds if r.num_drafted]
        accepted, drafted = ([getattr(r, name) for r in steps] for name in ("num_accepted", "num_drafted"))
        return {
            "mean_acceptance_length": 1 + sum(accepted) / len(steps) if steps else None,
            "draft_acceptance_rate": self.accepted_fraction,
            "acceptance_histogram": [accepted.count(num) for num in range(self.gamma + 1)],
            "per_step_accepted": accepted,
            "per_step_drafted": drafted,
        }

    @property
    def survival(self):
        """`survival[i]` = share of the rounds drafting more than i in which draft i was accepted; None at unused i."""
        if not any(r.num_drafted for r in self.rounds):
            return None
        reached = [[r for r in self.rounds if r.num_drafted > i] for i in range(self.gamma)]
        return [_ratio(sum(r.num_accepted > i for r in rounds), len(rounds)) for i, rounds in enumerate(reached)]


@dataclass(frozen=True)
class Generation:
    """`ids` are the new tokens only; `stop_reason` is "eos" (the last id is then an end-of-sequence id) or "length"."""

    ids: list[int]
    stop_reason: str
    trace: Trace


def _ratio(part, whole):
    return part / whole if whole else None
