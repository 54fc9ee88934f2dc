"""Sweeps over batch sizes: the same texts, counted once, over the time until the last row has ended."""

import json

import pandas as pd
import pytest

from specnb.cli import main
from specnb.measure import concurrency, summary, sweep
from tests.test_sweep import OPTIONS, interrupt_after, make_pair, prompts  # noqa: F401 (a fixture)

BATCHES = {**OPTIONS, "batches": [1, 2, 4]}


@pytest.fixture
def result(tmp_path, prompts):  # noqa: F811
    return sweep.run(*make_pair(), prompts, out=tmp_path / "r.json", **BATCHES)


def test_every_prompt_is_measured_at_every_batch_size_and_emits_what_it_does_alone(result):
    rows = pd.DataFrame(result["rows"])
    assert rows.groupby("batch_size").size().tolist() == [4 * 2 * 5] * 3
    keys = ["drafter", "gamma", "temperature", "prompt_id"]
    rows["counts"] = rows.rounds.map(json.dumps)
    assert (rows.groupby(keys, dropna=False).counts.nunique() == 1).all()  # float64: to the last accepted draft
    assert rows[rows.batch_size == 4].first_prompt_id.unique().tolist() == ["p0"]
    assert rows[rows.batch_size == 1].first_prompt_id.isna().all()
    together = rows[rows.batch_size == 2].groupby([*keys[:3], "first_prompt_id"], dropna=False)
    assert (together.prompt_id.agg(tuple).map(lambda ids: ids in (("p0", "p1"), ("p2", "p3")))).all()


def test_prompts_that_fill_no_whole_batch_are_left_out_of_it(tmp_path, prompts):  # noqa: F811
    rows = sweep.run(*make_pair(), prompts, out=tmp_path / "r.json", **{**BATCHES, "batches": [3]})["rows"]
    assert {row["prompt_id"] for row in rows} == {"p0", "p1", "p2"}
    with pytest.raises(ValueError, match=r"between 1 and the number of prompts, 4; got \[1, 5\]"):
        sweep.run(*make_pair(), prompts, out=tmp_path / "s.json", **{**BATCHES, "batches": [1, 5]})


def test_a_batch_is_kept_whole_or_not_at_all(tmp_path, prompts, monkeypatch):  # noqa: F811
    out, lines = tmp_path / "r.json", []
    interrupt_after(monkeypatch, 23, lines)
    with pytest.raises(KeyboardInterrupt):
        sweep.run(*make_pair(), prompts, out=out, **BATCHES)
    partial = out.with_name("r.json.partial")
    partial.write_text(partial.read_text() + '[{"drafter": null, "gamma": 0}, {"dra')  # cut in the middle
    monkeypatch.undo()
    rows = pd.DataFrame(sweep.run(*make_pair(), prompts, out=out, **BATCHES)["rows"])
    assert set(lines) > {1, 2} and len(rows) == 3 * 4 * 2 * 5
    assert not rows.duplicated(["drafter", "gamma", "temperature", "batch_size", "prompt_id"]).any()


def fixed(rows):
    """A result whose seconds are known."""
    lines = []
    for batch, first, prompt, gamma, tokens, seconds in rows:
        lines.append(
            {
                "drafter": "d" if gamma else None, "gamma": gamma, "temperature": 0.0, "batch_size": batch,
                "prompt_id": prompt, "first_prompt_id": first, "repeat": 0, "status": "ok", "stop_reason": "length",
                "num_tokens": tokens, "repeated_4gram_percent": 0.0, "ttft_sec": 0.0, "decode_sec": seconds,
                "draft_sec": 0.0, "verify_sec": seconds, "other_sec": 0.0, "rounds": [[gamma, 0, 1]] * tokens,
            }
        )  # fmt: skip
    described = {name: {"kind": "k", "weight": 1.0, "max_new_tokens": 9, "num_prompt_tokens": 3} for name in "abcd"}
    return {"settings": {"prompts": described}, "rows": lines}


def test_throughput_is_all_tokens_over_the_time_of_the_slowest_row():
    plain = [(1, None, p, 0, 10, 2.0) for p in "abcd"] + [(2, f, p, 0, 10, 3.0) for f, p in ("aa", "ab", "cc", "cd")]
    fast = [(1, None, p, 4, 10, 1.0) for p in "abcd"]
    late = [(2, "a", "a", 4, 10, 1.0), (2, "a", "b", 4, 10, 4.0), (2, "c", "c", 4, 4, 2.0), (2, "c", "d", 4, 10, 4.0)]
    found = concurrency.batch_table(fixed(plain + fast + late)).set_index(["batch_size", "gamma"])
    assert found.tokens_per_sec.to_dict() == pytest.approx({(1, 0): 5.0, (1, 4): 10.0, (2, 0): 40 / 6, (2, 4): 34 / 8})
    assert found.speedup[2, 4] == pytest.approx(34 / 8 * 6 / 40) and found.speedup[1, 4] == pytest.approx(2.0)
    assert found.request_sec[2, 4] == pytest.approx(11 / 4) and found.num_batches[2, 4] == 2
    assert found.low[1, 4] == found.high[1, 4] == pytest.approx(2.0) and found.high[2, 4] > 1.05
    (sentence,) = concurrency.crossover(concurrency.answers(fixed(plain + fast + late)))
    assert sentence == "greedy, best draft of each batch size: deploy at batch 1; cannot tell at batch 2."


def test_a_verdict_speaks_of_one_batch_size_only(result):
    assert set(summary.frame(result).batch_size) == {1} and set(summary.frame(result, 4).batch_size) == {4}
    with pytest.raises(ValueError, match="no finished generation of batch size 8"):
        summary.frame(result, 8)


def test_report_shows_all_batch_sizes_and_draws_them(result, tmp_path, capsys):
    assert main(["report", str(tmp_path / "r.json"), "--figure", str(tmp_path / "r.png")]) == 0
    shown = capsys.readouterr().out
    assert "tokens_per_sec" in shown and "best draft of each batch size" in shown
    assert (tmp_path / "r.png").stat().st_size > 10_000
