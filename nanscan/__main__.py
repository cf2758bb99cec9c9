"""`python -m nanscan` is the command `nanscan`."""

import sys

from nanscan.cli import main

if __name__ == "__main__":
    sys.exit(main())
