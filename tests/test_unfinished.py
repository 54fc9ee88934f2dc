"""What any interrupted run keeps, and what may go on from it."""

import ast
import copy
import json
import os
import subprocess
import sys

import pytest

from specnb.measure import results
from specnb.measure.unfinished import Unfinished, differences
from specnb.models.places import PROJECT

GPU = {"name": "NVIDIA H200", "driver": "570.1", "num_processes": 0, "sm_clock_mhz": 345.0}
HEADER = {
    "schema": "specnb-sweep/1", "command": "specnb sweep", "commit": "abc", "dirty": False, "created": "today",
    "environment": {
        "processor": "a", "num_threads": 4, "cuda_runtime": "12.6", "gpus": [GPU], "versions": {"torch": "2.13.0"},
        "load_before_percent": 1.0, "float32_matmul_precision": "highest",
    },
    "models": {"target": {"id": "t"}}, "settings": {"gammas": [0, 4]},
}  # fmt: skip


def changed(path, value):
    header = copy.deepcopy(HEADER)
    *where, last = path
    place = header
    for name in where:
        place = place[name]
    place[last] = value
    return header


def begun(out, *entries):
    """A run that was interrupted after these."""
    with pytest.raises(KeyboardInterrupt), Unfinished(out, HEADER) as run:
        for entry in entries:
            run.append(entry)
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (("schema",), "specnb-sweep/2", 'schema ("specnb-sweep/1", now "specnb-sweep/2")'),
        (("commit",), "abd", 'commit ("abc", now "abd")'),
        (("dirty",), True, "dirty (false, now true)"),
        (("models", "target"), {"id": "u"}, 'models (target {"id": "t"}, now {"id": "u"})'),
        (("settings", "gammas"), [0], "settings (gammas [0, 4], now [0])"),
        (("settings", "seed"), 1, "settings (seed null, now 1)"),
        (("environment", "processor"), "b", 'processor ("a", now "b")'),
        (("environment", "num_threads"), 8, "num_threads (4, now 8)"),
        (("environment", "cuda_runtime"), None, 'cuda_runtime ("12.6", now null)'),
        (("environment", "versions"), {"torch": "2.14.0"}, 'versions (torch "2.13.0", now "2.14.0")'),
        (("environment", "gpus"), [GPU, GPU], "gpus"),
        (("environment", "gpus"), [], "gpus"),
        (("environment", "gpus"), [{**GPU, "name": "NVIDIA L4"}], 'now ["NVIDIA L4, driver 570.1"]'),
        (("environment", "gpus"), [{**GPU, "driver": "580.2"}], 'now ["NVIDIA H200, driver 580.2"]'),
    ],
)
def test_a_run_goes_on_only_where_and_as_it_was_begun(tmp_path, path, value, named):
    out = tmp_path / "r.json"
    begun(out, {"row": 1})
    with pytest.raises(ValueError, match="unfinished sweep with another .*--restart") as error:
        Unfinished(out, changed(path, value)).__enter__()
    assert named in str(error.value) and str(out) in str(error.value)
    with Unfinished(out, HEADER) as run:
        assert run.entries == [{"row": 1}]  # A refusal changes nothing.


def test_what_differs_between_two_calls_on_one_machine_does_not_matter(tmp_path):
    again = changed(("created",), "tomorrow") | {"command": "specnb sweep --force"}
    again["environment"] |= {"load_before_percent": 9.0, "gpus": [{**GPU, "sm_clock_mhz": 1980.0, "num_processes": 1}]}
    assert differences(HEADER, again) == []
    begun(tmp_path / "r.json", {"row": 1})
    with Unfinished(tmp_path / "r.json", again) as run:
        assert run.header == HEADER and run.entries == [{"row": 1}]


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{}\n", b"[]\n", b"null\n", b"3\n", b"garbage", b"garbage\n", b"\xff\xfe\x00", b'{"schema": 1}\n',
        b'{"schema": "specnb-sweep/1", "environment": []}\n',
        b'{"schema": "specnb-sweep/1", "environment": {"gpus": 1}}\n',
        *(json.dumps(HEADER).encode() + line for line in (b"\n{\n", b"\n3\n", b"\n[3]\n", b"\nnull\n", b"\n[{}]\n")),
    ],
)  # fmt: skip
def test_a_file_that_is_no_unfinished_run_is_named_in_one_line_and_restart_throws_it_away(tmp_path, content):
    out = tmp_path / "r.json"
    out.with_name("r.json.partial").write_bytes(content)
    with pytest.raises(ValueError, match=r"r\.json\.partial .*--restart") as error:
        Unfinished(out, HEADER, keys=["row"]).__enter__()
    assert "\n" not in str(error.value)
    assert out.with_name("r.json.partial").read_bytes() == content
    with Unfinished(out, HEADER, restart=True, keys=["row"]) as run:
        run.append({"row": 1})
    assert out.with_name("r.json.partial").read_text().splitlines() == [json.dumps(HEADER), '[{"row": 1}]']


def test_a_line_cut_short_is_removed_and_the_entries_before_it_stay(tmp_path):
    out, partial = tmp_path / "r.json", tmp_path / "r.json.partial"
    begun(out, {"row": 1}, {"row": 2})
    whole = partial.read_bytes()
    for cut in range(len(whole) - len('[{"row": 2}]\n'), len(whole)):
        partial.write_bytes(whole[:cut])
        with Unfinished(out, HEADER) as run:
            assert run.entries == [{"row": 1}]
            run.append({"row": 3})
        assert partial.read_text().splitlines()[1:] == ['[{"row": 1}]', '[{"row": 3}]']


def test_a_run_that_is_stopped_before_its_first_measurement_leaves_nothing(tmp_path):
    begun(tmp_path / "r.json")
    assert not list(tmp_path.iterdir())


