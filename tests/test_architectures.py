"""The table of architectures: its format, and some of its lines tried again."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
import architectures  # noqa: E402

FOUND = json.loads((ROOT / "data" / "architectures.json").read_text(encoding="utf-8"))
VERDICTS = {row["type"]: row["verdict"] for row in FOUND["rows"]}


def test_the_table_is_what_the_script_would_write_and_nothing_in_it_is_wrong():
    assert FOUND["schema"] == architectures.SCHEMA
    assert (ROOT / "data" / "architectures.md").read_text(encoding="utf-8") == architectures.markdown(FOUND)
    assert list(VERDICTS) == sorted(VERDICTS) and len(VERDICTS) > 150
    assert set(VERDICTS.values()) == {"exact", "exact, single rows only", "refused", "not tried"}
    assert all(row["reason"] or row["verdict"] == "exact" for row in FOUND["rows"])


@pytest.mark.parametrize(
    ("kind", "verdict"),
    [
        ("llama", "exact"),
        ("gpt_bigcode", "exact"),
        ("mistral", "refused"),  # its window
        ("openai-gpt", "refused"),
        ("gpt_neo", "exact, single rows only"),  # Its window is masked by itself, and only a long check sees that.
        ("roberta", "exact, single rows only"),
    ],
)
def test_a_line_of_the_table_holds_when_it_is_tried_again(kind, verdict):
    assert architectures.verdict_of(kind)[0] == verdict == VERDICTS[kind]
