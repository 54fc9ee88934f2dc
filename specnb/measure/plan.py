"""What a sweep measures, in which order: every cell of its grid, then what looks best again on other prompts.

It knows prompts by their names. It does not know models or clocks; `specnb.measure.sweep` carries the plan out.
"""

import math
from itertools import product

from specnb.measure import concurrency

CELL = ("drafter", "gamma", "temperature", "batch_size")


def cells_of(drafters, gammas, temperatures, batches):
    """Every cell of the grid, as a dict of `CELL`; plain decoding is among them."""
    arms = [(None, 0), *product(drafters, sorted(set(gammas) - {0}))]
    grid = product(batches, sorted({float(temperature) for temperature in temperatures}), arms)
    return [
        {"drafter": name, "gamma": gamma, "temperature": temperature, "batch_size": batch}
        for batch, temperature, (name, gamma) in grid
    ]


def ordered(cells, prompts, repeats, seed, phase="choose", first=0):
    """Every measurement in order: all cells of a prompt together, starting one cell further for each prompt.

    So slow drifts of the machine fall on all cells alike. A batch is measured with its first prompt. After a
    whole block all cells have seen the same prompts.
    """
    plan, block_size = [], math.lcm(*(cell["batch_size"] for cell in cells))
    for turn, (repeat, index) in enumerate(product(range(repeats), range(len(prompts)))):
        start = turn % len(cells)
        for cell in cells[start:] + cells[:start]:
            together = [prompt.id for prompt in prompts[index : index + cell["batch_size"]]]
            if index % cell["batch_size"] == 0 and len(together) == cell["batch_size"]:
                where = {"phase": phase, "prompt_ids": together, "repeat": repeat, "order": first + len(plan)}
                where["block"] = (repeat, index // block_size)
                plan.append({**cell, **where, "seed": seed + 1000 * repeat + index})
    return plan


def confirming(rows, settings, prompts, repeats, seed):
    """The plan of the second phase: at each batch size and temperature plain decoding and the arm that looks best.

    Which arm that is follows from the rows of the first phase, so a sweep that resumes finds it again.
    """
    found = concurrency.chosen({"rows": rows, "settings": settings})
    cells = [
        {"drafter": drafter, "gamma": gamma, "temperature": temperature, "batch_size": batch_size}
        for (batch_size, temperature), arm in sorted(found.items())
        for drafter, gamma in ((None, 0), arm)
        if len(prompts) >= 2 * batch_size  # A single batch shows no spread.
    ]
    first = 1 + max((row["order"] for row in rows if row["phase"] == "choose"), default=-1)
    return ordered(cells, prompts, repeats, seed + len(settings["prompts"]), "confirm", first) if cells else []


def cell_of(step):
    """The cell of a planned measurement, or of a row."""
    return tuple(step[name] for name in CELL)


def key_of(row):
    """What tells a measurement from the others: of a planned one, or of any of its rows."""
    first = row["prompt_ids"][0] if "prompt_ids" in row else row.get("first_prompt_id", row.get("prompt_id"))
    return *cell_of(row), first, row["repeat"]
