"""A run that is not over yet: what it has measured is kept beside its result file until the result is whole.

It knows files and JSON. It does not know what is measured: sweeps, suites, benchmarks and the training of a draft all
go on from here after an interruption. Read `specnb.measure.results` before.
"""

import json
import os
from pathlib import Path

from filelock import FileLock, Timeout

from specnb.measure import results

# What of a header may change between the calls that make one result; of the environment, what may not.
PER_CALL = ("command", "created", "environment")
MACHINE = ("processor", "num_threads", "cuda_runtime", "float32_matmul_precision", "versions")
WAY_OUT = "give another --out, or throw it away with --restart"


class Unfinished:
    """Keeps what a run has measured in `<out>.partial`, so that the same call goes on with it after any interruption.

    It is a context manager. Inside, no other run can write the same `out`. The file appears with the first `append`, so
    a run that is refused before it has measured anything leaves nothing behind.

    Parameters
    ----------
    out : path
        The result file.
    header : dict
        What `results.header` gives, with all that must be equal for measurements to share a file. A run that was begun
        with another value, or on another machine, is refused.
    restart : bool
        Throw away what an earlier run has kept, when the first measurement of this one is there.
    replace : bool
        Whether a result that stands in `out` may be replaced.
    keys : names that every entry has
    way_out : str
        What an error message proposes where what is kept does not fit.

    Attributes
    ----------
    header : dict
        That of the run which was begun first.
    entries : list of dict
        Everything that is kept, in the order in which it was appended.

    Raises
    ------
    ValueError
        On entering: another run is writing `out`, `out` must not be replaced, or what is kept cannot be read or does
        not fit.
    """

    def __init__(self, out, header, *, restart=False, replace=True, keys=(), way_out=WAY_OUT):
        self.out, self._replace, self._restart, self._keys, self._way_out = Path(out), replace, restart, keys, way_out
        self.header, self.entries, self._begun = json.loads(json.dumps(header)), [], False
        self.partial = self.out.with_name(self.out.name + ".partial")
        self._lock = FileLock(self.out.with_name(self.out.name + ".lock"), timeout=0)

    def __enter__(self):
        self.out.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire()
        except Timeout as error:
            raise ValueError(
                f"another run is writing {self.out} and holds {self._lock.lock_file}; wait until it is over, or give "
                "another --out"
            ) from error
        try:
            self._refuse_to_replace("give another --out, or --replace it")
            if self.partial.exists() and not self._restart:
                self._resume()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        Path(self._lock.lock_file).unlink(missing_ok=True)
        self._lock.release()

    def begin(self):
        """Write the header, if it is not written yet; `append` does so by itself."""
        if not self._begun:
            results.write_text(self.partial, json.dumps(self.header) + "\n")
            self._begun = True

    def append(self, *entries):
        """Keep some dicts together: after a crash all of them are there, or none."""
        self.begin()
        with open(self.partial, "a", encoding="utf-8") as file:
            file.write(json.dumps(entries) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.entries += entries

    def once(self, key, work):
        """What `work()` gives, as JSON would give it back; kept under `key`, so that it is done only once."""
        for entry in self.entries:
            if entry.get("key") == key:
                return entry["value"]
        value = json.loads(json.dumps(work()))
        self.append({"key": key, "value": value})
        return value

    def finish(self, result):
        """Write the result whole, remove what was kept, and return the result."""
        self._refuse_to_replace(
            f"it was written while this run was measuring, whose measurements are kept in {self.partial}: the same "
            "command with --replace puts them in its place"
        )
        results.write(self.out, result)
        self.partial.unlink(missing_ok=True)
        return result

    def _refuse_to_replace(self, way_out):
        if self.out.exists() and not self._replace:
            raise ValueError(f"{self.out} holds a finished result; {way_out}")

    def _resume(self):
        content = self.partial.read_bytes()
        end = content.rfind(b"\n") + 1
        try:
            header, self.entries = self._parse(content[:end].splitlines())
            kind, differing = results.kind_of(header), differences(header, self.header)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{self.partial} holds no unfinished run that could go on ({type(error).__name__}: {error}); "
                f"{self._way_out}"
            ) from error
        if differing:
            raise ValueError(
                f"{self.partial} is an unfinished {kind} with another {', '.join(differing)}; finish it with the "
                f"command it was begun with, {self._way_out}"
            )
        # Subtle: a kill can cut the last line short. It is removed here, and what it held is measured again.
        os.truncate(self.partial, end)
        self.header, self._begun = header, True

    def _parse(self, lines):
        """(header, entries) of the lines of a file, checked as far as this class can."""
        if not lines:
            raise ValueError("it has no header")
        header, *kept = map(json.loads, lines)
        entries = [entry for line in kept for entry in line]
        for entry in entries:
            if not isinstance(entry, dict) or (missing := [name for name in self._keys if name not in entry]):
                lacking = ", ".join(missing) if isinstance(entry, dict) else "an object around it"
                raise ValueError(f"an entry lacks {lacking}: {_short(entry)}")
        return header, entries


def differences(old, new):
    """Names of what differs between two headers of one kind and forbids to mix their rows, with the values.

    Examples
    --------
    >>> one = {"commit": "a", "settings": {"seed": 0}, "environment": {"num_threads": 2, "gpus": []}}
    >>> two = {"commit": "a", "settings": {"seed": 1}, "environment": {"num_threads": 8, "gpus": []}}
    >>> differences(one, two)
    ['settings (seed 0, now 1)', 'num_threads (2, now 8)']
    """
    old, new = ({**_without(header, PER_CALL), **machine_of(header.get("environment"))} for header in (old, new))
    return [
        _difference(name, old.get(name), new.get(name)) for name in {**old, **new} if old.get(name) != new.get(name)
    ]


def _without(header, names):
    return {name: value for name, value in header.items() if name not in names}


def machine_of(environment):
    """What of an environment decides how long things take; nothing in it names the one machine among its like."""
    environment = environment or {}
    gpus = [f"{gpu.get('name')}, driver {gpu.get('driver')}" for gpu in environment.get("gpus") or []]
    kinds = {"machines": list(map(machine_of, environment["machines"]))} if "machines" in environment else {}
    return {**{name: environment.get(name) for name in MACHINE}, "gpus": gpus, **kinds}


def _difference(name, old, new):
    if isinstance(old, dict) and isinstance(new, dict):
        parts = [part for part in {**old, **new} if old.get(part) != new.get(part)]
        return f"{name} ({'; '.join(f'{part} {_short(old.get(part))}, now {_short(new.get(part))}' for part in parts)})"
    return f"{name} ({_short(old)}, now {_short(new)})"


def _short(value):
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
