import json
import os
import re
import subprocess
import sys

import pytest
import torch

from specnb.cli import main
from specnb.cli.report import SHOWN
from specnb.drafters.pruned import PrunedLM, made_for, save_draft
from specnb.models import CausalLM
from tests.conftest import tiny_model
from tests.test_models import WORDS, tokenizer_of


@pytest.fixture
def folders(tmp_path):
    """Two tiny models on disk that share a tokenizer, and a prompt file."""
    for name, layers in (("target", 2), ("draft", 1)):
        tiny_model("Llama", layers=layers).float().save_pretrained(tmp_path / name)
        tokenizer_of(WORDS).save_pretrained(tmp_path / name)
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": f"w1 w2 w{i}"}) for i in range(3)))
    return tmp_path


def sweep_arguments(folders, *more):
    return [
        "sweep", "--target", str(folders / "target"), "--draft", str(folders / "draft"), "--draft", "lookup",
        "--gammas", "0,2-3", "--temperatures", "0,0.7", "--max-new-tokens", "8", "--device", "cpu", "--force",
        "--prompts", str(folders / "prompts.jsonl"), "--out", str(folders / "data" / "r.json"), *more,
    ]  # fmt: skip


def test_a_sweep_writes_result_and_figure_and_prints_table_and_answers(folders, capsys):
    assert main(sweep_arguments(folders)) == 0
    printed = capsys.readouterr().out
    result = json.loads((folders / "data" / "r.json").read_text())
    assert len(result["rows"]) == 3 * 2 * 5 and {row["status"] for row in result["rows"]} == {"ok"}
    assert (folders / "figures" / "r.png").read_bytes().startswith(b"\x89PNG")
    assert "speed-up" in printed and re.search(r"greedy: (deploy|do not deploy|cannot tell)", printed)
    assert "T=0.7:" in printed and "3 prompts of 1 kinds" in printed
    assert main(["report", str(folders / "data" / "r.json")]) == 0
    assert capsys.readouterr().out.strip() in printed
    assert main(["report", str(folders / "data" / "r.json"), "--compare", str(folders / "data" / "r.json")]) == 0
    beside = capsys.readouterr().out
    assert "beside it, b:" in beside and beside.count(" 0.00 ") >= 4 and "True" not in beside


def test_prompts_that_are_held_back_measure_the_chosen_draft_again(folders, capsys):
    assert main(sweep_arguments(folders, "--confirm", "2")) == 0
    result = json.loads((folders / "data" / "r.json").read_text())
    phases = {row["prompt_id"]: row["phase"] for row in result["rows"]}
    assert list(phases.values()) == ["choose", "confirm", "confirm"]
    assert "2 prompts that did not choose it" in capsys.readouterr().out
    assert main(sweep_arguments(folders, "--replace", "--confirm", "3")) == 1
    assert "3 prompts are too few to hold back 3" in capsys.readouterr().err


def test_a_finished_result_is_not_overwritten_unasked(folders, capsys):
    assert main(sweep_arguments(folders)) == 0
    before = (folders / "data" / "r.json").read_bytes()
    assert main(sweep_arguments(folders)) == 1
    assert "--replace" in capsys.readouterr().err and (folders / "data" / "r.json").read_bytes() == before
    assert main(sweep_arguments(folders, "--replace", "--seed", "1")) == 0


def test_a_busy_machine_is_refused_unless_forced(folders, capsys, monkeypatch):
    monkeypatch.setattr("specnb.measure.machine.busy_reasons", lambda device: ["80 % of the processor is in use"])
    arguments = [word for word in sweep_arguments(folders) if word != "--force"]
    assert main(arguments) == 1
    assert "80 % of the processor" in capsys.readouterr().err and not (folders / "data").exists()
    assert main([*arguments, "--force"]) == 0


