"""How long a round takes, how much memory it needs, and on which machine.

It knows devices and time. It does not know sampling. The clock never makes a generation wait: the host reads the result
of every round anyway, which synchronises it with the device, and the clock is read right after. Read
`specnb.measure.costs` next.
"""

import os
import platform
import sys
import time
from functools import partial

import torch


class RoundClock:
    """Times the phases of one round: `start`, `mark` after drafting, `mark` after verification, `stop`.

    On a CPU the host's clock is read at each call. On CUDA an event is recorded at each mark and read at `stop`, so the
    phases are device time and nothing waits for the clock. For that, `stop` must follow the round's own host
    synchronisation. MPS has no such events: each mark synchronises, which slows the round a little.
    """

    def __init__(self, device, *, now=time.perf_counter, record=None, synchronize=None):
        self._now = now
        self._record = record or (partial(recorded_event, device) if device.type == "cuda" else None)
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
        if self._record:
            return self._record()
        self._synchronize()
        return self._now()

    def _between(self, earlier, later):
        if self._record:
            return earlier.elapsed_time(later) / 1000  # CUDA events count milliseconds.
        return later - earlier


def synchronize(device):
    """Wait until the device has done all it was asked to, whether or not it is the current one."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def recorded_event(device):
    """An event recorded now among the work of a CUDA device, whether or not it is the current one."""
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def reset_peak_memory(*parts):
    """Start a new peak on every GPU that holds weights of these models and drafters.

    The peak starts at what is allocated now, weights included.
    """
    for device in _gpus_of(parts):
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory_bytes(*parts):
    """Peak bytes allocated since `reset_peak_memory` on the GPUs of these models and drafters, weights included.

    For a model that is spread over several GPUs it is the sum of their peaks. It is None where there is no GPU, because
    then it cannot be measured.
    """
    gpus = _gpus_of(parts)
    return sum(map(torch.cuda.max_memory_allocated, gpus)) if gpus else None


def _gpus_of(parts):
    """The CUDA devices of modules, of models that wrap a module, and of drafters that wrap models or drafters."""
    found = set()
    for part in parts:
        if isinstance(part, torch.nn.Module):
            found |= {weights.device for weights in part.parameters() if weights.device.type == "cuda"}
        elif part is not None:
            found |= _gpus_of([getattr(part, "model", None), *getattr(part, "drafters", ())])
    return found


def environment():
    """Processor, memory, GPU and versions, as every result file carries them.

    Returns
    -------
    dict
        What is unknown is None. Host names, user names and paths are left out on purpose.
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


def gpu_state():
    """One dict for each GPU that this process may use, in CUDA's order, with its clocks and processes as they are now.

    What the driver does not tell is None, and without a driver there are no GPUs. `CUDA_VISIBLE_DEVICES` may name GPUs
    by number, by UUID or as MIG devices. Where GPUs of several kinds are numbered, set CUDA_DEVICE_ORDER=PCI_BUS_ID,
    for otherwise CUDA counts the fastest first and the driver does not.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            return [_described(pynvml, *gpu) for gpu in _visible_gpus(pynvml)]
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return []


def _visible_gpus(nvml):
    """Handles of the GPUs this process may use: each a pair, the part of the GPU that is ours, and the whole GPU."""
    every = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    if (names := os.environ.get("CUDA_VISIBLE_DEVICES")) is None:
        return [(gpu, gpu) for gpu in every]
    found = []
    for name in map(str.strip, names.split(",")):
        try:
            found.append(_named_gpu(nvml, name, every))
        except (nvml.NVMLError, ValueError):
            break  # CUDA uses neither a name it does not know nor those after it.
    return found


def _named_gpu(nvml, name, every):
    if name.startswith("MIG-") and "/" not in name:
        part = nvml.nvmlDeviceGetHandleByUUID(name)
        return part, nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(part)
    uuid = name.removeprefix("MIG-").split("/")[0]  # Older drivers name a part MIG-GPU-<UUID of the GPU>/1/0.
    (gpu,) = (
        gpu
        for index, gpu in enumerate(every)
        if name == str(index) or (uuid.startswith("GPU-") and nvml.nvmlDeviceGetUUID(gpu).startswith(uuid))
    )
    return gpu, gpu


def _described(nvml, *handles):
    def ask(question, *more, read=lambda answer: answer):
        for handle in handles:  # Of a MIG device the driver knows the memory and the processes, of its GPU the rest.
            try:
                return read(getattr(nvml, question)(handle, *more))
            except nvml.NVMLError:
                continue
        return None

    return {
        "num_processes": ask("nvmlDeviceGetComputeRunningProcesses", read=len),
        "name": ask("nvmlDeviceGetName"),
        "driver": nvml.nvmlSystemGetDriverVersion(),
        "power_limit_watt": ask("nvmlDeviceGetPowerManagementLimit", read=lambda milliwatt: milliwatt / 1000),
        "sm_clock_mhz": ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
        "memory_clock_mhz": ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM),
        "throttle_reasons": ask("nvmlDeviceGetCurrentClocksThrottleReasons", read="0x{:016x}".format),
        "utilization_percent": ask("nvmlDeviceGetUtilizationRates", read=lambda rates: rates.gpu),
        "memory_used_mib": ask("nvmlDeviceGetMemoryInfo", read=lambda memory: memory.used / 2**20),
    }


def _processor():
    if sys.platform.startswith("linux"):
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    return platform.processor() or None
