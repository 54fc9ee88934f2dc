"""Make a draft model for a chat target, from nothing but the target itself: `make draft`.

Four steps, each resumable. All that is not yet the draft is kept in a work folder outside the project; the draft goes
to data/own/, where what a user makes is kept.

1. synthesise  the target writes conversations from its own chat template; with every token its last hidden state is
               kept, from which its probabilities over any part of the vocabulary are one matrix product away
2. train       a few of its layers, with its embedding (shared, frozen) and its output rows of the most frequent tokens
               (frozen), on its probabilities (soft targets); acceptance on held-out text is logged beside the loss
3. evaluate    a sweep of the draft alone: acceptance by kind of prompt and position in the block, cost of a step
4. card        the model card and the figure of the training, from the files of the steps before
"""

import argparse
import hashlib
import json
import math
import multiprocessing
import os
import shlex
import shutil
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from rich.progress import track
from safetensors.torch import load_file, save_file

from specnb.cli.smollm2 import fetch
from specnb.drafters import ModelDrafter
from specnb.drafters.pruned import PrunedLM, load_draft, made_for, save_draft
from specnb.measure import results, sweep
from specnb.measure.prompts import load_prompts
from specnb.measure.unfinished import Unfinished
from specnb.models import CausalLM, default_dtype, default_target
from specnb.models.cache import cache_argument
from specnb.models.places import PROJECT, cache_folder, file_sha256
from specnb.request import check_prompt
from specnb.rule import inverse_cdf
from specnb.timing import environment

HELD_OUT_EVERY = 16  # Of so many shards of text one is never trained on.
OVERLAP_WEIGHT = 0.9  # Share of total variation in the loss at the end of the training.
LENGTH = 256  # Tokens that are written in a row, behind the beginning it is given.


# ---------------------------------------------------------------------------------------------- 0. check


def check(target, layers):
    """Refuse a target that one of the steps could not work with, before the first of them begins."""
    if target.tokenizer is None:
        raise ValueError(f"{target.name} has no tokenizer, and without one it cannot write conversations")
    PrunedLM(target, layers, sorted(target.eos_ids) or [0])
    prefix = max((open_turn(target.tokenizer, opening) for opening in ("", *OPENINGS)), key=len)
    if target.context_length is not None and len(prefix) + LENGTH > target.context_length:
        raise ValueError(
            f"{target.name} reads {target.context_length} tokens, and a row of its text has {len(prefix) + LENGTH}; "
            "take a target with a longer context"
        )
    for prompt in load_prompts():  # The draft is evaluated on them, hours later.
        check_prompt(prompt.encode(target.tokenizer), target, prompt.max_new_tokens)
    text = write_text(target.model, prefix, rows=2, length=2, seed=0, vocab_size=target.vocab_size)
    target.reset()
    usual = target.forward(text["ids"][:1, :-1].long(), num_logits=2).logits[0]
    ours = own_logits(target.model, text["hidden"][:1].to(target.device))[0, :, : target.vocab_size]
    overlap = mean_overlap(*(logits.float().log_softmax(-1) for logits in (usual, ours)))
    if not overlap > 0.95:
        raise ValueError(
            f"{target.name} gives other probabilities when it writes text than in an ordinary forward (they overlap by "
            f"{overlap:.2f}); a draft cannot be made for it here"
        )


def own_logits(model, hidden):
    """What the model's own forward makes of last hidden states `(batch, n, width)`: its head, scaled and capped."""
    from transformers.modeling_outputs import BaseModelOutputWithPast

    ids = torch.zeros(hidden.shape[:2], dtype=torch.long, device=hidden.device)
    made = BaseModelOutputWithPast(last_hidden_state=hidden)
    with mock.patch.object(model.base_model, "forward", lambda *_, **__: made):
        return model(input_ids=ids, use_cache=False).logits


# ---------------------------------------------------------------------------------------------- 1. synthesise

