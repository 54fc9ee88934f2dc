"""Result files: each says how it came to be, and is there whole or not at all.

It knows git, the clock and JSON. It does not know what was measured.
"""

import json
import os
import subprocess
from datetime import UTC, datetime
from pathlib import Path

from specnb.models.fetch import PROJECT
from specnb.timing import environment


def header(schema, command):
    """What every result file begins with: `schema`, `command`, `commit`, `dirty`, `created`, `environment`."""
    return {"schema": schema, **came_to_be(command), "environment": environment()}


def came_to_be(command):
    """`command`, `commit`, `dirty`, `created`."""
    return {"command": command, **commit(), "created": datetime.now(UTC).isoformat(timespec="seconds")}


def commit():
    """Commit of the code that measures, and whether the package differs from it; None outside a checkout."""

    def git(*arguments):
        done = subprocess.run(["git", "-C", str(PROJECT), *arguments], capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else None

    try:
        changes = git("status", "--porcelain", "--", "specnb", "data/prompts.jsonl")
        return {"commit": git("rev-parse", "HEAD"), "dirty": None if changes is None else bool(changes)}
    except OSError:
        return {"commit": None, "dirty": None}


def write(path, result):
    """Write atomically: the file is there whole or as it was."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(path.name + ".writing")
    head = json.dumps({k: v for k, v in result.items() if k != "rows"}, indent=1)
    rows = ",\n".join(json.dumps(row) for row in result.get("rows", []))  # A line a row: diffs stay readable.
    scratch.write_text(f'{head[:-2]},\n "rows": [\n{rows}\n]}}\n', encoding="utf-8")
    os.replace(scratch, path)


def load(path, kind=None, made_by="specnb"):
    """The result in `path`, of the kind its schema names, such as "sweep"; a ValueError where it is none of these."""
    refusal = f"{path} is not a result of `{made_by}`"
    try:
        result = json.loads(Path(path).read_text(encoding="utf-8"))
        found = kind_of(result)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{refusal}: {type(error).__name__} {error}") from error
    if kind not in (None, found):
        raise ValueError(f"{refusal}: its schema is {result['schema']!r}")
    return result


def kind_of(result):
    """Of schema "specnb-sweep/1" the "sweep"."""
    return result["schema"].removeprefix("specnb-").split("/")[0]
