"""Measure generations over a grid and keep every one of them.

It knows the sampler, the clock and result files. It does not know drawing or judging: `specnb.verdict` reads what it
writes. Rows are appended to `<out>.partial` as they finish, so a killed sweep loses nothing and resumes; the result
file appears whole, at the end.
"""

import json
import os
import subprocess
from datetime import UTC, datetime
from itertools import product
from pathlib import Path

import torch

from specnb.probs import Sampling
from specnb.prompts import PROJECT
from specnb.sampler import speculative
from specnb.timing import environment

SCHEMA = "specnb-sweep/1"
# What must be the same for rows to share one file.
SAME = ("schema", "commit", "dirty", "models", "settings")
SAME_MACHINE = ("processor", "num_threads", "versions")


def run(target, drafters, prompts, *, out, gammas, temperatures, max_new_tokens=None, repeats=1, seed=0, **options):
    """Measure every cell of drafter x gamma x temperature on every prompt; returns the result, as written to `out`.

    Parameters
    ----------
    target : CausalLM
        With a tokenizer.
    drafters : dict, name -> Drafter
    prompts : list of Prompt
    out : path
    gammas : list of int
        0, plain decoding, is the baseline and always measured.
    temperatures : list of float
    max_new_tokens : int, optional
        Upper bound on top of each prompt's own.
    repeats, seed : int
    command : str, optional
        Kept in the file.
    restart : bool
        Throw an unfinished run of `out` away instead of resuming it.
    track : callable, optional
        Wraps the list of measurements to show progress.

    Raises
    ------
    ValueError
        Before anything is measured: for prompts that do not fit, a pair that cannot work, an unfinished run of other
        settings under the same name.

    Notes
    -----
    The cells of one prompt run one after the other in an order that rotates from prompt to prompt, so that slow
    drifts of the machine fall on all of them alike. A cell that runs out of memory is a row that says so.
    """
    encoded = {prompt.id: prompt.encode(target.tokenizer) for prompt in prompts}
    budget = {p.id: min(p.max_new_tokens, max_new_tokens or p.max_new_tokens) for p in prompts}
    _check_fit(target, encoded, budget)
    cells = _cells(drafters, gammas, temperatures)
    settings = {
        "gammas": sorted({0, *gammas}),
        "temperatures": list(temperatures),
        "drafters": list(drafters),
        "max_new_tokens": max_new_tokens,
        "repeats": repeats,
        "seed": seed,
        "eos_ids": sorted(target.eos_ids),
        "prompts": {
            p.id: {"kind": p.kind, "weight": p.weight, "num_prompt_tokens": len(encoded[p.id])} for p in prompts
        },
    }
    header = _header(target, drafters, settings, options.get("command"))
    partial, rows = _open_partial(Path(out), header, options.get("restart", False))
    done = {_key(row) for row in rows}
    plan = [step for step in _plan(cells, prompts, repeats) if _key(step) not in done]
    if plan:
        _warm_up(target, drafters, cells, next(iter(encoded.values())))
    for step in (options.get("track") or iter)(plan):
        step["seed"] = seed + 1000 * step["repeat"] + list(encoded).index(step["prompt_id"])
        row = _measure(target, drafters, step, encoded[step["prompt_id"]], budget[step["prompt_id"]])
        _append(partial, row)
        rows.append(row)
    result = {**header, "rows": sorted(rows, key=lambda row: row["order"])}
    write_json(out, result)
    partial.unlink()
    return result


