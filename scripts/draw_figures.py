"""Draw every figure in figures/ again from the result file of the same name in data/."""

import sys
from pathlib import Path

from specnb.__main__ import main

ROOT = Path(__file__).resolve().parents[1]

for result in sorted((ROOT / "data").glob("sweep-*.json")):
    print(result.stem, flush=True)
    status = main(["report", str(result), "--figure", str(ROOT / "figures" / f"{result.stem}.png")])
    if status:
        sys.exit(status)
