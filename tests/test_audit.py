import json
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch

from specnb import gof
from specnb.audit import compare_greedy, margin_in_ulps, teacher_forced
from specnb.audit.generate import PATHS, audit_transformers, check_candidates
from specnb.audit.settings import HARMLESS, NEUTRAL, UNTOLD, lossy_settings
from specnb.audit.tiny import joint_law, tiny_pair
from specnb.cli import main
from specnb.drafters import ModelDrafter
from specnb.models import CausalLM
from specnb.probs import Sampling
from specnb.sampler import autoregressive, speculative
from tests.conftest import tiny_model

GREEDY = Sampling(temperature=0)


def row(**logits):
    """`logits_at` that gives one row everywhere: ids as t0, t1, ..., the rest far below."""
    values = torch.full((10,), -50.0)
    for name, value in logits.items():
        values[int(name[1:])] = value
    return lambda index, common_ids: values


# ---- greedy sequences, exactly


def test_equal_ids_are_identical_and_a_report_says_first_what_was_tested_and_what_not():
    report = compare_greedy([[5, 7], [1]], [torch.tensor([5, 7]), (1,)])
    assert report.verdict == "identical" and report.exit_code == 0 and report.differences == ()
    first, second, *_ = str(report).splitlines()
    assert first.startswith("tested: greedy ids") and second.startswith("not tested: the sampled distribution")


@pytest.mark.parametrize(("baseline", "candidate"), [([], []), ([[1]], [[1], [2]]), ([[1], [2]], [[1]])])
def test_no_sequences_or_different_numbers_of_them_are_an_error(baseline, candidate):
    with pytest.raises(ValueError, match="sequences"):
        compare_greedy(baseline, candidate)


@pytest.mark.parametrize("wrong", [["text"], "text", [1, 2], [[1.5]], [None]])
def test_anything_but_ids_is_refused(wrong):
    with pytest.raises(ValueError, match="compare ids, never text"):
        compare_greedy(wrong, wrong)


def test_a_shorter_sequence_differs_at_its_end_and_no_tie_explains_it():
    for ours, theirs in (([4, 5, 6], [4, 5]), ([4, 5], [4, 5, 6])):
        report = compare_greedy([ours], [theirs], logits_at=row(t6=1.0))
        assert report.verdict == "not explained by rounding" and report.exit_code == 2
        assert report.differences[0]["position"] == 2 and None in report.differences[0].values()


def test_one_unit_in_the_last_place_of_bfloat16_is_rounding():
    # vllm-rbln PR #630: 23.625 against 23.5.
    logits_at = row(t3=23.625, t4=23.5)
    report = compare_greedy([[1, 3, 9]], [[1, 4, 8]], logits_at=logits_at, dtype="bfloat16")
    found = report.differences[0]
    assert report.verdict == "explained by rounding" and report.exit_code == 0
    assert (found["position"], found["baseline_id"], found["candidate_id"], found["margin_ulps"]) == (1, 3, 4, 1.0)
    # The same logits computed in float32 are 65,536 units apart.
    assert compare_greedy([[1, 3]], [[1, 4]], logits_at=logits_at).verdict == "not explained by rounding"


def test_a_gap_of_fifteen_hundredths_at_twenty_five_is_no_rounding_of_float32():
    # JustVugg/colibri #689, closed as a near-tie: about four orders of magnitude too large.
    report = compare_greedy([[3]], [[4]], logits_at=row(t3=25.0, t4=24.85))
    assert report.verdict == "not explained by rounding" and report.differences[0]["margin_ulps"] > 70_000
    assert compare_greedy([[3]], [[4]], logits_at=row(t3=25.0, t4=25.0 - 2e-5)).verdict == "explained by rounding"


def test_both_tokens_must_lie_near_the_maximum():
    report = compare_greedy([[3]], [[4]], logits_at=row(t3=23.5, t4=23.5, t5=30.0), dtype="bfloat16")
    assert report.verdict == "not explained by rounding" and report.differences[0]["margin_ulps"] == 52


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", ["t3", "t7"])
def test_logits_that_are_not_finite_explain_nothing(value, place):
    report = compare_greedy([[3]], [[4]], logits_at=row(**{"t3": 1.0, "t4": 1.0, place: value}), max_ulps=1e9)
    assert report.verdict == "not explained by rounding"
    assert json.loads(json.dumps(report.to_dict(), allow_nan=False))["differences"][0]["margin_ulps"] is None


