"""Where files are kept: the model cache of the user, and what comes with the package.

It knows folders and names. It does not know how a model gets into the cache. That says `specnb.cli.fetch`.
"""

import hashlib
import json
import os
from pathlib import Path

FOLDER = "SmolLM2-135M-Instruct"
MANIFEST = "specnb.json"
PROJECT = Path(__file__).resolve().parents[2]  # the repository, where the package is used from one
SHIPPED = PROJECT / "specnb" / "shipped"  # where a built package keeps what a repository has in data/


def shipped(name):
    """Path of a file or folder that comes with the package, such as "prompts.jsonl"."""
    path = (SHIPPED if SHIPPED.exists() else PROJECT / "data") / name
    if not path.exists():
        raise FileNotFoundError(
            f"{name} comes with specnb, but {SHIPPED.parent} was installed without it; install specnb with pip from "
            "its repository or a wheel of it, or name files of your own"
        )
    return path


def cache_folder():
    """Where models are kept: the environment variable SPECNB_CACHE, else the user's cache folder."""
    from platformdirs import user_cache_path

    return Path(os.environ.get("SPECNB_CACHE") or user_cache_path("specnb"))


def model_folder():
    """Folder of the fetched model; a FileNotFoundError that says how to fetch it where there is none."""
    folder = cache_folder() / FOLDER
    if not (folder / MANIFEST).exists():
        raise FileNotFoundError(
            "SmolLM2 is not in the cache; run `specnb fetch` once (93 MB), or set SPECNB_CACHE to a folder that has it"
        )
    return folder


def weights_of(folder):
    """Which weights a fetched folder holds, in a word: "Q4_1" (rounded, then expanded) or "original"."""
    return json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["weights"].split()[0]


def file_sha256(path):
    """Hexadecimal SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
