"""What the documentation shows works as it is written there: every command line is read, and the cheap ones are run."""

import inspect
import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command

from specnb.cli import app as command_line
from specnb.cli import audit, main

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "data").rglob("*.md"))]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def code_of(page):
    """What a Markdown page shows as code: lines set four in, fenced lines, and what stands between backticks."""
    fenced = re.findall(r"^```.*?\n(.*?)^```", page, re.M | re.S)
    rest = re.sub(r"^```.*?\n.*?^```", "", page, flags=re.M | re.S)
    lines = [line for block in fenced for line in block.splitlines()] + re.findall(r"^    (.*)$", rest, re.M)
    return [*lines, *(" ".join(span.split()) for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", rest))]


def commands_of(text):
    """The words of every `specnb COMMAND ...` shown; what follows a # explains."""
    for code in code_of(text):
        if found := re.match(r"\s*(?:\S*[/\\])?specnb (.*)", code):
            yield shlex.split(found[1], comments=True)


SHOWN = {
    shlex.join(words): words
    for text in [*(page.read_text(encoding="utf-8") for page in PAGES), command_line.EPILOG, audit.EPILOG]
    for words in commands_of(text.replace("\n  ", "\n    "))
}


@pytest.fixture
def parser():
    """The command line with nothing behind it: each command reads its options, and that is all."""
    command = get_command(command_line.app)
    commands = [command]
    while commands:
        one = commands.pop()
        commands += getattr(one, "commands", {}).values()
        one.callback = lambda **_: None
    return lambda words: command(words, standalone_mode=False)


def test_there_are_commands_to_read():
    assert {"fetch", "generate", "sweep", "report", "audit", "serve-bench"} <= {words[0] for words in SHOWN.values()}
    assert len(SHOWN) > 20


@pytest.mark.parametrize("words", [pytest.param(words, id=line) for line, words in SHOWN.items()])
def test_a_command_line_that_is_shown_can_be_read(parser, words):
    parser(words if len(words) > 1 else [*words, "--help"])  # A name alone speaks of the command.


def test_a_command_line_with_a_wrong_option_would_be_noticed(parser):
    with pytest.raises(Exception, match="--gama"):
        parser(["generate", "x", "--gama", "4"])


@pytest.mark.parametrize("line", [line for line in SHOWN if line.startswith("report data/") and "OTHER" not in line])
def test_a_report_that_is_shown_is_printed(line, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert main(SHOWN[line]) == 0 and "n = " in capsys.readouterr().out


def test_the_generate_line_answers_in_colour(smollm2, capsys):
    words = next(words for words in commands_of(README) if words[0] == "generate")
    assert main([*words, "--max-new-tokens", "8"]) == 0
    assert "8 tokens in" in capsys.readouterr().out


def test_the_python_block_runs_as_it_stands(smollm2, capsys):
    (block,) = re.findall(r"^```python\n(.*?)^```", README, re.M | re.S)
    exec(compile(block, "README.md", "exec"), {})
    assert re.search(r"\S.* \[\d+(, \d+){4}\]$", capsys.readouterr().out.strip())


def test_the_call_of_memory_budget_is_one_that_can_be_made():
    from specnb.measure.memory import memory_budget

    (arguments,) = re.findall(r"`specnb\.measure\.memory\.memory_budget\((.*?)\)`", README)
    names = [part.strip() for part in arguments.split(",")]
    named = dict(part.split("=") for part in names if "=" in part)
    inspect.signature(memory_budget).bind(*(part for part in names if "=" not in part), **named)


def test_every_make_target_that_is_shown_is_there():
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    shown = {found[1] for code in code_of(README) if (found := re.match(r"make ([a-z-]+)", code))}
    assert len(shown) > 8 and shown <= {*targets}
