"""Clocks, peak memory, and what machine this is.

It knows devices and time. It does not know sampling. A generation is never synchronised on the clock's account: a round
has one host synchronisation already (its result is read), and the clock is read there. Read `specnb.measure.costs`
next.
"""

import platform
import subprocess
import sys
import time

import torch

BUSY_PERCENT = 15  # Mean use of the processor by others above which a measurement is worthless.


class RoundClock:
    """Times the phases of one round: `start`, `mark` after drafting, `mark` after verification, `stop`.

    On a CPU the host clock is read at each call. On CUDA an event is recorded at each mark and read at `stop`, which
    must follow the round's own host synchronisation, so the phases are device time and nothing waits for the clock.
    On MPS each mark synchronises, which slows the round a little: best effort.
    """

    def __init__(self, device, *, now=time.perf_counter, make_event=None, synchronize=None):
        self._now = now
        self._make_event = make_event or (_cuda_event if device.type == "cuda" else None)
        self._device = device
        self._synchronize = synchronize or (torch.mps.synchronize if device.type == "mps" else lambda: None)

    def start(self):
        self._began = self._now()
        self._marks = [self._stamp()]

    def mark(self):
        self._marks.append(self._stamp())

    def stop(self):
        """Seconds of (drafting, verification, everything else); they sum to the round's wall time."""
        total = self._now() - self._began
        drafted, verified = (self._between(a, b) for a, b in zip(self._marks, self._marks[1:], strict=False))
        return drafted, verified, max(total - drafted - verified, 0.0)

    def _stamp(self):
        if self._make_event:
            event = self._make_event()
            event.record(*([torch.cuda.current_stream(self._device)] if self._device.index else []))
            return event
        self._synchronize()
        return self._now()

    def _between(self, earlier, later):
        if self._make_event:
            return earlier.elapsed_time(later) / 1000  # CUDA events count milliseconds.
        return later - earlier


def in_time(steps, end, together=lambda step: step):
    """Yield `steps` while there is time for more: what a bounded measurement loops over.

    Parameters
    ----------
    steps : iterable
    end : float
        On `time.monotonic`'s clock, in seconds.
    together : callable
        Steps in a row with equal values are one block. A block is begun if it would be over by `end` were it to take as
        long as the longest before it, and then not cut. The first is begun in any case.
    """
    block, began, longest = None, None, 0.0
    for step in steps:
        if began is None or together(step) != block:
            now = time.monotonic()
            if began is not None:
                longest = max(longest, now - began)
                if now + longest > end:
                    return
            block, began = together(step), now
        yield step


def synchronize(device):
    """Wait until the device has done all it was asked to."""
    if device.type in ("cuda", "mps"):
        getattr(torch, device.type).synchronize()


def _cuda_event():
    return torch.cuda.Event(enable_timing=True)


def reset_peak_memory(device):
    """Start a new peak: what is allocated now, weights included, is the baseline it grows from."""
    if device.type == "cuda":
        for index in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(index)


def peak_memory_bytes(device):
    """Peak bytes allocated since `reset_peak_memory`, weights included; None where it cannot be measured (no GPU)."""
    if device.type != "cuda":
        return None
    return sum(torch.cuda.max_memory_allocated(index) for index in range(torch.cuda.device_count()))


def environment():
    """Processor, memory, GPU and versions, as every result file carries them; unknown is None.

    Returns
    -------
    dict
        Host names, user names and paths are left out on purpose.
    """
    import psutil

    return {
        "processor": _processor(),
        "num_cores": psutil.cpu_count(logical=False),
        "num_threads": torch.get_num_threads(),
        "load_before_percent": psutil.cpu_percent(interval=0.5),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": gpu_state(),
        "cuda_runtime": torch.version.cuda,
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": versions(),
    }


def versions():
    """Versions of Python and of the packages that decide speed or results."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version()}
    for name in ("torch", "transformers", "numpy", "specnb"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


GPU_FIELDS = {
    "uuid": "uuid",
    "name": "name",
    "driver": "driver_version",
    "power_limit_watt": "power.limit",
    "sm_clock_mhz": "clocks.sm",
    "memory_clock_mhz": "clocks.mem",
    "throttle_reasons": "clocks_throttle_reasons.active",  # the older name, which every driver knows
    "utilization_percent": "utilization.gpu",
    "memory_used_mib": "memory.used",
}


def gpu_state():
    """One dict for each GPU, with its clocks, throttle reasons and number of processes now; empty without one."""
    rows = _nvidia_smi("--query-gpu=" + ",".join(GPU_FIELDS.values()))
    users = [row[0] for row in _nvidia_smi("--query-compute-apps=gpu_uuid,pid")]
    gpus = [dict(zip(GPU_FIELDS, map(_number, row), strict=False)) for row in rows]
    return [{"num_processes": users.count(gpu.pop("uuid")), **gpu} for gpu in gpus]


def busy_reasons():
    """Why a measurement started now would be worthless; an empty list on a quiet machine.

    Ask before a model is loaded: inside a container a process cannot tell its own use of a GPU from others'.
    """
    import psutil

    reasons = []
    used = min(psutil.cpu_percent(interval=1.0) for _ in range(2))  # A short burst is over after a second.
    if used > BUSY_PERCENT:
        reasons.append(f"{used:.0f} % of the processor is in use (at most {BUSY_PERCENT} % is allowed)")
    for index, gpu in enumerate(gpu_state()):
        if gpu["num_processes"]:
            reasons.append(f"{gpu['num_processes']} processes use GPU {index} ({gpu['name']})")
    return reasons


def _nvidia_smi(query):
    try:
        done = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = done.stdout.splitlines() if done.returncode == 0 else []
    return [[cell.strip() for cell in line.split(",")] for line in lines if line.strip()]


def _number(cell):
    """A number where it is one, None where the driver does not know, else the text."""
    if cell.startswith("["):  # [N/A], [Not Supported]
        return None
    try:
        return float(cell)
    except ValueError:
        return cell


def _processor():
    if sys.platform.startswith("linux"):
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    return platform.processor() or None
