"""How good are the tests of exactness? Right samplers must pass them, every wrong one must fail: `make exactness`.

Writes `data/exactness/exactness.json` and the table in `data/exactness/README.md`. Every number is counted over runs of
a sampler; what an enumeration or an approximation predicts stands beside it.

1. single tests  the eight wrong rules of the power table: rejections against the power computed by enumeration
2. named tests   every wrong sampler at the n at which its named test has power .99999
3. battery       the right sampler, three ways, and the innocents: how many of so many seeds pass
4. speed         ten million draws of the rule, tested
5. answers       the deployment answer on results in which no arm is faster, and on some in which arms are
"""

import argparse
import json
import time
from itertools import product
from pathlib import Path

import numpy as np
import torch
from rich.progress import track
from scipy import stats

from specnb import exact
from specnb.audit.battery import against, battery
from specnb.drafters import ModelDrafter
from specnb.gof import chi_square, exact_power, sample_size
from specnb.measure import intervals, results
from specnb.models import TableModel
from specnb.models.places import PROJECT
from specnb.rogues import INNOCENTS, ROGUES, example_draft, example_target, sampler_of
from specnb.rule import verify
from specnb.sampler import speculative

LEVEL, FAMILY_LEVEL, CERTAIN = 0.001, 0.001, 0.99999
VOCAB, GAMMA = 3, 2
LENGTH = {"first token": 1, "round": 3, "sequence": 4}  # Tokens that the named test looks at.
BATTERY_DRAWS, LOOP_DRAWS = 5000, 1000
TARGET, DRAFT = (row(()) for row in (example_target, example_draft))  # The pair of the power table.
PAIR = (example_target, example_draft)


def aligned(right, wrong):
    """Both laws as floats, over all sequences that either can emit."""
    known = sorted({*right, *wrong})
    return ([float(law.get(tokens, 0)) for tokens in known] for law in (right, wrong))


def rejections(draw, n, right, seeds):
    """In how many of so many seeds the first tokens of `n` runs are rejected as draws from `right`."""
    length = max(map(len, right))
    return sum(
        against(draw(n, np.random.default_rng(seed))[0][:, :length], right, alpha=LEVEL).verdict == "fail"
        for seed in range(seeds)
    )


def single_tests(seeds):
    """The eight rules of the power table on its pair: first token, gamma 1, at the n of power .99."""
    lines = []
    for rogue in track(ROGUES[:8], description="single tests"):
        right, fixed = exact.sequence_law(lambda _: TARGET, 1), (lambda _: TARGET, lambda _: DRAFT)
        probs, wrong = aligned(right, exact.first_tokens(rogue.law(*fixed, 1, 2), 1))
        n = sample_size(probs, wrong, alpha=LEVEL)
        power = exact_power(probs, wrong, n, alpha=LEVEL)
        found = rejections(rogue.sampler(*fixed, 1, 2), n, right, seeds)
        low, high = (int(x) for x in stats.binom.interval(0.999, seeds, power))
        lines.append(
            {"sampler": rogue.name, "n": n, "approximate_power": 0.99, "exact_power": power}
            | {"rejected": found, "low": low, "high": high, "holds": low <= found <= high}
        )
    return lines


def named_tests(seeds):
    """Every wrong sampler against its named test, on the pair that depends on the prefix."""
    lines = []
    for rogue in track(ROGUES, description="named tests"):
        length = LENGTH[rogue.exposed_by]
        longest = max(length, GAMMA + 1)
        right = rogue.right_law(example_target, length)
        probs, wrong = aligned(right, exact.first_tokens(rogue.law(*PAIR, GAMMA, longest), length))
        n = sample_size(probs, wrong, alpha=LEVEL, power=CERTAIN)
        found = rejections(rogue.sampler(*PAIR, GAMMA, longest), n, right, seeds)
        distance = sum(abs(a - b) for a, b in zip(probs, wrong, strict=True)) / 2
        lines.append(
            {"sampler": rogue.name, "test": rogue.exposed_by, "total_variation": distance, "n": n, "rejected": found}
            | {"holds": found == seeds}
        )
    return lines


