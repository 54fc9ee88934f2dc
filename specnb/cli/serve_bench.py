"""The command `specnb serve-bench`: a concurrency sweep against a running server.

It reads prompts, writes a file and prints the table of `specnb.serving.load`.
"""

from pathlib import Path
from typing import Annotated

import typer

from specnb.cli.parts import KeyEnv, Prompts, Replace, json_object, whole_number_list
from specnb.cli.report import show_serve


def serve_bench(
    context: typer.Context,
    endpoint: Annotated[str, typer.Option(metavar="URL", help="Base URL, such as http://127.0.0.1:8111.")],
    model: Annotated[
        str | None, typer.Option(help="Name sent with each request, where the server asks for one.")
    ] = None,
    key_env: KeyEnv = None,
    concurrency: whole_number_list(1, help="Requests at once.") = "1,2,4",
    requests: Annotated[int, typer.Option(min=1, help="Sent in all at each concurrency.")] = 16,
    max_tokens: Annotated[int, typer.Option(min=1)] = 64,
    temperature: Annotated[float, typer.Option(min=0)] = 0.0,
    prompts: Prompts = None,
    seconds: Annotated[float, typer.Option(help="For each concurrency.")] = 300,
    timeout: Annotated[float, typer.Option(help="For each request, in seconds.")] = 60,
    options: json_object(help="""More fields, as JSON, such as '{"top_k": 0}'.""") = "{}",
    server: json_object(
        help="""What is known of it, kept in the file, as JSON, such as '{"version": "1.2"}'."""
    ) = None,
    out: Annotated[Path | None, typer.Option(help="Result file.")] = None,
    replace: Replace = False,
):
    """Measure a running server at several concurrencies."""
    from rich.progress import track

    from specnb.measure.prompts import load_prompts
    from specnb.measure.results import check_outputs
    from specnb.serving import load

    check_outputs(out, inputs=[prompts], replace=replace)
    result = load.serve_bench(
        endpoint,
        load_prompts(prompts),
        concurrencies=concurrency,
        requests=requests,
        max_tokens=max_tokens,
        temperature=temperature,
        model=model,
        seconds=seconds,
        timeout=timeout,
        options=options,
        key_env=key_env,
        server=server,
        out=out,
        command=context.obj,
        track=lambda levels: track(levels, description="asking", update_period=1),
    )
    show_serve(result, out, None)
