"""Two results side by side: two machines, two commits, two drafts. Which differences are more than noise?

It knows frames of `specnb.measure.verdict`. It does not know what differs between the two results; that is the reader's
to say.
"""

import numpy as np
import pandas as pd

from specnb.measure.verdict import NUM_RESAMPLES, speedups


def compare(rows, others, *, level=0.95):
    """Speed-ups of the arms that two results share, and their differences.

    Parameters
    ----------
    rows, others : DataFrame
        From `verdict.frame`.
    level : float
        Of the intervals.

    Returns
    -------
    DataFrame
        One line for each temperature, drafter and gamma in both: `speedup_a` and `speedup_b`, each over plain decoding
        in its own result; `difference` (b less a) with its bootstrap interval `low`..`high`; `differs` where it leaves
        out 0; `plain_ratio`, plain decoding's sec_per_token of b over that of a. Prompts are resampled in pairs where
        both results hold the same ones, else independently, which is cautious where they share some.

    Raises
    ------
    ValueError
        Where the results share no arm that drafts.
    """
    paired = sorted(rows.prompt_id.unique()) == sorted(others.prompt_id.unique())
    shuffled = np.r_[0, 1 + np.random.default_rng(1).permutation(NUM_RESAMPLES)]
    lines = []
    for temperature in sorted({*rows.temperature} & {*others.temperature}):
        parts = [part[part.temperature == temperature] for part in (rows, others)]
        ours, theirs = (speedups(part) for part in parts)
        plain = [_sec_per_token(part[part.gamma == 0]) for part in parts]
        for arm in [arm for arm in ours if arm in theirs and arm[1] > 0]:
            differences = (theirs[arm] if paired else theirs[arm][shuffled]) - ours[arm]
            low, high = np.nanpercentile(differences[1:], [50 * (1 - level), 50 * (1 + level)])
            lines.append(
                {"temperature": temperature, "drafter": arm[0], "gamma": arm[1], "speedup_a": ours[arm][0]}
                | {"speedup_b": theirs[arm][0], "difference": differences[0], "low": low, "high": high}
                | {"differs": bool(not low <= 0 <= high), "plain_ratio": plain[1] / plain[0]}
            )
    if not lines:
        raise ValueError("the two results share no temperature, drafter and gamma that drafts; nothing can be compared")
    return pd.DataFrame(lines)


def _sec_per_token(rows):
    return (rows.total_sec * rows.weight).sum() / (rows.num_tokens * rows.weight).sum()
