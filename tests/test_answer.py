"""Answers, on simulated results: every number here is made up to have a known answer."""

import json

import numpy as np
import pytest

from specnb import theory
from specnb.cli import main
from specnb.measure import answer, intervals, summary, sweep
from specnb.measure.compare import compare
from specnb.models.places import PROJECT


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
    table = summary.by_arm(summary.frame(simulated(0.7, lambda gamma: 1 + 0.1 * gamma, prefill_sec=30)))
    for _, arm in table.iterrows():
        assert arm.tokens_per_round == pytest.approx(theory.tokens_per_round(0.7, arm.gamma), rel=0.03)
        assert arm.round_cost == pytest.approx(1 + 0.1 * arm.gamma)
        if arm.gamma:
            assert arm.alpha_hat == pytest.approx(0.7, abs=0.02)
            assert arm.break_even_fraction == pytest.approx(0.1)
    predictions = summary.predicted(table)
    assert np.allclose(predictions, table.speedup, rtol=0.03)
    assert table.speedup.max() < theory.speedup(0.7, 4, 0.1) - 0.05  # the prefill dilutes it


def test_a_pair_that_pays_is_recommended_with_its_best_gamma():
    (decision,) = answer.decide(summary.frame(simulated(0.8, lambda g: 1 + 0.1 * g + 0.5 * max(g - 2, 0))))
    assert decision.answer == "deploy" and decision.gamma == decision.best.gamma == 2 and decision.low > 1
    assert str(decision).startswith("greedy: deploy gamma 2 with sim: it is") and "n = 20 prompts" in str(decision)
    assert "plain decoding" not in decision.tied


def test_a_pair_that_does_not_pay_is_not():
    (decision,) = answer.decide(summary.frame(simulated(0.2, lambda g: 1 + 0.5 * g)))
    assert decision.answer == "do not deploy" and decision.high < 1.05
    assert str(decision).startswith("greedy: do not deploy; the fastest, gamma 1 with sim, is 0.")


def noise(num_prompts, seed, arms=12, spread=0.15, gain=()):
    """Seconds and tokens of plain decoding and so many arms, each with its own noise; those of `gain` 1.2x as fast."""
    sec = np.exp(spread * np.random.default_rng(seed).normal(size=(num_prompts, 1 + arms)))
    sec[:, list(gain)] /= 1.2
    return sec, np.ones_like(sec)


def test_the_best_of_twelve_arms_that_are_all_alike_is_seldom_called_faster():
    """Case 73: judged as if it had been the only one, the best is called faster in 28 % of results of 14 prompts."""
    wrong = alone = 0
    for seed in range(400):
        measured, pseudo = intervals.speedups(*noise(14, seed))
        best = measured[1:].argmax()
        wrong += intervals.chosen(measured[1:], pseudo[:, 1:])[0][best] > 1
        alone += intervals.fixed(measured, pseudo)[0][1 + best] > 1
    assert wrong <= 24, f"{wrong} of 400: more than 24 have probability .0001 at the level of 2.5 %"
    assert alone > 48, f"{alone} of 400: what this test must be able to see"


def test_an_arm_that_is_faster_is_mostly_found():
    right = 0
    for seed in range(100):
        measured, pseudo = intervals.speedups(*noise(35, seed, gain=[5]))
        low, _ = intervals.chosen(measured[1:], pseudo[:, 1:])
        right += low[4] > 1 and measured.argmax() == 5
    assert right >= 90, f"{right} of 100; make exactness counts 97 %"


def test_margins_of_chosen_arms_are_wider_than_those_of_fixed_ones_and_hold_with_a_prompt_missing():
    sec, tokens = noise(14, 0)
    sec[3, 2] = tokens[3, 2] = np.nan
    measured, pseudo = intervals.speedups(sec, tokens)
    without = intervals.speedups(np.delete(sec, 3, 0), np.delete(tokens, 3, 0))[0]
    assert measured[2] == pytest.approx(without[2]) and np.isnan(pseudo[3, 2]) and measured[1] != without[1]
    low, margins = intervals.chosen(measured[1:], pseudo[:, 1:])
    assert (low < intervals.fixed(measured, pseudo)[0][1:]).mean() > 0.9 and np.isfinite(margins).all()


