"""Sweeps over batch sizes: when one request's speed-up stops being the server's.

It knows result files and `specnb.measure.verdict`, which it asks about each batch size alone. It does not know models.
"""

import pandas as pd

from specnb.measure import verdict

SUMMED = ["num_tokens", "num_drafted", "num_accepted", "num_tested"]
SHARED = ["temperature", "drafter", "gamma", "batch_size", "first_prompt_id", "repeat"]


def batches_of(result):
    """Batch sizes a result file holds, ascending."""
    return sorted({row.get("batch_size", 1) for row in result["rows"]})


def frame(result, batch_size):
    """`verdict.frame` of one batch size, a line a batch: tokens of all its rows over the time until the last ended.

    So `sec_per_token` is the inverse of throughput, and bootstraps resample batches. Seconds and rounds are those of
    the row that ended last, tokens and drafts those of all rows.
    """
    rows = verdict.frame(result, batch_size)
    if batch_size == 1:
        return rows
    lines = []
    for _, batch in rows.groupby(SHARED, sort=False):
        slowest = batch.loc[batch.total_sec.idxmax()].copy()  # It was there in every round.
        slowest[SUMMED] = batch[SUMMED].sum()
        slowest["prompt_id"] = slowest.first_prompt_id
        lines.append(slowest)
    return pd.DataFrame(lines).infer_objects().reset_index(drop=True)


def batch_table(result):
    """A line for each batch size, temperature, drafter and gamma.

    Returns
    -------
    DataFrame
        `tokens_per_sec`: throughput, all rows together; `speedup` with `low`..`high`: over plain decoding at the same
        batch size; `request_sec`: mean time of a request, prefill included; `round_cost`: time of a round over a plain
        one of as many rows, first rounds left out; `num_batches`: how many of them were measured, requests at batch
        size 1.
    """
    lines = []
    for batch_size in batches_of(result):
        arms = verdict.summary(frame(result, batch_size))
        keys = ["temperature", "drafter", "gamma"]
        request_sec = verdict.frame(result, batch_size).groupby(keys).total_sec.mean().rename("request_sec")
        arms = arms.join(request_sec, on=keys).assign(batch_size=batch_size, tokens_per_sec=1 / arms.sec_per_token)
        lines.append(arms)
    shown = ["batch_size", *keys, "tokens_per_sec", "speedup", "low", "high", "request_sec", "round_cost"]
    return pd.concat(lines, ignore_index=True)[[*shown, "accepted_fraction", "num_prompts"]].rename(
        columns={"num_prompts": "num_batches"}
    )


def crossover(found):
    """A sentence for each temperature and drafter of `batch_table`: up to which batch size drafting beats plain steps.

    Every batch size is asked on its own for its best draft length, by the 95 % interval.
    """
    sentences = []
    for (temperature, drafter), part in found[found.gamma > 0].groupby(["temperature", "drafter"]):
        best = part.loc[part.groupby("batch_size").speedup.idxmax()].sort_values("batch_size")
        pays, slower = (list(best.batch_size[mask]) for mask in (best.low > 1, best.high < 1))
        unclear = [size for size in best.batch_size if size not in pays + slower]
        where = [
            f"{what} at batch {', '.join(map(str, sizes))}"
            for what, sizes in (("faster", pays), ("not clearly either", unclear), ("slower", slower))
            if sizes
        ]
        at = "greedy" if temperature == 0 else f"T={temperature:g}"
        sentences.append(f"{at}, {drafter}, best length of each batch size: {'; '.join(where)}.")
    return sentences
