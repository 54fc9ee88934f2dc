"""Counts and laws are checked here, and cells that are too small for a test are merged.

It knows arrays. It does not know which test uses them. Read `specnb.gof.tests` next.
"""

import numpy as np


def rare_cells(sizes, minimum):
    """Indices of the cells below `minimum`, and of as many larger ones as it takes for them to reach it together.

    Examples
    --------
    >>> rare_cells(np.array([2, 40, 1, 6]), 5)  # 1 and 2 are below 5, and only with the 6 do they reach it
    array([2, 0, 3])
    """
    order = np.argsort(sizes, kind="stable")
    num = int((sizes < minimum).sum())
    while 0 < num < len(sizes) and sizes[order[:num]].sum() < minimum:
        num += 1
    return order[:num]


def pool(counts, expected, min_expected):
    """Merge the cells of smallest expected count into one, which comes last.

    Returns counts, expected counts and how many cells were merged.

    Examples
    --------
    >>> counts, expected, num_merged = pool(np.array([9, 3, 1, 0]), np.array([8.0, 3.0, 1.0, 1.0]), 5)
    >>> counts.tolist(), expected.tolist(), num_merged
    ([9, 4], [8.0, 5.0], 3)
    """
    merged = rare_cells(expected, min_expected)
    if len(merged) == 0:
        return counts, expected, 0
    kept = np.delete(np.arange(len(expected)), merged)
    pooled = [np.append(values[kept], values[merged].sum()) for values in (counts, expected)]
    return *pooled, len(merged)


def counts_of(name, values):
    """`values` as an array of counts; a ValueError for anything that was not counted, such as proportions."""
    counts = _list_of(name, "counts", values)
    wrong = counts[(counts < 0) | (counts % 1 != 0)]
    if len(wrong):
        raise ValueError(f"{name} must be whole numbers, 0 or more, not proportions; got {wrong[0]:g}")
    return counts


def law_of(name, values):
    """`values` as probabilities that sum to 1 exactly; a ValueError where they miss it by more than rounding does."""
    probs = _list_of(name, "probabilities", values)
    if (probs < 0).any():
        raise ValueError(f"{name} is negative: {probs.min():g}")
    if abs(probs.sum() - 1) > 1e-5:
        raise ValueError(f"{name} must sum to 1, got {probs.sum():.8g}")
    return probs / probs.sum()


def _list_of(name, what, values):
    numbers = np.asarray(values, dtype=np.float64)
    if numbers.ndim != 1 or len(numbers) == 0:
        raise ValueError(f"{name} must be a list of {what}, got shape {numbers.shape}")
    if np.isnan(numbers).any():
        raise ValueError(f"{name} holds NaN")
    return numbers


def same_shape(**arrays):
    """Refuse two arrays of different shapes, by their names."""
    (one, first), (other, second) = arrays.items()
    if first.shape != second.shape:
        raise ValueError(f"{one} has shape {first.shape} and {other} {second.shape}; they must be the same")
