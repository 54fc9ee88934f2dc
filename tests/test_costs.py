"""Costs of forwards: on a clock of our own where the answer must be known, on a tiny model where shapes must be."""

import math

import pytest
import torch

from specnb.measure import costs
from specnb.models import CausalLM
from tests.conftest import VOCAB, tiny_model


class Clockwork:
    """A model whose forwards take known times on a clock that only it moves; the first of each width takes longer."""

    vocab_size, context_length, device = 7, 300, torch.device("cpu")

    def __init__(self):
        self.now, self.length, self.compiled, self.order = 0.0, 0, set(), []

    def reset(self, batch=1):
        self.length = 0

    def rollback(self, length):
        self.length = length if isinstance(length, int) else max(length)

    def forward(self, ids, num_logits):
        width = ids.shape[1]
        self.order.append((self.length, width))
        self.now += 1.0 + 0.1 * ids.numel() + 0.01 * self.length + 50.0 * (width not in self.compiled)
        self.compiled.add(width)
        self.length += width


@pytest.fixture
def clockwork(monkeypatch):
    model = Clockwork()
    monkeypatch.setattr(costs.time, "perf_counter", lambda: model.now)
    return model


def test_the_curve_is_the_time_of_a_warm_forward_by_width_and_context(clockwork):
    table = costs.cost_curve(clockwork, [4, 1, 2], [10, 100], repeats=5)
    assert list(zip(table.context, table.width, strict=True)) == [(c, w) for c in (10, 100) for w in (1, 2, 4)]
    for line in table.itertuples():
        assert line.sec == pytest.approx(1 + 0.1 * line.width + 0.01 * line.context)
        assert line.low_sec == pytest.approx(line.high_sec) and line.n == 5
    assert clockwork.length == 100  # every forward was taken back


def test_a_batch_has_the_new_tokens_in_every_row(clockwork):
    table = costs.cost_curve(clockwork, [1, 3], [10, 100], batch=4, repeats=3)
    assert table.sec.tolist() == pytest.approx([1.5, 2.3, 2.4, 3.2])
    model = CausalLM(tiny_model("Llama"))
    assert len(costs.cost_curve(model, [1, 2], [4, 8], batch=3, repeats=2)) == 4
    assert model.length == [8, 8, 8]


@pytest.mark.parametrize("batch", [1, 3])
def test_no_timed_forward_lets_the_cache_grow(batch):
    """Which would be counted as a cost of its width, in every repeat where the context fills the slots."""
    model, grown = CausalLM(tiny_model("Llama")), []
    forward = model.forward

    def watched(ids, num_logits):
        slots = [tensor.shape[2] for tensor in model.cache_tensors]
        logits = forward(ids, num_logits)
        if ids.shape[1] == 1:
            grown.append(slots != [tensor.shape[2] for tensor in model.cache_tensors])
        return logits

    model.forward = watched
    costs.cost_curve(model, [1], [63, 64], batch=batch, repeats=2)
    assert grown == [False] * 6


def test_widths_are_interleaved_and_in_another_order_each_time(clockwork):
    costs.cost_curve(clockwork, [1, 2, 3, 4], [10], repeats=8)
    orders = [tuple(width for _, width in clockwork.order[start + 1 : start + 5]) for start in range(0, 45, 5)]
    assert all(sorted(order) == [1, 2, 3, 4] for order in orders) and len(set(orders)) > 4


def test_a_disturbed_repeat_does_not_move_the_median(clockwork):
    forward, calls = clockwork.forward, []

    def disturbed(ids, num_logits):
        calls.append(1)
        clockwork.now += 9.0 * (len(calls) % 10 == 0)
        return forward(ids, num_logits)

    clockwork.forward = disturbed
    table = costs.cost_curve(clockwork, [1, 2], [10], repeats=15)
    assert table.sec.tolist() == pytest.approx([1.2, 1.3])


class Recorded:
    """What `torch.cuda.graph` would give of a clockwork forward: the same without the time that Python takes."""

    def __init__(self, model, width):
        self.model, self.width = model, width

    def replay(self):
        self.model.now += 0.1 * self.width


