"""The benchmark's own arithmetic, on tiny models: what it compares must be what it says."""

import importlib
import math
import sys
import types

import pytest
import torch

from specnb.drafters import ModelDrafter
from specnb.drafters.pruned import PrunedLM
from specnb.models import CausalLM
from specnb.models.places import PROJECT
from specnb.probs import Sampling
from specnb.sampler import rounds, speculative
from tests.conftest import seeded, tiny_model


@pytest.fixture(scope="module")
def timing():
    sys.path.insert(0, str(PROJECT / "scripts"))
    yield importlib.import_module("bench_timing")
    sys.path.remove(str(PROJECT / "scripts"))


@pytest.fixture(scope="module")
def pair():
    target = CausalLM(tiny_model("Llama", initializer_range=0.3, eos_token_id=None).float())
    return target, PrunedLM(target, [0], range(0, 40))


def test_generate_gets_the_same_draft_and_accepts_the_same(timing, pair):
    """Greedy rounds of both engines: the assistant proposes what the trimmed draft does, so as many are needed."""
    target, draft = pair
    assistant = timing.as_assistant(draft, gamma=3)
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    logits = assistant(input_ids=ids).logits
    draft.reset()
    assert torch.equal(logits, draft.forward(ids, num_logits=5).logits) and logits[..., 40:].eq(-math.inf).all()
    ours = timing.ours(target, ModelDrafter(draft), 3, Sampling(temperature=0), lambda *measured: measured[2:])
    theirs = timing.theirs(target, lambda *measured: measured[2:], assistant_model=assistant, do_sample=False)
    for prompt in ([3, 1, 4, 1, 5], [2, 7, 1, 8], [11, 12, 13]):
        assert ours(prompt) == theirs(prompt)  # (tokens, rounds)


@pytest.mark.parametrize("temperature", [0, 1])
def test_bare_forwards_between_the_rounds_change_nothing(timing, pair, temperature):
    target, draft = pair
    options = {"gamma": 3, "max_new_tokens": 30, "sampling": Sampling(temperature=temperature)}
    alone = speculative(target, ModelDrafter(draft), [3, 1, 4], generator=seeded(0), **options)
    ids = []
    for r in rounds(target, ModelDrafter(draft), [3, 1, 4], generator=seeded(0), **options):
        lengths = target.length, draft.length
        assert timing.bare_round(target, draft, gamma=3) > 0
        assert (target.length, draft.length) == lengths
        ids += r.ids
    assert ids == alone.ids


def test_draws_and_the_rule_are_in_the_costs(timing, pair, monkeypatch):
    """A clock that stands still while forwards run: what is left is the work around them."""
    target, draft = pair
    now, probs, rule = [0.0], Sampling.probs, timing.verify_unchecked

    def pass_by(seconds, function):
        def slow(*arguments):
            now[0] += seconds
            return function(*arguments)

        return slow

    monkeypatch.setattr(timing, "CONTEXT", 20)
    monkeypatch.setattr("specnb.measure.costs.time.perf_counter", lambda: now[0])
    monkeypatch.setattr(Sampling, "probs", pass_by(1, probs))
    monkeypatch.setattr(timing, "verify_unchecked", pass_by(3, rule))
    cost_ratio, verify_cost = timing.costs(target, ModelDrafter(draft), Sampling())
    assert cost_ratio == 1 / 4 and verify_cost == [1.0] * 10


def test_the_reliability_of_a_draft_that_is_its_target_is_at_least_one_when_greedy(timing):
    """Every draft is accepted, and no confidence is above 1."""
    target = CausalLM(tiny_model("Llama", initializer_range=0.3))
    drafter = ModelDrafter(CausalLM(target.model))
    assert timing.reliability_of(target, drafter, [[1, 2, 3], [4, 5]], Sampling(temperature=0)) > 1
    at_one = timing.reliability_of(target, drafter, [[1, 2, 3], [4, 5]], Sampling())
    assert at_one > 1


