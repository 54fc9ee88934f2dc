import json
import math
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace

import pandas as pd
import pytest
import torch

from specnb import sampler
from specnb.cli import main
from specnb.drafters import ModelDrafter, PromptLookup
from specnb.measure import concurrency, plan, summary, sweep
from specnb.measure.prompts import load_prompts
from specnb.measure.unfinished import Unfinished
from specnb.models import CausalLM
from tests.conftest import VOCAB, FakeClock, tiny_model
from tests.test_models import WORDS, tokenizer_of

OPTIONS = {"gammas": [0, 1, 3], "temperatures": [0, 1], "max_new_tokens": 6}
KEYS = ["drafter", "gamma", "temperature", "prompt_id", "repeat"]


def make_pair(target_seed=0):
    target = CausalLM(tiny_model("Llama", seed=target_seed), tokenizer_of(WORDS), name="tiny")
    return target, {"lookup": PromptLookup(), "small": ModelDrafter(CausalLM(tiny_model("Llama", layers=1, seed=1)))}


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [{"id": f"p{i}", "prompt": " ".join(WORDS[2 + i : 8 + i]), "kind": f"k{i % 2}"} for i in range(4)]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return load_prompts(path)


def test_every_cell_is_measured_once_and_the_baseline_with_them(tmp_path, prompts):
    result = sweep.run(*make_pair(), prompts, out=tmp_path / "r.json", **{**OPTIONS, "gammas": [1, 3]}, repeats=2)
    rows = pd.DataFrame(result["rows"])
    assert len(rows) == 4 * 2 * 2 * (1 + 2 * 2) and not rows.duplicated(KEYS).any()
    assert (rows[rows.gamma == 0].drafter.isna()).all() and (rows.gamma == 0).sum() == 16
    assert json.loads((tmp_path / "r.json").read_text()) == result
    assert list(tmp_path.glob("*.partial")) == list(tmp_path.glob("*.writing")) == []


def test_a_file_says_how_it_came_to_be(tmp_path, prompts):
    result = sweep.run(*make_pair(), prompts, out=tmp_path / "r.json", command="specnb sweep", **OPTIONS)
    assert list(result) == [
        "schema", "command", "commit", "dirty", "created", "environment", "models", "settings", "rows",
    ]  # fmt: skip
    row = result["rows"][5]
    assert list(row) == [
        "drafter", "gamma", "temperature", "batch_size", "phase", "prompt_id", "repeat", "order", "seed", "status",
        "stop_reason", "num_tokens", "repeated_4gram_percent", "ttft_sec", "decode_sec", "draft_sec", "verify_sec",
        "other_sec", "peak_memory_bytes", "rounds",
    ]  # fmt: skip
    assert row["peak_memory_bytes"] is None
    assert sum(emitted for *_, emitted in row["rounds"]) == row["num_tokens"]
    phases = row["draft_sec"] + row["verify_sec"] + row["other_sec"]
    assert phases == pytest.approx(row["ttft_sec"] + row["decode_sec"], abs=1e-5)
    assert str(tmp_path) not in json.dumps(result)


def test_cells_rotate_from_prompt_to_prompt(prompts):
    cells = plan.cells_of(["lookup"], [0, 1, 2], [0.0], [1])
    steps = plan.ordered(cells, prompts, repeats=3, seed=0)
    firsts = [step["gamma"] for step in steps[:: len(cells)]]
    assert firsts[:4] == [0, 1, 2, 0] and [step["order"] for step in steps] == list(range(len(steps)))


def test_reversed_gammas_draft_the_same(tmp_path, prompts):
    target, drafters = make_pair()
    drafted = []
    for gammas in ([1, 3], [3, 1]):
        rows = sweep.run(target, drafters, prompts, out=tmp_path / "r.json", **{**OPTIONS, "gammas": gammas})["rows"]
        drafted.append({tuple(row[k] for k in KEYS): row["rounds"] for row in rows})
    assert drafted[0] == drafted[1]


CHILD = """
import sys
from pathlib import Path
from tests.test_sweep import make_pair, OPTIONS
from specnb.measure import sweep
from specnb.measure.prompts import load_prompts
sweep.run(*make_pair(), load_prompts(sys.argv[1]), out=Path(sys.argv[2]), repeats=20, **OPTIONS)
"""


