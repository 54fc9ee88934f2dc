"""Draw every figure in figures/ again: a sweep's from the result file of its name, a draft's curve from its log."""

import sys
from pathlib import Path

import draft_card

from specnb.cli import main

ROOT = Path(__file__).resolve().parents[1]

for result in [path for kind in ("sweep", "costs") for path in sorted((ROOT / "data").glob(f"{kind}-*.json"))]:
    print(result.stem, flush=True)
    status = main(["report", str(result), "--figure", str(ROOT / "figures" / f"{result.stem}.png")])
    if status:
        sys.exit(status)
for draft in sorted((ROOT / "data").glob("*-draft")):
    print(draft.name, flush=True)
    draft_card.write(draft)