def result_of(sec, phase="choose", first=0, status="ok", temperature=0.0):
    """A whole result of rows of one token; seconds of shape (prompts, arms), the first arm plain decoding."""
    rows = [
        {
            "drafter": "sim" if gamma else None, "gamma": gamma, "temperature": temperature, "batch_size": 1,
            "phase": phase, "prompt_id": f"p{first + prompt}", "repeat": 0, "order": 0, "seed": 0, "status": status,
            "stop_reason": "eos", "num_tokens": 1, "repeated_4gram_percent": 0.0, "ttft_sec": float(seconds),
            "decode_sec": 0.0, "draft_sec": 0.0, "verify_sec": float(seconds), "other_sec": 0.0,
            "rounds": [[gamma, 0, 1]],
        }
        for prompt, line in enumerate(sec)
        for gamma, seconds in enumerate(line)
    ]  # fmt: skip
    prompts = {row["prompt_id"]: {"kind": "k", "weight": 1.0, "num_prompt_tokens": 5} for row in rows}
    return {
        "schema": sweep.SCHEMA, "commit": None, "environment": {"processor": "P", "num_threads": 1, "gpus": []},
        "models": {"target": {"id": "T", "device": "cpu", "dtype": "float32"}},
        "settings": {"prompts": prompts, "drafters": ["sim"]}, "rows": rows,
    }  # fmt: skip


def joined(*results):
    """One result of the rows of several."""
    prompts = {name: prompt for result in results for name, prompt in result["settings"]["prompts"].items()}
    rows = [row for result in results for row in result["rows"]]
    return {**results[0], "rows": rows, "settings": {"prompts": prompts, "drafters": ["sim"]}}


def answers_of(result, **options):
    return answer.decide(summary.frame(result), summary.frame(result, phase="confirm"), **options)


def test_the_arm_that_is_truly_fastest_is_seldom_set_apart():
    """All are alike, so any arm is among the truly fastest; it is set apart where the best seems to beat it."""
    apart = 0
    for seed in range(200):
        rows = summary.frame(result_of(noise(14, seed, arms=5)[0]))
        (best,) = answer.choices(rows).values()
        apart += best != ("sim", 1) and ("sim", 1) not in answer._tied(rows, best)
    assert apart <= 14, f"{apart} of 200: more than 14 have probability .0003 at the level of 2.5 %"


@pytest.mark.parametrize(
    ("gain", "spread", "worth", "expected"),
    [
        (1.02, 0.001, 1.05, "deploy"),
        (1.02, 0.03, 1.05, "do not deploy"),
        (1.02, 0.03, 1.01, "cannot tell"),
        (1.2, 0.3, 1.05, "cannot tell"),
        (0.8, 0.05, 1.05, "do not deploy"),
        (1.0, 0.0, 1.05, "do not deploy"),
    ],
)
def test_there_are_three_answers(gain, spread, worth, expected):
    z = np.random.default_rng(0).normal(size=(20, 3))
    sec = np.exp(spread * (z - z.mean(0))) / [1, gain, gain / 1.1]
    (found,) = answers_of(result_of(sec), worth=worth)
    assert (found.answer, found.gamma) == (expected, 1) and found.low <= found.speedup <= found.high
    assert (found.more_prompts is not None) == (expected == "cannot tell")
    with pytest.raises(ValueError, match="worth must be at least 1"):
        answers_of(result_of(sec), worth=0.9)


def test_as_many_prompts_as_it_would_take_mostly_tell():
    told, asked = 0, 0
    for seed in range(40):
        (found,) = answers_of(result_of(noise(14, seed, arms=3, spread=0.3, gain=[1])[0]))
        if found.answer == "cannot tell" and found.more_prompts <= 200:
            asked += 1
            later = noise(14 + found.more_prompts, 1000 + seed, arms=3, spread=0.3, gain=[1])[0]
            told += answers_of(result_of(later))[0].answer != "cannot tell"
    assert asked >= 15 and told >= 0.5 * asked, (told, asked)