def test_a_sweep_killed_outright_resumes_with_nothing_lost_or_repeated(tmp_path, prompts):
    out = tmp_path / "r.json"
    partial = tmp_path / "r.json.partial"
    command = [sys.executable, "-c", CHILD, str(tmp_path / "prompts.jsonl"), str(out)]
    child = subprocess.Popen(command)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (partial.exists() and partial.read_text().count("\n") > 20):
        time.sleep(0.02)
    child.kill()  # SIGKILL: no handler, no clean-up
    child.wait()
    header, *kept = partial.read_text().splitlines()
    assert len(kept) > 19 and not out.exists()
    with open(partial, "a") as file:
        file.write('{"drafter": "look')  # what a kill in the middle of a write leaves
    result = sweep.run(*make_pair(), prompts, out=out, repeats=20, **OPTIONS)
    assert result["created"] == json.loads(header)["created"]
    rows = pd.DataFrame(result["rows"])
    assert len(rows) == 20 * 4 * 2 * 5 and not rows.duplicated(KEYS).any()
    assert list(rows.order) == list(range(len(rows)))
    measured = [json.dumps([row]) for row in result["rows"]]
    assert set(kept) <= set(measured)
    assert not partial.exists()


def interrupt_after(monkeypatch, num, kept=None):
    """Ctrl-C after so many measurements, whose numbers of rows are noted in `kept`."""
    append, kept = Unfinished.append, [] if kept is None else kept

    def interrupted(self, *entries):
        append(self, *entries)
        kept.append(len(entries))
        if len(kept) == num:
            raise KeyboardInterrupt

    monkeypatch.setattr(Unfinished, "append", interrupted)


def test_a_refused_sweep_leaves_nothing_behind(tmp_path, prompts):
    target, drafters = make_pair()
    other = CausalLM(tiny_model("Llama", layers=1, seed=1), tokenizer_of(WORDS[:-1]), name="other")
    for options, made in (
        ({"temperatures": [-1]}, drafters),
        ({}, {"other": ModelDrafter(other)}),
        ({"max_new_tokens": 0}, drafters),
        ({"batches": [9]}, drafters),
    ):
        with pytest.raises(ValueError):
            sweep.run(target, made, prompts, out=tmp_path / "r.json", **{**OPTIONS, **options})
        assert [path.name for path in tmp_path.iterdir()] == ["prompts.jsonl"]
    assert sweep.run(target, drafters, prompts, out=tmp_path / "r.json", **OPTIONS)["rows"]


def test_a_second_sweep_to_the_same_file_is_refused_while_the_first_measures(tmp_path, prompts):
    out, refused = tmp_path / "r.json", []

    def meanwhile(plan):
        with pytest.raises(ValueError, match=r"another run is writing .*r.json.*another --out") as error:
            sweep.run(*make_pair(), prompts, out=out, **OPTIONS)
        refused.append(error)
        return plan

    result = sweep.run(*make_pair(), prompts, out=out, track=meanwhile, **OPTIONS)
    assert refused and json.loads(out.read_text()) == result
    assert sorted(path.name for path in tmp_path.iterdir()) == ["prompts.jsonl", "r.json"]


def test_an_unfinished_sweep_of_other_settings_is_not_mixed_in(tmp_path, prompts, monkeypatch):
    out, pair = tmp_path / "r.json", make_pair()
    interrupt_after(monkeypatch, 1)
    with pytest.raises(KeyboardInterrupt):
        sweep.run(*pair, prompts, out=out, **OPTIONS)
    monkeypatch.undo()
    for changed in ({"max_new_tokens": 5}, {"gammas": [0, 2]}, {"seed": 1}):
        with pytest.raises(ValueError, match="another settings.*--restart"):
            sweep.run(*pair, prompts, out=out, **{**OPTIONS, **changed})
    with pytest.raises(ValueError, match="another models"):
        sweep.run(make_pair()[0], {"lookup": pair[1]["lookup"], "small": PromptLookup()}, prompts, out=out, **OPTIONS)
    assert sweep.run(*pair, prompts, out=out, restart=True, **{**OPTIONS, "max_new_tokens": 5})["rows"]


class Elsewhere:
    """Measures as usual, and says that it was done on other machines: the first row on 0, the rest on 1."""

    def __init__(self, *processors):
        self.processors = processors

    def environment(self):
        machines = [{"processor": name, "num_threads": 1, "gpus": []} for name in self.processors]
        return {**machines[0], "machines": machines}

    def __call__(self, *arguments):
        for index, rows in enumerate(sweep.in_turn(*arguments)):
            yield [{**row, "machine": min(index, 1)} for row in rows]


