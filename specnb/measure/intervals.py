"""Intervals for speed-ups: of an arm fixed beforehand, and of the best of many, which was chosen for looking best.

It knows arrays of seconds and tokens, one line a prompt and one column an arm. It does not know result files. Prompts
are the independent units, so every spread here is one between prompts. `scripts/exactness.py` counts how often these
intervals err.
"""

from functools import lru_cache

import numpy as np
from scipy import stats

LEVEL = 0.95  # Of an interval with two ends; each end errs in at most 2.5 %.
NUM_ROTATIONS = 4000
SHARED_VARIANCE = 0.25  # Weight of the mean variance over arms in each arm's own.


def speedups(sec, tokens, control=0):
    """Speed-up of each arm over the control arm, a ratio of sums, and what each prompt says of it.

    Parameters
    ----------
    sec, tokens : arrays of shape (prompts, arms)
        Weighted sums of a prompt, NaN where an arm has no result; such a prompt is left out of both sides of the ratio.
    control : int
        The arm to compare with, such as plain decoding.

    Returns
    -------
    (measured, pseudo) : arrays of shape (arms,) and (prompts, arms)
        `pseudo` holds the jackknife's values, moved so that their mean is `measured`: n times the speed-up less n - 1
        times the one without the prompt. They behave like independent measurements of the speed-up.

    Examples
    --------
    >>> measured, pseudo = speedups(np.array([[4.0, 2.0], [6.0, 3.0]]), np.ones((2, 2)))
    >>> measured.tolist(), pseudo[:, 1].tolist()
    ([1.0, 2.0], [2.0, 2.0])
    """
    used = ~np.isnan(sec) & ~np.isnan(sec[:, [control]])
    num, both = used.sum(0), (sec, tokens)
    parts = [np.where(used, x[:, [control]], 0.0) for x in both] + [np.where(used, x, 0.0) for x in both]

    def ratio(plain_sec, plain_tokens, arm_sec, arm_tokens):
        return (plain_sec * arm_tokens) / (arm_sec * plain_tokens)

    with np.errstate(divide="ignore", invalid="ignore"):
        measured = ratio(*(part.sum(0) for part in parts))
        without = ratio(*(part.sum(0) - part for part in parts))
        pseudo = np.where(used & (num > 1), num * measured - (num - 1) * without, np.nan)
        return measured, pseudo + measured - np.nansum(pseudo, 0) / num


def standard_errors(pseudo):
    """Standard error of each arm's mean, NaN where fewer than two prompts say something."""
    num = np.maximum((~np.isnan(pseudo)).sum(0), 1)
    mean = np.nansum(pseudo, 0) / num
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.sqrt(np.nansum((pseudo - mean) ** 2, 0) / (num - 1) / num)


def fixed(measured, pseudo, level=LEVEL):
    """(low, high) of each arm by Student's t, right for an arm that was fixed before these prompts were measured."""
    degrees = (~np.isnan(pseudo)).sum(0) - 1
    margin = stats.t.ppf((1 + level) / 2, np.where(degrees > 0, degrees, np.nan)) * standard_errors(pseudo)
    return measured - margin, measured + margin


def chosen(measured, pseudo, level=LEVEL):
    """Lower ends that hold for all arms together, so for whichever arm is chosen afterwards; and their margins.

    Parameters
    ----------
    measured, pseudo : as from `speedups`, without the control arm
        At least two prompts in each arm.

    Returns
    -------
    (low, margins) : arrays of shape (arms,)

    Notes
    -----
    The margin is a multiple of a standard error, and the multiple is the quantile of the largest t among the arms when
    none of them is faster. That law comes from rotating the prompts: with no gain and normal spread, what the prompts
    say is as likely as any rotation of it (Langsrud 2005, doi:10.1007/s11222-005-4789-5), whatever the spreads of the
    arms and their correlations. A quarter of each variance is the mean over arms, for a variance of a few prompts is
    itself a guess. Speed-ups of very skewed prompts make any such interval err more often than it says.
    """
    used = ~np.isnan(pseudo)
    num, gains = used.sum(0), np.where(used, pseudo - 1, 0.0)
    turned = _directions(len(pseudo))
    lengths = 1.0 if used.all() else np.sqrt(turned**2 @ used)  # Of what is left of each where an arm lacks prompts.
    means = turned @ gains / (lengths * np.sqrt(num))  # (rotations, arms)
    variances = np.maximum((gains**2).sum(0) / num - means**2, 0) / (num - 1)
    largest = (means / _pooled(variances)).max(1)
    margins = np.quantile(largest, (1 + level) / 2) * _pooled(standard_errors(pseudo) ** 2)
    return measured - margins, margins


def _pooled(variances):
    """Standard errors whose squares lean towards their mean over arms."""
    mean = variances.mean(-1, keepdims=True)
    return np.sqrt(np.maximum((1 - SHARED_VARIANCE) * variances + SHARED_VARIANCE * mean, 1e-30))


@lru_cache(maxsize=64)
def _directions(num_prompts):
    """Random unit vectors of shape (rotations, prompts)."""
    normal = np.random.default_rng(0).normal(size=(NUM_ROTATIONS, num_prompts))
    return normal / np.linalg.norm(normal, axis=1, keepdims=True)
