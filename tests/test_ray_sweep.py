"""A grid on a local Ray cluster gives the serial rows, and loses or doubles none when a worker is killed."""

import os
import sys
import uuid
from functools import partial
from pathlib import Path

import pandas as pd
import pytest

from specnb.drafters import PromptLookup
from specnb.measure import sweep
from tests.test_sweep import make_pair, prompts  # noqa: F401 (a fixture)

ray = pytest.importorskip("ray", reason="Ray is an optional extra: pip install 'specnb[ray]'")
from specnb.measure.on_ray import OnRay  # noqa: E402
from specnb.measure.unfinished import machine_of  # noqa: E402

GRID = {"gammas": [1, 2, 3], "temperatures": [0, 1], "max_new_tokens": 6}  # with plain decoding 14 cells
KEYS = ["drafter", "gamma", "temperature", "batch_size", "prompt_id", "repeat", "order", "seed"]


@pytest.fixture(autouse=True)
def workers_find_the_tests(monkeypatch):
    """Workers inherit the environment of the process that starts their cluster, but not its import path."""
    root = str(Path(__file__).resolve().parents[1])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([root, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]))


@pytest.fixture(scope="module")
def running():
    """The address of a cluster of two CPUs that this process is not connected to."""
    from ray.cluster_utils import Cluster

    root = str(Path(__file__).resolve().parents[1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([root, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]))
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    yield cluster.address
    cluster.shutdown()


def comparable(result):
    rows = pd.DataFrame(result["rows"])
    return rows[[*KEYS, "status", "num_tokens", "rounds"]].astype({"rounds": str})


def counted_pair(folder):
    """The pair, and a file that says which process has loaded it."""
    (folder / f"{os.getpid()}-{uuid.uuid4().hex}").touch()
    return make_pair()


def test_the_grid_gives_the_serial_run_s_rows_and_each_worker_loads_once(tmp_path, prompts, running, monkeypatch):  # noqa: F811
    (tmp_path / "loads").mkdir()
    monkeypatch.setattr("platform.python_version", lambda: "of the driver")
    serial = sweep.run(*make_pair(), prompts, out=tmp_path / "serial.json", **GRID)
    # A partial is a new object in every task, so that a cache by the object itself would load for each of 14 cells.
    measure = OnRay(running, partial(counted_pair, tmp_path / "loads"))
    spread = sweep.run(*make_pair(), prompts, out=tmp_path / "ray.json", measure=measure, **GRID)
    assert comparable(serial).equals(comparable(spread)) and len(spread["rows"]) == 14 * 4
    assert {**spread["settings"]} == serial["settings"] and not list(tmp_path.glob("*.partial"))
    loads = [path.name.split("-")[0] for path in (tmp_path / "loads").iterdir()]
    assert 1 <= len(loads) == len(set(loads)) <= 4 and str(os.getpid()) not in loads
    environment = spread["environment"]  # that of the workers: Ray gives a task of one CPU one thread
    assert environment["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert environment["num_threads"] == 1 and environment["gpus_after"] is None
    machines = environment.pop("machines")
    assert list(map(machine_of, machines)) == [machine_of(environment)] and "machine" not in spread["rows"][0]


class Grows(OnRay):
    """A cluster whose only kind of machine was another one when it was asked."""

    def environment(self):
        found, self._machines = super().environment(), ["another kind"]
        return found


def test_a_machine_of_another_kind_that_joins_later_is_refused(tmp_path, prompts, running):  # noqa: F811
    with pytest.raises(RuntimeError, match="another kind joined the cluster while it measured"):
        sweep.run(*make_pair(), prompts, out=tmp_path / "r.json", measure=Grows(running, make_pair), **GRID)


def test_local_starts_a_cluster_of_its_own_whatever_ray_address_says(running, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", running)
    local = OnRay("local", make_pair)
    with local._connected():
        assert ray.get_runtime_context().gcs_address != running
        with pytest.raises(RuntimeError, match="connected to the Ray cluster .* already, and asked for is 'local'"):
            local.environment()
    assert not ray.is_initialized()
    with OnRay("auto", make_pair)._connected():
        assert ray.get_runtime_context().gcs_address == running
    assert not ray.is_initialized()


def test_a_process_that_is_connected_already_measures_there_and_stays_connected(tmp_path, prompts, running):  # noqa: F811
    ray.init(running, log_to_driver=False)
    try:
        for address in ("auto", running):
            sweep.run(*make_pair(), prompts[:1], out=tmp_path / "r.json", measure=OnRay(address, make_pair), **GRID)
            assert ray.is_initialized()
        with pytest.raises(RuntimeError, match="asked for is 'ray://elsewhere:10001'"):
            OnRay("ray://elsewhere:10001", make_pair).environment()
    finally:
        ray.shutdown()


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


def test_a_killed_worker_s_cell_is_measured_again_and_counts_once(tmp_path, prompts, running):  # noqa: F811
    serial = sweep.run(*make_pair(), prompts, out=tmp_path / "serial.json", **GRID)
    mark = tmp_path / "died"
    spread = sweep.run(
        *make_pair(), prompts, out=tmp_path / "ray.json", measure=OnRay(running, partial(dying_pair, mark)), **GRID
    )
    assert mark.exists() and comparable(serial).equals(comparable(spread))


def test_an_interrupted_grid_resumes_with_the_cells_that_are_missing(tmp_path, prompts, running):  # noqa: F811
    def stopped(steps):
        yield from list(steps)[:5]
        raise KeyboardInterrupt

    measure = OnRay(running, make_pair)
    with pytest.raises(KeyboardInterrupt):
        sweep.run(*make_pair(), prompts, out=tmp_path / "r.json", measure=measure, track=stopped, **GRID)
    kept = (tmp_path / "r.json.partial").read_text().splitlines()[1:]
    assert len(kept) == 5 * 4
    result = sweep.run(*make_pair(), prompts, out=tmp_path / "r.json", measure=measure, **GRID)
    assert len(result["rows"]) == 14 * 4 and not comparable(result).duplicated(KEYS).any()
