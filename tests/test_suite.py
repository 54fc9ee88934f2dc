"""The suite of cost curves, on a CPU and at sizes that take no time; its replays need a GPU."""

import json
import time

import pytest
import torch

from specnb.cli import main
from specnb.measure import costs, sweep
from specnb.measure import shapes as suite
from tests.conftest import FakeClock

TINY = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "vocab_size": 97}
SHAPES = {
    "big": {**suite.SHAPES["Llama-3.1-8B"], **TINY, "num_attention_heads": 4, "num_key_value_heads": 2},
    "small": {**suite.SHAPES["Qwen2.5-0.5B"], **TINY, "num_attention_heads": 4, "num_hidden_layers": 1},
}
PUBLISHED = {
    "Llama-3.1-8B": 8_030_261_248, "Llama-3.2-1B": 1_235_814_400, "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-0.5B": 494_032_768,
}  # fmt: skip
OPTIONS = {
    "device": "cpu", "shapes": SHAPES, "pairs": [("big", "small")], "widths": (1, 2, 5), "contexts": (8, 16),
    "repeats": 2, "replay": False, "dtype": torch.float32,
}  # fmt: skip


@pytest.mark.parametrize("name", suite.SHAPES)
def test_a_shape_has_the_parameters_of_the_published_model(name):
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**suite.SHAPES[name]))
    assert model.num_parameters() == PUBLISHED[name]


@pytest.mark.parametrize("name", suite.SHAPES)
def test_the_costs_of_a_published_shape_are_asked_for_whole_with_nothing_left_on_the_host(name):
    """On the device that keeps shapes but no numbers: it refuses a tensor of another device, and to be read."""
    options = {"widths": (1, 17), "contexts": (128, 4096), "repeats": 1, "replay": False, "dtype": torch.bfloat16}
    described, rows = suite.measure(suite.SHAPES[name], name, torch.device("meta"), **options)
    assert (described["num_params"], described["device"]) == (PUBLISHED[name], "meta")
    assert [(row["context"], row["width"]) for row in rows] == [(128, 1), (128, 17), (4096, 1), (4096, 17)]


def test_random_weights_are_those_of_the_class_and_never_zeros():
    model = suite.random_model(SHAPES["big"], "big", device="cpu", dtype=torch.float32).model
    for name, weights in model.named_parameters():
        assert abs(weights.std() - 0.02) < 0.002 if weights.ndim == 2 else (weights == 1).all(), name


def test_a_file_of_costs_says_that_acceptance_was_not_measured(tmp_path):
    result = suite.run(tmp_path / "costs.json", **OPTIONS, command="specnb sweep --suite gpu")
    kept = suite.load(tmp_path / "costs.json")
    assert kept == json.loads(json.dumps(result)) and not list(tmp_path.glob("*.partial"))
    assert "not measured" in kept["acceptance"] and kept["models"]["big"]["weights"] == "random"
    assert [(r["model"], r["context"], r["width"]) for r in kept["rows"]] == [
        (name, context, width) for name in ("big", "small") for context in (8, 16) for width in (1, 2, 5)
    ]
    assert all(r["sec"] > 0 and r["floor_sec"] > 0 and r["graph_sec"] is None for r in kept["rows"])


def test_a_suite_short_of_time_repeats_less_and_leaves_no_model_out(tmp_path, monkeypatch):
    clock, forward = FakeClock(), costs._timed_forward
    monkeypatch.setattr(time, "monotonic", clock)
    monkeypatch.setattr(costs, "_timed_forward", lambda *arguments: clock.advance(1) or forward(*arguments))
    options = {**OPTIONS, "repeats": 15}  # of 2 contexts, each read once, with 3 widths: 8 seconds
    whole = suite.run(tmp_path / "whole.json", **options)["rows"]
    assert {row["n"] for row in whole} == {15} and clock.now == 2 * 16 * 8
    clock.now = 0
    short = suite.run(tmp_path / "short.json", **options, seconds=120)["rows"]
    assert len(short) == len(whole) and clock.now <= 120
    assert {row["n"] for row in short} == {5, 7}  # What the first left of its 60 seconds is the second's.
    none = suite.run(tmp_path / "none.json", **options, seconds=0)["rows"]
    assert len(none) == len(whole) and {row["n"] for row in none} == {1}


