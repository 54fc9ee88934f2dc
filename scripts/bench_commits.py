"""Is this commit as fast as another? Both run the same rounds in turn, each in a process of its own.

    python scripts/bench_commits.py OTHER_CHECKOUT

`OTHER_CHECKOUT` is a folder with the other commit, such as one made by `git worktree add`. Both processes load SmolLM2
and wait; then they are asked for the same generation by turns, and the one that is not asked does nothing. What is
compared is the time of a round without the first. The texts of single prompts must be equal; those of a batch are
counted, because a commit that asks for other shapes of a batch may round a near tie in bfloat16 the other way. Writes
`data/bench/commits.json`. Run it with nothing else on the machine.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

ARMS = ("plain", "lookup", "draft", "first of both")
TEMPERATURES, GAMMA, TOKENS, NUM_PROMPTS, REPEATS = (0.0, 1.0), 4, 32, 14, 3
BAR = 1.03


def work():
    """Answer each line of stdin, `{arm, temperature, prompts, seed}`, with `{ids, sec_per_round}`."""
    import torch

    from specnb.drafters import FirstOf, PromptLookup
    from specnb.models import load_pair
    from specnb.probs import Sampling
    from specnb.sampler import speculative

    target, drafter, _ = load_pair(device="cpu")
    lookup = PromptLookup()
    drafters = {"plain": None, "lookup": lookup, "draft": drafter}
    drafters["first of both"] = FirstOf(PromptLookup(min_ngram=2), drafter, caps=(None, 2))
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        drafter, sampling = drafters[asked["arm"]], Sampling(asked["temperature"])
        generators = [torch.Generator().manual_seed(asked["seed"] + i) for i in range(len(asked["prompts"]))]
        options = {"gamma": GAMMA * (drafter is not None), "max_new_tokens": TOKENS, "sampling": sampling}
        runs = speculative(target, drafter, asked["prompts"], generator=generators, **options)
        longest = max(runs, key=lambda run: len(run.trace.rounds)).trace  # It was there in every round.
        seconds = longest.decode_sec / (len(longest.rounds) - 1)
        print(json.dumps({"ids": [run.ids for run in runs], "sec_per_round": seconds}), flush=True)


class Worker:
    """A process that runs one checkout and answers one question at a time."""

    def __init__(self, checkout):
        environment = {**os.environ, "PYTHONPATH": str(checkout)}
        command = [sys.executable, __file__, "--work"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=environment, cwd=checkout, **pipes)
        assert self.process.stdout.readline().strip() == "ready", checkout

    def ask(self, question):
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


def main(other):
    from bench_arms import interval, row
    from rich.console import Console
    from rich.progress import track

    from specnb.measure import results
    from specnb.measure.prompts import load_prompts
    from specnb.models import default_target

    tokenizer = default_target(device="cpu").tokenizer
    prompts = [prompt.encode(tokenizer) for prompt in load_prompts(limit=NUM_PROMPTS)]
    here, there = Worker(Path(__file__).resolve().parents[1]), Worker(Path(other).resolve())
    cells = [(arm, temperature, 1) for arm in ARMS for temperature in TEMPERATURES]
    cells += [(arm, 0.0, 4) for arm in ("plain", "draft")]
    ratios, texts = ({cell: [] for cell in cells} for _ in range(2))
    for repeat in track(range(REPEATS + 1), description="measuring"):  # The first warms up.
        for start in range(0, NUM_PROMPTS, 1 if repeat else NUM_PROMPTS):
            for arm, temperature, batch in cells:
                if start % batch or start + batch > NUM_PROMPTS:
                    continue
                question = {"arm": arm, "temperature": temperature, "seed": 100 * repeat + start}
                question["prompts"] = prompts[start : start + batch]
                in_turn = (here, there) if (start + repeat) % 2 else (there, here)
                answers = {worker: worker.ask(question) for worker in in_turn}
                equal = sum(map(list.__eq__, answers[here]["ids"], answers[there]["ids"]))
                assert batch > 1 or equal, question
                if repeat:
                    seconds = [answers[worker]["sec_per_round"] for worker in (here, there)]
                    ratios[arm, temperature, batch].append(seconds[0] / seconds[1])
                    texts[arm, temperature, batch].append(equal / batch)
    rows = [
        row(f"time a round over the other commit's: {arm}, T={temperature:g}, batch {batch}", interval(found), BAR,
            at_least=False) | {"n": len(found), "equal_texts": sum(texts[cell]) / len(found)}
        for cell, found in ratios.items() for arm, temperature, batch in [cell]
    ]  # fmt: skip
    result = results.header("specnb-bench/1", "python scripts/bench_commits.py OTHER_CHECKOUT")
    commit = subprocess.run(["git", "-C", other, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    results.write(Path("data/bench/commits.json"), {**result, "suite": "commits", "other": commit, "rows": rows})
    for one in rows:
        Console().print(f"{one['value']:.3f} ({one['low']:.3f}-{one['high']:.3f}, n = {one['n']})  {one['name']}")


if __name__ == "__main__":
    work() if sys.argv[1:] == ["--work"] else main(*sys.argv[1:])