# How user turns begin: half of the shards leave it to the target, the others ask for the kinds of work that chat
# models are given. None is a prompt of data/prompts.jsonl, on which drafts are evaluated.
OPENINGS = (
    "Summarize the following text.\n\n",
    "Write a Python function that",
    "Rewrite the following paragraph",
    "Translate the following",
    "Answer the question using the passage.\n\nPassage:",
    "Extract the",
    "Can you",
    "Here is a",
    "How",
    "What",
    "Write a",
    "I",
)


def opening_of(shard):
    return "" if shard % 2 == 0 else OPENINGS[shard // 2 % len(OPENINGS)]


def open_turn(tokenizer, opening):
    """Ids of a chat up to a user turn that has begun with `opening`."""
    mark = "\N{SYMBOL FOR NULL}"
    try:
        text = tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False)
    except Exception as error:  # A template is a program of somebody else, which may fail in any way.
        raise ValueError(f"the target's chat template takes no user turn: {' '.join(str(error).split())}") from error
    before, found, _ = text.partition(mark)
    if not found:
        raise ValueError("the target's chat template leaves out or changes what the user says")
    return tokenizer(before + opening, add_special_tokens=False)["input_ids"]


def grouped_attention(module, query, key, value, attention_mask, scaling=None, filled=None, **options):
    """Attention over the filled part of a static cache, without copying keys for each query head of their group."""
    if options.get("softcap") or options.get("sliding_window"):
        raise ValueError(f"{type(module).__name__} has soft-capped or windowed attention; that is not supported here")
    batch, heads, length, width = query.shape
    groups = key.shape[1]
    key, value = key[:, :, :filled], value[:, :, :filled]
    attend = F.scaled_dot_product_attention
    if length == 1:
        query = query.view(batch, groups, heads // groups, width)
        read = attend(query, key, value, scale=scaling).view(batch, heads, 1, width)
    else:
        read = attend(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    return read.transpose(1, 2).contiguous(), None


@torch.no_grad()
def write_text(model, prefix_ids, *, rows, length, seed, vocab_size=None):
    """Sample `rows` continuations of `length` tokens, at temperatures from .5 to 1, among the first `vocab_size` ids.

    Returns
    -------
    dict of Tensor
        ids (rows, prefix + length) int32; hidden (rows, length, width): the state from which each new token was drawn;
        log_total (rows, length) float32: log of the sum of exp(logits) at temperature 1, over the whole vocabulary,
        of the logits that the target's own forward gives (see `own_logits`);
        seconds: how long it took.
    """
    from transformers import AttentionInterface, StaticCache

    AttentionInterface.register("grouped", grouped_attention)
    usual = model.config._attn_implementation
    began, device = time.monotonic(), model.device
    temperatures = torch.linspace(0.5, 1, rows, device=device)[:, None]
    generator = torch.Generator().manual_seed(seed)
    uniforms = torch.rand(length, rows, dtype=torch.float64, generator=generator).to(device)
    ids = torch.tensor([prefix_ids], device=device).expand(rows, -1)
    cache = StaticCache(config=model.config, max_cache_len=ids.shape[1] + length)
    argument = cache_argument(model.base_model)
    new, hidden, log_total = ids, [], []
    model.set_attn_implementation("grouped")
    try:
        for step in range(length):
            state = model.base_model(input_ids=new, use_cache=True, filled=ids.shape[1], **{argument: cache})
            hidden.append(state.last_hidden_state[:, -1])
            logits = own_logits(model, hidden[-1][:, None])[:, 0, :vocab_size].float()  # (rows, vocab)
            log_total.append(logits.logsumexp(-1))
            new = inverse_cdf((logits / temperatures).softmax(-1), uniforms[step])[:, None]
            ids = torch.cat([ids, new], -1)
    finally:
        model.set_attn_implementation(usual)
    return {
        "seconds": torch.tensor(time.monotonic() - began),
        "ids": ids.int().cpu(),
        "hidden": torch.stack(hidden, 1).cpu(),
        "log_total": torch.stack(log_total, 1).cpu(),
    }


def shard_file(folder, shard):
    return folder / f"text-{shard:05}.safetensors"


def synthesise_shards(target, folder, shards, rows, length, seed, dtype):
    """One worker: every shard of `shards` that is not there yet, each with its own seed."""
    torch.set_num_threads(1 if not torch.cuda.is_available() else torch.get_num_threads())
    missing = [shard for shard in shards if not shard_file(folder, shard).exists()]
    if not missing:
        return
    lm = CausalLM.from_pretrained(target, dtype=dtype)
    for shard in missing:
        prefix = open_turn(lm.tokenizer, opening_of(shard))
        tensors = write_text(
            lm.model, prefix, rows=rows, length=length, seed=seed * 1_000_003 + shard, vocab_size=lm.vocab_size
        )
        scratch = folder / f".text-{shard:05}.{os.getpid()}"
        save_file(tensors, scratch)
        os.replace(scratch, shard_file(folder, shard))


@contextmanager
def kept(out, kind, made, **settings):
    """What a step keeps in the work folder, so that a later call with these settings on such a machine goes on with it.

    `made` is a pattern of the files which the step makes beside it.
    """
    header = {"schema": f"specnb-{kind}/1", "environment": environment(), "settings": settings}
    way_out = "give another --work, or remove that folder"
    with Unfinished(out, header, way_out=way_out) as unfinished:
        if not unfinished.partial.exists() and (found := sorted(out.parent.glob(made))):
            raise ValueError(f"{found[0]} is of an unknown run; {way_out}")
        unfinished.begin()
        yield unfinished


def synthesise(target, folder, *, tokens, rows=96, length=LENGTH, seed=0, dtype=None, workers=None):
    """At least `tokens` tokens of the target's own text, in shards of rows x length; a killed run goes on."""
    settings = {"target": Path(target).name, "rows": rows, "length": length, "seed": seed}
    with kept(folder / "text", "text", "text-*.safetensors", **settings):
        workers = workers or (1 if torch.cuda.is_available() else os.cpu_count())
        shards = range(-(-tokens // (rows * length)))
        context = multiprocessing.get_context("spawn")
        processes = [
            context.Process(
                target=synthesise_shards,
                args=(target, folder, shards[w::workers], rows, length, seed, dtype),
                daemon=True,
            )
            for w in range(workers)
        ]
        for process in processes:
            process.start()
        for shard in track(shards, description="text"):
            while not shard_file(folder, shard).exists():
                if all(not p.is_alive() for p in processes) and not shard_file(folder, shard).exists():
                    raise RuntimeError(
                        f"no worker is left and {shard_file(folder, shard).name} is missing; see the error above"
                    )
                processes[0].join(timeout=1)
        for process in processes:
            process.join()


# ---------------------------------------------------------------------------------------------- 2. train


def load_text(folder):
    """(shards to train on, shards held out): every `HELD_OUT_EVERY`-th shard is never trained on."""
    files = sorted(folder.glob("text-*.safetensors"))
    if len(files) < 2:
        raise ValueError(f"{folder} holds {len(files)} shards of text; synthesise first, at least two")
    held_out = files[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY] or files[-1:]
    return [load_file(f) for f in files if f not in held_out], [load_file(f) for f in held_out]


def frequent_ids(shards, size, always=()):
    """The `size` most frequent ids of the text, ascending, and the share of the text they cover."""
    written = torch.cat([shard["ids"][:, -shard["hidden"].shape[1] :].flatten() for shard in shards]).long()
    counts = torch.bincount(written, minlength=max(always, default=0) + 1)
    ranked = counts.float()
    ranked[list(always)] = torch.inf
    ids = ranked.argsort(descending=True, stable=True)[:size].sort().values
    return ids, counts[ids].sum().item() / len(written)


def soft_target_loss(draft_logits, target_logits, log_total, overlap_weight):
    """Mean loss over positions, and the mean of sum min(p, q), which is the draft's acceptance at temperature 1.

    Parameters
    ----------
    draft_logits, target_logits : Tensor of shape `(n, num_output_ids)`, both over the draft's ids only
    log_total : Tensor of shape `(n,)`
        Log of the target's normaliser over its whole vocabulary: p sums to less than 1 over the draft's ids.
    overlap_weight : float in [0, 1]
        0: Kullback-Leibler divergence (Hinton et al. 2015). 1: total variation, 1 - sum min(p, q), which is what
        acceptance pays for; its gradient is poor while the draft is far off (Zhou et al. 2023, DistillSpec). Two
        thirds of it are taken at temperature 1, one at temperature 1/2, nearer to what greedy decoding pays for.
    """
    log_target, log_draft = log_probs(draft_logits, target_logits, log_total)
    target_probs, overlap = log_target.exp(), mean_overlap(log_target, log_draft)
    divergence = (target_probs * (log_target - log_draft)).sum(-1).mean()
    sharp = mean_overlap((2 * log_target).log_softmax(-1), (2 * log_draft).log_softmax(-1))
    return (1 - overlap_weight) * divergence + overlap_weight * (1 - (2 * overlap + sharp) / 3), overlap.detach()


def log_probs(draft_logits, target_logits, log_total):
    """Of target and draft, over the draft's ids."""
    return target_logits.float() - log_total[:, None], draft_logits.float().log_softmax(-1)


def mean_overlap(log_target, log_draft):
    """Mean over positions of sum min(p, q)."""
    return torch.minimum(log_target.exp(), log_draft.exp()).sum(-1).mean()


def positions(model, shard, rows):
    """Hidden states `(n, width)` of draft and target, and `log_total (n,)`, for every written token of some rows."""
    ids, length = shard["ids"][rows].long(), shard["hidden"].shape[1]
    device = model.device
    read = model.base_model(input_ids=ids[:, :-1].to(device), use_cache=False).last_hidden_state[:, -length:]
    return (
        read.flatten(0, 1),
        shard["hidden"][rows].flatten(0, 1).to(device),
        shard["log_total"][rows].flatten().to(device),
    )


def batches(shards, rows, seed, epoch):
    """One pass over the text in random order: (shard, row indices), rows of one shard together."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    chunks = [
        (shard, chunk)
        for shard, tensors in enumerate(shards)
        for chunk in torch.randperm(len(tensors["ids"]), generator=generator).split(rows)
    ]
    return [chunks[i] for i in torch.randperm(len(chunks), generator=generator)]


def batch_at(shards, rows, seed, step):
    per_epoch = sum(-(-len(s["ids"]) // rows) for s in shards)
    return batches(shards, rows, seed, step // per_epoch)[step % per_epoch]


def step_on(model, shard, rows, overlap_weight, chunk=256):
    """Forward and backward over one batch; the logits are made and let go in chunks of positions.

    The draft's head has the target's own rows, so it gives the target's logits of the target's hidden states.
    """
    hidden, theirs, log_total = positions(model, shard, rows)
    leaf = hidden.detach().requires_grad_()
    loss = overlap = 0.0
    for part, part_theirs, part_total in zip(
        leaf.split(chunk), theirs.split(chunk), log_total.split(chunk), strict=True
    ):
        share = len(part) / len(leaf)
        with torch.no_grad():
            target_logits = own_logits(model, part_theirs[None])[0]
        draft_logits = own_logits(model, part[None])[0]
        part_loss, part_overlap = soft_target_loss(draft_logits, target_logits, part_total, overlap_weight)
        (part_loss * share).backward()
        loss, overlap = loss + part_loss.item() * share, overlap + part_overlap.item() * share
    hidden.backward(leaf.grad)
    return loss, overlap


@torch.no_grad()
def held_out_overlap(model, shards, rows=16, every=3, chunk=1024):
    """Mean of sum min(p, q) over text never trained on: alpha at temperature 1, along the target's own path.

    Every third row is read: of each temperature its share.
    """
    overlap = num = 0
    for shard in shards:
        for chosen in torch.arange(0, len(shard["ids"]), every).split(rows):
            for ours, theirs, total in zip(*(x.split(chunk) for x in positions(model, shard, chosen)), strict=True):
                found = mean_overlap(*log_probs(*(own_logits(model, x[None])[0] for x in (ours, theirs)), total))
                overlap, num = overlap + found.item() * len(ours), num + len(ours)
    return overlap / num


def learning_rate(step, steps, peak, warm_up=50):
    """Linear warm-up, then half a cosine down to a twentieth."""
    if step < warm_up:
        return peak * (step + 1) / warm_up
    done = (step - warm_up) / max(steps - warm_up, 1)
    return peak * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done)))


def train(
    draft, text, work, *,
    tokens, rows=16, peak=1.5e-3, seed=0, log_every=20, evaluate_every=100, bfloat16=None, track=iter,
):  # fmt: skip
    """Train the layers and the norm of a `PrunedLM` in place; a killed run goes on from its last checkpoint.

    Parameters
    ----------
    draft : PrunedLM
    text : (list of shards, list of held-out shards), from `load_text`
    work : path
        For `checkpoint.safetensors`, `training.partial` and, at the end, `training.jsonl`.
    tokens : int
        Written tokens to train on, passes over the same text counted each time.
    bfloat16 : bool, optional
        Multiply in bfloat16 (autocast, and Muon, which knows no other dtype); else all is float32, with AdamW.
        Default: where it is fast. A processor without it takes tens of times as long for a step of Muon.
    track : callable
        Wraps the steps, such as `rich.progress.track`. In a notebook its bar is a widget that sends some forty
        messages a second, and a front end that reads them only after the cell, as nbval does, loses the last.
    """
    shards, held_out = text
    bfloat16 = default_dtype(draft.device) is torch.bfloat16 if bfloat16 is None else bfloat16
    trained = trainable(draft)
    optimizers = optimizers_of(trained, peak, bfloat16)
    per_step = rows * shards[0]["hidden"].shape[1]
    steps = -(-tokens // per_step)
    settings = {"layers": draft.kept_layers, "num_shards": len(shards), "tokens": tokens, "rows": rows, "peak": peak}
    settings |= {
        "bfloat16": bfloat16,
        "seed": seed,
        "output_ids": hashlib.sha256(draft.output_ids.cpu().numpy().tobytes()).hexdigest(),
    }
    checkpoint = work / "checkpoint.safetensors"
    with kept(work / "training", "training", checkpoint.name, **settings) as unfinished:
        first, seconds = restore(checkpoint, optimizers, trained)
        began = time.monotonic() - seconds
        for step in track(range(first, steps)):
            for optimizer in optimizers:
                optimizer.param_groups[0]["lr"] = learning_rate(step, steps, optimizer.defaults["lr"])
            shard, chosen = batch_at(shards, rows, seed, step)
            with torch.autocast(draft.device.type, torch.bfloat16, enabled=bfloat16):
                loss, overlap = step_on(draft.model, shards[shard], chosen, overlap_weight(step, steps))
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            line = {"step": step + 1, "tokens": (step + 1) * per_step, "loss": loss, "overlap": overlap}
            done = step + 1 == steps
            if done or (step + 1) % evaluate_every == 0:
                with torch.autocast(draft.device.type, torch.bfloat16, enabled=bfloat16):
                    line["held_out_overlap"] = held_out_overlap(draft.model, held_out)
            if done or (step + 1) % log_every == 0:
                unfinished.append({**line, "seconds": round(time.monotonic() - began, 1)})
            if done or (step + 1) % evaluate_every == 0:
                keep(checkpoint, optimizers, trained, step + 1, time.monotonic() - began)
        # Steps after a checkpoint are done again when a killed run goes on: the last line of each step counts.
        log = {line["step"]: line for line in unfinished.entries}.values()
        results.write_text(work / "training.jsonl", "".join(json.dumps(line) + "\n" for line in log))


def trainable(draft):
    """The parameters that are trained, in float32: those of the layers and the norm; all others are frozen."""
    base = draft.model.base_model
    for parameter in draft.model.parameters():
        parameter.requires_grad_(False)
    base.layers.float(), base.norm.float()
    trained = [*base.layers.parameters(), *base.norm.parameters()]
    for parameter in trained:
        parameter.requires_grad_(True)
    return trained


def overlap_weight(step, steps):
    """Divergence first, total variation at the end."""
    return min(max(2 * step / steps - 0.5, 0.0), OVERLAP_WEIGHT)


def optimizers_of(trained, peak, bfloat16):
    """Muon (Jordan et al. 2024) for the matrices, its steps scaled to the size of AdamW's, and AdamW for the norms.

    Without bfloat16, in which Muon multiplies, AdamW for all.
    """
    matrices = [parameter for parameter in trained if bfloat16 and parameter.ndim == 2]
    others = [parameter for parameter in trained if not bfloat16 or parameter.ndim != 2]
    optimizers = [torch.optim.AdamW(others, lr=peak, betas=(0.9, 0.95), weight_decay=0.01)]
    if matrices:
        optimizers.append(torch.optim.Muon(matrices, lr=3 * peak, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"))
    return optimizers


def keep(checkpoint, optimizers, trained, step, seconds):
    tensors = {"step": torch.tensor(step), "seconds": torch.tensor(seconds)}
    for i, parameter in enumerate(trained):
        tensors[f"{i}.weight"] = parameter.detach().contiguous()
        for optimizer in optimizers:
            tensors |= {f"{i}.state.{name}": value for name, value in optimizer.state.get(parameter, {}).items()}
    scratch = checkpoint.with_name(checkpoint.name + ".writing")
    save_file(tensors, scratch)
    os.replace(scratch, checkpoint)


def restore(checkpoint, optimizers, trained):
    """Step and seconds of the last checkpoint, (0, 0) without one."""
    if not checkpoint.exists():
        return 0, 0.0
    tensors = load_file(checkpoint)
    step = int(tensors["step"])
    owner = {parameter: optimizer for optimizer in optimizers for parameter in optimizer.param_groups[0]["params"]}
    for i, parameter in enumerate(trained):
        parameter.data.copy_(tensors[f"{i}.weight"])
        start = f"{i}.state."
        state = {name.removeprefix(start): value for name, value in tensors.items() if name.startswith(start)}
        owner[parameter].state[parameter] = {
            name: value if name == "step" else value.to(parameter.device) for name, value in state.items()
        }
    return step, float(tensors["seconds"])


# ---------------------------------------------------------------------------------------------- 3. evaluate


def evaluate(target, draft, out, *, gamma=4, max_new_tokens=64, seed=0):
    """A sweep of the draft alone at one gamma, on prompts never trained on, beside plain decoding; its result file."""
    return sweep.run(
        target,
        {draft.name: ModelDrafter(draft)},
        load_prompts(),
        out=out,
        gammas=[gamma],
        temperatures=[0.0, 1.0],
        max_new_tokens=max_new_tokens,
        seed=seed,
        command=command(),
        track=lambda steps: track(steps, description="evaluate"),
    )


def command():
    """As typed, without the folders, which are this machine's and decide nothing."""
    typed = [word for word in sys.argv[1:] if not word.startswith(("--work=", "--out="))]
    for option in {"--work", "--out"} & {*typed}:
        place = typed.index(option)
        del typed[place : place + 2]
    return shlex.join(["python", "scripts/distill.py", *typed])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", default=list(STEPS), help=f"which (default: {' '.join(STEPS)})")
    parser.add_argument("--target", default="smollm2", help="smollm2 (default), a hub id or a local folder")
    parser.add_argument("--out", type=Path, help="where the draft is kept (default: data/own/TARGET-draft)")
    parser.add_argument("--work", type=Path, help="where text and checkpoints are kept (default: the cache folder)")
    parser.add_argument(
        "--text-tokens", type=int, default=2_050_000, help="tokens to synthesise (default 2.05 million)"
    )
    parser.add_argument("--train-tokens", type=int, default=6_400_000, help="tokens to train on (default 6.4 million)")
    parser.add_argument("--layers", default="0,1,-1", help="layers of the target to keep (default 0,1,-1)")
    parser.add_argument("--vocabulary", type=int, default=8192, help="ids the draft may propose (default 8192)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, help="processes that synthesise (default: one a core; one on a GPU)")
    arguments = parser.parse_args()
    if unknown := set(arguments.steps) - set(STEPS):
        parser.error(f"unknown step {min(unknown)!r}; the steps are {', '.join(STEPS)}")
    name = Path(arguments.target).name.lower()
    out = arguments.out or PROJECT / "data" / "own" / f"{name}-draft"
    work = arguments.work or cache_folder() / f"{name}-draft"
    target_path = str(fetch(report=lambda line: None)) if arguments.target == "smollm2" else arguments.target
    target = default_target() if arguments.target == "smollm2" else CausalLM.from_pretrained(target_path)
    layers = layers_of(target, arguments.layers)
    try:
        check(target, layers)
    except ValueError as error:
        parser.error(str(error))
    if "synthesise" in arguments.steps:
        synthesise(
            target_path, work / "text", tokens=arguments.text_tokens, seed=arguments.seed, workers=arguments.workers
        )
    if "train" in arguments.steps:
        build_and_train(target, layers, out, work, arguments)
    if "evaluate" in arguments.steps:
        evaluate(target, load_draft(out, target), out / "evaluation.json", seed=arguments.seed)
    if "card" in arguments.steps:
        import draft_card

        draft_card.write(out)


STEPS = ("synthesise", "train", "evaluate", "card")


def layers_of(target, listed):
    """Layers by number, from the end where it is negative: "0,1,-1" -> [0, 1, 29] of a target with 30."""
    num = len(getattr(target.model.base_model, "layers", ()))
    return [layer + num if layer < 0 else layer for layer in map(int, listed.split(","))]


def build_and_train(target, layers, out, work, arguments):
    text = load_text(work / "text")
    ids, covered = frequent_ids(text[0], arguments.vocabulary, always=target.eos_ids)
    draft = PrunedLM(target, layers, ids)
    train(
        draft, text, work, tokens=arguments.train_tokens, seed=arguments.seed,
        track=lambda steps: track(steps, description="train"),
    )  # fmt: skip
    how = {
        **results.came_to_be(command()),
        "seed": arguments.seed,
        "processor": environment()["processor"],
        "text": describe_text(*text),
        "output_ids_cover_percent": round(100 * covered, 2),
    }
    weights = out / "draft.safetensors"
    before = file_sha256(weights) if weights.exists() else None
    save_draft(draft, out, made_for(target), how)
    if file_sha256(weights) != before:
        (out / "evaluation.json.partial").unlink(missing_ok=True)  # It is that of another draft.
    shutil.copy(work / "training.jsonl", out / "training.jsonl")
    write_sample(work / "text", out / "sample.jsonl", target.tokenizer)


def describe_text(shards, held_out):
    num = [sum(shard["log_total"].numel() for shard in part) for part in (shards, held_out)]
    seconds = sum(float(shard["seconds"]) for shard in (*shards, *held_out))
    return {
        "num_shards": len(shards) + len(held_out),
        "rows_per_shard": len(shards[0]["ids"]),
        "tokens_per_row": shards[0]["log_total"].shape[1],
        "num_tokens": num[0],
        "num_held_out_tokens": num[1],
        "worker_seconds": round(seconds),
    }


def write_sample(folder, out, tokenizer, rows=(0, 47, 95), shards=4):
    """A few rows of the first shards, so that a reader sees what the draft was trained on."""
    lines = []
    for shard in range(min(shards, len(list(folder.glob("text-*"))))):
        ids = load_file(shard_file(folder, shard))["ids"]
        lines += [{"shard": shard, "row": row, "text": tokenizer.decode(ids[row])} for row in rows if row < len(ids)]
    results.write_text(out, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


if __name__ == "__main__":
    main()
