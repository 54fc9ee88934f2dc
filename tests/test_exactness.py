"""A fast part of the study behind `make exactness`, and its committed table."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
import exactness  # noqa: E402

RESULT = ROOT / "data" / "exactness" / "exactness.json"


def test_the_committed_table_is_the_text_of_its_result():
    result = json.loads(RESULT.read_text())
    assert (RESULT.parent / "README.md").read_text() == exactness.markdown(result)


def test_the_bars_of_the_study_hold_in_the_committed_result():
    result = json.loads(RESULT.read_text())
    assert result["settings"]["seeds"] == 200
    assert result["seconds"] < 30 * 60
    assert result["speed"]["seconds"] < 5 and result["speed"]["verdict"] == "pass"
    for key in ("single_tests", "named_tests", "batteries", "answers"):
        assert all(line["holds"] for line in result[key]), key
    assert {line["prompts"] for line in result["answers"]} == {7, 14, 35, 100}


def test_rejections_agree_with_the_enumerated_power_on_a_few_seeds():
    lines = exactness.single_tests(10)
    assert len(lines) == 8
    assert all(line["holds"] for line in lines), (
        "eight binomial 99.9 % intervals: a false alarm has probability below .008"
    )


def test_every_named_test_rejects_its_sampler_on_a_few_seeds():
    assert [line["sampler"] for line in exactness.named_tests(2) if not line["holds"]] == [], "probability below 4e-4"


@pytest.mark.parametrize("arm", [exactness.by_verify, exactness.by_loop])
def test_the_package_s_own_samplers_give_whole_sequences_with_the_law_of_the_target(arm):
    import numpy as np

    from specnb import exact
    from specnb.audit.battery import battery

    draw, rng = arm(), np.random.default_rng(0)
    law = exact.sequence_law(exactness.example_target, 4)
    accepted = exact.accepted_law(*exactness.PAIR, exactness.GAMMA)
    found = battery(lambda n: draw(n, rng), law, n=600, accepted_law=accepted)
    assert found.verdict == "pass", f"{found}\n(a false alarm has probability .001)"


def test_a_fault_planted_in_the_rule_s_kernel_fails_the_battery(monkeypatch):
    import numpy as np

    from specnb import exact, rule
    from specnb.audit.battery import battery

    monkeypatch.setattr(rule.token, "residual_weights", lambda target_row, draft_row: target_row)
    law = exact.sequence_law(exactness.example_target, 4)
    for arm in (exactness.by_verify, exactness.by_loop):
        draw, rng = arm(), np.random.default_rng(0)
        assert battery(lambda n, draw=draw, rng=rng: draw(n, rng), law, n=600).verdict == "fail"


def test_answers_find_arms_that_are_faster_and_seldom_others():
    lines = exactness.answers(simulations=100, prompts=(35,))
    assert len(lines) == len(exactness.EFFECTS)
    assert lines[0]["power_one_arm"] > 0.8 and lines[0]["power_all_arms"] > 0.9
    assert all(line["false_deploy"] <= 0.1 for line in lines), (
        "four rates of 3 % in 100 simulations: a false alarm has probability below .003"
    )
