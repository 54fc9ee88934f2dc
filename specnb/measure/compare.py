"""Two results side by side: two machines, two commits, two drafts. Which differences are more than noise?

It knows frames of `specnb.measure.summary`. It does not know what differs between the two results; that is the reader's
to say.
"""

import numpy as np
import pandas as pd
from scipy import stats

from specnb.measure.intervals import LEVEL, standard_errors
from specnb.measure.summary import over_plain


def compare(rows, others, *, level=LEVEL):
    """Speed-ups of the arms that two results share, and their differences.

    Parameters
    ----------
    rows, others : DataFrame
        From `summary.frame`.
    level : float
        Of each interval. With many arms some differ by chance: of twenty, one at 95 %.

    Returns
    -------
    DataFrame
        One line for each temperature, drafter and gamma in both: `speedup_a` and `speedup_b`, each over plain decoding
        in its own result; `difference` (b less a) with its interval `low`..`high` by Student's t over prompts, NaN for
        a single prompt; `differs` where it leaves out 0; `plain_ratio`, plain decoding's sec_per_token of b over that
        of a. Prompts are compared in pairs where both results hold the same ones, else as two samples (Welch), which
        is cautious where they share some.

    Raises
    ------
    ValueError
        Where the results share no arm that drafts.
    """
    lines = []
    for temperature in sorted({*rows.temperature} & {*others.temperature}):
        parts = [part[part.temperature == temperature] for part in (rows, others)]
        ours, theirs = (over_plain(part) for part in parts)
        paired = sorted(parts[0].prompt_id.unique()) == sorted(parts[1].prompt_id.unique())
        plain = [_sec_per_token(part[part.gamma == 0]) for part in parts]
        for arm in [arm for arm in ours if arm in theirs and arm[1] > 0]:
            (ours_measured, before), (theirs_measured, after) = ours[arm], theirs[arm]
            difference = theirs_measured - ours_measured
            margin = _margin([after - before] if paired else [before, after], level)
            low, high = difference - margin, difference + margin
            lines.append(
                {"temperature": temperature, "drafter": arm[0], "gamma": arm[1], "speedup_a": ours_measured}
                | {"speedup_b": theirs_measured, "difference": difference, "low": low, "high": high}
                | {"differs": bool(low > 0 or high < 0), "plain_ratio": plain[1] / plain[0]}
            )
    if not lines:
        raise ValueError("the two results share no temperature, drafter and gamma that drafts; nothing can be compared")
    return pd.DataFrame(lines)


def _margin(samples, level):
    """Half the interval of a mean, or of the difference of two; the degrees of freedom are Welch's."""
    squares = np.array([standard_errors(sample[:, None])[0] ** 2 for sample in samples])
    degrees = np.array([(~np.isnan(sample)).sum() - 1 for sample in samples])
    with np.errstate(divide="ignore", invalid="ignore"):
        pooled = squares.sum() ** 2 / (squares**2 / degrees).sum() if squares.any() else degrees.min()
    return stats.t.ppf((1 + level) / 2, pooled) * np.sqrt(squares.sum()) if pooled > 0 else np.nan


def _sec_per_token(rows):
    if not len(rows):
        return np.nan
    return (rows.total_sec * rows.weight).sum() / (rows.num_tokens * rows.weight).sum()
