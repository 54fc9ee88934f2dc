"""What a server's /metrics page says of its speculation, and what was added to it between two looks.

It knows the names that vLLM, llama.cpp and SGLang use. It does not know requests. Read `specnb.serving.load` next.
"""

import asyncio
import math
import re
from collections import defaultdict

# vLLM and llama.cpp count, with names that end in _total or not. SGLang shows means of its last decoding steps.
NAME = re.compile(
    r"(?P<engine>\w+):spec_(decode_num_(?P<counter>drafts|draft_tokens|accepted_tokens|accepted_tokens_per_pos)(_total)?"
    r"|(?P<gauge>accept_length|accept_rate))"
)
GAUGES = ("accept_length", "accept_rate")


async def read_metrics(client, url, seconds):
    """`parse_metrics` of the server now; (None, None) where its page cannot be read within so many seconds."""
    import httpx

    try:
        async with asyncio.timeout(seconds):
            response = await client.get(f"{url}/metrics")
        if response.status_code in (200, 404):
            return parse_metrics(response.text if response.status_code == 200 else "")
    except (httpx.HTTPError, TimeoutError, ValueError):
        pass
    return None, None


def parse_metrics(text):
    """(engine, values) of a Prometheus page: counters summed over all labels but the position, gauges averaged.

    Examples
    --------
    >>> parse_metrics('vllm:spec_decode_num_drafts_total{engine="0"} 7.0')
    ('vllm', {'drafts': 7.0})
    >>> parse_metrics('sglang:spec_accept_length{dp_rank="0"} 2.5')
    ('sglang', {'accept_length': 2.5})
    """
    from prometheus_client.parser import text_string_to_metric_families

    found, engine = defaultdict(list), None
    # Only the lines of interest are parsed, so that a malformed line of something else loses nothing.
    lines = [line for line in text.split("\n") if NAME.match(line)]
    for family in text_string_to_metric_families("\n".join(lines)):
        for sample in family.samples:
            if match := NAME.fullmatch(sample.name):
                position = sample.labels.get("position")
                name = match["gauge"] or match["counter"]
                found[name if position is None else f"{name}_{position}"].append(float(sample.value))
                engine = match["engine"]
    return engine, {name: sum(all_) / (len(all_) if name in GAUGES else 1) for name, all_ in found.items()}


def growth(before, after):
    """(what each counter grew by and each gauge shows, why this is unknown: a sentence, or None).

    Examples
    --------
    >>> growth({"drafts": 10.0}, {"drafts": 14.0})
    ({'drafts': 4.0}, None)
    >>> growth({"drafts": 10.0}, {"drafts": 3.0})
    ({'drafts': None}, 'the counter drafts went from 10 to 3 in /metrics, so what the counters grew by is unknown')
    """
    if before is None or after is None:
        return {}, "the server's /metrics could not be read in time before and after, so nothing is known of its drafts"
    gauges = {name: after[name] if math.isfinite(after[name]) else None for name in GAUGES if name in after}
    names = [name for name in {**before, **after} if name not in GAUGES]
    grown = {name: after.get(name, math.nan) - before.get(name, 0.0) for name in names}
    for name, more in grown.items():
        # A server that was started again counts from 0, and then no counter can be trusted, not even one that grew.
        if not 0 <= more < math.inf:
            change = f"from {before.get(name, 0.0):g} to {after.get(name, math.nan):g}"
            why = f"the counter {name} went {change} in /metrics, so what the counters grew by is unknown"
            return {**dict.fromkeys(grown), **gauges}, why
    return {**grown, **gauges}, None


def vllm_metrics(trace):
    """A trace under the names of vLLM's per-request metrics, where a round without drafts is no step.

    Examples
    --------
    >>> from specnb.trace import Round, Trace
    >>> vllm_metrics(Trace(gamma=2, rounds=[Round(2, 2, 3), Round(2, 0, 1), Round(0, 0, 1)]))["mean_acceptance_length"]
    2.0
    """
    steps = [r for r in trace.rounds if r.num_drafted]
    accepted = [r.num_accepted for r in steps]
    return {
        "mean_acceptance_length": 1 + sum(accepted) / len(steps) if steps else None,
        "draft_acceptance_rate": trace.accepted_fraction,
        "acceptance_histogram": [accepted.count(num) for num in range(trace.gamma + 1)],
        "per_step_accepted": accepted,
        "per_step_drafted": [r.num_drafted for r in steps],
    }
