"""The benchmarks: ratios measured in one interleaved run, with their 95 % intervals, against stated bars.

Each suite prints a table and writes `data/bench/<suite>.json`: the environment and rows of {name, value, low, high,
bar, holds}. A suite is a function of `once`, which keeps what a piece of it has measured, so that an interrupted suite
goes on where it was. It reports; it does not fail. Run it with nothing else on the machine: `make bench`.
"""

import argparse
import subprocess
import sys
import time
from functools import partial

import bench_batches
import bench_timing
import numpy as np
import torch
from bench_arms import (
    AT_ONE,
    GREEDY,
    TOKENS,
    interval,
    ours,
    paired_ratio,
    random_draft,
    row,
    sec_per_round,
    theirs,
    tokens_per_sec,
)
from rich.progress import track

from specnb.drafters import FirstOf, ModelDrafter, PromptLookup
from specnb.measure import results, summary, sweep
from specnb.measure.machine import busy_reasons
from specnb.measure.prompts import load_prompts
from specnb.measure.unfinished import Unfinished
from specnb.models import CausalLM, load_pair
from specnb.models.places import PROJECT
from specnb.sampler import autoregressive, speculative


def outside_forwards(target, drafter, gamma, sampling, prompts):
    """Share of a round's time outside the forwards of target and draft, for each prompt; the prefill round left out."""
    spent = []
    for model in (target, drafter.model):
        forward = model.forward

        def timed(*arguments, forward=forward, **options):
            began = time.perf_counter()
            logits = forward(*arguments, **options)
            spent.append(time.perf_counter() - began)
            return logits

        model.forward = timed
    shares = []
    for index, ids in enumerate([prompts[0], *prompts]):
        first = 0.0
        generator = torch.Generator().manual_seed(index)
        spent.clear()
        trace = speculative(
            target, drafter, ids, gamma=gamma, max_new_tokens=TOKENS, sampling=sampling, generator=generator
        ).trace
        num_first = 1 + trace.rounds[0].num_drafted
        first = sum(spent[:num_first])
        forwards, wall = sum(spent) - first, trace.decode_sec
        shares.append(1 - forwards / wall)
    for model in (target, drafter.model):
        del model.forward
    return shares[1:]


def suite_transformers(once):
    """Against transformers' own generation, SmolLM2, same weights, prompts, lengths."""
    target, _, tokenizer = load_pair()
    prompts = [prompt.encode(tokenizer) for prompt in load_prompts(limit=14)]
    rows = []
    name = "plain decoding, tokens/s over generate(), greedy"
    arms = (ours(target, None, 0, GREEDY, tokens_per_sec), theirs(target, tokens_per_sec, do_sample=False))
    ratios = once(name, partial(paired_ratio, arms, prompts, 3))
    rows.append(row(name, interval(ratios), 0.97, at_least=True))
    for gamma in (4, 8):
        options = {"prompt_lookup_num_tokens": gamma, "max_matching_ngram_size": 3, "do_sample": False}
        arms = (
            ours(target, PromptLookup(3), gamma, GREEDY, tokens_per_sec),
            theirs(target, tokens_per_sec, **options),
        )
        name = f"lookup gamma {gamma}, tokens/s over generate(prompt_lookup_num_tokens), greedy"
        ratios = once(name, partial(paired_ratio, arms, prompts, 3))
        rows.append(row(name, interval(ratios), 0.97, at_least=True))
    draft = random_draft(target)
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    for gamma in (4, 8):
        for name, sampling, options, bar in (
            ("greedy", GREEDY, {"do_sample": False}, 0.97),
            ("T=1", AT_ONE, {"do_sample": True, "top_k": 0, "temperature": 1.0}, 0.90),
        ):
            draft.generation_config.num_assistant_tokens = gamma
            arms = (
                ours(target, ModelDrafter(CausalLM(draft)), gamma, sampling, sec_per_round),
                theirs(target, sec_per_round, assistant_model=draft, **options),
            )
            title = f"random 2-layer draft gamma {gamma}, time/round over generate(assistant_model), {name}"
            ratios = once(title, partial(paired_ratio, arms, prompts, 6))
            rows.append(row(title, interval(ratios), bar, at_least=False))
    for gamma in (4, 8):
        for name, sampling, bar in (("greedy", GREEDY, 0.06), ("T=1", AT_ONE, 0.12)):
            title = f"share of a round outside model forwards, gamma {gamma}, {name}"
            drafter = ModelDrafter(CausalLM(draft))
            shares = once(title, partial(outside_forwards, target, drafter, gamma, sampling, prompts[:7]))
            rows.append(row(title, interval(shares, np.mean), bar, at_least=False))
    return rows