def test_without_logits_a_difference_is_not_explained():
    assert compare_greedy([[3]], [[4]]).verdict == "not explained by rounding"


def test_one_unexplained_sequence_among_near_ties_decides():
    rows = [torch.tensor([1.0, 1.0, 0.0]), torch.tensor([1.0, 0.9, 0.0])]
    report = compare_greedy([[0], [0], [2]], [[1], [1], [2]], logits_at=lambda index, common: rows[index])
    assert [found["explained"] for found in report.differences] == [True, False]
    assert report.verdict == "not explained by rounding" and "sequence 1 parts at position 0" in report.found


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(([0.0, 1.0], (0, 1)), "no dtype"), (([0.0], (0,), "int8"), "unknown dtype"), (([0.0], (0, 5), "float32"), "fit")],
)
def test_logits_that_cannot_be_weighed_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        margin_in_ulps(*arguments)


def test_a_tiny_model_in_float64_is_identical_with_drafts_and_a_draft_that_overrules_it_is_not_explained():
    # jaymody #9: at temperature 0 the draft's token was accepted where the target's first choice was another.
    target, draft = CausalLM(tiny_model("Llama")), CausalLM(tiny_model("Llama", layers=1, seed=1))
    prompts = [[3, 1, 4], [1, 5, 9, 2], [6]]
    plain = [autoregressive(target, p, max_new_tokens=12, sampling=GREEDY).ids for p in prompts]
    drafter = ModelDrafter(draft)
    fast = [speculative(target, drafter, p, gamma=4, max_new_tokens=12, sampling=GREEDY).ids for p in prompts]
    logits_at = teacher_forced(target, prompts)
    assert compare_greedy(plain, fast, logits_at=logits_at).verdict == "identical"
    overruled = [autoregressive(draft, p, max_new_tokens=12, sampling=GREEDY).ids for p in prompts]
    report = compare_greedy(plain, overruled, logits_at=logits_at)
    assert report.verdict == "not explained by rounding" and len(report.differences) == 3
    assert all(found["margin_ulps"] > 1e9 for found in report.differences)


# ---- generate(): settings known beforehand


def never(*args, **kwargs):
    raise AssertionError("sampled although the settings are lossy")


@pytest.mark.parametrize("side", ["generate()", "target", "assistant"])
def test_an_ensemble_weight_is_named_before_anything_is_drawn(side):
    # huggingface/transformers #45865: drafts are verified against a mixture, by a field of a config that may be saved.
    target, assistant = tiny_pair(4)
    model = {"target": target, "assistant": assistant}.get(side)
    if model is not None:
        model.generation_config.assistant_ensemble_weight = 0.8
    options = {} if model is not None else {"assistant_ensemble_weight": 0.8}
    report = audit_transformers("assistant", target=target, assistant=assistant, options=options, generate=never)
    assert report.verdict == "not lossless by its settings" and report.exit_code == 2 and report.n == 0
    assert "assistant_ensemble_weight=0.8" in report.found and side in report.found


@pytest.mark.parametrize(
    ("name", "value", "shown"), [("top_k", None, "50"), ("temperature", 0.5, "0.5"), ("top_p", 0.9, "0.9")]
)
def test_a_setting_on_one_side_only_is_never_called_lossless(name, value, shown):
    # transformers #47932: the silent top_k=50; vllm #9834 and dflash #74: parameters that reach one of two samplers.
    target, assistant = tiny_pair(4)
    setattr(assistant.generation_config, name, value)
    report = audit_transformers("assistant", target=target, assistant=assistant, generate=never)
    assert report.verdict == "not lossless by its settings" and f"{name} is " in report.found and shown in report.found
    assert lossy_settings(target, None, {}) == []


def test_left_out_on_the_target_side_top_k_is_fifty_there():
    target, assistant = tiny_pair(4)
    target.generation_config.top_k = None
    options = {"top_k": None}
    report = audit_transformers("assistant", target=target, assistant=assistant, options=options, generate=never)
    assert "top_k is 50 for the target and 0 for the assistant" in report.found


