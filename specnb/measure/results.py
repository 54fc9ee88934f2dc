"""Result files: each says how it came to be, and is there whole or not at all.

It knows git, the clock and JSON. It does not know what was measured.
"""

import json
import os
import subprocess
import tempfile
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

from specnb.measure.layout import check
from specnb.models.places import PROJECT, SHIPPED
from specnb.timing import environment

VERSION = 1  # Of the layout, behind the kind: "specnb-sweep/1".


def results_folder():
    """Where results go for which no place is named: data/own in the repository, else the current folder."""
    return Path() if SHIPPED.exists() else PROJECT / "data" / "own"


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
        if SHIPPED.exists():  # An installed package may lie within the repository of something else.
            raise FileNotFoundError(PROJECT)
        changes = git("status", "--porcelain", "--", "specnb", "data/prompts.jsonl")
        return {"commit": git("rev-parse", "HEAD"), "dirty": None if changes is None else bool(changes)}
    except OSError:
        return {"commit": None, "dirty": None}


def write(path, result):
    """Write atomically: the file is there whole or as it was."""
    head = json.dumps({k: v for k, v in result.items() if k != "rows"}, indent=1)
    rows = ",\n".join(json.dumps(row) for row in result.get("rows", []))  # A line a row: diffs stay readable.
    write_text(path, f'{head[:-2]},\n "rows": [\n{rows}\n]}}\n')


def write_text(path, text):
    """Write a text file atomically, as UTF-8 whatever the locale, with its folder if there is none yet."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(path.name + ".writing")
    with open(scratch, "w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())  # Otherwise a power cut may leave the new name with nothing behind it.
    os.replace(scratch, path)


def check_outputs(*outputs, inputs=(), replace=False):
    """Refuse files that a command cannot write as asked, before any work is spent on what goes into them.

    Parameters
    ----------
    outputs, inputs : paths; None stands for one that was not asked for
        What the command writes and what it reads.
    replace : bool
        Whether one that exists already may be replaced.

    Raises
    ------
    ValueError
        Where an output is another one or an input, is a folder, exists and is not to be replaced, or lies in a folder
        that cannot be written to.

    Examples
    --------
    >>> check_outputs("result.png", "result.png")
    Traceback (most recent call last):
    ValueError: two files of this command are result.png; give each a name of its own
    """
    taken = [_real(path) for path in inputs if path is not None]
    for path in (Path(output) for output in outputs if output is not None):
        if _real(path) in taken:
            raise ValueError(f"two files of this command are {path}; give each a name of its own")
        taken.append(_real(path))
        if path.is_dir():
            raise ValueError(f"{path} is a folder; give the name of a file in it")
        if path.exists() and not replace:
            raise ValueError(f"{path} is there already; give another name, or --replace it")
        _check_folder(path)


def _real(path):
    return os.path.normcase(os.path.realpath(path))


def _check_folder(path):
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {folder} takes no new file ({error.strerror})") from error


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
    check(path, result, {"properties": {"schema": {"const": f"specnb-{found}/{VERSION}"}}})
    check(path, result)
    return result


def kind_of(result):
    """Of schema "specnb-sweep/1" the "sweep"."""
    return result["schema"].removeprefix("specnb-").split("/")[0]


def machines_in_words(result):
    """Which kinds of machine the rows of a sweep come from, where a cluster had several; else an empty string."""
    machines = result["environment"].get("machines", [])
    if len(machines) < 2:
        return ""
    rows = Counter(row.get("machine") for row in result["rows"])
    kinds = [
        f"{rows[i]} rows on {each['processor']}, {each['num_threads']} threads, "
        f"{', '.join(gpu['name'] for gpu in each['gpus']) or 'no GPU'}"
        for i, each in enumerate(machines)
    ]
    return f"measured on {len(machines)} kinds of machine, so differences may be theirs: {'; '.join(kinds)}"