def test_a_restart_throws_away_only_when_there_is_something_new(tmp_path):
    begun(tmp_path / "r.json", {"row": 1})
    with pytest.raises(KeyboardInterrupt), Unfinished(tmp_path / "r.json", HEADER, restart=True) as run:
        assert run.entries == []
        raise KeyboardInterrupt
    with Unfinished(tmp_path / "r.json", HEADER) as run:
        assert run.entries == [{"row": 1}]


def test_two_runs_into_one_file_are_refused_by_name_while_one_is_going(tmp_path):
    out = tmp_path / "r.json"
    with Unfinished(out, HEADER) as first:
        first.append({"row": 1})
        with pytest.raises(ValueError, match=r"another run is writing .*r\.json .*another --out"):
            Unfinished(out, HEADER, restart=True).__enter__()
        with Unfinished(tmp_path / "s.json", HEADER):
            pass
        first.append({"row": 2})
    with Unfinished(out, HEADER) as again:
        assert again.entries == [{"row": 1}, {"row": 2}]
    assert [path.name for path in tmp_path.iterdir()] == ["r.json.partial"]


def test_a_finished_result_is_replaced_only_where_that_was_asked_for(tmp_path):
    out = tmp_path / "r.json"
    with Unfinished(out, HEADER, replace=False) as run:
        run.append({"row": 1})
        results.write(out, {**HEADER, "rows": [{"row": "another's"}]})  # by something that takes no lock
        with pytest.raises(ValueError, match=r"kept in .*r\.json\.partial.*--replace"):
            run.finish({**HEADER, "rows": run.entries})
    assert results.load(out)["rows"] == [{"row": "another's"}]
    with pytest.raises(ValueError, match="holds a finished result; give another --out, or --replace it"):
        Unfinished(out, HEADER, replace=False).__enter__()
    with Unfinished(out, HEADER) as run:
        run.finish({**HEADER, "rows": run.entries})
    assert results.load(out)["rows"] == [{"row": 1}] and [path.name for path in tmp_path.iterdir()] == ["r.json"]


def test_a_piece_of_work_is_done_once_and_given_back_as_it_was_kept(tmp_path):
    done = []

    def work(value):
        return lambda: done.append(value) or (value, 0.1)

    with Unfinished(tmp_path / "r.json", HEADER) as run:
        assert run.once("a", work(1)) == [1, 0.1]
    with Unfinished(tmp_path / "r.json", HEADER) as run:
        assert (run.once("a", work(2)), run.once("b", work(3))) == ([1, 0.1], [3, 0.1])
    assert done == [1, 3]


# --------------------------------------------------------------------------------------------------- outputs


def test_two_outputs_with_one_name_are_refused_and_so_is_what_must_not_be_replaced(tmp_path):
    out, figure = tmp_path / "r.json", tmp_path / "r.png"
    results.check_outputs(out, figure, None)
    for same in (out, tmp_path / "." / "r.json", tmp_path / "new" / ".." / "r.json"):
        with pytest.raises(ValueError, match=r"two files of this command are .*r\.json"):
            results.check_outputs(out, figure, same)
    out.write_text("")
    with pytest.raises(ValueError, match=r"r\.json is there already; .*--replace"):
        results.check_outputs(figure, out)
    results.check_outputs(figure, out, replace=True)
    (tmp_path / "link.json").symlink_to(out)
    with pytest.raises(ValueError, match="two files"):
        results.check_outputs(out, tmp_path / "link.json", replace=True)
    with pytest.raises(ValueError, match="two files"):
        results.check_outputs(out, inputs=[figure, None, out], replace=True)
    with pytest.raises(ValueError, match="is a folder"):
        results.check_outputs(tmp_path, replace=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.json", "r.json"]


def test_a_folder_that_cannot_be_written_is_refused_and_a_new_one_is_not_made(tmp_path):
    (tmp_path / "file").write_text("")
    for where in (tmp_path / "file" / "r.json", tmp_path / "file" / "new" / "r.json"):
        with pytest.raises(ValueError, match=r"r\.json cannot be written: .*file takes no new file"):
            results.check_outputs(where)
    results.check_outputs(tmp_path / "new" / "newer" / "r.json")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_files_are_utf8_whatever_the_locale(tmp_path):
    child = r"""
import locale, sys
from specnb.measure import results
assert locale.getencoding().lower() != "utf-8"
results.write_text(sys.argv[1], "Gr\u00f6\u00dfe \U0001f600\n")
results.write(sys.argv[2], {"schema": "specnb-x/1", "rows": [{"row": "\u00df"}]})
"""
    ascii_only = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    text, result = tmp_path / "new" / "a.txt", tmp_path / "new" / "b.json"
    subprocess.run([sys.executable, "-c", child, text, result], env=ascii_only, check=True)
    assert text.read_bytes() == "Größe \U0001f600\n".encode() and results.load(result)["rows"] == [{"row": "ß"}]
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["a.txt", "b.json"]


@pytest.mark.parametrize("folder", ["specnb", "scripts"])
def test_every_text_file_is_opened_with_an_encoding(folder):
    """The default is the locale's, which differs from machine to machine."""
    unnamed, seen = [], 0
    for path in sorted((PROJECT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in OPENING:
                call = ast.unparse(node)
                binary = "'rb'" in call or "'wb'" in call or call.startswith("archive.open(")
                own = call.startswith(("results.write_text(", "write_text("))
                seen += 1
                if not (binary or own or "encoding=" in call or "'utf-8'" in call):
                    unnamed.append(f"{path.relative_to(PROJECT)}, line {node.lineno}: {call}")
    assert seen > 5 and not unnamed, unnamed


OPENING = {"open", "read_text", "write_text"}