def by_verify():
    """The package's rule on tensors, all runs at once: (n, rng) -> (ids, num_accepted), as `rogues.sampler_of`."""
    length = LENGTH["sequence"]
    tables = [{}, {}]  # of target and draft: prefix -> row
    for prefix in (ids for size in range(length) for ids in np.ndindex(*[VOCAB] * size)):
        for table, model in zip(tables, PAIR, strict=True):
            table[prefix] = torch.tensor([float(x) for x in model(prefix)], dtype=torch.float64)

    def rows(which, prefixes):
        return torch.stack([tables[which][tuple(prefix)] for prefix in prefixes])

    def draw(n, rng):
        ids, num_accepted = (np.full((n, length), -1) for _ in range(2))
        done, turn = np.zeros(n, dtype=int), np.zeros(n, dtype=int)
        for num_done in range(length):  # A round emits a token at least, so each run has at most one from here.
            runs = np.flatnonzero(done == num_done)
            if len(runs):
                emitted, num = _round_by_verify(rows, ids[runs, :num_done], min(GAMMA, length - num_done - 1), rng)
                ids[runs, num_done : num_done + emitted.shape[1]] = emitted
                num_accepted[runs, turn[runs]] = num
                done[runs], turn[runs] = num_done + num + 1, turn[runs] + 1
        return ids, num_accepted

    return draw


def _round_by_verify(rows, prefixes, block, rng):
    """One round of runs that have emitted as much: ids emitted `(runs, block + 1)`, -1 after them; drafts accepted."""
    seen, draft_rows = prefixes, []
    target_rows = [rows(0, seen)]
    for _ in range(block):
        draft_rows.append(rows(1, seen))
        drafts = (draft_rows[-1].cumsum(-1) <= torch.from_numpy(rng.random((len(seen), 1)))).sum(-1)
        seen = np.column_stack([seen, drafts])
        target_rows.append(rows(0, seen))
    target_rows = torch.stack(target_rows, 1)
    draft_ids = torch.from_numpy(seen[:, prefixes.shape[1] :])
    verdict = verify(
        target_rows,
        torch.stack(draft_rows, 1) if block else target_rows[:, :0],
        draft_ids,
        torch.from_numpy(rng.random((len(seen), block + 1))),
    )
    num = verdict.num_accepted.numpy()[:, None]
    places = np.arange(block + 1)
    emitted = np.where(places < num, np.pad(draft_ids.numpy(), ((0, 0), (0, 1))), -1)
    return np.where(places == num, verdict.next_id.numpy()[:, None], emitted), num[:, 0]


def by_loop():
    """`sampler.speculative` itself, one run after the other."""
    length = LENGTH["sequence"]
    target, draft = (TableModel(lambda prefix, row=row: row(prefix[1:]), VOCAB) for row in PAIR)
    drafter = ModelDrafter(draft)

    def draw(n, rng):
        generator = torch.Generator().manual_seed(int(rng.integers(2**62)))
        ids, num_accepted = (np.full((n, length), -1) for _ in range(2))
        for run in range(n):
            done = speculative(target, drafter, [0], gamma=GAMMA, max_new_tokens=length, generator=generator)
            ids[run] = done.ids
            counts = [r.num_accepted for r in done.trace.rounds]
            num_accepted[run, : len(counts)] = counts
        return ids, num_accepted

    return draw


