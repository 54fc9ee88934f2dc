import sys
import types

import pytest
import torch
from torch.overrides import TorchFunctionMode

from specnb import sampler, timing
from specnb.drafters import FirstOf, ModelDrafter, PromptLookup
from specnb.measure import costs, machine
from specnb.measure.bounded import in_time
from specnb.models import CausalLM, TableModel
from specnb.probs import Sampling
from specnb.sampler import speculative
from specnb.timing import RoundClock
from tests.conftest import FakeClock, tiny_model


def test_a_bounded_loop_begins_no_block_that_would_end_too_late(monkeypatch):
    clock = FakeClock()
    monkeypatch.setattr(timing.time, "monotonic", clock)

    def given(lengths, end):
        """Which steps are given; a step (block, seconds) takes its seconds."""
        clock.now, done = 0.0, []
        for step in in_time(lengths, end, lambda step: step[0]):
            clock.advance(step[1])
            done.append(step[0])
        return "".join(done)

    steps = [("a", 1), ("a", 1), ("b", 2), ("b", 2), ("c", 1), ("a", 1)]
    assert given(steps, 100) == given(steps, 11) == "aabbca"
    assert given(steps, 10.9) == "aabbc"  # The last might take 4, as b did.
    assert given(steps, 9.9) == "aabb"
    assert given(steps, 3.9) == given(steps, 0) == given(steps, -1) == "aa"
    assert given([], 5) == ""


class FakeTime:
    """A host clock and a device queue: work takes device time, and the host only waits when it synchronises."""

    def __init__(self):
        self.host = self.device = 0.0
        self.log = []

    def now(self):
        return self.host

    def launch(self, seconds):
        self.device = max(self.device, self.host) + seconds
        self.host += 0.001

    def synchronize(self):
        self.log.append("synchronize")
        self.host = max(self.host, self.device)

    def record(self):
        return FakeEvent(max(self.device, self.host))


class FakeEvent:
    """An event that was recorded at a known time."""

    def __init__(self, at):
        self.at = at

    def elapsed_time(self, later):
        return 1000 * (later.at - self.at)

    def synchronize(self):
        pass


def test_on_a_cpu_the_phases_are_read_from_the_host_clock():
    times = iter([0.0, 0.0, 1.0, 3.0, 3.5])
    clock = RoundClock(torch.device("cpu"), now=lambda: next(times))
    clock.start(), clock.mark(), clock.mark()
    assert clock.stop() == (1.0, 2.0, 0.5)


def test_on_a_gpu_phases_are_device_time_read_at_the_round_s_own_synchronisation():
    # 1ytic/warp-rnnt #9: a clock read before the kernels finish; pytorch PR #75393: a synchronisation at every mark.
    fake = FakeTime()
    clock = RoundClock(torch.device("cuda"), now=fake.now, record=fake.record)
    clock.start()
    fake.launch(0.5)  # draft
    clock.mark()
    fake.launch(2.0)  # verify
    clock.mark()
    fake.launch(0.25)  # the rule
    fake.synchronize()  # the round reads its result
    drafted, verified, other = clock.stop()
    assert (drafted, verified) == (0.5, 2.0) and other == pytest.approx(0.25)
    assert drafted + verified + other == pytest.approx(fake.host)
    assert fake.log == ["synchronize"]


def test_a_host_clock_without_synchronisation_would_have_been_wrong():
    """The negative control: the same round timed as if on a CPU claims almost nothing for drafting."""
    fake = FakeTime()
    clock = RoundClock(torch.device("cpu"), now=fake.now)
    clock.start()
    fake.launch(0.5)
    clock.mark()
    fake.launch(2.0)
    clock.mark()
    fake.synchronize()
    drafted, verified, other = clock.stop()
    assert drafted < 0.01 and verified < 0.01 and other > 2