def suite_package(once):
    """The package alone: the rule's throughput and memory, import time, and identical arms."""
    rows = []
    code = (
        "import time, resource, torch; from specnb.rule import verify; n = 10_000_000;"
        "p = torch.tensor([[.6, .3, .1], [.6, .3, .1]]); q = torch.tensor([[.2, .5, .3]]);"
        "ids = torch.multinomial(q[0], n, replacement=True)[:, None];"
        "u = torch.rand(n, 2, dtype=torch.float64);"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; began = time.perf_counter();"
        "v = verify(p.expand(n, 2, 3), q.expand(n, 1, 3), ids, u);"
        "print(time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)"
    )
    measured = np.array(once("rule.verify", lambda: [_child(code).split() for _ in range(5)]), dtype=float)
    rows.append(
        row("10^7 three-token draws through rule.verify, s", interval(measured[:, 0], np.median), 3, at_least=False)
    )
    rows.append(row("peak memory of that process, GiB", interval(measured[:, 1], np.median), 2, at_least=False))
    imports = "import time; began = time.perf_counter(); import specnb; print(time.perf_counter() - began)"
    times = once("import specnb", lambda: [float(_child(imports)) for _ in range(10)])
    rows.append(row("import specnb, s", interval(times, np.median), 1, at_least=False))
    missed, repeats = once("identical arms", identical_arms)
    title = f"identical arms: 95 % intervals that miss 1, of {repeats}"
    rows.append(row(title, (missed,) * 3, 4, at_least=False))
    return rows


def identical_arms(repeats=20, pairs=6):
    """A/A: plain decoding against itself. How often does a 95 % interval of the speed-up miss 1?"""
    target, _, tokenizer = load_pair()
    prompts = [prompt.encode(tokenizer)[:64] for prompt in load_prompts(limit=pairs)]

    def rate(ids):
        began = time.perf_counter()
        autoregressive(target, ids, max_new_tokens=8, sampling=GREEDY)
        return 8 / (time.perf_counter() - began)

    missed = 0
    for _ in range(repeats):
        _, low, high = interval(paired_ratio((rate, rate), prompts, 1))
        missed += int(not low <= 1 <= high)
    return missed, repeats


def suite_draft(once):
    """The draft that ships, lookup, and both: drafter and gamma chosen on the first 14 prompts, quoted from the others.

    The run is kept as `data/sweep-smollm2-cpu-long.json`.
    """
    target, shipped, tokenizer = load_pair()
    name = shipped.model.name
    both = FirstOf(PromptLookup(min_ngram=2), shipped, caps=(None, 2))
    out = PROJECT / "data" / "sweep-smollm2-cpu-long.json"
    once("sweep", lambda: draft_sweep(target, {"lookup": PromptLookup(), name: shipped, f"lookup+{name}": both}, out))
    result = results.load(out, "sweep")
    rows = summary.frame(result)
    first_half = rows.prompt_id.isin(list(result["settings"]["prompts"])[:14])
    lines = []
    for temperature, title, bar in ((0.0, "greedy", 1.20), (1.0, "T=1", 1.08)):
        at = rows.temperature == temperature
        lines += chosen_and_quoted(rows[at & first_half], rows[at & ~first_half], title, bar)
    drafted = rows[(rows.drafter == name) & (rows.temperature == 0)]
    plain = rows[(rows.gamma == 0) & (rows.temperature == 0)]
    step = plain.decode_sec.sum() / plain.num_later_rounds.sum()
    ratios = drafted[drafted.gamma == 8].pipe(lambda part: part.draft_sec / part.num_drafted / step)
    lines.append(row(f"{name}: cost_ratio, a draft step with its prefill over a plain step", interval(ratios, np.mean)))
    return lines + open_chat_alpha(once, target, shipped, tokenizer)


def draft_sweep(target, drafters, out):
    result = sweep.run(
        target, drafters, load_prompts(), out=out, gammas=[1, 2, 8], temperatures=[0, 1], max_new_tokens=32,
        command="python scripts/bench.py draft",
        track=lambda steps: track(steps, description="measuring", update_period=1),
    )  # fmt: skip
    return len(result["rows"])