def batteries(seeds):
    """Right samplers and innocents through the whole battery."""
    length, target = LENGTH["sequence"], example_target
    right = exact.sequence_law(target, length)
    accepted = exact.accepted_law(*PAIR, GAMMA)
    arms = [
        ("the rule, outcome by outcome", sampler_of(exact.TOKEN_RULE, *PAIR, GAMMA, length), right, accepted, None),
        ("rule.verify", by_verify(), right, accepted, None),
        ("sampler.speculative", by_loop(), right, accepted, LOOP_DRAWS),
    ]
    for innocent in INNOCENTS:
        law = exact.accepted_law(innocent.target(target), example_draft, GAMMA, innocent.rule)
        arms.append(
            (innocent.name, innocent.sampler(*PAIR, GAMMA, length), innocent.right_law(target, length), law, None)
        )
    lines = []
    for name, draw, law, accepted_law, n in arms:
        n, verdicts = n or BATTERY_DRAWS, []
        for seed in track(range(seeds), description=f"battery, {name[:30]}"):
            rng = np.random.default_rng(seed)
            found = battery(
                lambda n, rng=rng, draw=draw: draw(n, rng), law, n=n, accepted_law=accepted_law, alpha=FAMILY_LEVEL
            )
            verdicts.append(found.verdict)
        mean = float(sum(i * mass for i, mass in enumerate(accepted_law)))
        lines.append(
            {"sampler": name, "n": n, "tests": len(found.results), "passed": verdicts.count("pass")}
            | {"cannot_test": verdicts.count("cannot test"), "accepted_per_round": mean}
            | {"smallest_tv_first_token": float(found.table.smallest_tv[0])}
            | {"smallest_tv_sequence": float(found.table.smallest_tv[length])}
            | {"holds": verdicts.count("pass") >= 0.99 * seeds}
        )
    return lines


def speed(num=10_000_000):
    """Ten million one-step draws through `rule.verify`, and their test."""
    target, draft = (torch.tensor([[float(x) for x in row]]) for row in (TARGET, DRAFT))
    generator = torch.Generator().manual_seed(0)
    ids = torch.multinomial(draft[0], num, replacement=True, generator=generator)[:, None]
    uniforms = torch.rand(num, 2, dtype=torch.float64, generator=generator)
    began = time.perf_counter()
    verdict = verify(target.expand(num, 2, VOCAB), draft.expand(num, 1, VOCAB), ids, uniforms)
    first = torch.where(verdict.num_accepted > 0, ids[:, 0], verdict.next_id)
    result = chi_square(torch.bincount(first, minlength=VOCAB).numpy(), [float(x) for x in TARGET], alpha=LEVEL)
    return {"draws": num, "seconds": time.perf_counter() - began, "p_value": result.p_value, "verdict": result.verdict}


