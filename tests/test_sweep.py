import json
import math
import subprocess
import sys
import time

import numpy as np
import pandas as pd
import pytest
import torch

from specnb import sampler, theory
from specnb.cli import main
from specnb.drafters import ModelDrafter, PromptLookup
from specnb.measure import sweep, verdict
from specnb.measure.compare import compare
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
        "drafter", "gamma", "temperature", "batch_size", "prompt_id", "repeat", "order", "seed", "status",
        "stop_reason", "num_tokens", "repeated_4gram_percent", "ttft_sec", "decode_sec", "draft_sec", "verify_sec",
        "other_sec", "peak_memory_bytes", "rounds",
    ]  # fmt: skip
    assert row["peak_memory_bytes"] is None
    assert sum(emitted for *_, emitted in row["rounds"]) == row["num_tokens"]
    phases = row["draft_sec"] + row["verify_sec"] + row["other_sec"]
    assert phases == pytest.approx(row["ttft_sec"] + row["decode_sec"], abs=1e-5)
    assert str(tmp_path) not in json.dumps(result)


def test_cells_rotate_from_prompt_to_prompt(prompts):
    cells = sweep._cells(["lookup"], [0, 1, 2], [0.0], [1])
    plan = sweep._plan(cells, prompts, repeats=3, seed=0)
    firsts = [step["gamma"] for step in plan[:: len(cells)]]
    assert firsts[:4] == [0, 1, 2, 0] and [step["order"] for step in plan] == list(range(len(plan)))


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
    assert set(verdict.frame(result).gamma) == {0, 1}


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


# --- verdicts, on simulated results: every number below is made up to have a known answer ---


def simulated(alpha, round_sec, num_prompts=20, gammas=range(5), tokens=400, prefill_sec=0.0, spread=0.0, seed=0):
    """A result whose drafts are accepted independently with `alpha` and whose rounds cost `round_sec(gamma)`."""
    rng, rows = np.random.default_rng(seed), []
    for prompt in range(num_prompts):
        factor = np.exp(spread * rng.normal())
        for gamma in gammas:
            rounds = []
            while sum(r[2] for r in rounds) < tokens:
                accepted = int(np.argmin(np.append(rng.random(gamma) < alpha, False)))
                rounds.append([gamma, accepted, accepted + 1])
            sec = factor * round_sec(gamma)
            rows.append(
                {
                    "drafter": "sim" if gamma else None, "gamma": gamma, "temperature": 0.0, "prompt_id": f"p{prompt}",
                    "repeat": 0, "order": len(rows), "status": "ok", "stop_reason": "eos",
                    "num_tokens": sum(r[2] for r in rounds),
                    "repeated_4gram_percent": 0.0, "ttft_sec": prefill_sec + sec, "decode_sec": sec * (len(rounds) - 1),
                    "draft_sec": 0.0, "verify_sec": prefill_sec + sec * len(rounds), "other_sec": 0.0, "rounds": rounds,
                }
            )  # fmt: skip
    prompts = {f"p{i}": {"kind": "k", "weight": 1.0, "num_prompt_tokens": 5} for i in range(num_prompts)}
    return {"schema": sweep.SCHEMA, "settings": {"prompts": prompts}, "rows": rows}


def test_the_summary_agrees_with_the_closed_form():
    table = verdict.summary(verdict.frame(simulated(0.7, lambda gamma: 1 + 0.1 * gamma, prefill_sec=30)))
    for _, arm in table.iterrows():
        assert arm.tokens_per_round == pytest.approx(theory.tokens_per_round(0.7, arm.gamma), rel=0.03)
        assert arm.round_cost == pytest.approx(1 + 0.1 * arm.gamma)
        if arm.gamma:
            assert arm.alpha_hat == pytest.approx(0.7, abs=0.02)
            assert arm.break_even_fraction == pytest.approx(0.1)
    predictions = verdict.predicted(table)
    assert np.allclose(predictions, table.speedup, rtol=0.03)
    assert table.speedup.max() < theory.speedup(0.7, 4, 0.1) - 0.05  # the prefill dilutes it


def test_a_pair_that_pays_is_recommended_with_its_best_gamma():
    (decision,) = verdict.decide(verdict.frame(simulated(0.8, lambda g: 1 + 0.1 * g + 0.5 * max(g - 2, 0))))
    assert decision.deploy and decision.best.gamma == 2 and decision.best.low > 1
    assert "gamma 2 with sim is" in str(decision) and "n = 20 prompts" in str(decision)
    assert "plain decoding" not in decision.tied


def test_a_pair_that_does_not_pay_is_not():
    (decision,) = verdict.decide(verdict.frame(simulated(0.2, lambda g: 1 + 0.5 * g)))
    assert not decision.deploy and str(decision).startswith("greedy: do not deploy here; at best, gamma 1 with sim")


def test_noise_between_prompts_is_not_a_speed_up():
    """The right answer on 40 identical-arm results: at most a few may be recommended.

    Five arms of equal cost and one token a round; each has its own noise of 5 % a prompt. A best-of-four interval at
    95 % errs more often than one in twenty: 40 seeds, at most 9 false recommendations (binomial .1: below 1 %).
    """
    wrong = 0
    for seed in range(40):
        result = simulated(0.0, lambda g: 1.0, tokens=20, seed=seed)
        rng = np.random.default_rng(seed + 1000)
        for row in result["rows"]:
            row["decode_sec"] *= np.exp(0.05 * rng.normal())
        (decision,) = verdict.decide(verdict.frame(result))
        wrong += decision.deploy
    assert wrong <= 9, wrong