def write_json(path, result):
    """Write atomically: the file is there whole or as it was."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(path.name + ".writing")
    head = json.dumps({k: v for k, v in result.items() if k != "rows"}, indent=1)
    rows = ",\n".join(json.dumps(row) for row in result.get("rows", []))  # A line a row: diffs stay readable.
    scratch.write_text(f'{head[:-2]},\n "rows": [\n{rows}\n]}}\n', encoding="utf-8")
    os.replace(scratch, path)


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


def _cells(drafters, gammas, temperatures):
    arms = [(None, 0), *product(drafters, sorted(set(gammas) - {0}))]
    return [
        {"drafter": name, "gamma": gamma, "temperature": float(t)} for t, (name, gamma) in product(temperatures, arms)
    ]


def _plan(cells, prompts, repeats):
    """Every measurement in order: all cells of a prompt together, starting one cell further for each prompt."""
    plan = []
    for turn, (repeat, prompt) in enumerate(product(range(repeats), prompts)):
        start = turn % len(cells)
        for cell in cells[start:] + cells[:start]:
            plan.append({**cell, "batch_size": 1, "prompt_id": prompt.id, "repeat": repeat, "order": len(plan)})
    return plan


def _key(row):
    return row["drafter"], row["gamma"], row["temperature"], row["prompt_id"], row["repeat"]


def _measure(target, drafters, step, prompt_ids, max_new_tokens):
    """One generation as a row; running out of memory or failing is a status, not the end of the sweep."""
    row = {**step, "status": "ok"}
    try:
        generation = _generate(target, drafters, step, prompt_ids, max_new_tokens)
    except (RuntimeError, ValueError, MemoryError) as error:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return {**row, "status": "out of memory" if _is_out_of_memory(error) else f"failed: {error}"}
    trace = generation.trace
    return {
        **row,
        "stop_reason": generation.stop_reason,
        "num_tokens": len(generation.ids),
        "repeated_4gram_percent": round(repeated_4gram_percent(generation.ids), 2),
        **{
            name: round(getattr(trace, name), 6)
            for name in ("ttft_sec", "decode_sec", "draft_sec", "verify_sec", "other_sec")
        },
        "peak_memory_bytes": trace.peak_memory_bytes,
        "rounds": [[r.num_drafted, r.num_accepted, r.num_emitted] for r in trace.rounds],
    }


def _generate(target, drafters, step, prompt_ids, max_new_tokens):
    return speculative(
        target,
        drafters.get(step["drafter"]),
        prompt_ids,
        gamma=step["gamma"],
        max_new_tokens=max_new_tokens,
        sampling=Sampling(temperature=step["temperature"]),
        eos_ids=target.eos_ids,
        generator=torch.Generator().manual_seed(step.get("seed", 0)),
    )


def _is_out_of_memory(error):
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "not enough memory" in str(error)


def _warm_up(target, drafters, cells, prompt_ids):
    """Every cell once, discarded: first calls compile, tune and page in. What cannot work at all is raised here."""
    for cell in cells:
        try:
            _generate(target, drafters, cell, prompt_ids[-64:], 2 * cell["gamma"] + 2)
        except (RuntimeError, MemoryError) as error:
            if not _is_out_of_memory(error):
                raise


def _check_fit(target, encoded, budget):
    for prompt_id, ids in encoded.items():
        if target.context_length is not None and len(ids) + budget[prompt_id] > target.context_length + 1:
            raise ValueError(
                f"prompt {prompt_id!r} has {len(ids)} tokens and may generate {budget[prompt_id]}: more than the "
                f"target's context of {target.context_length}; shorten it or lower max_new_tokens"
            )


def _header(target, drafters, settings, command):
    return {
        "schema": SCHEMA,
        "command": command,
        **_commit(),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": environment(),
        "models": {"target": target.describe(), "drafters": {n: d.describe() for n, d in drafters.items()}},
        "settings": settings,
    }


def _commit():
    """Commit of the code that measures, and whether the package differs from it; None outside a checkout."""

    def git(*arguments):
        done = subprocess.run(["git", "-C", str(PROJECT), *arguments], capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else None

    try:
        changes = git("status", "--porcelain", "--", "specnb", "data/prompts.jsonl")
        return {"commit": git("rev-parse", "HEAD"), "dirty": None if changes is None else bool(changes)}
    except OSError:
        return {"commit": None, "dirty": None}


def _open_partial(out, header, restart):
    """The file rows are appended to, and the rows it holds already."""
    partial = out.with_name(out.name + ".partial")
    partial.parent.mkdir(parents=True, exist_ok=True)
    if partial.exists() and not restart:
        # Subtle: a kill can cut the last line short; it is measured again, and cut off before anything is added.
        whole = [line for line in partial.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
        if whole:
            _check_same(json.loads(whole[0]), json.loads(json.dumps(header)), partial)
            partial.write_text("".join(whole), encoding="utf-8")
            return partial, [json.loads(line) for line in whole[1:]]
    partial.write_text(json.dumps(header) + "\n", encoding="utf-8")
    return partial, []


def _check_same(old, new, partial):
    differing = [k for k in SAME if old.get(k) != new[k]]
    differing += [k for k in SAME_MACHINE if old["environment"].get(k) != new["environment"][k]]
    if differing:
        raise ValueError(
            f"{partial} is an unfinished sweep with another {', '.join(differing)}; finish it with the command it was "
            "begun with, give another --out, or throw it away with --restart"
        )


def _append(partial, row):
    with open(partial, "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
        file.flush()
        os.fsync(file.fileno())
