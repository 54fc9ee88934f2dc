"""A sweep's grid spread over a Ray cluster: each cell on a GPU of its own, or on a CPU slot where there is none.

An optional extra, `pip install "specnb[ray]"`. It knows `specnb.measure.sweep`'s plan and Ray's tasks, and schedules
nothing itself. Cells are independent: their rows go to the same file in the same format, and what Ray runs again after
a worker was lost counts once. A cell and its plain decoding may run on different workers, so all of them should be
alike.
"""

from functools import lru_cache

from specnb.measure import sweep


def measure_on(address, load, *, num_gpus=0, num_cpus=1, retries=3):
    """A `measure` for `sweep.run` that runs the cells of its plan on a Ray cluster.

    Parameters
    ----------
    address : str
        Of a running cluster, such as "ray://HOST:10001" or "auto"; "local" starts one here, for as long as it takes.
    load : callable, () -> (target, drafters)
        Called once in each worker; it travels there by pickle.
    num_gpus, num_cpus : numbers, of each cell
    retries : int
        How often Ray runs a cell again whose worker was lost.

    Raises
    ------
    RuntimeError
        Where Ray is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise RuntimeError("Ray is an optional extra and not installed here; pip install 'ray>=2.50'") from error

    def measure(target, drafters, plan, encoded, budgets, track):
        cells = {}
        for step in plan:
            cells.setdefault(sweep.cell_of(step), []).append(step)
        if own := not ray.is_initialized():
            ray.init(None if address == "local" else address, include_dashboard=False, log_to_driver=False)
        try:
            task = ray.remote(_cell).options(num_gpus=num_gpus, num_cpus=num_cpus, max_retries=retries)
            pending = [task.remote(load, steps, encoded, budgets) for steps in cells.values()]
            for _ in track(list(pending)):
                (finished,), pending = ray.wait(pending)
                yield from ray.get(finished)
        finally:
            if own:
                ray.shutdown()

    return measure


def _cell(load, steps, encoded, budgets):
    target, drafters = _loaded(load)
    return list(sweep.in_turn(target, drafters, steps, encoded, budgets))


@lru_cache(maxsize=1)
def _loaded(load):
    return load()