@pytest.mark.parametrize("options", [{"repetition_penalty": 1.2}, {"do_sample": False}, {"num_beams": 2}])
def test_settings_the_expected_law_does_not_know_are_refused(options):
    with pytest.raises(ValueError, match="does not know"):
        audit_transformers("assistant", n=1, options=options, generate=never)
    with pytest.raises(ValueError, match="unknown path"):
        audit_transformers("no such path", generate=never)


@pytest.mark.parametrize("where", ["options", "generation_config"])
@pytest.mark.parametrize(
    "name",
    ["use_lossy_drafts", "cache_config", "cache_rounding", "assistant_lenience", "max_time", "max_bias", "output_bias",
     "num_assistant_skips", "prompt_lookup_top_k", "target_bias", "_from_elsewhere", "eos_bonus", "tokenizer_bias"],
)  # fmt: skip
def test_an_option_is_known_by_its_full_name_not_by_how_it_begins(name, where):
    target, assistant = tiny_pair(4)
    if where == "generation_config":
        setattr(target.generation_config, name, 0.5)
    options = {name: 0.5} if where == "options" else {}
    common = {"target": target, "assistant": assistant, "options": options}
    for audit in (
        lambda: audit_transformers(generate=never, path="assistant", **common),
        lambda: check_candidates(**common),
    ):
        with pytest.raises(ValueError, match=f"does not know {name}=0.5; leave it out"):
            audit()


def test_every_field_of_a_generation_config_is_known_harmless_neutral_or_refused():
    from transformers import GenerationConfig

    known = HARMLESS | set(UNTOLD)
    for name in vars(GenerationConfig()):
        target, assistant = tiny_pair(4)
        setattr(target.generation_config, name, NEUTRAL.get(name))
        common = {"target": target, "assistant": assistant, "generate": lambda *_, **__: torch.zeros(1, 99).long()}
        audit_transformers("plain", n=1, vocab=4, **common)  # a neutral value is no reason to refuse
        if name not in known:
            for value in (0.3, 7, [[1]], 0 if NEUTRAL.get(name) else True):
                with pytest.raises(ValueError, match=f"does not know {name}="):
                    audit_transformers("plain", n=1, vocab=4, options={name: value}, **common)


def test_a_rounding_cache_of_the_target_is_lossy_by_its_settings():
    target, assistant = tiny_pair(4)
    options = {"cache_implementation": "quantized"}
    report = audit_transformers("assistant", target=target, assistant=assistant, options=options, generate=never)
    assert report.verdict == "not lossless by its settings" and "cache_implementation='quantized'" in report.found
    assert lossy_settings(target, assistant, {"cache_implementation": "static"}) == []


# ---- generate(): its sampled law


def test_the_expected_law_is_the_product_of_the_models_rows_and_ends_at_the_end():
    target, _ = tiny_pair(3, eos_id=2)
    law = joint_law(target, [1, 0], 2, Sampling())
    rows = lambda ids: target(torch.tensor([ids])).logits[0, -1].double().softmax(-1).tolist()  # noqa: E731
    first = rows([1, 0])
    wanted = [first[i] * second for i in (0, 1) for second in rows([1, 0, i])] + [0, 0, first[2]]
    assert np.allclose(law, wanted, atol=1e-12)
    with pytest.raises(ValueError, match="take fewer"):
        joint_law(target, [1], 30, Sampling())


@pytest.mark.parametrize("path", PATHS)
def test_the_installed_generate_passes_on_every_path(path):
    # Vocabulary 4, draft length 3: a text of 3 tokens takes one round or several, by what is rejected.
    report = audit_transformers(path, n=300, vocab=4, length=3)
    assert report.verdict == "pass", f"n = {report.n}; a false alarm has probability .001, seed fixed\n{report}"
    assert report.versions["transformers"] and 0 < report.smallest_tv < 0.25


def test_generate_passes_with_an_end_of_sequence_and_an_engine_that_runs_past_it_fails():
    # transformers #47912: an accepted end of sequence inside a block did not end the text.
    target, assistant = tiny_pair(4, eos_id=1)
    models = {"target": target, "assistant": assistant}
    report = audit_transformers("assistant", n=200, length=3, **models)
    assert report.verdict == "pass", f"n = {report.n}; a false alarm has probability .001, seed fixed"

    def runs_on(target, ids, **settings):
        return torch.cat([ids, torch.tensor([[1, 3, 3]])], 1)

    report = audit_transformers("assistant", n=1, length=3, generate=runs_on, **models)
    assert report.verdict == "fail" and "the target never gives" in report.found and report.p_value == 0