def test_the_bookkeeping_of_a_batch_is_a_part_of_its_time_and_grows_with_what_is_slow(timing, monkeypatch):
    batches = importlib.import_module("bench_batches")
    target = CausalLM(tiny_model("Llama", initializer_range=0.3))
    drafter = ModelDrafter(CausalLM(tiny_model("Llama", layers=1, seed=1)))
    prompts, now = [[1, 2, 3], [4], [5, 6]], [0.0]

    def pass_by(seconds):
        now[0] += seconds
        return now[0]

    monkeypatch.setattr(batches, "time", types.SimpleNamespace(perf_counter=lambda: pass_by(0.001)))
    share = batches.bookkeeping(target, drafter, prompts, 2)
    assert 0 < share < 0.5
    rollback = batches.cache.BatchCache.rollback
    slow = lambda self, length: (pass_by(100), rollback(self, length))[1]  # noqa: E731
    monkeypatch.setattr(batches.cache.BatchCache, "rollback", slow)
    assert batches.bookkeeping(target, drafter, prompts, 2) > 0.99  # a slow phase lands in its bucket


def test_an_interrupted_benchmark_goes_on_with_the_pieces_that_are_missing(timing, monkeypatch, tmp_path, capsys):
    bench, done = importlib.import_module("bench"), []

    def suite(once, stop_at):
        for name in ("a", "b", "c"):
            if name == stop_at:
                raise KeyboardInterrupt
            ratios = once(name, lambda name=name: done.append(name) or [1.0, 1.1])
            yield timing.row(name, timing.interval(ratios))

    monkeypatch.setitem(bench.SUITES, "package", lambda once: suite(once, "c"))
    with pytest.raises(KeyboardInterrupt):
        bench.measure("package", tmp_path)
    assert done == ["a", "b"] and not (tmp_path / "package.json").exists()
    monkeypatch.setitem(bench.SUITES, "package", lambda once: suite(once, None))
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        with pytest.raises(ValueError, match=rf"unfinished bench with another num_threads \({threads}, now"):
            bench.measure("package", tmp_path)
    finally:
        torch.set_num_threads(threads)
    result = bench.measure("package", tmp_path)
    assert done == ["a", "b", "c"] and [row["name"] for row in result["rows"]] == ["a", "b", "c"]
    assert [path.name for path in tmp_path.iterdir()] == ["package.json"] and capsys.readouterr().out.count("\n") == 5
    bench.measure("package", tmp_path, restart=True)
    assert done == ["a", "b", "c", "a", "b", "c"]


def test_every_suite_asks_for_its_rows_by_pieces_with_names_of_their_own(timing, pair, monkeypatch):
    """The suites run through on pieces that are made up; a piece asked for twice would be measured once for both."""
    bench, batches = importlib.import_module("bench"), importlib.import_module("bench_batches")
    models = types.SimpleNamespace(model=types.SimpleNamespace(name="d"))
    monkeypatch.setattr(bench, "random_draft", lambda target: CausalLM(tiny_model("Llama")).model)
    for module in (bench, timing, batches):
        monkeypatch.setattr(module, "load_pair", lambda: (models, models, None))
        monkeypatch.setattr(module, "load_prompts", lambda limit=None: [])
    names = {}

    def once(name, work):
        assert name not in names, name
        names[name] = work
        if "cost-aware" in name:
            return [2, 0.5, 0.9, [1.0, 1.1]]
        return [1.0, 1.1, 1.2]

    for suite in (bench.suite_transformers, batches.suite):
        rows = list(suite(once))
        assert len(rows) == len(names) and {row["name"] for row in rows} == set(names)
        names.clear()
    same = (once, pair[0], ModelDrafter(pair[1]), [[1]])
    rows = [row for part in (timing.ceilings, timing.against_generate, timing.cost_aware) for row in part(*same)]
    assert len(names) == 2 + 6 + 2 and len(rows) == len(names) + 1  # and the mean of the six


def test_an_interval_holds_its_value_and_a_bar_is_asked_of_its_worse_end(timing):
    value, low, high = timing.interval([0.9, 1.0, 1.1, 1.2])
    assert low < value < high and value == pytest.approx((0.9 * 1.0 * 1.1 * 1.2) ** 0.25)
    assert timing.row("speed", (1.1, 0.9, 1.3), 1.0)["holds"] is False
    assert timing.row("time", (0.9, 0.8, 0.99), 1.0, at_least=False)["holds"] is True
