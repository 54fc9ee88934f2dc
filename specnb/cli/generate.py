"""The command `specnb generate`: an answer, its tokens coloured by where they came from."""

from typing import Annotated

import typer

from specnb.cli.parts import PAIR, SHIPPED_DRAFT, Device, Draft, Dtype, Pair, Target


def generate(
    prompt: Annotated[str, typer.Argument(help="The user's message.")],
    gamma: Annotated[int, typer.Option(min=0, help="Draft length; 0 is plain decoding.")] = 4,
    max_new_tokens: Annotated[int, typer.Option(min=0)] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: Annotated[int | None, typer.Option(show_default="a new one each time")] = None,
    target: Target = PAIR,
    draft: Draft = None,
    device: Device = None,
    dtype: Dtype = None,
):
    """Answer a prompt, tokens coloured by where they came from."""
    import torch
    from rich.console import Console
    from rich.text import Text

    from specnb.cli import show
    from specnb.measure.prompts import Prompt
    from specnb.probs import Sampling
    from specnb.sampler import rounds
    from specnb.trace import Trace

    if len(draft or ()) > 1:
        raise ValueError(f"generate takes one --draft, got {', '.join(draft)}; a sweep compares several")
    console = Console(highlight=False)
    sampling = Sampling(temperature, top_k, top_p)
    model, drafters = Pair(target, draft, device, dtype).load([SHIPPED_DRAFT])
    asked = Prompt("prompt", "own", [{"role": "user", "content": prompt}], None, 1, 1.0)
    done, printer = [], show.Printer(console, model.tokenizer)
    for done_round in rounds(
        model,
        next(iter(drafters.values())),
        asked.encode(model.tokenizer),
        gamma=gamma,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        eos_ids=model.eos_ids,
        generator=None if seed is None else torch.Generator().manual_seed(seed),
    ):
        done.append(done_round)
        printer.show(done_round)
    console.print("\n")
    console.print(Text.assemble("colours: ", *[(f"{name} ", style) for name, style in show.STYLES.items()]))
    print(show.statistics(Trace(gamma, done)))
