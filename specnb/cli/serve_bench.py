"""The command `specnb serve-bench`: a concurrency sweep against a running server.

It reads prompts, writes a file and prints the table of `specnb.serving.load`.
"""

from pathlib import Path

from specnb.cli.parts import fields, whole_numbers
from specnb.cli.report import show_serve


def add_serve_bench(commands):
    parser = commands.add_parser("serve-bench", help="concurrency against latency and throughput of a running server")
    parser.add_argument("--endpoint", required=True, metavar="URL", help="base URL, such as http://127.0.0.1:8111")
    parser.add_argument("--model", help="name sent with each request, where the server asks for one")
    parser.add_argument("--concurrency", type=whole_numbers, default="1,2,4", help="requests at once (default 1,2,4)")
    parser.add_argument("--requests", type=int, default=16, help="sent in all at each concurrency (default 16)")
    parser.add_argument("--max-tokens", type=int, default=64, help="(default 64)")
    parser.add_argument("--temperature", type=float, default=0.0, help="(default 0)")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="JSON lines (default: the project's prompts)")
    parser.add_argument("--seconds", type=float, default=300, help="for each concurrency (default 300)")
    parser.add_argument("--timeout", type=float, default=60, help="for each request (default 60)")
    parser.add_argument("--options", type=fields, default={}, help="""more fields, as JSON, such as '{"top_k": 0}'""")
    parser.add_argument(
        "--server", type=fields, help="""what is known of it, kept in the file, as JSON, such as '{"version": "1.2"}'"""
    )
    parser.add_argument("--out", type=Path, help="result file")
    parser.set_defaults(run=_run)


def _run(arguments):
    from rich.progress import track

    from specnb.measure.prompts import DEFAULT_PROMPTS, load_prompts
    from specnb.serving.load import serve_bench

    prompts = load_prompts(arguments.prompts or DEFAULT_PROMPTS)
    result = serve_bench(
        arguments.endpoint,
        prompts,
        concurrencies=arguments.concurrency,
        out=arguments.out,
        command=arguments.command_line,
        track=lambda levels: track(levels, description="asking", update_period=1),
        **{
            name: getattr(arguments, name)
            for name in ("requests", "max_tokens", "temperature", "model", "seconds", "timeout", "options", "server")
        },
    )
    show_serve(result, arguments.out, None)
    return 0
