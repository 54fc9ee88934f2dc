"""Quantiles of latency: printed only where enough requests lie beyond them."""

import math

import numpy as np
import pandas as pd
import pytest

from specnb.measure.latency import quantile, quantile_table


@pytest.mark.parametrize(
    ("n", "share", "printed"),
    [(10, 0.5, True), (9, 0.5, False), (50, 0.9, True), (49, 0.9, False), (500, 0.99, True), (499, 0.99, False)],
)
def test_a_quantile_is_given_only_where_five_requests_are_expected_beyond_it(n, share, printed):
    seconds = np.arange(n, dtype=float)
    found = quantile(seconds, share)
    assert (found == pytest.approx(share * (n - 1))) if printed else math.isnan(found)


@pytest.mark.parametrize("share", [0, 1, -0.1, 95])
def test_a_share_outside_0_to_1_is_refused(share):
    with pytest.raises(ValueError, match=f"must lie between 0 and 1, got {share}"):
        quantile([1.0] * 100, share)


def test_each_arm_has_its_own_requests():
    rows = pd.DataFrame(
        [
            {"temperature": 0.0, "drafter": drafter, "gamma": gamma, "total_sec": scale * (1 + i)}
            for drafter, gamma, scale in (("-", 0, 1.0), ("lookup", 4, 2.0))
            for i in range(25)
        ]
    )
    found = quantile_table(rows).set_index("drafter")
    assert found.p50_sec.tolist() == [13.0, 26.0] and found.n.tolist() == [25, 25]
    assert found.p80_sec["lookup"] == pytest.approx(2 * 20.2) and found[["p90_sec", "p99_sec"]].isna().all(None)