class OneRead(TorchFunctionMode):
    """Stands in for a GPU: tensors without numbers, which refuse the host's and to be read.

    Only the whole results of a round are handed over, made up and counted.
    """

    reads = 0

    def __torch_function__(self, function, types, arguments=(), options=None):
        if function is torch.Tensor.tolist and arguments[0].is_meta:
            self.reads += 1
            return torch.ones(arguments[0].shape, dtype=torch.long, device="cpu").tolist()
        return function(*arguments, **(options or {}))


def elsewhere():
    """A model on a device that is not the host."""
    with torch.device("meta"):
        return CausalLM(tiny_model("Llama"))


PROCESSED = Sampling(temperature=0.7, top_k=5, top_p=0.9, min_p=0.01, repetition_penalty=1.2, logit_bias={3: 1.0})


@pytest.mark.parametrize("sampling", [Sampling(temperature=0), Sampling(), PROCESSED], ids=["greedy", "T=1", "all"])
@pytest.mark.parametrize("prompt", [[1, 2, 1, 2], [[1, 2, 1], [3, 4]]], ids=["one", "batch"])
@pytest.mark.parametrize("name", ["plain", "draft", "lookup", "both"])
def test_a_round_reads_the_device_once_and_nothing_else_leaves_it(name, prompt, sampling):
    target, draft, lookup = elsewhere(), ModelDrafter(elsewhere()), PromptLookup()
    drafter = {"plain": None, "draft": draft, "lookup": lookup, "both": FirstOf(lookup, draft)}[name]
    with OneRead() as device:
        run = speculative(target, drafter, prompt, gamma=4 if drafter else 0, max_new_tokens=9, sampling=sampling)
    assert device.reads == max(len(run.trace.rounds) for run in (run if isinstance(run, list) else [run]))


class Reading(ModelDrafter):
    """The negative control: it looks at its first draft before the round is over."""

    def propose(self, *arguments):
        draft = super().propose(*arguments)
        assert draft.ids[0, 0].item() >= 0
        return draft


def test_a_second_read_or_a_tensor_of_the_host_would_have_been_seen(monkeypatch):
    target, draft = elsewhere(), elsewhere()
    with OneRead(), pytest.raises(RuntimeError, match="meta"):
        speculative(target, Reading(draft), [1], gamma=2, max_new_tokens=4)
    monkeypatch.setattr(sampler, "uniforms_of", lambda rows, counts, device: torch.rand(len(rows), max(counts)))
    with OneRead(), pytest.raises(RuntimeError, match="meta"):
        speculative(target, PromptLookup(), [1, 2, 1], gamma=2, max_new_tokens=4)


def test_mps_synchronises_at_each_mark():
    fake = FakeTime()
    clock = RoundClock(torch.device("mps"), now=fake.now, synchronize=fake.synchronize)
    clock.start()
    fake.launch(0.5)
    clock.mark()
    fake.launch(1.0)
    clock.mark()
    assert clock.stop() == pytest.approx((0.5, 1.0, 0.0)) and len(fake.log) == 3


class FakeCuda:
    """Stands in for `torch.cuda` with several GPUs, of which number 0 is the current one, and notes who is asked."""

    def __init__(self, monkeypatch, peaks=()):
        self.asked, self.peaks, fake = [], list(peaks), self

        class Event(FakeEvent):
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self, stream):
                fake.asked.append(("record", stream))
                self.at = len(fake.asked)

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: f"stream of {device}")
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: self.asked.append(("wait", str(device))))
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda d: self.asked.append(("reset", str(d))))
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda d: self.peaks[d.index])


@pytest.mark.parametrize("name", ["cuda:0", "cuda:1"])
def test_the_clock_follows_the_model_s_gpu_and_not_the_current_one(monkeypatch, name):
    fake = FakeCuda(monkeypatch)
    clock = RoundClock(torch.device(name))
    clock.start(), clock.mark(), clock.mark()
    clock.stop()
    timing.synchronize(torch.device(name))
    assert costs._timed(lambda: None, torch.device(name)) == 1
    assert {where for _, where in fake.asked} == {name, f"stream of {name}"}
    assert [what for what, _ in fake.asked] == ["record"] * 3 + ["wait"] * 2 + ["record"] * 2


