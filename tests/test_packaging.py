"""Installed without the repository, the package still finds what it ships, and writes where its user stands."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from specnb.cli.sweep import _default_out, _figure_of
from specnb.models import places

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("specnb", "pyproject.toml", "setup.py", "README.md", "LICENSE", "data/prompts.jsonl", "data/smollm2-draft")
ASK = """
import specnb
from specnb.measure.prompts import load_prompts
from specnb.measure.results import commit, results_folder
from specnb.models.places import shipped
print(specnb.__file__, len(load_prompts()), shipped("smollm2-draft") / "draft.safetensors", results_folder(), commit())
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder that holds the package as its wheel installs it, and nothing of the repository."""
    pytest.importorskip("setuptools", minversion="77")
    sources, folder = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("installed")
    for name in SOURCES:
        (sources / name).parent.mkdir(exist_ok=True)
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, sources / name)
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", build, str(folder)], cwd=sources, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        wheel.extractall(folder / "site")
    return folder / "site"


def run(site, *words):
    environment = {**os.environ, "PYTHONPATH": str(site), "SPECNB_CACHE": str(site / "nothing")}
    return subprocess.run([sys.executable, *words], cwd=site.parent, capture_output=True, text=True, env=environment)


def test_a_wheel_brings_the_prompts_and_the_draft_and_knows_no_repository(installed):
    # The folder lies within a repository of something else, whose commit is not the package's.
    subprocess.run(["git", "init", "-q", str(installed.parent)], check=True)
    done = run(installed, "-c", ASK)
    assert done.returncode == 0, done.stderr
    package, num_prompts, draft, where, commit = done.stdout.strip().split(" ", 4)
    assert Path(package).is_relative_to(installed) and num_prompts == "35"
    assert Path(draft).is_relative_to(installed) and Path(draft).stat().st_size > 1_000_000
    assert where == "." and commit == "{'commit': None, 'dirty': None}"


def test_a_wheel_says_what_is_missing_at_the_first_call_that_needs_it(installed):
    done = run(installed, "-m", "specnb", "generate", "x")
    assert done.returncode == 1 and "run `specnb fetch` once" in done.stderr and done.stderr.count("\n") == 1


def test_a_wheel_holds_every_module(installed):
    here = {path.relative_to(ROOT) for path in (ROOT / "specnb").rglob("*.py")}
    assert here == {path.relative_to(installed) for path in (installed / "specnb").rglob("*.py")}


def test_a_package_without_its_files_says_how_to_get_them(tmp_path, monkeypatch):
    monkeypatch.setattr(places, "PROJECT", tmp_path)
    monkeypatch.setattr(places, "SHIPPED", tmp_path / "specnb" / "shipped")
    with pytest.raises(FileNotFoundError, match=r"prompts\.jsonl comes with specnb.*install specnb with pip"):
        places.shipped("prompts.jsonl")


@pytest.mark.parametrize(
    ("result", "figure"),
    [
        ("data/own/r.json", "figures/own/r.png"),
        ("data/r.json", "figures/r.png"),
        ("r.json", "r.png"),
        ("mine/own/r.json", "mine/own/r.png"),
    ],
)
def test_a_figure_goes_where_its_result_belongs(result, figure):
    assert _figure_of(Path("x") / result) == Path("x") / figure and _figure_of(Path(result)) == Path(figure)


def own_result():
    return _default_out("some/model", None, SimpleNamespace(type="cpu"), [1])


def test_a_sweep_keeps_its_result_apart_from_those_that_are_committed():
    assert own_result() == ROOT / "data" / "own" / "sweep-model-lookup-cpu.json"


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="this is no clone")
def test_what_a_user_measures_leaves_a_clone_clean():
    out = own_result()
    for path in (out, out.with_name(out.name + ".partial"), out.with_name("costs-gpu.json"), _figure_of(out)):
        assert subprocess.run(["git", "-C", str(ROOT), "check-ignore", "-q", str(path)]).returncode == 0, path
