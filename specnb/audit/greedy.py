"""Greedy ids of two engines compared; a difference is excused only where the target's logits nearly tie.

It knows ids and rows of logits. It does not know how an engine works. Read `specnb.audit.generate` next.
"""

import math
import operator

from specnb.audit.report import Report

# Largest margin taken for rounding, in units in the last place of the largest logit. Measured on SmolLM2 (558
# positions, CPU): reading a text one token or five at a time changed the margin of the two best tokens by at most 3.5
# units in bfloat16 (99 %: 2) and 16 in float32 (99 %: 12), where sums round in the format they are kept in.
ROUNDING_ULPS = {"bfloat16": 4, "float16": 4, "float32": 32, "float64": 32}


def compare_greedy(baseline_ids, candidate_ids, *, logits_at=None, dtype=None, max_ulps=None):
    """Compare the ids of two greedy runs; a difference is excused only where the target's own logits nearly tie.

    Parameters
    ----------
    baseline_ids, candidate_ids : list of lists of int
        New ids, one list a prompt, in the same order. Ids, never text: two texts may be one and their ids differ.
    logits_at : callable, (index of the sequence, ids common to both) -> row of logits `(vocab,)`, optional
        Such as `teacher_forced(target, prompts)`. Without it no difference is explained.
    dtype : str or torch.dtype, optional
        The format the model computes in; default: that of the row. Name it where logits were widened.
    max_ulps : float, optional
        Largest distance of either token from the maximum, in units in the last place there; default `ROUNDING_ULPS`.

    Returns
    -------
    Report
        "identical" (in length too), "explained by rounding", or "not explained by rounding". No near-tie explains an
        end, and NaN explains nothing. `differences`, the first of each pair: sequence, position, both ids (None at an
        end), margin_ulps (None where unknown).

    Raises
    ------
    ValueError
        For no sequences or different numbers of them, for anything but ids, for an id the logits have no place for.

    Examples
    --------
    >>> compare_greedy([[5, 7, 2]], [[5, 8]]).differences[0]["position"]
    1
    """
    baseline, candidate = _sequences("baseline_ids", baseline_ids), _sequences("candidate_ids", candidate_ids)
    if len(baseline) != len(candidate) or not baseline:
        raise ValueError(f"{len(baseline)} baseline and {len(candidate)} candidate sequences; give as many, at least 1")
    pairs = enumerate(zip(baseline, candidate, strict=True))
    different = tuple(_difference(i, *pair, logits_at, dtype, max_ulps) for i, pair in pairs if pair[0] != pair[1])
    unexplained = [found for found in different if not found["explained"]]
    verdict = "not explained by rounding" if unexplained else "explained by rounding" if different else "identical"
    found = [f"{len(baseline) - len(different)} of {len(baseline)} sequences are the same, in length too"]
    found += map(_in_words, (unexplained or different)[:1])
    return Report(
        tested="greedy ids are equal, in length too, or part only where the target's two tokens nearly tie",
        not_tested="the sampled distribution at temperatures above 0; other prompts; what follows a first difference",
        verdict=verdict,
        found="; ".join(found),
        settings={"logits": "none" if logits_at is None else "teacher-forced", "dtype": str(dtype or "of the logits")},
        n=len(baseline),
        differences=different,
    )


def teacher_forced(target, prompts):
    """`logits_at` for `compare_greedy`: a `LanguageModel` reads prompt and common ids and gives the next row."""
    import torch

    def logits_at(index, common_ids):
        target.reset()
        return target.forward(torch.tensor([[*prompts[index], *common_ids]]), num_logits=1).logits[0, -1]

    return logits_at


def margin_in_ulps(row, ids, dtype=None):
    """How far the lower of `ids` lies below the maximum of `row`, in units in the last place of `dtype` there.

    Examples
    --------
    >>> margin_in_ulps([23.625, 23.5, 1.0], (0, 1), "bfloat16")  # vllm-rbln PR #630
    1.0
    >>> round(margin_in_ulps([25.0, 24.85], (0, 1), "float32"))  # colibri #689
    78643
    """
    import torch

    if dtype is None and not hasattr(row, "dtype"):
        raise ValueError("logits given as a list have no dtype; say which one the model computes in: dtype='float32'")
    name = str(dtype or row.dtype).removeprefix("torch.")
    if name not in ROUNDING_ULPS:
        raise ValueError(f"unknown dtype {name!r}; choose one of {', '.join(ROUNDING_ULPS)}")
    values = torch.as_tensor(row, dtype=torch.float64).flatten()
    if not all(0 <= token < len(values) for token in ids):
        raise ValueError(f"ids {tuple(ids)} do not fit {len(values)} logits; is this the model that wrote them?")
    top, lower = float(values.max()), float(values[list(ids)].min())
    if not math.isfinite(top):  # The maximum of a row with a NaN is NaN.
        return math.nan
    info = torch.finfo(getattr(torch, name))
    return (top - lower) / max(info.eps * 2.0 ** (math.frexp(top)[1] - 1), info.tiny * info.eps)


def _difference(index, baseline, candidate, logits_at, dtype, max_ulps):
    common = next(
        (i for i, pair in enumerate(zip(baseline, candidate, strict=False)) if pair[0] != pair[1]),
        min(len(baseline), len(candidate)),
    )
    ids = [sequence[common] if common < len(sequence) else None for sequence in (baseline, candidate)]
    margin, limit = None, max_ulps
    if logits_at is not None and None not in ids:
        row = logits_at(index, baseline[:common])
        margin = margin_in_ulps(row, ids, dtype)
        limit = ROUNDING_ULPS[str(dtype or row.dtype).removeprefix("torch.")] if max_ulps is None else max_ulps
    return {
        "sequence": index,
        "position": common,
        "baseline_id": ids[0],
        "candidate_id": ids[1],
        "margin_ulps": margin,
        "max_ulps": limit,
        "explained": margin is not None and margin <= limit,
    }


def _in_words(difference):
    margin, limit = difference["margin_ulps"], difference["max_ulps"]
    return (
        f"sequence {difference['sequence']} parts at position {difference['position']}: {difference['baseline_id']} "
        f"against {difference['candidate_id']}, margin "
        f"{'unknown' if margin is None else f'{margin:.4g} of at most {limit}'} units in the last place"
    )


def _sequences(name, sequences):
    found = []
    for index, ids in enumerate(sequences):
        try:
            found.append([operator.index(token) for token in (ids.tolist() if hasattr(ids, "tolist") else ids)])
        except TypeError:
            raise ValueError(f"{name}[{index}] is no list of token ids: {ids!r:.60}; compare ids, never text") from None
    return found