def test_a_killed_suite_goes_on_with_the_next_model(tmp_path, monkeypatch):
    measure, measured = suite.measure, []

    def until_killed(shape, name, *arguments):
        if name == "small" and len(measured) == 1:
            raise KeyboardInterrupt
        measured.append(name)
        return measure(shape, name, *arguments)

    monkeypatch.setattr(suite, "measure", until_killed)
    with pytest.raises(KeyboardInterrupt):
        suite.run(tmp_path / "costs.json", **OPTIONS)
    assert not (tmp_path / "costs.json").exists()
    with pytest.raises(ValueError, match=r"unfinished costs with another settings \(repeats 2, now 3\)"):
        suite.run(tmp_path / "costs.json", **{**OPTIONS, "repeats": 3})
    measured.append("resumed")
    assert list(suite.run(tmp_path / "costs.json", **OPTIONS)["models"]) == ["big", "small"]
    assert measured == ["big", "resumed", "small"]


ROWS = [
    {"model": model, "context": 8, "width": width, "sec": sec, "graph_sec": graph}
    for model, width, sec, graph in (("t", 1, 2.0, 1.0), ("t", 5, 3.0, 1.1), ("d", 1, 0.5, 0.1), ("d", 5, 0.6, None))
]


def test_ratios_are_over_one_step_of_the_target():
    assert suite.ratios(ROWS, "t", "d", 8) == (0.25, {0: 1.0, 4: 1.5})
    assert suite.ratios(ROWS, "t", "d", 8, "graph_sec") == (0.1, {0: 1.0, 4: 1.1})
    table = suite.cost_table({"rows": ROWS, "settings": {"pairs": [["t", "d"]], "contexts": [8]}})
    # sum of a^i for i up to 4 must be 4 x .25 + 1.5
    alpha = table.break_even_alpha_4[0]
    assert sum(alpha**i for i in range(5)) == pytest.approx(2.5) and table.verify_cost_8.isna().all()


def test_report_shows_costs_and_draws_them(tmp_path, capsys):
    suite.run(tmp_path / "costs.json", **OPTIONS)
    assert main(["report", str(tmp_path / "costs.json"), "--figure", str(tmp_path / "costs.png")]) == 0
    shown = capsys.readouterr().out
    assert "cost_ratio" in shown and "not measured" in shown and (tmp_path / "costs.png").stat().st_size > 10_000
    assert main(["report", str(tmp_path / "costs.json"), "--compare", "other.json"]) == 1
    assert "of another kind, costs; --compare and --json are for those of sweeps" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_the_suite_is_refused_before_anything_is_loaded(capsys):
    assert main(["sweep", "--suite", "gpu"]) == 1
    assert "the suite needs a CUDA device, and this is cpu" in capsys.readouterr().err


@pytest.mark.parametrize(("asked", "costs_get", "sweep_gets"), [([], 270, 350), (["--seconds", "100"], 60, 0)])
def test_costs_and_sweep_share_the_time_of_the_suite(tmp_path, monkeypatch, asked, costs_get, sweep_gets):
    clock, given = FakeClock(), []
    monkeypatch.setattr(time, "monotonic", clock)
    monkeypatch.setattr("specnb.models.available_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr("specnb.cli.parts.Pair.load", lambda *_: (None, {}))
    monkeypatch.setattr("specnb.cli.sweep.show_costs", lambda *_: None)
    monkeypatch.setattr("specnb.cli.sweep.show_sweep", lambda *_: None)
    monkeypatch.setattr(suite, "run", lambda *_, **options: clock.advance(100) or given.append(options["seconds"]))
    monkeypatch.setattr(sweep, "run", lambda *_, **options: given.append(options["seconds"]))
    command = ["sweep", "--suite", "gpu", "--force", "--out", str(tmp_path / "r.json"), *asked]
    assert main(command) == 0
    assert given == [costs_get, sweep_gets] and clock.now <= 480


@pytest.mark.parametrize("bound", [["--seconds", "9"], ["--suite", "gpu"]])
def test_a_bound_in_time_on_a_cluster_is_refused_before_anything_is_measured(monkeypatch, tmp_path, capsys, bound):
    monkeypatch.setattr("specnb.models.available_device", lambda name: torch.device("cuda"))
    assert main(["sweep", "--ray", "local", "--force", "--out", str(tmp_path / "r.json"), *bound]) == 1
    assert "nothing bounds the time; leave out --ray" in capsys.readouterr().err