def test_the_chosen_arm_measured_again_is_judged_on_what_did_not_choose_it():
    """The choice was luck: on the prompts that chose it the arm is twice as fast, on the others no faster."""
    z = 0.02 * np.random.default_rng(0).normal(size=(16, 3))
    lucky, fair = np.exp(z) / [1, 1.1, 2], np.exp(z)
    (alone,) = answers_of(result_of(lucky))
    assert (alone.answer, alone.gamma, alone.confirmed) == ("deploy", 2, False)
    again = result_of(fair[:, [0, 2]], "confirm", first=50)
    for row in again["rows"]:
        row["gamma"] *= 2
    (found,) = answers_of(joined(result_of(lucky), again))
    assert (found.answer, found.gamma, found.confirmed) == ("do not deploy", 2, True) or found.answer == "cannot tell"
    assert found.speedup == pytest.approx(1, abs=0.03) and "16 prompts that did not choose it" in str(found)
    measured, pseudo = intervals.speedups(fair[:, [0, 2]], np.ones((16, 2)))
    assert [found.low, found.high] == pytest.approx([end[1] for end in intervals.fixed(measured, pseudo)])


def test_another_arm_measured_again_or_on_the_prompts_that_chose_counts_for_nothing():
    lucky = np.exp(0.02 * np.random.default_rng(0).normal(size=(16, 3))) / [1, 1.1, 2]
    (alone,) = answers_of(result_of(lucky))
    other_arm = result_of(np.ones((16, 2)), "confirm", first=50)  # of gamma 1
    same_prompts = result_of(np.ones((16, 3)), "confirm")
    one_prompt = result_of(np.ones((1, 3)), "confirm", first=50)
    for again in (other_arm, same_prompts, one_prompt):
        (found,) = answers_of(joined(result_of(lucky), again))
        assert found.to_dict() == alone.to_dict() and not found.confirmed


def written(tmp_path, result):
    path = tmp_path / "r.json"
    path.write_text(json.dumps(result))
    return path


def test_report_as_json_is_the_answers_alone(tmp_path, capsys):
    path = written(tmp_path, joined(result_of(np.array([[3.7, 1.0]])), result_of(noise(14, 1)[0], temperature=1.0)))
    assert main(["report", str(path), "--json"]) == 0
    greedy, sampled = json.loads(capsys.readouterr().out)
    assert greedy == {
        "temperature": 0.0, "answer": "cannot tell", "drafter": "sim", "gamma": 1, "speedup": 3.7,
        "low": None, "high": None,
    }  # fmt: skip
    assert list(sampled) == list(greedy) and sampled["low"] < sampled["speedup"] < sampled["high"]
    assert main(["report", str(path), "--json", "--worth", "2"]) == 0
    assert json.loads(capsys.readouterr().out)[1]["answer"] == "do not deploy"


HOLES = {
    "batch 8": lambda row: row["batch_size"] == 8,
    "batch 2, greedy": lambda row: (row["batch_size"], row["temperature"]) == (2, 0),
    "T=1, plain decoding": lambda row: row["gamma"] == 0 and row["temperature"] == 1,
    "plain decoding": lambda row: row["gamma"] == 0,
    "lookup": lambda row: row["drafter"] == "lookup",
    "gamma 4": lambda row: row["gamma"] == 4,
    "everywhere": lambda row: True,
}


@pytest.mark.parametrize("hole", HOLES)
@pytest.mark.parametrize("name", ["sweep-smollm2-cpu-batches", "sweep-smollm2-cpu"])
def test_report_and_figure_show_what_there_is_and_name_what_is_missing(tmp_path, capsys, name, hole):
    """Case 67."""
    status = "out of memory" if "batch" in hole else "failed: no kernel image"
    result = json.loads((PROJECT / "data" / f"{name}.json").read_text())
    few = list(result["settings"]["prompts"])[:16]
    result["rows"] = [row for row in result["rows"] if row["prompt_id"] in few and row["gamma"] in (0, 1, 4)]
    emptied = [row for row in result["rows"] if HOLES[hole](row)]
    for row in emptied:
        row.update(dict.fromkeys(sweep.MEASURED), status=status)
    path, figure = written(tmp_path, result), tmp_path / "r.png"
    assert main(["report", str(path), "--figure", str(figure)]) == 0
    shown, said = capsys.readouterr()
    everything = len(emptied) == len(result["rows"])
    assert figure.exists() != everything and ("no figure is drawn" in said) == everything
    assert "nan" not in shown.lower()
    if emptied:
        assert f"{len(emptied)} of {len(result['rows'])} rows did not finish; the first: {status}" in shown
        assert "rows finished; the first" in shown and hole.split(", ")[-1] in shown
    assert main(["report", str(path), "--json"]) == 0
    answers = json.loads(capsys.readouterr().out)
    cells = {(row["batch_size"], row["temperature"]) for row in result["rows"]}
    assert len(answers) == len(cells)
    if hole in ("plain decoding", "everywhere"):
        assert {found["answer"] for found in answers} == {"cannot tell"}


