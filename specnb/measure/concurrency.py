"""Sweeps over batch sizes: when one request's speed-up stops being the server's.

It knows result files, and asks `specnb.measure.summary` and `specnb.measure.answer` about each batch size alone. It
does not know models.
"""

import pandas as pd

from specnb.measure import summary
from specnb.measure.answer import WORTH, Answer, choices, decide
from specnb.measure.summary import at

SUMMED = ["num_tokens", "num_drafted", "num_accepted", "num_tested"]
SHARED = ["temperature", "drafter", "gamma", "batch_size", "first_prompt_id", "repeat"]


def batches_of(result):
    """Batch sizes a result file holds, ascending."""
    return sorted({row.get("batch_size", 1) for row in result["rows"]})


def finished(result):
    """Those of them of which anything finished."""
    rows = [row for row in result["rows"] if row["status"] == "ok" and row.get("phase", "choose") == "choose"]
    return sorted({row.get("batch_size", 1) for row in rows})


def frame(result, batch_size, phase="choose"):
    """`summary.frame` of one batch size, a line a batch: tokens of all its rows over the time until the last ended.

    So `sec_per_token` is the inverse of throughput, and intervals are over batches. Seconds and rounds are those of
    the row that ended last, tokens and drafts those of all rows.
    """
    rows = summary.frame(result, batch_size, phase)
    if batch_size == 1 or not len(rows):
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
    for batch_size in finished(result):
        arms = summary.by_arm(frame(result, batch_size))
        keys = ["temperature", "drafter", "gamma"]
        request_sec = summary.frame(result, batch_size).groupby(keys).total_sec.mean().rename("request_sec")
        arms = arms.join(request_sec, on=keys).assign(batch_size=batch_size, tokens_per_sec=1 / arms.sec_per_token)
        lines.append(arms)
    shown = ["batch_size", *keys, "tokens_per_sec", "speedup", "low", "high", "request_sec", "round_cost"]
    return pd.concat(lines, ignore_index=True)[[*shown, "accepted_fraction", "num_prompts"]].rename(
        columns={"num_prompts": "num_batches"}
    )


def answers(result, worth=WORTH):
    """One `Answer` for each batch size and temperature, "cannot tell" for those at which nothing finished."""
    decided = {}
    for batch_size in finished(result):
        phases = (frame(result, batch_size, phase) for phase in ("choose", "confirm"))
        for answer in decide(*phases, worth=worth):
            decided[batch_size, answer.temperature] = answer
    measured = sorted({(row.get("batch_size", 1), float(row["temperature"])) for row in result["rows"]})
    nothing = {"note": "nothing finished there", "worth": worth}
    return [decided.get(cell) or Answer(cell[1], "cannot tell", cell[0], **nothing) for cell in measured]


def chosen(result):
    """{(batch size, temperature): (drafter, gamma)} of highest speed-up, where there is one."""
    found = {batch_size: choices(frame(result, batch_size)) for batch_size in finished(result)}
    return {(size, temperature): arm for size, arms in found.items() for temperature, arm in arms.items()}


def crossover(decided):
    """For each temperature among `answers`, a sentence: up to which batch size drafting pays.

    Every batch size is asked on its own for its best draft, and judged for having chosen it.
    """
    sentences = []
    for temperature in sorted({answer.temperature for answer in decided}):
        sizes = {}
        for answer in decided:
            if answer.temperature == temperature:
                sizes.setdefault(answer.answer, []).append(str(answer.batch_size))
        where = [f"{what} at batch {', '.join(found)}" for what, found in sizes.items()]
        sentences.append(f"{at(temperature)}, best draft of each batch size: {'; '.join(where)}.")
    return sentences


def holes(result):
    """Sentences that name what has no result: the largest parts of the grid in which nothing finished."""
    rows = [
        {**row, "batch": f"batch {row.get('batch_size', 1)}", "temperature": at(row["temperature"])}
        | {"drafter": row["drafter"] or "plain decoding", "gamma": f"gamma {row['gamma']}"}
        for row in result["rows"]
    ]
    return list(_holes(pd.DataFrame(rows), ["batch", "temperature", "drafter", "gamma"], []))


def _holes(rows, keys, where):
    if not (rows.status == "ok").any():
        yield f"{', '.join(where) or 'everywhere'}: none of {len(rows)} rows finished; the first: {rows.status.iloc[0]}"
    elif keys:
        for value, part in rows.groupby(keys[0], sort=False):
            several = rows[keys[0]].nunique() > 1
            yield from _holes(part, keys[1:], [*where, value] if several else where)
