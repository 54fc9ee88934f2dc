import types

import pytest
import torch
from torch.overrides import TorchFunctionMode

from specnb import sampler, timing
from specnb.drafters import FirstOf, ModelDrafter, PromptLookup
from specnb.models import CausalLM
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
        for step in timing.in_time(lengths, end, lambda step: step[0]):
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

    def event(self):
        fake = self

        class Event:
            def record(self):
                self.at = max(fake.device, fake.host)

            def elapsed_time(self, later):
                return 1000 * (later.at - self.at)

        return Event()


def test_on_a_cpu_the_phases_are_read_from_the_host_clock():
    times = iter([0.0, 0.0, 1.0, 3.0, 3.5])
    clock = RoundClock(torch.device("cpu"), now=lambda: next(times))
    clock.start(), clock.mark(), clock.mark()
    assert clock.stop() == (1.0, 2.0, 0.5)


def test_on_a_gpu_phases_are_device_time_read_at_the_round_s_own_synchronisation():
    # 1ytic/warp-rnnt #9: a clock read before the kernels finish; pytorch PR #75393: a synchronisation at every mark.
    fake = FakeTime()
    clock = RoundClock(torch.device("cuda"), now=fake.now, make_event=fake.event)
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


def test_peak_memory_is_not_measured_on_a_cpu():
    # torch.cuda.max_memory_allocated() returns 0 there, which would read as "nothing".
    timing.reset_peak_memory(torch.device("cpu"))
    assert timing.peak_memory_bytes(torch.device("cpu")) is None


def test_the_environment_is_complete_and_names_no_machine():
    import getpass
    import socket

    found = timing.environment()
    assert found["num_threads"] == torch.get_num_threads() and found["memory_bytes"] > 1e9
    assert found["versions"]["torch"] == torch.__version__ and found["versions"]["specnb"]
    text = str(found)
    assert socket.gethostname() not in text and f"/{getpass.getuser()}" not in text


def test_a_gpu_is_described_from_what_the_driver_says(monkeypatch):
    answers = {
        "--query-gpu": "GPU-a, NVIDIA H200, 570.1.2, 700.00, 1980, [N/A], 0x0000000000000000, 3, 512\n"
        "GPU-b, NVIDIA H200, 570.1.2, 700.00, 1980, 3201, 0x0000000000000000, 3, 512\n",
        "--query-compute-apps": "GPU-b, 4242\n",
    }
    monkeypatch.setattr(
        timing.subprocess,
        "run",
        lambda command, **_: types.SimpleNamespace(returncode=0, stdout=answers[command[1].split("=")[0]]),
    )
    first, second = timing.gpu_state()
    assert first["name"] == "NVIDIA H200" and first["power_limit_watt"] == 700 and first["memory_clock_mhz"] is None
    assert (first["num_processes"], second["num_processes"]) == (0, 1) and "uuid" not in first
    monkeypatch.setattr("psutil.cpu_percent", lambda interval: 0.0)
    assert timing.busy_reasons() == ["1 processes use GPU 1 (NVIDIA H200)"]


def test_without_a_driver_there_are_no_gpus(monkeypatch):
    def missing(*_, **__):
        raise FileNotFoundError

    monkeypatch.setattr(timing.subprocess, "run", missing)
    assert timing.gpu_state() == []


def test_a_busy_processor_is_a_reason_and_a_short_burst_is_not(monkeypatch):
    monkeypatch.setattr(timing, "gpu_state", list)
    for readings, busy in (([90.0, 80.0], True), ([90.0, 1.0], False), ([0.0, 0.0], False)):
        values = iter(readings)
        monkeypatch.setattr("psutil.cpu_percent", lambda interval, values=values: next(values))
        assert bool(timing.busy_reasons()) is busy
