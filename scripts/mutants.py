"""Plant faults in a copy of the package and see which test notices; writes the table tests/MUTANTS.md.

A fault that no test notices is a hole in the tests, and this script then ends with an error.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# Fault, where it has been seen, file, what stands there (once), what is put in its place; then, where the core's tests
# do not notice it, the test files that do: "theory" stands for tests/test_theory.py.
MUTANTS = [
    (
        "target cache off by one",
        "transformers #47433 (the kind)",
        "sampler.py",
        "return num_accepted, emitted, len(row.committed) - (num_accepted < end)",
        "return num_accepted, emitted, len(row.committed) - (num_accepted < end) - 1",
    ),
    (
        "target cache keeps rejected drafts",
        "mlx-lm PR #1109",
        "sampler.py",
        "self.target.rollback([length for _, _, length in done])",
        "pass",
    ),
    (
        "end of sequence ignored",
        "transformers #47912",
        "sampler.py",
        "end = next((i + 1 for i, token in enumerate(emitted) if token in self.eos_ids), len(emitted))",
        "end = len(emitted)",
    ),
    (
        "end of sequence seen only as the last token",
        "transformers #47912",
        "sampler.py",
        "if token in self.eos_ids), len(emitted))",
        "if token in self.eos_ids and i == len(emitted) - 1), len(emitted))",
    ),
    (
        "draft cache not caught up",
        "vllm PR #9730",
        "drafters/model.py",
        "unseen = [prefix[length:] for",
        "unseen = [prefix[-1:] for",
    ),
    (
        "draft cache not rolled back",
        "vllm PR #26498 (the kind)",
        "drafters/model.py",
        "self.model.rollback([len(ids) - 1 for ids in committed])",
        "pass",
    ),
    (
        "processors at the first position only",
        "vllm #9834 (the kind)",
        "sampler.py",
        "[whole[:end] for end in range(len(row.committed), len(whole) + 1)]",
        "[whole[: len(row.committed)] for end in range(len(row.committed), len(whole) + 1)]",
    ),
    (
        "one uniform reused across positions",
        "feifeibear, local-inference-lab/vllm PR #209",
        "request.py",
        "torch.rand(count, dtype=torch.float64, generator=row.source, out=line[:count])",
        "line[:count] = torch.rand(1, dtype=torch.float64, generator=row.source)",
    ),
    (
        "accepted tokens counted beyond the first rejection",
        "vllm PR #2658",
        "rule/token.py",
        "accepted.long().cumprod(-1).sum(-1)",
        "accepted.long().sum(-1)",
    ),
    (
        "acceptance not strict",
        "a token of target probability 0 passes at u = 0",
        "rule/token.py",
        "* wide(draft_at, target_at) < wide",
        "* wide(draft_at, target_at) <= wide",
    ),
    (
        "recovered token from the target instead of the residual",
        "romsto skip_sample_adjustment",
        "rule/token.py",
        "torch.where((num_accepted < gamma)[..., None], recovered, weights)",
        "weights",
    ),
    (
        "residual without a fallback",
        "jaymody #5",
        "rule/token.py",
        "return torch.where(mass > 0, excess / mass, target)",
        "return excess / mass",
    ),
    (
        "recovered token from the last row",
        "romsto 53922df",
        "rule/token.py",
        "weights = row_at(target_probs, num_accepted)",
        "weights = target_probs[..., -1, :]",
    ),
    (
        "running sum in float32",
        "the tail of a large vocabulary bends",
        "rule/draws.py",
        'return torch.float32 if values.device.type == "mps" else torch.float64',
        "return torch.float32",
    ),
    (
        "temperature dropped on the draft's side",
        "z-lab/dflash #74",
        "drafters/model.py",
        "probs.append(sampling.probs(",
        "probs.append(type(sampling)().probs(",
    ),
    (
        "draft by argmax, probabilities of a softmax",
        "jaymody #3, transformers #32867",
        "drafters/model.py",
        "inverse_cdf(probs[-1], uniforms[:, i])",
        "probs[-1].argmax(-1)",
    ),
    (
        "block not clipped to what may be emitted",
        "feifeibear overshoots by up to gamma",
        "request.py",
        "room = [gamma, self.end - len(self.committed) - 1]",
        "room = [gamma]",
    ),
    (
        "block not clipped to the draft's context",
        "exllamav2 #274",
        "request.py",
        "room.append(context_length - len(self.committed) + 1)",
        "pass",
    ),
    (
        "prompt lookup matches its own suffix",
        "transformers PR #27775 (the kind)",
        "drafters/lookup.py",
        "range(len(ids) - size - 1, -1, -1)",
        "range(len(ids) - size, -1, -1)",
    ),
    (
        "last of several maxima wins",
        "ohdearquant/lattice #280",
        "probs.py",
        "top, first = scores.max(-1, keepdim=True)",
        "top, first = scores.flip(-1).max(-1, keepdim=True); first = scores.shape[-1] - 1 - first",
    ),
    (
        "every logit computed in the prefill",
        "transformers #30860",
        "models/cache.py",
        'options["logits_to_keep"] = num_logits',
        "pass",
    ),
    (
        "global random state read",
        "CASES 48",
        "request.py",
        "torch.rand(count, dtype=torch.float64, generator=row.source, out=line[:count])",
        "torch.rand(count, dtype=torch.float64, out=line[:count])",
    ),
    (
        "padding of a shorter block tested like a draft",
        "vllm-ascend #13608 (the kind)",
        "rule/token.py",
        "accepted &= torch.arange(gamma, device=accepted.device) < num_drafted[..., None]",
        "pass",
    ),
    (
        "a row's last uniform is its padding",
        "the kind of vllm #6034",
        "sampler.py",
        "uniforms[:, -1:] = uniforms.gather(-1, lengths[:, None])",
        "pass",
    ),
    (
        "padding written over a row's own cache",
        "left padding, the kind of CASES 30",
        "models/cache.py",
        "torch.where(real, positions, num_slots - 1), num_slots",
        "before + offset.clamp(min=0), num_slots",
    ),
    (
        "rejected drafts stay visible in a batch",
        "mlx-lm PR #1109 (the kind)",
        "models/cache.py",
        "<= positions[..., None]",
        "<= positions.amax()",
    ),
    (
        "keys written one slot early",
        "transformers #47433 (the kind)",
        "models/cache.py",
        "stored[:, :, self.lengths[0] : self.num_slots] = new",
        "stored[:, :, max(self.lengths[0] - 1, 0) : self.num_slots - (self.lengths[0] > 0)] = new",
    ),
    (
        "a batch keeps the wrong rows",
        "the kind of vllm #11123",
        "models/cache.py",
        "layer.keys, layer.values = layer.keys[rows], layer.values[rows]",
        "layer.keys, layer.values = layer.keys[: len(rows)], layer.values[: len(rows)]",
    ),
    (
        "a stale run goes on in another run's cache",
        "CASES 74",
        "sampler.py",
        "if self._owners() != self._ours:",
        "if False:",
    ),
    (
        "a part of a drafter that another run has taken is not noticed",
        "the kind of CASES 74",
        "drafters/first_of.py",
        "return tuple(drafter.run for drafter in self.drafters)",
        "return None",
    ),
    (
        "a model is asked about the padding behind a shorter block",
        "CASES 76",
        "sampler.py",
        'asked["num_behind"] = [longest - num for num in draft.num_drafted]',
        "num_new = [new + longest - num for new, num in zip(num_new, draft.num_drafted, strict=True)]",
    ),
    (
        "a row that is done drafts on in the draft's cache",
        "the kind of CASES 76",
        "drafters/model.py",
        "num_new = [int(num > i + 1) for num in num_drafted]",
        "num_new = [int(max(num_drafted) > i + 1)] * len(num_drafted)",
    ),
    (
        "a run's peak memory holds the caches of the run before",
        "found by use",
        "sampler.py",
        "        self.target.reset(len(self.rows))\n",
        "        reset_peak_memory(self.device)\n        self.target.reset(len(self.rows))\n",
    ),
    (
        "the sum of an expanded row is that of its first entry",
        "CASES 75",
        "rule/checks.py",
        "in probs.stride()[:-1])]",
        "in probs.stride())]",
    ),
    (
        "a verify cost that is missing is not named",
        "CASES, fault 9",
        "theory.py",
        "    if cost is None:\n",
        "    if False:\n",
        "theory",
    ),
    (
        "an option of generate() is known by how it begins",
        "the kind of transformers #45865",
        "audit/settings.py",
        "if name not in HARMLESS and name not in UNTOLD",
        "if not name.startswith(tuple(name[:4] for name in HARMLESS)) and name not in UNTOLD",
        "audit",
    ),
    (
        "a second --draft of generate is dropped",
        "found by use",
        "cli/generate.py",
        "if len(draft or ()) > 1:",
        "if False:",
        "cli",
    ),
    (
        "a prompt file is read whole for its first three lines",
        "found by use",
        "measure/prompts.py",
        "in islice(json_lines(path), limit):",
        "in islice([*json_lines(path)], limit):",
        "prompts",
    ),
    (
        "an assistant's last message is rendered as if it were asked",
        "found by use",
        "measure/prompts.py",
        """if messages[-1]["role"] == "assistant":""",
        "if False:",
        "prompts",
    ),
    (
        "a chat template drops a message without a word",
        "templates that know only user and assistant",
        "measure/chat.py",
        """        if message["content"] not in with_marks:""",
        "        if False:",
        "prompts",
    ),
    (
        "what a tokenizer cannot represent is left out of a prompt",
        "tokenizers without a token for unknown",
        "measure/chat.py",
        "    if lost:",
        "    if unknown in ids and lost:",
        "prompts",
    ),
    (
        "U+2028 inside a text ends a line of JSON",
        "str.splitlines",
        "measure/json_lines.py",
        "for line in block.splitlines():",
        "for line in map(str.encode, block.decode(errors='replace').splitlines()):",
        "prompts",
    ),
    (
        "a sweep writes where committed results are kept",
        "found by use",
        "measure/results.py",
        """PROJECT / "data" / "own\"""",
        """PROJECT / "data\"""",
        "packaging",
    ),
    (
        "an installed package quotes the commit of the repository it lies in",
        "found by use",
        "measure/results.py",
        "        if SHIPPED.exists():",
        "        if False:",
        "packaging",
    ),
    (
        "errors inside a library are reported as bad input",
        "found by use",
        "cli/app.py",
        "    return raised_here and",
        "    return",
        "cli",
    ),
    (
        "a list of pairs passes for a JSON object",
        "found by use",
        "cli/parts.py",
        "if not isinstance(found, dict):",
        "if not isinstance(found, (dict, list)):",
        "cli",
    ),
    ("a run goes on with other GPUs", "found by use", "measure/unfinished.py", '"gpus": gpus,', '"gpus": [],'),
    (
        "a line that was cut short is appended to",
        "found by use (the kind)",
        "measure/unfinished.py",
        "os.truncate(self.partial, end)",
        "None",
    ),
    ("two runs write one file", "CASES 78", "measure/unfinished.py", "self._lock.acquire()", "None"),
    (
        "a header is written before anything was measured",
        "CASES 78",
        "measure/unfinished.py",
        "        return self\n\n    def __exit__",
        "        self.begin()\n        return self\n\n    def __exit__",
    ),
    (
        "a text file is written in the locale's encoding",
        "CASES 81",
        "measure/results.py",
        'open(scratch, "w", encoding="utf-8", newline="\\n")',
        'open(scratch, "w", newline="\\n")',
        "unfinished",
    ),
    (
        "a finished result is replaced unasked",
        "CASES 78",
        "measure/unfinished.py",
        "if self.out.exists() and not self._replace:",
        "if False:",
    ),
    (
        "the figure overwrites the result",
        "CASES 79",
        "measure/results.py",
        "if _real(path) in taken:",
        "if False:",
        "unfinished",
    ),
    (
        "events of the current GPU instead of the model's",
        "found by use",
        "timing.py",
        "event.record(torch.cuda.current_stream(device))",
        "event.record(torch.cuda.current_stream())",
    ),
    (
        "waiting for the current GPU instead of the model's",
        "found by use",
        "timing.py",
        "torch.cuda.synchronize(device)",
        "torch.cuda.synchronize()",
    ),
    (
        "peak memory of GPUs that hold no part of the model",
        "found by use",
        "timing.py",
        'if weights.device.type == "cuda"}',
        'if weights.device.type == "cuda"} | {torch.device("cuda:0")}',
    ),
    (
        "GPUs are looked at that this process may not use",
        "found by use",
        "timing.py",
        'os.environ.get("CUDA_VISIBLE_DEVICES")',
        "None",
    ),
    (
        "a resting drafter's cache counts in a row's peak",
        "found by use",
        "measure/sweep.py",
        "        drafter.begin(1)  #",
        "        pass  #",
        "sweep",
    ),
    (
        "a time limit that begins again with every read",
        "found by use (CASES K 69)",
        "serving/stream.py",
        "async with asyncio.timeout(seconds), client.stream(",
        "async with asyncio.timeout(None), client.stream(",
        "serve_bench",
    ),
    (
        "metrics waited for without a limit",
        "found by use (CASES K 69, the kind)",
        "serving/metrics.py",
        "async with asyncio.timeout(seconds):",
        "async with asyncio.timeout(None):",
        "serve_bench",
    ),
    (
        "thoughts of a model not counted as its first tokens",
        "found by use (CASES K 68)",
        "serving/stream.py",
        "if content or thought or any(",
        "if content or any(",
        "serve_bench",
    ),
    (
        "tokens thought in silence spread over the answer",
        "found by use (CASES K 68, the kind)",
        "serving/stream.py",
        "hidden = 0 if self.has_thought else thought",
        "hidden = 0",
        "serve_bench",
    ),
    (
        "an error in the middle of a stream taken for a success",
        "found by use (CASES K 68, 83)",
        "serving/stream.py",
        'if chunk.get("error") or "error" in (event.event, chunk.get("object")):',
        "if False:",
        "serve_bench",
    ),
    (
        "counters that were reset taken for growth",
        "found by use (CASES K 83)",
        "serving/metrics.py",
        "if not 0 <= more < math.inf:",
        "if more is None:",
        "serve_bench",
    ),
    (
        "SGLang's bonus token counted as accepted",
        "found by use (CASES K 83)",
        "serving/load.py",
        "length - 1 if length else None",
        "length if length else None",
        "serve_bench",
    ),
    (
        "options of a request sent, but overruled",
        "found by use (CASES K 83)",
        "serving/client.py",
        "{**fields, **(options or {})}.items()",
        "{**(options or {}), **fields}.items()",
        "serving_audit",
    ),
    (
        "a key repeated by the server kept in the result",
        "found by use (CASES K 83)",
        "serving/client.py",
        'return text.replace(key, "***") if key else text',
        "return text",
        "serving_audit",
    ),
    (
        "a level that is no probability noticed after the last request",
        "found by use (CASES K 83)",
        "serving/audit.py",
        "if not 0 < level < 1:",
        "if False:",
        "serving_audit",
    ),
    (
        "one busy moment of a server loses an audit",
        "found by use (CASES K 83)",
        "serving/audit.py",
        "for wait_sec in WAITS_SEC:",
        "for wait_sec in ():",
        "serving_audit",
    ),
    (
        "an audit that compares the first tokens of blocks",
        "found by use (CASES K 72)",
        "serving/audit.py",
        "if not all(one.lists_all(limit) for arm",
        "if not all(one.tokens for arm",
        "serving_audit",
    ),
    (
        "an audit that compares ids with words",
        "found by use (CASES K 72, the kind)",
        "serving/audit.py",
        "return {text for text, _ in shared} == texts[0] & texts[1]",
        "return True",
        "serving_audit",
    ),
    (
        "a target's scaled logits left out of the soft targets",
        "CASES 86",
        "../scripts/distill.py",
        "return model(input_ids=ids, use_cache=False).logits",
        "return model.get_output_embeddings()(hidden)",
        "distill",
    ),
    (
        "the best of many arms is judged as if it had been the only one",
        "CASES 73",
        "measure/intervals.py",
        "largest = (means / _pooled(variances)).max(1)",
        "largest = (means / _pooled(variances))[:, 0]",
        "answer",
    ),
    (
        "not to deploy is the answer where one arm might still be worth it",
        "found by use",
        "measure/answer.py",
        "if all(top is not None and top < worth for top in tops)",
        "if any(top is not None and top < worth for top in tops)",
        "answer",
    ),
    (
        "prompts that chose an arm confirm it",
        "found by use (the kind)",
        "measure/answer.py",
        " & ~confirm.prompt_id.isin(part.prompt_id)]",
        "]",
        "answer",
    ),
    (
        "one batch size without results loses the whole report",
        "CASES 67",
        "measure/concurrency.py",
        """if row["status"] == "ok" and row.get("phase", "choose") == "choose"]""",
        """if row.get("phase", "choose") == "choose"]""",
        "answer",
    ),
    (
        "a damaged result of a sweep is read",
        "CASES 80",
        "measure/summary.py",
        "    check_sweep(path, result)\n",
        "",
        "answer",
    ),
    (
        "the chosen arm is measured again on nothing but itself",
        "found by use (the kind)",
        "measure/plan.py",
        "for drafter, gamma in ((None, 0), arm)",
        "for drafter, gamma in (arm,)",
        "sweep",
    ),
    (
        "position scaling that changes with the length goes unnoticed",
        "CASES 65",
        "models/checks.py",
        'if kind == "longrope":',
        "if False:",
        "checks",
    ),
    (
        "a model that forgets its context is accepted",
        "CASES 66",
        "models/checks.py",
        "        if share:\n            raise",
        "        if False:\n            raise",
        "checks",
    ),
    (
        "rows that depend on their neighbours share a batch",
        "CASES 66 (the kind)",
        "models/causal.py",
        "if batch > 1 and self.batch_refusal:",
        "if False:",
        "checks",
    ),
    (
        "a check that never reaches beyond a window",
        "CASES 87 (the kind)",
        "models/checks.py",
        'n = 6 + min(getattr(config, "window_size", None) or 0, 1024)',
        "n = 6",
        "architectures",
    ),
    (
        "a window as long as the context is refused",
        "CASES 87",
        "models/cache.py",
        "min(windows) < context_length",
        "min(windows) <= context_length",
        "checks",
    ),
    (
        "a hole in a checkpoint is filled with random numbers",
        "CASES 85",
        "models/loading.py",
        "        if keys:\n",
        "        if False:\n",
        "models",
    ),
    (
        "a missing library is a traceback",
        "CASES 84",
        "models/loading.py",
        "except ImportError as error:",
        "except ZeroDivisionError as error:",
        "models",
    ),
    (
        "keys and values are taken to be of one size",
        "CASES 70 (the kind)",
        "measure/memory.py",
        "keys.shape[1] * (keys.shape[3] + values.shape[3])",
        "keys.shape[1] * 2 * keys.shape[3]",
        "memory",
    ),
    (
        "weights are hashed at each call",
        "a description reads 270 MB",
        "models/causal.py",
        "@cached_property",
        "@property",
        "models",
    ),
]