def always_accept(target, ids, assistant_model, **settings):
    """Hands out the draft's own text (transformers PR #28508: accepts the draft tokens all the time)."""
    return assistant_model.generate(ids, **settings)


def right_in_round_one(target, ids, **settings):
    """Every token is drawn after the prompt alone (romsto 41668c8: the prompt's length as base index for ever)."""
    prompt, settings = ids, {**settings, "max_new_tokens": 1}
    for _ in range(3):
        ids = torch.cat([ids, target.generate(prompt, **settings)[:, -1:]], 1)
    return ids


@pytest.mark.parametrize("engine", [always_accept, right_in_round_one])
def test_a_planted_lossy_wrapper_around_generate_fails(engine):
    # Both laws are known, so is n for power .99: 55 for either.
    report = audit_transformers("assistant", n=250, vocab=6, length=2, generate=engine)
    assert report.verdict == "fail", f"n = {report.n}\n{report}"


def test_the_numbers_of_calls_these_wrappers_need_are_computed():
    target, assistant = tiny_pair(6)
    first, law, draft_law = (
        joint_law(model, [3, 1, 2, 3, 1], length, Sampling())
        for model, length in ((target, 1), (target, 2), (assistant, 2))
    )
    needed = [gof.sample_size(law, wrong) for wrong in (np.outer(first, first).ravel(), draft_law)]
    assert needed == [55, 55]


def test_the_second_wrapper_is_invisible_in_the_first_token():
    report = audit_transformers("assistant", n=250, vocab=6, length=1, generate=right_in_round_one)
    assert report.verdict == "pass", f"n = {report.n}; a false alarm has probability .001, seed fixed"


def test_an_engine_that_stops_short_is_an_error():
    with pytest.raises(RuntimeError, match="0 new tokens where 2"):
        audit_transformers("assistant", n=1, vocab=4, generate=lambda target, ids, **settings: ids)


def test_an_audit_leaves_torchs_global_generator_alone_and_repeats_itself():
    before = torch.get_rng_state()
    one, two = (audit_transformers("assistant", n=20, vocab=4, length=1, seed=3) for _ in range(2))
    assert torch.equal(before, torch.get_rng_state()) and one.statistic == two.statistic


# ---- candidates: the q returned is the q drawn from


@pytest.mark.parametrize("top_k", [0, None])
def test_the_installed_assistant_keeps_the_contract_and_a_silent_top_k_shows(top_k):
    target, assistant = tiny_pair(64)
    for model in (target, assistant):
        model.generation_config.top_k = top_k
    report = check_candidates(n=250, target=target, assistant=assistant, options={"top_k": top_k})
    assert report.verdict == "pass", f"n = {report.n}; a false alarm has probability .001, seed fixed\n{report}"
    assert f"give {50 if top_k is None else 64} of 64 tokens" in report.found


@lru_cache
def assistant_of_64():
    return tiny_pair(64)[1]


def raw_logits(prefix):
    with torch.inference_mode():
        return assistant_of_64()(torch.tensor([prefix])).logits[:, -1:]


def raw_row(ids, logits):
    """Drawn from the best five, reported without that cut (transformers #47932)."""
    raw = raw_logits(ids[0, : -logits.shape[1]].tolist())
    return ids, torch.cat([raw.to(logits.dtype), logits[:, 1:]], 1)


def argmax_draft(ids, logits):
    """The draft's first choice, reported with its softmax (transformers #32867, jaymody #3)."""
    return torch.cat([ids[:, : -logits.shape[1]], logits.argmax(-1)], 1), logits


def other_temperature(ids, logits):
    """Drawn at temperature 1, reported at 2 (dflash #74)."""
    return ids, logits / 2


def impossible(ids, logits):
    """A draft of probability 0."""
    return ids, logits.scatter(2, ids[:, -logits.shape[1] :, None], -torch.inf)


@pytest.mark.parametrize(
    ("planted", "n"), [(raw_row, 150), (argmax_draft, 60), (other_temperature, 200), (impossible, 20)]
)
def test_a_generator_whose_q_is_not_the_q_it_drew_from_fails(planted, n):
    target, assistant = tiny_pair(64)
    top_k = 5 if planted is raw_row else 0
    for model in (target, assistant):
        model.generation_config.top_k = top_k
    models = {"target": target, "assistant": assistant, "options": {"top_k": top_k}}
    assert check_candidates(n=n, planted=planted, **models).verdict == "fail"


