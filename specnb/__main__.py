"""`python -m specnb`."""

import sys

from specnb.cli import main

if __name__ == "__main__":
    sys.exit(main())
