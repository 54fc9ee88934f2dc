"""What the command line prints: coloured tokens, the statistics of a run, the table of a sweep.

It knows traces and summaries. It does not know where they came from.
"""

from rich.text import Text

from specnb.measure.plots import COLOURS

STYLES = {source: COLOURS[source] for source in ("accepted", "recovered", "bonus", "plain")}


class Printer:
    """Prints tokens in colour as they come; bytes of an unfinished character wait for the rest."""

    def __init__(self, console, tokenizer):
        self.console, self.tokenizer, self.ids, self.printed = console, tokenizer, [], ""

    def show(self, done_round):
        for token, source in zip(done_round.ids, done_round.sources, strict=True):
            self.ids.append(token)
            # Subtle: some tokenizers strip a leading space, so what is new is cut from the whole text.
            text = self.tokenizer.decode(self.ids, skip_special_tokens=True)
            if not text.endswith("\ufffd"):
                self.console.print(Text(text[len(self.printed) :], style=STYLES[source]), end="", soft_wrap=True)
                self.printed = text


def statistics(trace):
    """What a generation did, in three lines."""
    if not trace.rounds:
        return "nothing was generated"
    drafted = sum(r.num_drafted for r in trace.rounds)
    accepted = (
        f"accepted/drafted {trace.accepted_fraction:.2f} of {drafted}, alpha_hat {trace.alpha_hat:.2f}, "
        f"rounds by accepted drafts {trace.accepted_histogram}"
        if trace.accepted_fraction is not None
        else "nothing was drafted"
    )
    return (
        f"{trace.num_tokens} tokens in {len(trace.rounds)} rounds ({trace.tokens_per_round:.2f} a round); {accepted}\n"
        f"first tokens after {1000 * trace.ttft_sec:.0f} ms; {1000 * trace.sec_per_token:.1f} ms a token over all; "
        f"draft {trace.draft_sec:.2f} s, verify {trace.verify_sec:.2f} s, other {trace.other_sec:.2f} s"
    )


def sweep_table(summary):
    """The summary as aligned text; break-even is the accepted/drafted at which a round has paid for its extra time."""
    phases = summary[["draft_sec_per_round", "verify_sec_per_round", "other_sec_per_round"]] * 1000
    shown = summary.assign(
        interval=[
            f"{low:.2f}-{high:.2f}" if low == low else "-" for low, high in zip(summary.low, summary.high, strict=True)
        ],
        ms_per_token=(1000 * summary.sec_per_token).map("{:.1f}".format),
        phases_ms=[" + ".join(f"{ms:.1f}" for ms in row) for row in phases.to_numpy()],
    )
    names = {
        "temperature": "T",
        "drafter": "drafter",
        "gamma": "gamma",
        "ms_per_token": "ms/token",
        "speedup": "speed-up",
        "interval": "95 % interval",
        "tokens_per_round": "tokens/round",
        "accepted_fraction": "accepted/drafted",
        "break_even_fraction": "break-even",
        "wasted_per_token": "wasted/token",
        "phases_ms": "draft + verify + other ms/round",
    }
    shown = shown[list(names)].rename(columns=names)
    return shown.to_string(index=False, float_format="{:.2f}".format, na_rep="-", formatters={"T": "{:g}".format})
