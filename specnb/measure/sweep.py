"""Measure generations over a grid and keep every one of them.

It knows the sampler, the clock and result files. It does not know drawing or judging: `specnb.measure.answer` reads
what it writes. `specnb.measure.unfinished` keeps every row as it comes, so a killed sweep loses nothing and resumes.
"""

import gc
import hashlib
import json
import math
import re
import time
from collections import Counter
from functools import partial

import torch

from specnb.measure import plan, results
from specnb.measure.bounded import in_time
from specnb.measure.unfinished import Unfinished
from specnb.probs import Sampling
from specnb.request import check_prompt
from specnb.sampler import speculative
from specnb.timing import gpu_state

SCHEMA = "specnb-sweep/1"
CHOOSE_SHARE = 0.85  # Of a bounded time; the rest is for measuring what was chosen again.
SECONDS = ("ttft_sec", "decode_sec", "draft_sec", "verify_sec", "other_sec")
MEASURED = ("stop_reason", "num_tokens", "repeated_4gram_percent", *SECONDS, "peak_memory_bytes", "rounds")
OUT_OF_MEMORY = re.compile("out of memory|(not enough|can't allocate) memory|ALLOC_FAILED")


def run(
    target, drafters, prompts, *, out, gammas, temperatures, batches=(1,), max_new_tokens=None, repeats=1, seed=0,
    command=None, restart=False, replace=True, track=iter, measure=None, seconds=math.inf,
    confirm=(),
):  # fmt: skip
    """Measure every cell of drafter x gamma x temperature x batch on every prompt; returns what is written to `out`.

    Parameters
    ----------
    target : CausalLM, with a tokenizer
    drafters : dict, name -> Drafter
    prompts : list of Prompt
    gammas, temperatures : lists of numbers
        Gamma 0, plain decoding, is the baseline and always measured.
    batches : list of int
        How many consecutive prompts are decoded together, each with the seed it has alone, to the smallest of their
        bounds. Those that fill no whole batch are left out of it.
    max_new_tokens : int, optional
        Upper bound on top of each prompt's own.
    command : str, optional, kept in the file
    restart, replace : bool
        Throw an unfinished run of `out` away instead of resuming it; replace the result that stands in `out`.
    track : callable
        Wraps the list of measurements, to show progress.
    measure : callable, optional
        Measures in the place of `in_turn`, such as an `on_ray.OnRay`. If it has an `environment`, the result file keeps
        what that returns instead of the environment of this process.
    seconds : float
        For the whole call, from here on. Prompts for which the time would not do are left out, or repeated less
        often, and named under `prompts_left_out` in the settings; a prompt that is begun is measured in every cell.
        The first is in any case. What is left of the time is for `confirm`.
    confirm : list of Prompt, optional
        Prompts that do not choose. The arm of highest speed-up on `prompts`, for each batch size and temperature, is
        measured on them again with plain decoding, so that it is judged on what did not choose it.

    Raises
    ------
    ValueError
        Before anything is measured: for what does not fit or cannot work, and as `Unfinished` says.
    """
    began, batches = time.monotonic(), sorted(set(batches))
    _check(len(prompts), batches, max_new_tokens, repeats, measure, seconds)
    texts = {prompt.id: _describe(prompt, target, max_new_tokens) for prompt in [*prompts, *confirm]}
    if len(texts) < len(prompts) + len(confirm):
        raise ValueError("a prompt that confirms the choice must not be among those that choose; leave it out of one")
    encoded, described = ({name: text[part] for name, text in texts.items()} for part in (0, 1))
    cells = plan.cells_of(drafters, gammas, temperatures, batches)
    settings = {"gammas": sorted({0, *gammas}), "temperatures": sorted({float(t) for t in temperatures})}
    settings |= {"drafters": list(drafters), "batches": batches, "repeats": repeats, "seed": seed}
    settings |= {"eos_ids": sorted(target.eos_ids), "prompts": described}
    settings["confirm"] = [prompt.id for prompt in confirm]
    models = {"target": target.describe(), "draft": {name: d.describe() for name, d in drafters.items()}}
    header = {**results.header(SCHEMA, command), "models": models, "settings": settings}
    if hasattr(measure, "environment"):
        header["environment"] = {**measure.environment(), "gpus_after": None}
    budgets = {name: prompt["max_new_tokens"] for name, prompt in described.items()}
    keys = (*plan.CELL, "prompt_id", "repeat", "order")
    with Unfinished(out, header, restart=restart, replace=replace, keys=keys) as unfinished:
        rows, now = unfinished.entries, unfinished.header["settings"]
        for phase, share in ("choose", CHOOSE_SHARE if confirm else 1), ("confirm", 1):
            if phase == "choose":
                steps = plan.ordered(cells, prompts, repeats, seed)
            else:
                steps = plan.confirming(rows, now, confirm, repeats, seed)
            done = set(map(plan.key_of, rows))
            left = [step for step in steps if plan.key_of(step) not in done]
            bounded = track if measure else partial(_in_time, track, began + share * seconds)
            for measured in (measure or in_turn)(target, drafters, left, encoded, budgets, bounded) if left else ():
                unfinished.append(*measured)
        return unfinished.finish(_result(unfinished))


def _in_time(track, until, steps):
    return in_time(track(steps), until, lambda step: step["block"])


def _result(unfinished):
    header, rows = unfinished.header, sorted(unfinished.entries, key=lambda row: row["order"])
    header["environment"].setdefault("gpus_after", gpu_state())
    header["settings"] |= _left_out(header["settings"], rows)
    return {**header, "rows": rows}


