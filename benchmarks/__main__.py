"""Run the suites with pytest-benchmark; tables on the terminal, JSON and a plot in ``benchmarks/output/``.

    python -m benchmarks                     all suites, about five minutes on two cores
    python -m benchmarks scan gather         some of them; --help lists them all
    python -m benchmarks scan --seconds 10   further options go to pytest (--seconds: measuring time of one row)

Goals are printed beside the figures and never asserted: the exit code tells whether the measuring worked.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

HERE = Path(__file__).parent
OUTPUT = HERE / "output"
SUITES = (
    "scan",
    "gather",
    "step",
    "scaler",
    "memory",
    "linearity",
    "snapshot",
    "background_save",
    "save",
    "trace",
    "batches",
    "watch",
    "paddle",
    "distributed",
)


def main(arguments: Sequence[str]) -> int:
    """Run the suites named (default: all); returns pytest's exit code."""
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        print("Suites:", *SUITES)
        return 0
    suites = [name for name in arguments if name in SUITES] or list(SUITES)
    options = [name for name in arguments if name not in SUITES]
    OUTPUT.mkdir(exist_ok=True)
    files = [str(HERE / f"bench_{name}.py") for name in suites]
    return int(pytest.main([*files, *_settings(), *options]))


def _settings() -> list[str]:
    return [
        f"--rootdir={HERE.parent}",
        f"--confcutdir={HERE}",
        f"--benchmark-json={OUTPUT / 'pytest-benchmark.json'}",
        "--benchmark-columns=median,iqr,min,rounds",
        "--benchmark-sort=mean",
        "--timeout=0",
        "-q",
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