def test_what_is_measured_elsewhere_names_its_machines_and_resumes_on_no_others(tmp_path, prompts, monkeypatch, capsys):
    out, pair = tmp_path / "r.json", make_pair()
    interrupt_after(monkeypatch, 5)
    with pytest.raises(KeyboardInterrupt):
        sweep.run(*pair, prompts, out=out, measure=Elsewhere("One 7", "Two 9"), **OPTIONS)
    for others in ([Elsewhere("One 7")], [Elsewhere("One 7", "Three 1")], [Elsewhere("Two 9", "One 7")], []):
        with pytest.raises(ValueError, match="unfinished sweep with another .*(machines|processor)"):
            sweep.run(*pair, prompts, out=out, measure=others[0] if others else None, **OPTIONS)
    result = sweep.run(*pair, prompts, out=out, measure=Elsewhere("One 7", "Two 9"), **OPTIONS)
    assert result["environment"]["processor"] == "One 7" and result["environment"]["gpus_after"] is None
    assert main(["report", str(out)]) == 0
    said = capsys.readouterr().out
    assert "measured on 2 kinds of machine" in said
    assert "2 rows on One 7, 1 threads, no GPU" in said and f"{len(result['rows']) - 2} rows on Two 9" in said


def test_a_cell_that_runs_out_of_memory_is_a_row_and_the_sweep_goes_on(tmp_path, prompts):
    target, drafters = make_pair()
    forward = target.forward

    def limited(ids, num_logits, *more):
        if num_logits == 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(ids, num_logits, *more)

    target.forward = limited
    result = sweep.run(target, {"small": drafters["small"]}, prompts, out=tmp_path / "r.json", **OPTIONS)
    status = pd.DataFrame(result["rows"]).groupby("gamma").status.unique()
    assert status[3].tolist() == ["out of memory"] and status[0].tolist() == status[1].tolist() == ["ok"]
    assert set(summary.frame(result).gamma) == {0, 1}


@pytest.mark.parametrize(
    ("seconds", "batches", "kept"),
    [(0, [1], 1), (25, [1], 2), (40, [1], 4), (0, [1, 2], 2), (math.inf, [1], 4), (math.inf, [3], 3)],
)
def test_a_bounded_sweep_ends_in_time_with_whole_prompts_and_names_the_rest(
    tmp_path, prompts, monkeypatch, capsys, seconds, batches, kept
):
    clock, measure = FakeClock(), sweep._measure
    monkeypatch.setattr(time, "monotonic", clock)
    monkeypatch.setattr(sweep, "_measure", lambda *arguments: clock.advance(1) or measure(*arguments))
    options = {**OPTIONS, "batches": batches, "seconds": seconds}
    result = sweep.run(*make_pair(), prompts, out=tmp_path / "r.json", **options)
    rows = pd.DataFrame(result["rows"])
    assert list(result["settings"]["prompts"]) == [f"p{i}" for i in range(kept)] == list(rows.prompt_id.unique())
    assert (rows.groupby("prompt_id").size() == 10 * len(batches)).all()
    left_out = result["settings"].get("prompts_left_out", [])
    assert left_out == [f"p{i}" for i in range(kept, 4)]
    assert seconds == 0 or clock.now <= seconds
    assert main(["report", str(tmp_path / "r.json")]) == 0
    named = f"{len(left_out)} prompts were left out, or measured less often than asked: {', '.join(left_out)}"
    assert (named in capsys.readouterr().out) == bool(left_out)


def test_no_cache_of_a_row_before_is_alive_when_the_peak_of_a_row_begins(tmp_path, prompts, monkeypatch):
    target, drafters = make_pair()
    alive = []
    monkeypatch.setattr(
        sampler, "reset_peak_memory", lambda *_: alive.append((target.length, drafters["small"].model.length))
    )
    sweep.run(target, drafters, prompts, out=tmp_path / "r.json", **OPTIONS)
    assert len(alive) >= 4 * 2 * 5 and set(alive) == {(0, 0)}


def test_a_bounded_sweep_names_what_it_repeated_less_often(tmp_path, prompts, monkeypatch):
    clock, measure = FakeClock(), sweep._measure
    monkeypatch.setattr(time, "monotonic", clock)
    monkeypatch.setattr(sweep, "_measure", lambda *arguments: clock.advance(1) or measure(*arguments))
    result = sweep.run(*make_pair(), prompts, out=tmp_path / "r.json", **OPTIONS, repeats=2, seconds=60)
    assert len(result["rows"]) == 60 and list(result["settings"]["prompts"]) == ["p0", "p1", "p2", "p3"]
    assert result["settings"]["prompts_left_out"] == ["p2", "p3"]


def test_a_bound_in_time_is_for_what_is_measured_in_turn(tmp_path, prompts):
    with pytest.raises(ValueError, match="leave out `seconds`, or `measure`"):
        sweep.run(*make_pair(), prompts, out=tmp_path / "r.json", seconds=9, measure=sweep.in_turn, **OPTIONS)
    assert not list(tmp_path.glob("r.json*"))


def test_running_out_of_memory_is_recognised_by_every_name():
    for text in ("CUDA out of memory", "DefaultCPUAllocator: can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED"):
        assert sweep._is_out_of_memory(RuntimeError(text))
    assert sweep._is_out_of_memory(MemoryError()) and not sweep._is_out_of_memory(ValueError("bad memory"))


