"""The benchmark of batches: what rows gain from each other, what their bookkeeping costs, and whether drafting pays."""

import time
from contextlib import ExitStack
from functools import partial, wraps
from unittest import mock

import numpy as np
from bench_arms import GREEDY, TOKENS, interval, paired_ratio, row

from specnb import sampler
from specnb.drafters import FirstOf, PromptLookup
from specnb.measure.prompts import load_prompts
from specnb.models import cache, load_pair
from specnb.sampler import speculative


def suite(once):
    target, drafter, tokenizer = load_pair()
    prompts = [prompt.encode(tokenizer) for prompt in load_prompts(limit=28)]
    groups = {size: [prompts[i : i + size] for i in range(0, 28 - size + 1, size)][:7] for size in (2, 4, 8)}
    name = "plain decoding, greedy: tokens/s at batch 4 over batch 1"
    ratios = once(name, partial(paired_ratio, (together(target, None, 0), one_by_one(target)), groups[4], 2))
    yield row(name, interval(ratios), 2.2)
    for gamma in (0, 4):
        name = f"share of a round spent on rollback, packing and masks, batch 4, gamma {gamma}"
        shares = once(name, lambda g=gamma: [bookkeeping(target, drafter, b, g) for b in [groups[4][0], *groups[4]]])
        yield row(name, interval(shares[1:], np.mean), 0.10, at_least=False)
    both = FirstOf(PromptLookup(min_ngram=2), drafter, caps=(None, 2))
    for size, chosen in groups.items():
        for name, arm, gamma in (("lookup", PromptLookup(), 4), ("draft", drafter, 2), ("lookup+draft", both, 4)):
            title = f"{name} gamma {gamma} over plain decoding, batch {size}, greedy: tokens/s"
            arms = (together(target, arm, gamma), together(target, None, 0))
            yield row(title, interval(once(title, partial(paired_ratio, arms, chosen, 2))))


def together(target, drafter, gamma):
    def run(group):
        began = time.perf_counter()
        runs = speculative(
            target, drafter, group, gamma=gamma, max_new_tokens=TOKENS, sampling=GREEDY, eos_ids=target.eos_ids
        )
        return sum(len(run.ids) for run in runs) / (time.perf_counter() - began)

    return run


def one_by_one(target):
    def run(group):
        began, tokens = time.perf_counter(), 0
        for ids in group:
            options = {"max_new_tokens": TOKENS, "sampling": GREEDY, "eos_ids": target.eos_ids}
            tokens += len(speculative(target, None, ids, gamma=0, **options).ids)
        return tokens / (time.perf_counter() - began)

    return run


def bookkeeping(target, drafter, group, gamma):
    """Seconds in rollbacks, padding, masks and writes to the cache, over those of the whole run with its prefill.

    Every write of new keys is counted, though a cache of one row writes too; so the share is an upper bound.
    """
    spent = {"counted": 0.0, "inside": 0.0}

    def timed(function, key):
        @wraps(function)  # The cache looks at the parameters of a model's forward.
        def call(*arguments, **options):
            began = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                spent[key] += time.perf_counter() - began

        return call

    with ExitStack() as stack:
        for owner, name, key in (
            *((cache.BatchCache, name, "counted") for name in ("forward", "rollback", "keep")),
            (cache._slot_layer(), "update", "counted"),
            (sampler, "padded", "counted"),
            *((model.model, "forward", "inside") for model in (target, drafter.model)),
        ):
            stack.enter_context(mock.patch.object(owner, name, timed(getattr(owner, name), key)))
        began = time.perf_counter()
        speculative(target, drafter, group, gamma=gamma, max_new_tokens=TOKENS, sampling=GREEDY)
        wall = time.perf_counter() - began
    return (spent["counted"] - spent["inside"]) / wall  # A write to the cache lies inside a model, and is counted too.
