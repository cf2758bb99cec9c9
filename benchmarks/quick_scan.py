"""The scan table alone, in under twenty seconds: for looking while changing the engine.

python benchmarks/quick_scan.py [--dtype float32,bfloat16,float16] [--rows small,lora] [--seconds 12] [--steps]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from nanscan.bench import WORKLOADS, quick_bench


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32", help="comma-separated (default: float32)")
    parser.add_argument("--rows", default=",".join(WORKLOADS), help="comma-separated (default: all)")
    parser.add_argument("--seconds", type=float, default=12.0, help="measuring time, all rows together")
    parser.add_argument("--steps", action="store_true", help="measure guarded steps too")
    asked = parser.parse_args()
    result = quick_bench(asked.rows.split(","), asked.dtype.split(","), seconds=asked.seconds, steps=asked.steps)
    result.print()


if __name__ == "__main__":
    main()
