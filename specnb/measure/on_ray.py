"""A sweep's grid spread over a Ray cluster: each cell on a GPU of its own, or on a CPU slot where there is none.

An optional extra, `pip install "specnb[ray]"`. It knows `specnb.measure.sweep`'s plan and Ray's tasks, and leaves the
scheduling to Ray. Cells are independent: their rows go to the same file in the same format, and a cell that Ray runs
again because its worker was lost counts once. A cell and its plain decoding may run on different machines, so each row
of a cluster with several kinds of machine says which kind it was measured on.
"""

import uuid
from contextlib import contextmanager
from functools import cache

from specnb.measure import plan, sweep
from specnb.measure.unfinished import machine_of
from specnb.timing import environment

_LOADED = {}  # In a worker: what `load` gave there, under the token of the `OnRay` that asked for it.


class OnRay:
    """A `measure` for `sweep.run` that runs the cells of its plan on a Ray cluster.

    Parameters
    ----------
    address : str
        "local" starts a cluster here for as long as the sweep takes, whatever else is running. Else the address of a
        running cluster, such as "ray://HOST:10001", or "auto" for the one that RAY_ADDRESS or this machine knows.
    load : callable, () -> (target, drafters)
        Called once in each worker process; it travels there by pickle.
    num_gpus, num_cpus : numbers, of each cell
    retries : int
        How often Ray runs a cell again whose worker was lost.

    Raises
    ------
    RuntimeError
        Where Ray is not installed. When it measures: where this process is connected to another cluster already.
    """

    def __init__(self, address, load, *, num_gpus=0, num_cpus=1, retries=3):
        try:
            import ray
        except ImportError as error:
            raise RuntimeError("Ray is an optional extra and not installed here; pip install 'ray>=2.50'") from error
        self._ray, self._address, self._load, self._token = ray, address, load, uuid.uuid4().hex
        # Ray ends a worker after each task that uses a GPU, unless `max_calls` is 0; the models would be loaded again.
        self._options = {"num_gpus": num_gpus, "num_cpus": num_cpus, "max_calls": 0, "max_retries": retries}
        self._machines = []

    def environment(self):
        """`timing.environment` of a worker, with `machines`: that of one worker for each kind of machine there is."""
        with self._connected():
            found = {str(machine_of(each)): each for each in self._ray.get(self._asked())}
        self._machines = sorted(found)
        machines = [found[kind] for kind in self._machines]
        return {**machines[0], "machines": machines}

    def __call__(self, target, drafters, steps, encoded, budgets, track):
        cells = {}
        for step in steps:
            cells.setdefault(plan.cell_of(step), []).append(step)
        with self._connected():
            task = self._ray.remote(**self._options)(_cell)
            pending = [task.remote(self._token, self._load, cell, encoded, budgets) for cell in cells.values()]
            for _ in track(list(pending)):
                (finished,), pending = self._ray.wait(pending)
                machine, measured = self._ray.get(finished)
                where = self._where(machine)
                yield from ([{**row, **where} for row in rows] for rows in measured)

    def _asked(self):
        """Ask one worker of every machine that a cell fits on; of any, where the cluster has yet to grow one."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        wanted = {"GPU": self._options["num_gpus"], "CPU": self._options["num_cpus"]}
        nodes = [
            node["NodeID"]
            for node in self._ray.nodes()
            if node["Alive"] and all(node["Resources"].get(name, 0) >= num for name, num in wanted.items())
        ]
        ask = self._ray.remote(**self._options)(environment)
        strategies = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes] or ["DEFAULT"]
        return [ask.options(scheduling_strategy=strategy).remote() for strategy in strategies]

    def _where(self, machine):
        """What a row has to say of the machine it comes from: nothing where all of them are of one kind."""
        if self._machines and machine not in self._machines:
            raise RuntimeError(
                f"a machine of another kind joined the cluster while it measured: {machine}; start again with "
                "--restart when all its machines are there"
            )
        return {"machine": self._machines.index(machine)} if len(self._machines) > 1 else {}

    @contextmanager
    def _connected(self):
        ray = self._ray
        if ray.is_initialized():
            here = ray.get_runtime_context().gcs_address
            if self._address not in ("auto", here):
                raise RuntimeError(
                    f"this process is connected to the Ray cluster {here} already, and asked for is {self._address!r}; "
                    "give that address, or call ray.shutdown() before"
                )
            yield
            return
        # Given no address, or none but these options, Ray would join the cluster of RAY_ADDRESS; "local" never does.
        ray.init(
            self._address, log_to_driver=False, **({"include_dashboard": False} if self._address == "local" else {})
        )
        try:
            yield
        finally:
            ray.shutdown()


@cache
def _machine():
    """The kind of machine this worker is on; it does not change while the worker lives."""
    return str(machine_of(environment()))


def _cell(token, load, steps, encoded, budgets):
    """Run in a worker: the kind of machine it is on, and the rows of each step."""
    target, drafters = _loaded(token, load)
    return _machine(), list(sweep.in_turn(target, drafters, steps, encoded, budgets))


def _loaded(token, load):
    # `load` arrives as a new object with every task, so it cannot be the key itself.
    if token not in _LOADED:
        _LOADED.clear()  # Another sweep's models would stay in memory.
        _LOADED[token] = load()
    return _LOADED[token]