def test_arms_that_cannot_be_told_apart_are_named():
    """Gamma 2 and 3 cost what they yield to half a percent; gamma 1 and 4 are far behind."""
    price = {0: 1.0, 1: 3.0, 2: 1.2, 3: 1.2 * theory.tokens_per_round(0.7, 3) / theory.tokens_per_round(0.7, 2), 4: 9.0}
    (decision,) = verdict.decide(verdict.frame(simulated(0.7, price.get, tokens=100)))
    other = 5 - decision.best.gamma
    assert decision.tied == [f"gamma {other} with sim"]
    assert f"It cannot be told from gamma {other} with sim" in str(decision)


def test_rows_that_loop_are_set_aside_and_the_verdict_printed_without_them():
    result = simulated(0.8, lambda g: 1 + 0.1 * g)
    for row in result["rows"][:25]:
        row["repeated_4gram_percent"] = 60.0
    text = verdict.report(verdict.frame(result))
    assert "Without the 25 of 100 rows with more than 20 % repeated 4-grams" in text
    assert text.count("n = 20 prompts") == text.count("n = 15 prompts") == 1


def test_a_prompt_missing_in_one_arm_is_left_out_of_both_sides():
    result = simulated(0.0, lambda g: 1.0, num_prompts=12, gammas=[0, 1])
    for row in result["rows"]:
        slow = row["prompt_id"] in ("p0", "p1")
        row["decode_sec"] *= 10 if slow else 1
        row["status"] = "out of memory" if slow and row["gamma"] else "ok"
    table = verdict.summary(verdict.frame(result))
    assert table[table.gamma == 1].iloc[0][["low", "speedup", "high"]].tolist() == pytest.approx([1, 1, 1])


def test_one_prompt_is_never_enough_to_deploy():
    (decision,) = verdict.decide(verdict.frame(simulated(0.8, lambda g: 1 + 0.1 * g, num_prompts=1)))
    assert not decision.deploy and "rough" in str(decision)


def test_a_heavier_prompt_counts_for_more():
    result = simulated(0.0, lambda g: 1.0 + g, num_prompts=2, gammas=[0, 1])
    for row in result["rows"]:
        row["decode_sec"] *= 5 if (row["prompt_id"], row["gamma"]) == ("p1", 1) else 1
    result["settings"]["prompts"]["p0"]["weight"] = 1e6
    table = verdict.summary(verdict.frame(result))
    assert table[table.gamma == 1].iloc[0].speedup == pytest.approx(0.5, rel=1e-3)


def test_generations_of_a_single_round_have_no_round_cost_and_break_nothing():
    result = simulated(0.8, lambda g: 1.0, tokens=1, gammas=[0, 2])
    table = verdict.summary(verdict.frame(result))
    assert table.round_cost.isna().all() and verdict.predicted(table)[table.gamma == 2].isna().all()
    assert "greedy" in verdict.report(verdict.frame(result))


def test_a_temperature_without_drafts_has_no_verdict():
    assert verdict.decide(verdict.frame(simulated(0.8, lambda g: 1.0, gammas=[0]))) == []


def test_the_last_token_s_plain_round_is_not_a_failed_draft():
    """Draft equal to target: six tokens as 5 + 1; the last round had no room to draft and says nothing of alpha."""
    result = simulated(1.0, lambda g: 1.0, gammas=[0, 4], tokens=5)
    for row in result["rows"]:
        if row["gamma"]:
            row.update(stop_reason="length", rounds=[[4, 4, 5], [0, 0, 1]], num_tokens=6)
    assert verdict.frame(result).query("gamma == 4").num_undrafted.sum() == 0


def test_two_results_that_differ_by_noise_are_the_same_and_a_faster_draft_is_not():
    slow, again, fast = (
        verdict.frame(simulated(alpha, lambda g: 1 + 0.1 * g, spread=0.3, seed=seed))
        for alpha, seed in ((0.6, 1), (0.6, 2), (0.8, 3))
    )
    table = compare(slow, again, level=0.999)
    assert list(table.gamma) == [1, 2, 3, 4] and not table.differs.any(), (
        "four 99.9 % intervals: false alarm below .004"
    )
    table = compare(slow, fast)
    assert table.differs.all() and (table.low > 0).all()
    wanted = theory.speedup(0.8, 3, 0.1) - theory.speedup(0.6, 3, 0.1)
    assert table.difference[2] == pytest.approx(wanted, abs=0.06)
    assert (compare(slow, slow)[["difference", "low", "high"]] == 0).all(axis=None)


def test_other_prompts_are_resampled_on_their_own():
    few, many = (verdict.frame(simulated(0.6, lambda g: 1.0, num_prompts=n, seed=n)) for n in (8, 20))
    assert not compare(few, many, level=0.999).differs.any()
    with pytest.raises(ValueError, match="share no temperature, drafter and gamma"):
        compare(few, many.assign(drafter="other").where(many.gamma > 0, many))


def test_what_is_no_result_is_refused(tmp_path):
    path = tmp_path / "x.json"
    for text in ("{", "[]", '{"schema": "other/1"}'):
        path.write_text(text)
        with pytest.raises(ValueError, match="not a result of `specnb sweep`"):
            verdict.load(path)
    with pytest.raises(ValueError, match="no finished generation"):
        verdict.frame({**simulated(0.5, lambda g: 1.0), "rows": []})


def test_token_ids_of_prompts_are_in_range(prompts):
    target, _ = make_pair()
    assert all(0 <= token < VOCAB for p in prompts for token in p.encode(target.tokenizer))