def test_replays_are_timed_beside_the_forwards_they_recorded(clockwork, monkeypatch):
    monkeypatch.setattr(costs, "_check", lambda *_: None)  # It would refuse a replay on a CPU.
    monkeypatch.setattr(
        costs, "_record", lambda model, context, width, _: (Recorded(model, width) if width < 4 else None, None)
    )
    table = costs.cost_curve(clockwork, [1, 2, 4], [10], repeats=5, replay=True)
    assert table.sec.tolist() == pytest.approx([1.2, 1.3, 1.5])
    assert table.graph_sec.tolist() == pytest.approx([0.1, 0.2, math.nan], nan_ok=True)  # 4 could not be captured


def test_on_cuda_the_clock_is_the_device_s(monkeypatch):
    """Events are recorded around the work and read after the last has been reached; they count milliseconds."""
    log = []

    class Event:
        def __init__(self, device):
            assert device == torch.device("cuda:1")
            log.append("record")

        def synchronize(self):
            log.append("wait")

        def elapsed_time(self, later):
            return 2.5

    monkeypatch.setattr(costs, "recorded_event", Event)
    monkeypatch.setattr(costs, "synchronize", lambda device: log.append("idle"))
    assert costs._timed(lambda: log.append("work"), torch.device("cuda:1")) == pytest.approx(0.0025)
    assert log == ["idle", "record", "work", "record", "wait"]


def test_only_one_row_on_cuda_can_be_replayed(clockwork, monkeypatch):
    with pytest.raises(ValueError, match="only a forward on CUDA can be replayed as a graph, the model is on cpu"):
        costs.cost_curve(clockwork, [1], [10], replay=True)
    monkeypatch.setattr(clockwork, "device", torch.device("cuda"))
    with pytest.raises(ValueError, match="batch is 2, give 1 or no replay"):
        costs.cost_curve(clockwork, [1], [10], batch=2, replay=True)
    assert clockwork.order == []


def test_what_does_not_fit_is_refused_before_anything_is_timed(clockwork):
    with pytest.raises(ValueError, match="290 tokens in the cache and 16 new ones do not fit the context of 300"):
        costs.cost_curve(clockwork, [1, 16], [290])
    with pytest.raises(ValueError, match="at least 1"):
        costs.cost_curve(clockwork, [0, 1])
    assert clockwork.order == []


def test_the_floor_counts_what_a_step_reads_and_multiplies():
    """By hand for the tiny Llama: 2 layers, width 32, 4 heads of 8, 2 for keys and values, 48 within, float64."""
    model = CausalLM(tiny_model("Llama"))
    layer = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48
    products, norms = 2 * layer + VOCAB * 32, 5 * 32
    rates = {"bytes_per_sec": 1e9, "operations_per_sec": 1e9}
    table = costs.floor(model, [1, 100], context_length=50, rates=rates)
    cached = 2 * 2 * 2 * 8 * 8 * 50
    assert table.memory_sec.tolist() == pytest.approx([(8 * (products + norms) + cached) / 1e9] * 2)
    assert table.compute_sec.tolist() == pytest.approx([2 * products / 1e9, 200 * products / 1e9])
    assert table.floor_sec.tolist() == pytest.approx([table.memory_sec[0], table.compute_sec[1]])


def test_a_tied_embedding_is_read_once():
    model = CausalLM(tiny_model("Llama", tie_word_embeddings=True))
    untied = CausalLM(tiny_model("Llama"))
    rates = {"bytes_per_sec": 1.0, "operations_per_sec": 1.0}
    assert costs.floor(model, [1], rates=rates).equals(costs.floor(untied, [1], rates=rates))


def test_rates_of_a_device_are_positive_and_a_measured_step_is_above_its_floor():
    model = CausalLM(tiny_model("Llama"))
    rates = costs.device_rates(model.device, torch.float64, megabytes=16, size=256)
    assert min(rates.values()) > 1e6
    step = costs.cost_curve(model, [1], [16], repeats=3)
    assert step.sec[0] > costs.floor(model, [1], 16, rates=rates).floor_sec[0]