@pytest.mark.parametrize(
    "kept", [{"gamma": 0}, {"gamma": 1}, {"temperature": 1.0}, {"batch_size": 2}, {"prompt_id": "x"}]
)
def test_report_and_figure_survive_axes_with_one_value(tmp_path, capsys, kept):
    """`--gammas 0` and its kind: what is left has one draft length, temperature, batch size or prompt."""
    result = json.loads((PROJECT / "data" / "sweep-smollm2-cpu-batches.json").read_text())
    ((key, value),) = kept.items()
    value = result["rows"][0]["prompt_id"] if key == "prompt_id" else value
    few = list(result["settings"]["prompts"])[:16]
    result["rows"] = [row for row in result["rows"] if row[key] == value and row["prompt_id"] in few]
    path, figure = written(tmp_path, result), tmp_path / "r.png"
    assert main(["report", str(path), "--figure", str(figure)]) == 0
    assert figure.exists() and "nan" not in capsys.readouterr().out.lower()


DAMAGE = {
    "rows is []; expected at least 1 entries": lambda result: result.update(rows=[]),
    "rows is None; expected type array": lambda result: result.update(rows=None),
    "settings is None; expected type object": lambda result: result.update(settings=None),
    "rows.3.rounds is None; expected type array": lambda result: result["rows"][3].update(rounds=None),
    "rows.3 lacks 'ttft_sec'; expected stop_reason": lambda result: result["rows"][3].pop("ttft_sec"),
    "rows.0.status is 5; expected type string": lambda result: result["rows"][0].update(status=5),
    "the file lacks 'environment'; expected": lambda result: result.pop("environment"),
    "rows name the prompt 'who'": lambda result: result["rows"][3].update(prompt_id="who"),
    "schema is 'specnb-sweep/99'; expected 'specnb-sweep/1'": lambda result: result.update(schema="specnb-sweep/99"),
}


@pytest.mark.parametrize("message", DAMAGE)
def test_a_damaged_result_is_refused_by_one_line_that_names_file_and_key(tmp_path, capsys, message):
    """Case 80: for `report` and for `--compare`."""
    whole, damaged = (result_of(noise(4, 0, arms=2)[0]) for _ in range(2))
    DAMAGE[message](damaged)
    path, whole_path = written(tmp_path, damaged), tmp_path / "whole.json"
    whole_path.write_text(json.dumps(whole))
    for arguments in ([str(path)], [str(whole_path), "--compare", str(path)]):
        assert main(["report", *arguments]) == 1
        shown, said = capsys.readouterr()
        assert f"{path}: {message}" in said and said.count("\n") == 1 and not shown


def test_arms_that_cannot_be_told_apart_are_named():
    """Gamma 2 and 3 cost what they yield to half a percent; gamma 1 and 4 are far behind."""
    price = {0: 1.0, 1: 3.0, 2: 1.2, 3: 1.2 * theory.tokens_per_round(0.7, 3) / theory.tokens_per_round(0.7, 2), 4: 9.0}
    (decision,) = answer.decide(summary.frame(simulated(0.7, price.get, tokens=100)))
    other = 5 - decision.best.gamma
    assert decision.tied == [f"gamma {other} with sim"]
    assert f"It cannot be told from gamma {other} with sim" in str(decision)


