"""What an audit says: the property tested, the one that was not, the verdict and what would have been seen.

It knows `specnb.gof`'s results. It does not know engines. Read `specnb.audit.greedy` next.
"""

import math
from dataclasses import asdict, dataclass, field, fields

from specnb import gof
from specnb.timing import versions

LEVEL, POWER = 0.001, 0.99


PASSES = ("pass", "identical", "explained by rounding")


@dataclass(frozen=True)
class Report:
    """What was tested and what not, the verdict, what was found, under which settings and versions.

    `smallest_tv` is the smallest total variation that would have been caught with 99 % power even in its worst
    direction; differences inside a pooled cell are invisible to it. Where a number does not apply it is None.
    """

    tested: str
    not_tested: str
    verdict: str
    found: str
    settings: dict
    n: int
    versions: dict = field(default_factory=versions)
    statistic: float | None = None
    p_value: float | None = None
    level: float | None = None
    smallest_tv: float | None = None
    differences: tuple = ()

    @property
    def exit_code(self):
        """0: nothing against it; 2: not lossless; 3: cannot test."""
        return 0 if self.verdict in PASSES else 3 if self.verdict == "cannot test" else 2

    def to_dict(self):
        """The schema of a file of it, and its fields as JSON knows them: what is not finite becomes None."""
        finite = {k: v for k, v in asdict(self).items() if not (isinstance(v, float) and not math.isfinite(v))}
        kept = {**dict.fromkeys(asdict(self)), **finite, "differences": [_finite(d) for d in self.differences]}
        return {"schema": "specnb-audit/1", **kept}

    @classmethod
    def from_dict(cls, kept):
        """The report in a file of `specnb audit`, whatever else is kept there."""
        return cls(**{about.name: kept[about.name] for about in fields(cls)})

    def __str__(self):
        lines = [f"tested: {self.tested}", f"not tested: {self.not_tested}", f"verdict: {self.verdict}"]
        lines += [f"found: {self.found}"]
        if self.statistic is not None:
            lines += [f"n = {self.n}, statistic {self.statistic:.4g}, p = {self.p_value:.3g}, level {self.level:g}"]
        if self.smallest_tv is not None:
            caught = f"{self.smallest_tv:.3f}" if math.isfinite(self.smallest_tv) else "none, n is too small"
            lines += [f"smallest total variation caught with 99 % power, worst direction: {caught}"]
        for name, values in (("settings", self.settings), ("versions", self.versions)):
            lines += [f"{name}: " + ", ".join(f"{key} {value}" for key, value in values.items())]
        return "\n".join(lines)


def report_of(result, found, level=LEVEL, *, num_equivalent=None, **about):
    """A `Report` of a `GofResult`; `num_equivalent` is the n of a one-sample test of the same power, else its own."""
    numbers = {}
    if result.verdict != "cannot test":
        numbers = {"statistic": result.statistic, "p_value": result.p_value, "level": level}
        if result.dof:
            n = num_equivalent or result.n
            numbers["smallest_tv"] = gof.smallest_total_variation(n, result.dof + 1, alpha=level, power=POWER)
    return Report(verdict=result.verdict, found=found, n=result.n, **numbers, **about)


def _finite(values):
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