def test_drafts_without_probabilities_cannot_be_tested():
    report = check_candidates("prompt lookup", n=20)
    assert report.verdict == "cannot test" and report.exit_code == 3
    assert "20 drafts without logits, 1 different first candidates" in report.found


# ---- the command line


def lines(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def test_greedy_files_are_compared_and_the_exit_code_says_how(tmp_path, capsys):
    ours = lines(tmp_path / "a.jsonl", [[1, 2, 3], {"ids": [4]}])
    theirs = lines(tmp_path / "b.jsonl", [[1, 2, 3], [5]])
    assert main(["audit", "greedy", ours, ours]) == 0
    assert capsys.readouterr().out.startswith("tested: ")
    known = ["--server", '{"version": "1.2"}']
    out = str(tmp_path / "out" / "r.json")
    assert main(["audit", "greedy", ours, theirs, "--out", out, *known]) == 2
    printed = capsys.readouterr().out
    assert main(["report", out]) == 0
    assert capsys.readouterr().out == f"{printed}engine: version 1.2\n"
    assert main(["report", out, "--figure", str(tmp_path / "r.png")]) == 1
    assert "no figure of a result of kind audit" in capsys.readouterr().err and not (tmp_path / "r.png").exists()
    report = json.loads(Path(out).read_text())
    assert report["verdict"] == "not explained by rounding" and report["differences"][0]["sequence"] == 1
    assert list(report)[:3] == ["schema", "tested", "not_tested"] and report["server"] == {"version": "1.2"}


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parents[1] / "data").rglob("*audit*.json")), ids=lambda p: p.stem
)
def test_every_audit_that_is_kept_can_be_shown(path, capsys):
    assert main(["report", str(path)]) == 0
    verdict = json.loads(path.read_text())["verdict"]
    assert f"\nverdict: {verdict}\n" in capsys.readouterr().out


def test_greedy_files_with_prompts_are_held_against_the_target(tmp_path, capsys):
    model = tiny_model("Llama").float()
    with torch.no_grad():  # tokens 7 and 8 tie, and are always the best
        model.lm_head.weight[:] = 0
    model.save_pretrained(tmp_path / "target")
    rows = [[{"prompt_ids": [1, 2], "ids": [5, token]}] for token in (7, 8)]
    files = [lines(tmp_path / f"{i}.jsonl", row) for i, row in enumerate(rows)]
    arguments = ["audit", "greedy", *files, "--target", str(tmp_path / "target"), "--device", "cpu"]
    assert main([*arguments, "--dtype", "float32"]) == 0
    assert "explained by rounding" in capsys.readouterr().out
    other = lines(tmp_path / "other.jsonl", [{"prompt_ids": [9], "ids": [5, 7]}])
    assert main(["audit", "greedy", files[0], other]) == 1
    assert "different prompts" in capsys.readouterr().err
    bare = lines(tmp_path / "bare.jsonl", [[5, 7]])
    assert main(["audit", "greedy", bare, files[1], *arguments[4:]]) == 1
    assert "needs prompt_ids" in capsys.readouterr().err


@pytest.mark.parametrize("line", ["{", '{"prompt_ids": [1]}', "7"])
def test_a_line_that_holds_no_ids_is_named(tmp_path, capsys, line):
    (tmp_path / "a.jsonl").write_text(f"[1]\n{line}\n")
    assert main(["audit", "greedy", str(tmp_path / "a.jsonl"), str(tmp_path / "a.jsonl")]) == 1
    error = capsys.readouterr().err
    assert "Traceback" not in error and ("line 2" in error or "never text" in error)


def test_transformers_is_audited_from_the_command_line(capsys):
    arguments = ["audit", "transformers", "--vocab", "4", "--calls", "60"]
    assert main([*arguments, "--length", "1"]) == 0
    assert "verdict: pass" in capsys.readouterr().out
    assert main([*arguments, "--path", "prompt lookup", "--candidates"]) == 3
    assert main([*arguments, "--path", "x"]) == 1
    assert "unknown path 'x'" in capsys.readouterr().err