class On(torch.nn.Module):
    """A model whose weights lie on these devices."""

    def __init__(self, *names):
        super().__init__()
        self.names = names

    def parameters(self):
        return (types.SimpleNamespace(device=torch.device(name)) for name in self.names)


def wrapped(*names):
    return types.SimpleNamespace(model=On(*names))


@pytest.mark.parametrize(
    ("parts", "used"),
    [
        ([wrapped("cuda:1")], [1]),
        ([wrapped("cuda:0"), None], [0]),
        ([wrapped("cuda:0", "cuda:2", "cuda:2", "cpu")], [0, 2]),  # spread by a device map
        ([wrapped("cuda:1"), ModelDrafter(wrapped("cuda:2"))], [1, 2]),
        ([wrapped("cuda:1"), FirstOf(PromptLookup(), ModelDrafter(wrapped("cuda:0")))], [0, 1]),
        ([wrapped("cpu"), PromptLookup()], None),
        ([TableModel(None, 2)], None),
    ],
)
def test_peak_memory_is_that_of_the_gpus_which_hold_the_models(monkeypatch, parts, used):
    # On a CPU torch.cuda.max_memory_allocated() returns 0, which would read as "nothing".
    fake = FakeCuda(monkeypatch, peaks=[1, 10, 100])
    timing.reset_peak_memory(*parts)
    assert sorted(fake.asked) == [("reset", f"cuda:{index}") for index in used or []]
    assert timing.peak_memory_bytes(*parts) == (used and sum(10**index for index in used))


def test_the_environment_is_complete_and_names_no_machine():
    import getpass
    import socket

    found = timing.environment()
    assert found["num_threads"] == torch.get_num_threads() and found["memory_bytes"] > 1e9
    assert found["versions"]["torch"] == torch.__version__ and found["versions"]["specnb"]
    text = str(found)
    assert socket.gethostname() not in text and f"/{getpass.getuser()}" not in text


class FakeNvml:
    """Stands in for the driver: GPUs by name, their processes, and the MIG devices they are cut into."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM = "sm", "mem"

    class NVMLError(Exception):
        pass

    def __init__(self, gpus, parts=None, no_driver=False):
        """`gpus`: {UUID: number of processes}; `parts`: {MIG UUID: (UUID of its GPU, number of processes)}."""
        self.gpus, self.parts, self.no_driver, self.open = gpus, parts or {}, no_driver, 0

    def nvmlInit(self):
        if self.no_driver:
            raise self.NVMLError("no driver")
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlDeviceGetCount(self):
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index):
        return list(self.gpus)[index]

    def nvmlDeviceGetUUID(self, handle):
        return handle

    def nvmlDeviceGetHandleByUUID(self, name):
        return self._known(name, self.parts)

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, part):
        return self.parts[part][0]

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        return [object()] * (self.gpus[handle] if handle in self.gpus else self.parts[handle][1])

    def nvmlDeviceGetName(self, handle):
        return f"name of {handle}"

    def nvmlSystemGetDriverVersion(self):
        return "570.1.2"

    def nvmlDeviceGetPowerManagementLimit(self, handle):
        return 700_000 if self._known(handle, self.gpus) else None

    def nvmlDeviceGetClockInfo(self, handle, which):
        if which == self.NVML_CLOCK_MEM:
            raise self.NVMLError("not supported")
        return 1980 if self._known(handle, self.gpus) else None

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):
        return 4 if self._known(handle, self.gpus) else None

    def nvmlDeviceGetUtilizationRates(self, handle):
        return types.SimpleNamespace(gpu=3) if self._known(handle, self.gpus) else None

    def nvmlDeviceGetMemoryInfo(self, handle):
        return types.SimpleNamespace(used=512 * 2**20)

    def _known(self, name, among):
        if name not in among:
            raise self.NVMLError("not found")
        return name


@pytest.fixture
def driver(monkeypatch):
    """A function that puts a driver with these GPUs in the place of this machine's, and says which of them are seen."""
    monkeypatch.setattr("psutil.cpu_percent", lambda interval: 0.0)

    def install(*arguments, visible=None, **options):
        fake = FakeNvml(*arguments, **options)
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        return fake

    return install