def test_rows_that_loop_are_set_aside_and_the_verdict_printed_without_them():
    result = simulated(0.8, lambda g: 1 + 0.1 * g)
    for row in result["rows"][:25]:
        row["repeated_4gram_percent"] = 60.0
    text = answer.report(summary.frame(result))
    assert "Without the 25 of 100 rows with more than 20 % repeated 4-grams" in text
    assert text.count("n = 20 prompts") == text.count("n = 15 prompts") == 1


def test_a_prompt_missing_in_one_arm_is_left_out_of_both_sides():
    result = simulated(0.0, lambda g: 1.0, num_prompts=12, gammas=[0, 1])
    for row in result["rows"]:
        slow = row["prompt_id"] in ("p0", "p1")
        row["decode_sec"] *= 10 if slow else 1
        row["status"] = "out of memory" if slow and row["gamma"] else "ok"
    table = summary.by_arm(summary.frame(result))
    assert table[table.gamma == 1].iloc[0][["low", "speedup", "high"]].tolist() == pytest.approx([1, 1, 1])


def test_one_prompt_is_never_enough_to_deploy():
    (decision,) = answer.decide(summary.frame(simulated(0.8, lambda g: 1 + 0.1 * g, num_prompts=1)))
    assert decision.answer == "cannot tell" and decision.low is decision.high is decision.more_prompts is None
    assert decision.speedup > 1.5 and "nan" not in str(decision) and "n = 1 prompt, too few" in str(decision)


def test_a_heavier_prompt_counts_for_more():
    result = simulated(0.0, lambda g: 1.0 + g, num_prompts=2, gammas=[0, 1])
    for row in result["rows"]:
        row["decode_sec"] *= 5 if (row["prompt_id"], row["gamma"]) == ("p1", 1) else 1
    result["settings"]["prompts"]["p0"]["weight"] = 1e6
    table = summary.by_arm(summary.frame(result))
    assert table[table.gamma == 1].iloc[0].speedup == pytest.approx(0.5, rel=1e-3)


def test_generations_of_a_single_round_have_no_round_cost_and_break_nothing():
    result = simulated(0.8, lambda g: 1.0, tokens=1, gammas=[0, 2])
    table = summary.by_arm(summary.frame(result))
    assert table.round_cost.isna().all() and summary.predicted(table)[table.gamma == 2].isna().all()
    assert "greedy" in answer.report(summary.frame(result))


def test_a_temperature_without_drafts_or_without_plain_decoding_says_what_is_missing():
    for gammas, missing in (([0], "no draft"), ([1, 2], "no plain decoding")):
        (found,) = answer.decide(summary.frame(simulated(0.8, lambda g: 1.0, gammas=gammas)))
        assert found.answer == "cannot tell" and found.speedup is None
        assert str(found) == f"greedy: cannot tell; {missing} was measured there to compare with."


def test_the_last_token_s_plain_round_is_not_a_failed_draft():
    """Draft equal to target: six tokens as 5 + 1; the last round had no room to draft and says nothing of alpha."""
    result = simulated(1.0, lambda g: 1.0, gammas=[0, 4], tokens=5)
    for row in result["rows"]:
        if row["gamma"]:
            row.update(stop_reason="length", rounds=[[4, 4, 5], [0, 0, 1]], num_tokens=6)
    assert summary.frame(result).query("gamma == 4").num_undrafted.sum() == 0


def test_two_results_that_differ_by_noise_are_the_same_and_a_faster_draft_is_not():
    slow, again, fast = (
        summary.frame(simulated(alpha, lambda g: 1 + 0.1 * g, spread=0.3, seed=seed))
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
    few, many = (summary.frame(simulated(0.6, lambda g: 1.0, num_prompts=n, seed=n)) for n in (8, 20))
    assert not compare(few, many, level=0.999).differs.any()
    with pytest.raises(ValueError, match="share no temperature, drafter and gamma"):
        compare(few, many.assign(drafter="other").where(many.gamma > 0, many))


def test_what_is_no_result_is_refused(tmp_path):
    path = tmp_path / "x.json"
    for text in ("{", "[]", '{"schema": "other/1"}'):
        path.write_text(text)
        with pytest.raises(ValueError, match="not a result of `specnb sweep`"):
            summary.load(path)
    with pytest.raises(ValueError, match="no finished generation"):
        summary.frame({**simulated(0.5, lambda g: 1.0), "rows": []})