def test_a_ray_cluster_without_ray_is_refused_before_a_model_is_loaded(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr("specnb.cli.parts.Pair.load", lambda *_: pytest.fail("a model was loaded"))
    assert main(["sweep", "--ray", "local", "--force", "--out", str(tmp_path / "r.json")]) == 1
    assert "pip install 'ray>=2.50'" in capsys.readouterr().err


def test_generate_streams_text_and_prints_the_rounds(folders, capsys):
    arguments = ["generate", "w1 w2 w3", "--target", str(folders / "target"), "--draft", str(folders / "draft")]
    assert main([*arguments, "--gamma", "3", "--max-new-tokens", "12", "--seed", "0"]) == 0
    printed = capsys.readouterr().out
    assert "12 tokens in" in printed and "alpha_hat" in printed and "ms a token" in printed
    assert main([*arguments, "--gamma", "0", "--max-new-tokens", "2"]) == 0
    assert "nothing was drafted" in capsys.readouterr().out


def test_a_pruned_draft_and_lookup_before_a_model_can_be_named(folders, capsys):
    target = CausalLM.from_pretrained(folders / "target", device="cpu")
    save_draft(PrunedLM(target, [1], range(0, 20, 2)), folders / "pruned", made_for(target))
    arguments = sweep_arguments(folders, "--draft", str(folders / "pruned"), "--draft", f"lookup+{folders / 'pruned'}")
    assert main(arguments) == 0
    result = json.loads((folders / "data" / "r.json").read_text())
    assert list(result["models"]["draft"]) == ["draft", "lookup", "pruned", "lookup+pruned"]
    assert result["models"]["draft"]["pruned"]["num_output_ids"] == 10
    assert {row["status"] for row in result["rows"]} == {"ok"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["report", "nowhere.json"], "nowhere.json"),
        (["generate", "x", "--temperature", "-1"], "temperature must be"),
        (["sweep", "--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
        (["sweep", "--target", "no/such/folder", "--device", "cpu", "--force"], "cannot load the model"),
    ],
)
def test_errors_are_one_line_and_say_what_was_wrong(arguments, message, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


@pytest.mark.parametrize("kind", SHOWN)
def test_a_result_that_is_not_whole_is_named_with_what_it_lacks(kind, tmp_path, capsys):
    (tmp_path / "cut.json").write_text(json.dumps({"schema": f"specnb-{kind}/1"}))
    assert main(["report", str(tmp_path / "cut.json")]) == 1
    error = capsys.readouterr().err
    assert re.search(r"cut\.json(: the file| is no whole result of kind \w+: it) lacks '", error)
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sweep", "--gammas", "x"], "0-8 or 1,2,4"),
        (["sweep", "--gammas=-1"], "at least 0"),
        (["sweep", "--gammas", "1,5-2"], "'5-2' names no whole numbers"),
        (["sweep", "--gammas", "0-999999999"], "0-8 or 1,2,4"),
        (["sweep", "--batches", "0-4"], "at least 1"),
        (["sweep", "--temperatures", "hot"], "0,0.7,1"),
        (["sweep", "--temperatures=-1"], "at least 0"),
        (["sweep", "--temperatures", "0,nan"], "0,0.7,1"),
        (["sweep", "--repeats", "0"], "--repeats"),
        (["serve-bench", "--endpoint", "x", "--concurrency", "0"], "at least 1"),
        (["serve-bench", "--endpoint", "x", "--options", "[]"], "JSON object"),
        (["serve-bench", "--endpoint", "x", "--options", '[["top_k", 0]]'], "JSON object"),
        (["serve-bench", "--endpoint", "x", "--server", '{"x": NaN}'], "NaN is no number"),
        (["audit", "transformers", "--level", "2"], "--level"),
        (["fetch", "--from", "elsewhere"], "index"),
        (["fetch", "--no-such-option"], "--no-such-option"),
        (["no-such-command"], "no-such-command"),
    ],
)
def test_options_that_cannot_be_read_are_refused_with_what_is_taken(arguments, message, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


def test_generate_refuses_a_second_draft_before_anything_is_loaded(capsys, monkeypatch):
    monkeypatch.setattr("specnb.cli.parts.Pair.load", lambda *_: pytest.fail("a model was loaded"))
    assert main(["generate", "x", "--draft", "lookup", "--draft", "other"]) == 1
    assert "one --draft, got lookup, other" in capsys.readouterr().err


def broken(kind):
    """Stands in the place of a command's work and fails as a programming error would."""

    def report(*_, **__):
        if kind == "inside a library":
            return torch.zeros(2).reshape(3)  # a RuntimeError of torch's
        if kind == "of an expression":
            return int("x")
        raise {"KeyError": KeyError("rows"), "TypeError": TypeError("rows"), "AssertionError": AssertionError()}[kind]

    return report


@pytest.mark.parametrize("kind", ["inside a library", "of an expression", "KeyError", "TypeError", "AssertionError"])
def test_a_programming_error_is_reported_as_a_fault_of_specnb(kind, capsys, monkeypatch):
    monkeypatch.setattr("specnb.cli.smollm2.fetch", broken(kind))
    assert main(["fetch"]) == 1
    error = capsys.readouterr().err
    assert "a fault of specnb" in error and "--traceback" in error and len(error.splitlines()) == 1
    assert main(["fetch", "--traceback"]) == 1
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_a_refusal_shows_its_traceback_only_where_it_is_asked_for(capsys):
    assert main(["report", "nowhere.json"]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    for words in (["--traceback", "report", "nowhere.json"], ["report", "nowhere.json", "--traceback"]):
        assert main(words) == 1
        error = capsys.readouterr().err
        assert "Traceback" in error and "fault of specnb" not in error and "nowhere.json" in error


def test_help_names_every_command(capsys):
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    for command in ("fetch", "generate", "sweep", "report", "audit", "serve-bench"):
        assert re.search(rf"^  {command} .*\.$", printed, re.M), f"{command} is missing, or its line is cut short"
    assert "examples:" in printed and "--traceback" in printed


def test_help_comes_without_importing_torch():
    code = "import sys; from specnb.cli import main; main(['sweep', '--help']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_the_module_runs_as_the_command_does():
    done = subprocess.run([sys.executable, "-m", "specnb", "report", "nowhere.json"], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("specnb: ") and done.stderr.count("\n") == 1


def test_a_terminal_that_knows_only_ascii_gets_the_rest_escaped():
    code = "import sys; from specnb.cli import main; sys.exit(main(['report', 'caf\u00e9\u2026.json']))"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 1 and r"caf\xe9\u2026.json" in done.stderr


def test_an_interrupt_says_that_nothing_is_lost(folders, capsys, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("specnb.measure.sweep.run", interrupted)
    assert main(sweep_arguments(folders)) == 130
    error = capsys.readouterr().err
    assert "resumes" in error and "specnb: interrupted" in error


@pytest.mark.parametrize(
    "command",
    [
        ["sweep", "--out", "r.png"],
        ["sweep", "--out", "r.json", "--figure", "r.json"],
        ["sweep", "--out", "p.jsonl", "--prompts", "p.jsonl", "--replace"],
        ["serve-bench", "--endpoint", "http://127.0.0.1:9", "--prompts", "p.jsonl", "--out", "p.jsonl", "--replace"],
        ["audit", "greedy", "p.jsonl", "p.jsonl", "--out", "p.jsonl", "--replace"],
        ["report", "p.jsonl", "--figure", "p.jsonl"],
        ["report", "r.json", "--compare", "p.jsonl", "--figure", "p.jsonl"],
    ],
)
def test_two_files_of_a_command_with_one_name_are_refused_before_any_work(tmp_path, monkeypatch, capsys, command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n')
    assert main(command) == 1
    name = next(command[i + 1] for i, word in enumerate(command) if word in ("--out", "--figure"))
    assert f"two files of this command are {name}" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["p.jsonl"] and (tmp_path / "p.jsonl").stat().st_size == 16


@pytest.mark.parametrize(
    "command",
    [
        ["sweep"],
        ["serve-bench", "--endpoint", "http://127.0.0.1:9"],
        ["audit", "endpoint", "http://127.0.0.1:9", "http://127.0.0.1:9"],
        ["audit", "transformers"],
    ],
)
def test_a_file_that_was_not_to_be_replaced_or_cannot_be_written_is_refused_first(tmp_path, capsys, command):
    (tmp_path / "r.json").write_text("{}")
    assert main([*command, "--out", str(tmp_path / "r.json")]) == 1
    assert "r.json is there already; give another name, or --replace it" in capsys.readouterr().err
    assert main([*command, "--out", str(tmp_path / "r.json" / "s.json")]) == 1
    assert "s.json cannot be written" in capsys.readouterr().err and (tmp_path / "r.json").read_text() == "{}"
