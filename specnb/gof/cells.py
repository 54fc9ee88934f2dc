"""Counts and laws, checked, and small cells merged.

It knows arrays. It does not know which test uses them. Read `specnb.gof.tests` next.
"""

import numpy as np


def rare_cells(sizes, minimum):
    """Indices of the cells below `minimum`, and of as many of the next larger as it takes to reach it together."""
    order = np.argsort(sizes, kind="stable")
    num = int((sizes < minimum).sum())
    while 0 < num < len(sizes) and sizes[order[:num]].sum() < minimum:
        num += 1
    return order[:num]


def pool(counts, expected, min_expected):
    """Merge the cells of smallest expected count; returns counts, expected counts and how many cells were merged."""
    merged = rare_cells(expected, min_expected)
    if len(merged) == 0:
        return counts, expected, 0
    kept = np.delete(np.arange(len(expected)), merged)
    return (
        np.append(counts[kept], counts[merged].sum()),
        np.append(expected[kept], expected[merged].sum()),
        len(merged),
    )


def counts_of(name, values):
    counts = np.asarray(values, dtype=np.float64)
    if counts.ndim != 1 or len(counts) == 0:
        raise ValueError(f"{name} must be a list of counts, got shape {counts.shape}")
    if np.isnan(counts).any():
        raise ValueError(f"{name} holds NaN")
    if (counts < 0).any() or (counts % 1 != 0).any():
        wrong = counts[(counts < 0) | (counts % 1 != 0)][0]
        raise ValueError(f"{name} must be whole numbers, 0 or more, not proportions; got {wrong:g}")
    return counts


def law_of(name, values):
    probs = np.asarray(values, dtype=np.float64)
    if probs.ndim != 1 or len(probs) == 0:
        raise ValueError(f"{name} must be a list of probabilities, got shape {probs.shape}")
    if np.isnan(probs).any():
        raise ValueError(f"{name} holds NaN")
    if (probs < 0).any():
        raise ValueError(f"{name} is negative: {probs.min():g}")
    if abs(probs.sum() - 1) > 1e-5:
        raise ValueError(f"{name} must sum to 1, got {probs.sum():.8g}")
    return probs / probs.sum()
