"""The commands put together, and what becomes of an exception: an exit status and one line on stderr.

It does not know what any command does. Read the file of a command next, `specnb.cli.generate` being the shortest.
"""

import dis
import shlex
import sys
import traceback
from pathlib import Path
from typing import Annotated

import typer

from specnb.cli.audit import audit
from specnb.cli.fetch import fetch
from specnb.cli.generate import generate
from specnb.cli.report import report
from specnb.cli.serve_bench import serve_bench
from specnb.cli.sweep import sweep

PACKAGE, INTERRUPTED = Path(__file__).parents[1], 130
TRACEBACK = "--traceback"
EPILOG = """\b
examples:
  specnb fetch                                     # bring SmolLM2 into the cache, once
  specnb generate "Why is the sky blue?" --gamma 4
  specnb sweep                                     # the default pair on the project's prompts
  specnb sweep --target ID --draft ID --device cuda --gammas 0-8 --prompts mine.jsonl
  specnb report data/sweep-smollm2-cpu.json --compare OTHER.json"""

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=EPILOG,
)
for command in (fetch, generate, sweep, report):
    app.command()(command)
app.add_typer(audit, name="audit")
app.command("serve-bench")(serve_bench)


@app.callback()
def specnb(
    traceback: Annotated[
        bool, typer.Option(TRACEBACK, help="Show the whole traceback of whatever goes wrong.")
    ] = False,
):
    """Speculative decoding: generate with it, measure whether it pays, and at which draft length."""


def main(argv=None):
    """Run one command and return its exit status; `argv` is a list of words, by default the process's own.

    A refusal of the package, or a file or server that cannot be reached, is one line on stderr. Anything else is
    reported as a fault of the package.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # A terminal that knows only ASCII shows the rest as \\u....
            stream.reconfigure(errors="backslashreplace")
    try:
        # The option may stand anywhere, for who meets an error appends it to the command just given.
        app([word for word in words if word != TRACEBACK], prog_name="specnb", obj=shlex.join(["specnb", *words]))
    except SystemExit as end:
        if end.code == INTERRUPTED:
            print("\nspecnb: interrupted", file=sys.stderr)
        return end.code
    except Exception as error:
        if TRACEBACK in words:
            traceback.print_exc()
        print(f"specnb: {error if _is_refusal(error) else _fault(error)}", file=sys.stderr)
        return 1


def _is_refusal(error):
    """Whether the user can mend it: the system's errors, and ValueErrors and RuntimeErrors that specnb itself raises.

    The same kinds of error raised inside torch or another library, or by an expression such as `int("x")`, were not
    foreseen.
    """
    if isinstance(error, OSError):
        return True
    step = error.__traceback__
    while step.tb_next is not None:
        step = step.tb_next
    code = step.tb_frame.f_code
    raised_here = (
        code.co_code[step.tb_lasti] == dis.opmap["RAISE_VARARGS"] and PACKAGE in Path(code.co_filename).parents
    )
    return raised_here and isinstance(error, (ValueError, RuntimeError))


def _fault(error):
    place = traceback.extract_tb(error.__traceback__)[-1]
    return (
        f"{type(error).__name__}: {error} ({Path(place.filename).name}, line {place.lineno}). This is a fault of "
        f"specnb, which should have refused what led to it; the same command with {TRACEBACK} shows where it came from"
    )
