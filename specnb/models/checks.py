"""Whether a model does what a run relies on, found out before the first token.

A run feeds a model several ids at a time, takes some of them back, and lets rows of different lengths share one
forward. Here a model is asked to do the same with a few ids. It knows a model and its cache. It does not know prompts
or drafting. Read `specnb.models.causal` next, which refuses what fails here.
"""

import torch

from specnb.models.cache import BatchCache, Cache
from specnb.models.loading import first_line

# How far two ways to the same logits may lie apart: as a share of what the context changes in them, and as a share of
# their spread over the vocabulary, below which rounding hides everything. Bfloat16 rounds so coarsely that only a model
# which loses its context altogether can be told from one that rounds.
TOLERANCES = {torch.float64: (1e-6, 1e-9), torch.float32: (0.02, 1e-4)}
COARSE = (0.5, 0.1)


def changing_positions(model):
    """(kind of position scaling, tokens up to which it stays the same) where it depends on the length, else None.

    Of dynamic NTK and LongRoPE, transformers chooses the frequencies of a whole forward by its longest position. So a
    drafted token, or a longer neighbour in a batch, would change the positions of others.
    """
    found = []
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        for layer_type, kind in (kinds if isinstance(kinds, dict) else {None: kinds}).items():
            if kind == "longrope":
                parameters = module.config.rope_parameters
                parameters = parameters[layer_type] if layer_type else parameters
                found.append((kind, parameters["original_max_position_embeddings"]))
            elif isinstance(kind, str) and "dynamic" in kind:
                found.append((kind, module.original_max_seq_len))
    return min(found, key=lambda pair: pair[1], default=None)


@torch.no_grad()
def check_forwards(model, name):
    """Raise a ValueError unless forwards that go on from a cache agree with one over everything.

    Returns why several prompts at a time are refused, or None where two rows of different lengths each get what they
    would get alone. That takes six forwards of a few tokens, less time than reading the weights, so every model is
    asked, whatever its architecture; only an empty one (on the device "meta") is not, for it computes nothing. The
    global random state stays as it is.
    """
    device = model.get_input_embeddings().weight.device
    if device.type == "meta":
        return None
    config = model.config.get_text_config()
    # GPT-Neo masks all but a window by itself; only beyond that window it shows whether it does so rightly.
    n = 6 + min(getattr(config, "window_size", None) or 0, 1024)
    # The last id is the first again: what the context does to it is the distance between their logits.
    ids = (torch.arange(n, device=device)[None] % (n - 1) + 1) * 7919 % config.vocab_size
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            expected = model(input_ids=ids, use_cache=False).logits[0]
            stepped = _in_steps(model, ids)
        except Exception as error:
            raise ValueError(f"{name} cannot go on from its cache: {_reason(error)}; choose another model") from error
        influence = _distance(expected[-1:], expected[:1])
        share = _excess(expected, stepped, influence)
        if share:
            raise ValueError(
                f"{name} gives other logits when it goes on from its cache than in one forward over the same ids "
                f"(they differ by {share:.0%} of what the context does to them): its texts would be wrong; choose "
                "another model"
            )
        return _batch_refusal(model, name, ids, expected, influence)


def _batch_refusal(model, name, ids, expected, influence):
    way_out = "call once for each prompt"
    try:
        cache = BatchCache(model, 2)
    except ValueError as error:
        return str(error)
    try:
        in_batch = _in_a_batch(cache, ids)
    except Exception as error:
        return f"{name} cannot decode several prompts at once: {_reason(error)}; {way_out}"
    share = _excess(torch.cat([expected[:-1], expected[:3]]), in_batch, influence)
    if share:
        return (
            f"{name} cannot decode several prompts at once: a row's logits depend on its neighbours (they differ from "
            f"those it has alone by {share:.0%} of what the context does to them); {way_out}"
        )
    return None


def _in_steps(model, ids):
    """Logits of all ids from three forwards that go on from a cache, as a run's do; the first has a rejected draft."""
    cache, kept = Cache(model), ids.shape[1] - 3
    first = cache.forward(torch.cat([ids[:, :kept], ids[:, :1]], 1), kept + 1).logits[0, :kept]
    cache.rollback([kept])
    return torch.cat([first, cache.forward(ids[:, kept:-1], 2).logits[0], cache.forward(ids[:, -1:], 1).logits[0]])


def _in_a_batch(cache, ids):
    """Logits of all ids but the last in one row, and of the first three in another, from two forwards of both rows.

    The shorter row has an id of padding before its own, and another behind them.
    """
    n = ids.shape[1] - 2
    padded = torch.cat([ids[:, : n - 3], ids[:, :3]], 1)  # The last of them counts as padding here.
    first = cache.forward(torch.cat([ids[:, :n], padded]), n, [n, 2], [0, 1]).logits
    second = cache.forward(torch.cat([ids[:, n : n + 1], ids[:, 2:3]]), 1).logits
    return torch.cat([first[0], second[0], first[1, -3:-1], second[1]])


def _excess(expected, found, influence):
    """How far `found` lies from `expected`, as a share of the context's `influence`; None if rounding explains it."""
    share, floor = TOLERANCES.get(expected.dtype, COARSE)
    finite = expected.masked_fill(~expected.isfinite(), 0)
    spread = _distance(finite, finite.mean(-1, keepdim=True))
    distance = _distance(expected, found)
    return None if distance <= max(share * influence, floor * spread) else float(distance / influence)


def _distance(expected, found):
    """The largest distance of two rows of logits `(n, vocab)`; what is equal, infinite or not, adds nothing."""
    same = (expected == found) | (expected.isnan() & found.isnan())
    return (expected - found).masked_fill(same, 0).norm(dim=-1).max()


def _reason(error):
    if isinstance(error, torch.OutOfMemoryError):  # That says nothing about the model.
        raise error
    return f"its forward fails ({type(error).__name__}: {first_line(error)})"
