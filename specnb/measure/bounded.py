"""Measurements that end in time.

It knows the clock. It does not know what is measured. Read `specnb.measure.sweep` next.
"""

import time


def in_time(steps, end, together=lambda step: step):
    """Yield `steps` while there is time for more.

    Steps in a row with equal values of `together` are one block, and a block that was begun is never cut. It is begun
    if it would be over by `end` even if it took as long as the longest block before it. The first is begun in any case.

    Parameters
    ----------
    steps : iterable
    end : float
        On `time.monotonic`'s clock, in seconds.
    together : callable, step -> value

    Examples
    --------
    >>> list(in_time(["a1", "a2", "b1"], end=time.monotonic() - 1, together=lambda step: step[0]))  # too late already
    ['a1', 'a2']
    """
    block, began, longest = None, None, 0.0
    for step in steps:
        if began is None or together(step) != block:
            now = time.monotonic()
            if began is not None:
                longest = max(longest, now - began)
                if now + longest > end:
                    return
            block, began = together(step), now
        yield step