def _check(num_prompts, batches, max_new_tokens, repeats, measure, seconds):
    if measure is not None and seconds < math.inf:
        raise ValueError("only what is measured in turn can be bounded in time; leave out `seconds`, or `measure`")
    if repeats < 1 or (max_new_tokens is not None and max_new_tokens < 1):
        raise ValueError(f"repeats and max_new_tokens must be at least 1, got {repeats} and {max_new_tokens}")
    if not batches or not 1 <= batches[0] <= batches[-1] <= num_prompts:
        raise ValueError(f"batches must lie between 1 and the number of prompts, {num_prompts}; got {batches}")


def _left_out(settings, rows):
    """What settings have to say of prompts that were not measured as often as asked; nothing where there are none."""
    times = Counter(name for name, _ in {(row["prompt_id"], row["repeat"]) for row in rows})
    prompts = settings["prompts"]
    short = [name for name in prompts if times[name] < settings["repeats"]]
    kept = {name: prompt for name, prompt in prompts.items() if times[name]}
    return {"prompts": kept, "prompts_left_out": short} if short else {}


def in_turn(target, drafters, steps, encoded, budgets, track=iter):
    """Yield the rows of each step of a plan, measured here in turn, everything warmed up first."""
    if steps:
        _warm_up(target, drafters, dict.fromkeys(map(plan.cell_of, steps)), next(iter(encoded.values())))
    for step in track(steps):
        yield _measure(target, drafters, step, encoded, min(budgets[name] for name in step["prompt_ids"]))


def repeated_4gram_percent(ids):
    """Share of 4-grams that occurred before in the same output, in percent; 0 where there are none.

    Examples
    --------
    >>> repeated_4gram_percent([1, 2, 3, 4, 5])
    0.0
    >>> repeated_4gram_percent([7] * 8)
    80.0
    """
    grams = [tuple(ids[i : i + 4]) for i in range(len(ids) - 3)]
    return 100 * (1 - len(set(grams)) / len(grams)) if grams else 0.0


def _describe(prompt, target, max_new_tokens):
    """Token ids of a prompt that fits, and what the file says of it."""
    budget = min(prompt.max_new_tokens, max_new_tokens or prompt.max_new_tokens)
    ids = prompt.encode(target.tokenizer)
    try:
        check_prompt(ids, target, budget)
    except ValueError as error:
        raise ValueError(f"prompt {prompt.id!r}: {error}") from error
    return ids, {
        "kind": prompt.kind,
        "weight": prompt.weight,
        "max_new_tokens": budget,
        "num_prompt_tokens": len(ids),
        "ids_sha256": hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16],
    }


def _measure(target, drafters, step, encoded, max_new_tokens):
    """One measurement as rows; running out of memory or failing is a status, not the end of the sweep."""
    prompt_ids, seed = step["prompt_ids"], step["seed"]
    try:
        generations = _generate(target, drafters, step, [encoded[name] for name in prompt_ids], seed, max_new_tokens)
        status = "ok"
    except (RuntimeError, ValueError, MemoryError) as error:
        generations, status = None, "out of memory" if _is_out_of_memory(error) else f"failed: {error}"
    if generations is None:
        gc.collect()  # Only now has the error been let go, and with it what its traceback held.
        torch.cuda.empty_cache()
    cell = {name: step[name] for name in (*plan.CELL, "phase")}
    when = {"repeat": step["repeat"], "order": step["order"]}
    together = {} if len(prompt_ids) == 1 else {"first_prompt_id": prompt_ids[0]}
    rows = []
    for i, prompt_id in enumerate(prompt_ids):
        row = {**cell, "prompt_id": prompt_id, **together, **when, "seed": seed + i, "status": status}
        rows.append({**row, **(_measured(generations[i]) if generations else dict.fromkeys(MEASURED))})
    return rows


def _measured(generation):
    trace = generation.trace
    return {
        "stop_reason": generation.stop_reason,
        "num_tokens": len(generation.ids),
        "repeated_4gram_percent": round(repeated_4gram_percent(generation.ids), 2),
        **{name: round(getattr(trace, name), 6) for name in SECONDS},
        "peak_memory_bytes": trace.peak_memory_bytes,
        "rounds": [[r.num_drafted, r.num_accepted, r.num_emitted] for r in trace.rounds],
    }


def _generate(target, drafters, step, prompts, seed, max_new_tokens):
    for drafter in drafters.values():
        drafter.begin(1)  # Otherwise the caches of drafters that rest in this cell would count in its peak memory.
    return speculative(
        target,
        drafters.get(step["drafter"]),
        prompts,
        gamma=step["gamma"],
        max_new_tokens=max_new_tokens,
        sampling=Sampling(temperature=step["temperature"]),
        eos_ids=target.eos_ids,
        generator=[torch.Generator().manual_seed(seed + i) for i in range(len(prompts))],
    )


def _is_out_of_memory(error):
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or bool(OUT_OF_MEMORY.search(str(error)))


def _warm_up(target, drafters, cells, prompt_ids):
    """Every cell and every width once, discarded: first calls compile, tune and page in.

    What cannot work at all with this pair is raised here, before the first row.
    """
    room = math.inf if target.context_length is None else target.context_length - len(prompt_ids) + 1
    for cell in (dict(zip(plan.CELL, cell, strict=True)) for cell in cells):
        try:
            _generate(target, drafters, cell, [prompt_ids] * cell["batch_size"], 0, min(2 * cell["gamma"] + 2, room))
            target.reset()  # A drafter need not fill its block, so the full width is run by hand.
            width = min(cell["gamma"] + 1, len(prompt_ids))
            target.forward(torch.tensor([prompt_ids[:width]], device=target.device), num_logits=width)
        except (RuntimeError, MemoryError) as error:
            if not _is_out_of_memory(error):
                raise