CORE_TESTS = ("properties", "rule", "probs", "models", "drafters", "sampler", "batch", "cases")


def first_failure(name, old, new, tests=()):
    """Name of the first test that fails with the fault planted, None where all pass."""
    with tempfile.TemporaryDirectory() as folder:
        for part in ("specnb", "tests", "data", "scripts", "pyproject.toml", "setup.py", "README.md", "LICENSE"):
            source = ROOT / part
            (shutil.copytree if source.is_dir() else shutil.copy)(source, Path(folder) / part)
        path = Path(folder) / "specnb" / name
        source = path.read_text(encoding="utf-8")
        if source.count(old) != 1:
            raise SystemExit(f"{name} holds {old!r} {source.count(old)} times instead of once; mend scripts/mutants.py")
        path.write_text(source.replace(old, new), encoding="utf-8")
        # The tests of the file's own room come first, after those the entry names: they should be the ones that notice.
        own = [part for part in Path(name).with_suffix("").parts if (ROOT / "tests" / f"test_{part}.py").exists()]
        names = dict.fromkeys([*tests, *own, *(() if tests else CORE_TESTS)])
        tests = [f"tests/test_{part}.py" for part in names]
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not model", *tests]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        found = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.M)
        return found and found[1].split("::", 1)[-1].split("[")[0]


def main():
    lines, missed = [], 0
    for fault, seen, name, old, new, *tests in MUTANTS:
        test = first_failure(name, old, new, tests)
        missed += test is None
        lines.append(f"| {fault} | {seen} | `{name}` | {f'`{test}`' if test else '**none**'} |")
        print(f"{fault}: {test or 'NOT NOTICED'}", flush=True)
    text = "\n".join(
        [
            "# Planted faults",
            "",
            "Each fault was planted in a copy of the package; the first test that failed is named. `make mutants`",
            "writes this table.",
            "",
            "| fault | seen in | file | first test that fails |",
            "|---|---|---|---|",
            *lines,
        ]
    )
    (ROOT / "tests" / "MUTANTS.md").write_text(text + "\n", encoding="utf-8")
    sys.exit(f"{missed} planted faults were not noticed" if missed else 0)


if __name__ == "__main__":
    main()