# By what a prompt multiplies the times of a row, plain decoding first. The mean of an arm's factors is that of plain
# decoding, so no arm is faster; the draws are of shape (simulations, prompts, arms).
EFFECTS = {
    "noise alone": lambda rng, shape: np.ones((*shape[:2], 1 + shape[2])),
    "gamma factors, shape 8": lambda rng, shape: _beside_plain(rng.gamma(8, 1 / 8, shape)),
    "lognormal factors of 30 %": lambda rng, shape: _beside_plain(rng.lognormal(-(0.3**2) / 2, 0.3, shape)),
    "lengths of 60 %, factors of 30 % shared by 6 arms": lambda rng, shape: (
        rng.lognormal(0, 0.6, (*shape[:2], 1))
        * _beside_plain(np.repeat(rng.lognormal(-(0.3**2) / 2, 0.3, (*shape[:2], shape[2] // 6)), 6, 2))
    ),
}
SIMULATIONS, ARMS, NOISE, GAIN = 2000, 12, 0.15, 1.2
MOST = 0.05  # What the upper bound of the rate of a false "deploy" must not exceed.


def answers(simulations=SIMULATIONS, prompts=(7, 14, 35, 100)):
    """How often the best of twelve arms is called faster: where none is, where one is 1.2 times as fast, where all are.

    Each line also says how often an arm that is as good as any is set apart from the best.
    """
    lines = []
    for (effects, factors), n in track([*product(EFFECTS.items(), prompts)], description="answers"):
        rng = np.random.default_rng(n)
        sec = rng.lognormal(0, NOISE, (simulations, n, 1 + ARMS)) * factors(rng, (simulations, n, ARMS))
        false = sum(_is_best_called_faster(x, 0) for x in sec)
        apart = sum(_is_best_called_faster(x, 1) for x in sec)
        bounds = [stats.beta.ppf(0.99, count + 1, simulations - count) for count in (false, apart)]
        some = sec[: simulations // 4]
        one, every = some.copy(), some.copy()
        one[..., 1] /= GAIN
        every[..., 1:] /= GAIN
        powers = [np.mean([_is_best_called_faster(x, 0, arm) for x in run]) for run, arm in ((one, 1), (every, None))]
        lines.append(
            {"effects": effects, "prompts": n, "false_deploy": false / simulations, "bound_99": float(bounds[0])}
            | {"power_one_arm": float(powers[0]), "power_all_arms": float(powers[1])}
            | {"wrongly_set_apart": apart / simulations, "apart_bound_99": float(bounds[1])}
            | {"holds": bool(max(bounds) <= MOST)}
        )
    return lines


def _beside_plain(factors):
    return np.concatenate([np.ones((*factors.shape[:2], 1)), factors], 2)


def _is_best_called_faster(sec, control, wanted=None):
    """Whether the arm that looks best is called faster than the control; and is the one wanted, where one is."""
    measured, pseudo = intervals.speedups(sec, np.ones_like(sec), control)
    others = [arm for arm in range(len(measured)) if arm != control]
    best = int(measured[others].argmax())
    low, _ = intervals.chosen(measured[others], pseudo[:, others])
    return bool(low[best] > 1) and wanted in (None, others[best])


def markdown(result):
    """The tables, from the result alone."""
    seeds, where = result["settings"]["seeds"], result["environment"]["processor"]
    parts = [
        "# How good are the tests of exactness?\n",
        "Written by `make exactness` from `exactness.json`; nothing is typed. "
        f"{seeds} seeds each, level {LEVEL}, commit {result['commit'][:7]}, {where}, "
        f"{result['seconds'] / 60:.0f} minutes.\n",
    ]
    for title, key in (
        ("Single tests: rejections in their binomial 99.9 % interval around the exact power", "single_tests"),
        (f"Named tests at the n of power {CERTAIN}: every seed rejected", "named_tests"),
        ("The battery: what is lossless passes", "batteries"),
        (f"The answer of a sweep: the best of {ARMS} arms at 1 and at {GAIN} times plain decoding's speed", "answers"),
    ):
        lines = result[key]
        parts.append(f"## {title}\n")
        parts.append("| " + " | ".join(name.replace("_", " ") for name in lines[0]) + " |")
        parts.append("|---" * len(lines[0]) + "|")
        parts += ["| " + " | ".join(_cell(value) for value in line.values()) + " |" for line in lines]
        parts.append("")
    run = result["answers_run"]
    parts.append(
        f"{SIMULATIONS:,} simulations a line (a quarter of them for power), noise of {NOISE:.0%} a row. Both bounds, "
        f"at 99 % after Clopper and Pearson, are to stay below {MOST}; the nominal level is 0.025. Commit "
        f"{run['commit'][:7]}, {run['seconds'] / 60:.0f} minutes.\n"
    )
    drawn = result["speed"]
    parts.append(
        f"{drawn['draws']:,} one-step draws through `rule.verify`, tested: {drawn['seconds']:.2f} s on {where}, "
        f"p = {drawn['p_value']:.2f}.\n"
    )
    return "\n".join(parts)


def _cell(value):
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=200, help="(default 200)")
    parser.add_argument("--only", choices=["answers"], help="measure this part again, and keep the rest of the result")
    parser.add_argument("--out", type=Path, default=PROJECT / "data" / "exactness")
    arguments = parser.parse_args()
    began, command = time.monotonic(), "python scripts/exactness.py"
    if arguments.only:
        result = json.loads((arguments.out / "exactness.json").read_text(encoding="utf-8"))
    else:
        result = {
            **results.header("specnb-exactness/1", command),
            "settings": {"seeds": arguments.seeds, "level": LEVEL, "family_level": FAMILY_LEVEL, "gamma": GAMMA},
            "single_tests": single_tests(arguments.seeds),
            "named_tests": named_tests(arguments.seeds),
            "batteries": batteries(arguments.seeds),
            "speed": speed(),
        }
        result["seconds"] = time.monotonic() - began
    began = time.monotonic()
    result["answers"] = answers()
    result["answers_run"] = {**results.came_to_be(command), "seconds": time.monotonic() - began}
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "exactness.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    (arguments.out / "README.md").write_text(markdown(result), encoding="utf-8")
    print(markdown(result))


if __name__ == "__main__":
    main()