def test_a_gpu_is_described_from_what_the_driver_says(driver):
    fake = driver({"GPU-a": 0, "GPU-b": 1})
    first, second = timing.gpu_state()
    assert first == {
        "num_processes": 0, "name": "name of GPU-a", "driver": "570.1.2", "power_limit_watt": 700.0,
        "sm_clock_mhz": 1980, "memory_clock_mhz": None, "throttle_reasons": "0x0000000000000004",
        "utilization_percent": 3, "memory_used_mib": 512.0,
    }  # fmt: skip
    assert second["num_processes"] == 1 and fake.open == 0


def test_of_a_mig_device_processes_are_its_own_and_clocks_are_its_gpu_s(driver):
    driver({"GPU-a": 7}, {"MIG-x": ("GPU-a", 2), "MIG-y": ("GPU-a", 5)}, visible="MIG-x")
    (gpu,) = timing.gpu_state()
    assert (gpu["num_processes"], gpu["name"], gpu["sm_clock_mhz"]) == (2, "name of MIG-x", 1980)


@pytest.mark.parametrize(
    ("visible", "seen"),
    [
        (None, "ab"), ("0", "a"), ("1", "b"), ("1,0", "ba"), (" 1 , 0 ", "ba"), ("", ""), ("-1", ""), ("0,-1,1", "a"),
        ("2", ""), ("1,7,0", "b"), ("GPU-b", "b"), ("GPU-bbb-1,0", "ba"), ("GPU-", ""), ("GPU-c", ""), ("bbb", ""),
        ("MIG-x", "x"), ("MIG-z", ""), ("MIG-GPU-aaa-1/1/0", "a"), ("NoDevFiles", ""),
    ],
)  # fmt: skip
def test_only_the_gpus_that_this_process_may_use_are_looked_at(driver, visible, seen):
    """A name that is not known, or stands for several, hides itself and what comes after it, as it does in CUDA."""
    driver({"GPU-aaa-1": 1, "GPU-bbb-1": 2}, {"MIG-x": ("GPU-aaa-1", 3)}, visible=visible)
    processes = {"a": 1, "b": 2, "x": 3}
    assert [gpu["num_processes"] for gpu in timing.gpu_state()] == [processes[name] for name in seen]
    reasons = machine.busy_reasons()
    assert [int(reason.split()[0]) for reason in reasons] == [processes[name] for name in seen]
    assert [gpu["num_processes"] for gpu in timing.environment()["gpus"]] == [processes[name] for name in seen]


def test_a_gpu_that_is_busy_with_another_s_work_matters_only_where_it_is_ours(driver):
    driver({"GPU-a": 0, "GPU-b": 4})
    assert machine.busy_reasons() == ["4 processes use GPU 1 (name of GPU-b)"]
    assert machine.busy_reasons(torch.device("cuda:1")) == machine.busy_reasons()
    for elsewhere in ("cpu", "cuda", "cuda:0", "mps"):
        assert machine.busy_reasons(torch.device(elsewhere)) == []
    driver({"GPU-a": 0, "GPU-b": 4}, visible="1")  # Then CUDA calls the second one its number 0.
    assert machine.busy_reasons(torch.device("cuda")) == ["4 processes use GPU 0 (name of GPU-b)"]


def test_without_a_driver_there_are_no_gpus(driver):
    driver({"GPU-a": 3}, no_driver=True)
    assert timing.gpu_state() == [] == timing.environment()["gpus"] == machine.busy_reasons()


def test_a_busy_processor_is_a_reason_and_a_short_burst_is_not(driver, monkeypatch):
    driver({})
    for readings, busy in (([90.0, 80.0], True), ([90.0, 1.0], False), ([0.0, 0.0], False)):
        values = iter(readings)
        monkeypatch.setattr("psutil.cpu_percent", lambda interval, values=values: next(values))
        assert bool(machine.busy_reasons()) is busy
