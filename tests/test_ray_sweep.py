"""A grid on a local Ray cluster gives the serial rows, and loses or doubles none when a worker is killed."""

import os
from functools import partial
from pathlib import Path

import pandas as pd
import pytest

from specnb.drafters import PromptLookup
from specnb.measure import sweep
from tests.test_sweep import make_pair, prompts  # noqa: F401 (a fixture)

ray = pytest.importorskip("ray", reason="Ray is an optional extra: pip install 'specnb[ray]'")
from specnb.measure.on_ray import measure_on  # noqa: E402

GRID = {"gammas": [1, 2, 3], "temperatures": [0, 1], "max_new_tokens": 6}  # with plain decoding 14 cells
KEYS = ["drafter", "gamma", "temperature", "batch_size", "prompt_id", "repeat", "order", "seed"]


@pytest.fixture(scope="module", autouse=True)
def cluster():
    root = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join([root, *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": path}})
    yield
    ray.shutdown()


def comparable(result):
    rows = pd.DataFrame(result["rows"])
    return rows[[*KEYS, "status", "num_tokens", "rounds"]].astype({"rounds": str})


def test_the_grid_gives_the_serial_run_s_rows(tmp_path, prompts):  # noqa: F811
    serial = sweep.run(*make_pair(), prompts, out=tmp_path / "serial.json", **GRID)
    spread = sweep.run(*make_pair(), prompts, out=tmp_path / "ray.json", measure=measure_on("local", make_pair), **GRID)
    assert comparable(serial).equals(comparable(spread)) and len(spread["rows"]) == 14 * 4
    assert {**spread["settings"]} == serial["settings"] and not list(tmp_path.glob("*.partial"))


class Dies(PromptLookup):
    """Kills its own process once, in the middle of a cell; a file remembers that it did."""

    def __init__(self, mark):
        super().__init__()
        self.mark = mark

    def propose(self, prefixes, *arguments):
        if len(prefixes[0]) > 8 and not self.mark.exists():
            self.mark.touch()
            os._exit(1)
        return super().propose(prefixes, *arguments)

    def describe(self):
        return PromptLookup().describe()


def dying_pair(mark):
    target, drafters = make_pair()
    return target, {**drafters, "lookup": Dies(mark)}


def test_a_killed_worker_s_cell_is_measured_again_and_counts_once(tmp_path, prompts):  # noqa: F811
    serial = sweep.run(*make_pair(), prompts, out=tmp_path / "serial.json", **GRID)
    mark = tmp_path / "died"
    spread = sweep.run(
        *make_pair(), prompts, out=tmp_path / "ray.json", measure=measure_on("local", partial(dying_pair, mark)), **GRID
    )
    assert mark.exists() and comparable(serial).equals(comparable(spread))


def test_an_interrupted_grid_resumes_with_the_cells_that_are_missing(tmp_path, prompts):  # noqa: F811
    def stopped(steps):
        yield from list(steps)[:5]
        raise KeyboardInterrupt

    measure = measure_on("local", make_pair)
    with pytest.raises(KeyboardInterrupt):
        sweep.run(*make_pair(), prompts, out=tmp_path / "r.json", measure=measure, track=stopped, **GRID)
    kept = (tmp_path / "r.json.partial").read_text().splitlines()[1:]
    assert len(kept) == 5 * 4
    result = sweep.run(*make_pair(), prompts, out=tmp_path / "r.json", measure=measure, **GRID)
    assert len(result["rows"]) == 14 * 4 and not comparable(result).duplicated(KEYS).any()
