"""How long requests take: quantiles, where there are enough requests to speak of them.

It knows frames of `specnb.measure.summary`. A mean hides what Chen et al. 2023 (arXiv 2302.01318) warn of: longer
drafts make the latency of single requests vary more.
"""

import numpy as np
import pandas as pd

MIN_BEYOND = 5  # A quantile that fewer requests are expected to exceed is the luck of a few.


def quantile(seconds, share):
    """The `share` quantile of some requests' seconds, NaN unless n (1 - share) is at least 5.

    Examples
    --------
    >>> quantile([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0], 0.5)
    5.5
    >>> quantile([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0], 0.9)
    nan
    """
    if not 0 < share < 1:
        raise ValueError(f"a quantile's share must lie between 0 and 1, got {share}")
    if len(seconds) * (1 - share) < MIN_BEYOND - 1e-9:
        return float("nan")
    return float(np.quantile(seconds, share))


def quantile_table(rows, shares=(0.5, 0.8, 0.9, 0.99)):
    """A line for each temperature, drafter and gamma: `n`, and quantiles of a request's time with its prefill."""
    lines = []
    for (temperature, drafter, gamma), arm in rows.groupby(["temperature", "drafter", "gamma"]):
        found = {f"p{100 * share:g}_sec": quantile(arm.total_sec, share) for share in shares}
        lines.append({"temperature": temperature, "drafter": drafter, "gamma": gamma, "n": len(arm), **found})
    return pd.DataFrame(lines)