def test_a_prompt_that_does_not_fit_is_named_before_anything_is_measured(tmp_path, prompts):
    target, drafters = make_pair()
    target.context_length, target.forward = 10, None
    with pytest.raises(ValueError, match="prompt 'p0': a prompt of 6 tokens and max_new_tokens=6 do not fit"):
        sweep.run(target, drafters, prompts, out=tmp_path / "r.json", **OPTIONS)


def test_every_cell_is_warmed_up_before_the_first_row(tmp_path, prompts):
    # vllm-project/vllm #39790: the first call of each width is slow.
    target, drafters = make_pair()
    forward, widths, sizes_at_first_row = target.forward, set(), []
    target.forward = lambda ids, num_logits, *more: widths.add(num_logits) or forward(ids, num_logits, *more)
    track = lambda plan: sizes_at_first_row.append(set(widths)) or plan  # noqa: E731
    sweep.run(target, drafters, prompts, out=tmp_path / "r.json", track=track, **OPTIONS)
    assert sizes_at_first_row[0] >= {1, 2, 4}


def test_token_ids_of_prompts_are_in_range(prompts):
    target, _ = make_pair()
    assert all(0 <= token < VOCAB for p in prompts for token in p.encode(target.tokenizer))


# --- the chosen arm, measured again on prompts that did not choose it ---


def chosen_of(result):
    return {(0.0 if at == 0 else 1.0): arm for (_, at), arm in concurrency.chosen(result).items()}


def test_the_chosen_arm_is_measured_again_on_prompts_that_did_not_choose_it(tmp_path, prompts):
    result = sweep.run(*make_pair(), prompts[:2], confirm=prompts[2:], out=tmp_path / "r.json", **OPTIONS)
    rows = pd.DataFrame(result["rows"])
    assert rows.groupby("phase").prompt_id.unique().map(list).to_dict() == {
        "choose": ["p0", "p1"],
        "confirm": ["p2", "p3"],
    }
    again = rows[rows.phase == "confirm"]
    for temperature, part in again.groupby("temperature"):
        arms = set(part[["drafter", "gamma"]].fillna("-").itertuples(index=False, name=None))
        assert arms == {("-", 0), chosen_of(result)[temperature]} and len(part) == 2 * 2
    assert list(rows.order) == list(range(len(rows))) and result["settings"]["confirm"] == ["p2", "p3"]
    with pytest.raises(ValueError, match="must not be among those that choose"):
        sweep.run(*make_pair(), prompts, confirm=prompts[:1], out=tmp_path / "s.json", **OPTIONS)


def test_a_sweep_killed_while_it_confirms_loses_nothing_and_goes_on_with_its_choice(tmp_path, prompts, monkeypatch):
    out = tmp_path / "r.json"
    interrupt_after(monkeypatch, 2 * 2 * 5 + 3)
    with pytest.raises(KeyboardInterrupt):
        sweep.run(*make_pair(), prompts[:2], confirm=prompts[2:], out=out, **OPTIONS)
    kept = [json.loads(line) for line in out.with_name("r.json.partial").read_text().splitlines()[1:]]
    monkeypatch.undo()
    result = sweep.run(*make_pair(), prompts[:2], confirm=prompts[2:], out=out, **OPTIONS)
    assert len(kept) == 23 and all(
        row in result["rows"] for entry in kept for row in ([entry] if isinstance(entry, dict) else entry)
    )
    assert len(result["rows"]) == 2 * 2 * 5 + 2 * 2 * 2
    assert not pd.DataFrame(result["rows"]).duplicated(KEYS).any()


def test_batch_sizes_are_confirmed_where_the_prompts_fill_two_batches(tmp_path, prompts):
    options, others = {**OPTIONS, "batches": [1, 2]}, [replace(prompt, id=f"q{prompt.id}") for prompt in prompts]
    for confirm, expected in ((others, {1: 16, 2: 16}), (others[:3], {1: 12})):
        result = sweep.run(*make_pair(), prompts[:2], confirm=confirm, out=tmp_path / "r.json", **options)
        again = [row["batch_size"] for row in result["rows"] if row["phase"] == "confirm"]
        assert Counter(again) == expected


def test_where_nothing_can_be_chosen_nothing_is_confirmed_and_the_prompts_are_named(tmp_path, prompts):
    options = {**OPTIONS, "gammas": [0]}
    result = sweep.run(*make_pair(), prompts[:2], confirm=prompts[2:], out=tmp_path / "r.json", **options)
    assert {row["phase"] for row in result["rows"]} == {"choose"}
    assert result["settings"]["prompts_left_out"] == ["p2", "p3"]
