"""The command line: one file a command. Everything here can be had without it, as a few calls of the package."""

from specnb.cli.app import main

__all__ = ["main"]