def chosen_and_quoted(choosing, quoting, title, bar):
    """Rows of the table for one temperature: the geometric mean over kinds, each kind's chosen arm, arms used for all.

    Chosen on `choosing`: gamma for each drafter over all kinds, then the drafter for each kind.
    """
    first, second = ({kind: resampled(part) for kind, part in rows.groupby("kind")} for rows in (choosing, quoting))
    drafted = [arm for arm in next(iter(first.values())) if arm != summary.PLAIN]
    ranked = sorted(drafted, key=lambda arm: over_kinds(first, arm)[0])
    arms = {arm[0]: arm for arm in ranked}  # The last of each drafter is its fastest.
    lines, quoted = [], []
    for kind, measured in first.items():
        drafter, gamma = max(arms.values(), key=lambda arm, measured=measured: measured[arm][0])
        quoted.append(second[kind][drafter, gamma])
        lines.append(row(f"{title}, {kind}: {drafter} gamma {gamma}", ends(quoted[-1])))
    for drafter, gamma in arms.values():
        lines.append(
            row(f"{title}, {drafter} gamma {gamma} for every kind", ends(over_kinds(second, (drafter, gamma))))
        )
    what = f"{title}, geometric mean over {len(quoted)} kinds: tokens/s over plain decoding"
    return [row(what, ends(geometric_mean(quoted)), bar), *lines]


def resampled(part):
    """{(drafter, gamma): speed-ups}; the first is as measured, the others are over prompts resampled for all alike."""
    arms, sec, tokens = summary.sums(part)
    chosen = np.random.default_rng(0).integers(len(sec), size=(4000, len(sec)))
    chosen = np.vstack([np.arange(len(sec)), chosen])  # (1 + resamples, prompts)
    sec_per_token = sec[chosen].sum(1) / tokens[chosen].sum(1)
    return dict(zip(arms, (sec_per_token[:, [arms.index(summary.PLAIN)]] / sec_per_token).T, strict=True))


def over_kinds(by_kind, arm):
    return geometric_mean([measured[arm] for measured in by_kind.values()])


def ends(resampled):
    """(value, low, high) of an array whose first entry is as measured and whose others are over resampled prompts."""
    return resampled[0], *np.percentile(resampled[1:], [2.5, 97.5])


def geometric_mean(measured):
    return np.exp(np.mean(np.log(measured), 0))


def open_chat_alpha(once, target, drafter, tokenizer, gamma=4, tokens=96, seeds=4):
    """alpha_hat of the draft alone on the open chat prompts, intervals over prompts."""
    prompts = [prompt.encode(tokenizer) for prompt in load_prompts() if prompt.kind == "open_chat"]
    lines = []
    for name, sampling, repeats, bar in (("greedy", GREEDY, 1, 0.45), ("T=1", AT_ONE, seeds, 0.42)):
        title = f"open chat, draft alone, gamma {gamma}, {name}: alpha_hat"
        options = {"gamma": gamma, "max_new_tokens": tokens, "sampling": sampling, "eos_ids": target.eos_ids}
        counts = once(title, lambda o=options, n=repeats: [accepted(target, drafter, ids, n, **o) for ids in prompts])
        measured = interval(counts, lambda x: x[:, 0].sum() / x[:, 1].sum())
        lines.append(row(title, measured, bar))
    return lines


def accepted(target, drafter, ids, repeats, **options):
    """(accepted, tested) drafts of a prompt, over so many seeds."""
    seeds = map(torch.Generator().manual_seed, range(repeats))
    runs = [speculative(target, drafter, ids, generator=seed, **options) for seed in seeds]
    rounds = [r for run in runs for r in run.trace.rounds]
    return sum(r.num_accepted for r in rounds), sum(r.num_tested for r in rounds)


def _child(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


SUITES = {
    "package": suite_package,
    "transformers": suite_transformers,
    "draft": suite_draft,
    "timing": bench_timing.suite,
    "predictions": bench_timing.predictions,
    "batches": bench_batches.suite,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suites", nargs="*", default=list(SUITES), help=f"which (default: {', '.join(SUITES)})")
    parser.add_argument("--force", action="store_true", help="measure although the machine is busy")
    parser.add_argument("--restart", action="store_true", help="throw unfinished suites away instead of resuming them")
    arguments = parser.parse_args()
    if not arguments.force and (reasons := busy_reasons()):
        raise SystemExit(f"the machine is busy: {'; '.join(reasons)}; stop the rest, or use --force")
    for suite in arguments.suites:
        measure(suite, PROJECT / "data" / "bench", arguments.restart)


def measure(suite, folder, restart=False):
    """Run a suite, print its rows as they come and write them to `folder`; one that was interrupted goes on."""
    header = {"suite": suite, **results.header("specnb-bench/1", f"python scripts/bench.py {suite}")}
    with Unfinished(folder / f"{suite}.json", header, restart=restart, keys=("key", "value")) as unfinished:
        rows = []
        for line in SUITES[suite](unfinished.once):
            rows.append(line)
            state = {True: "holds", False: "FALLS SHORT", None: "-"}[line["holds"]]
            print(
                f"{state:12}{line['value']:8.3f} [{line['low']:.3f}, {line['high']:.3f}]  "
                f"{line['bar'] or '':8} {line['name']}",
                flush=True,
            )
        return unfinished.finish({**unfinished.header, "rows": rows})


if __name__ == "__main__":
    main()
