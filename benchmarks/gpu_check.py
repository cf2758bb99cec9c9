"""Everything that needs a card, in one call of under six minutes.

    python benchmarks/gpu_check.py                   all sections, results into benchmarks/results/<card>.json and .txt
    python benchmarks/gpu_check.py --sections correct,graph --output DIR
    python benchmarks/gpu_check.py --require         a machine without a card is an error (exit code 1)

Each section runs in a process of its own with a time limit, so that a crash or a hang costs that section only; what
was measured up to then is written after every section. Exit code: 0 all sections hold (or there is no card and none
is required), 1 otherwise, 2 misuse.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu.sections import SECTIONS  # noqa: E402

BUDGET = 350.0  # seconds, all sections together
RESULTS = ROOT / "benchmarks" / "results"


def main(arguments: Sequence[str] | None = None) -> int:
    asked = _parse(arguments)
    if asked.child:
        return _child(asked.child, Path(asked.json))
    names = asked.sections.split(",") if asked.sections else list(SECTIONS)
    if unknown := [name for name in names if name not in SECTIONS]:
        print(f"there is no section {unknown[0]!r}: use some of {','.join(SECTIONS)}", file=sys.stderr)
        return 2
    card, why_not = find_card()
    if card is None:
        return _without_card(names, why_not, asked.require)
    return _with_card(card, names, asked.output, asked.budget)


def find_card() -> tuple[dict[str, Any] | None, str]:
    """The first card as torch sees it, or why there is none."""
    import torch

    if torch.version.cuda is None:
        return None, f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return None, f"torch {torch.__version__} is built for CUDA {torch.version.cuda} but sees no device"
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_gb": round(properties.total_memory / 1e9, 1),
        "multiprocessors": properties.multi_processor_count,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "driver": _driver(),
    }, ""


def _driver() -> str:
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"


def _without_card(names: Sequence[str], why: str, required: bool) -> int:
    print(f"No GPU check was made: {why}.")
    print("Not run:")
    for name in names:
        print(f"  {name:<10} {SECTIONS[name].what}")
    print("Nothing was written. Run this on a machine with an NVIDIA card and the CUDA build of torch.")
    if required:
        print("--require was given: this is an error.")
    return int(required)


def _with_card(card: dict[str, Any], names: Sequence[str], output: Path, budget: float) -> int:
    start, end = datetime.now(timezone.utc), time.monotonic() + budget
    results: dict[str, Any] = {"card": card, "date": start.isoformat(timespec="seconds"), "sections": {}}
    print(f"{card['name']}, torch {card['torch']}, CUDA {card['cuda']}, driver {card['driver']}", flush=True)
    for name in names:
        results["sections"][name] = _run(name, end - time.monotonic())
        print("\n".join(_lines(name, results["sections"][name])), flush=True)
        results["seconds"] = round(budget - (end - time.monotonic()), 1)
        write(results, output)
    bad = [name for name, section in results["sections"].items() if not section["ok"]]
    print(f"\n{len(names) - len(bad)} of {len(names)} sections hold, in {results['seconds']} s", end="")
    print(f"; not: {', '.join(bad)}" if bad else "")
    return int(bool(bad))


def _run(name: str, left: float) -> dict[str, Any]:
    """One section in a process of its own; a crash, a hang or spent time is its result."""
    limit = min(SECTIONS[name].seconds, left)
    if limit < 5.0:
        return _lost("not run: the time for all sections was used up", 0.0)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "section.json"
        command = [sys.executable, str(Path(__file__).resolve()), "--child", name, "--json", str(path)]
        code, output = run_limited(command, limit)
        took = round(time.monotonic() - start, 1)
        if code is None:
            return _lost(f"stopped after its {limit:.0f} s: {output[-600:]}", took)
        if not path.exists():
            return _lost(f"the process ended with code {code}: {output[-600:]}", took)
        return json.loads(path.read_text()) | {"seconds": took}


def run_limited(command: Sequence[str], limit: float) -> tuple[int | None, str]:
    """Exit code (None: it ran past the limit and was ended, with all it had started) and output of a command."""
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=limit)
        return process.returncode, output.strip()
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its own session: nothing but what it started
        output, _ = process.communicate()
        return None, output.strip()


def _lost(why: str, seconds: float) -> dict[str, Any]:
    return {"ok": False, "lines": [f"FAILED {why}"], "figures": {}, "seconds": round(seconds, 1)}


def _child(name: str, path: Path) -> int:
    """Run one section here and write what it says."""
    try:
        result = SECTIONS[name].run().to_dict()
    except Exception as error:
        detail = traceback.format_exc()
        lines = [f"FAILED {type(error).__name__}: {error}", *(f"       {line}" for line in detail.splitlines()[-12:])]
        result = {"ok": False, "lines": lines, "figures": {"traceback": detail}}
    path.write_text(json.dumps(result))
    return 0


def write(results: dict[str, Any], output: Path) -> None:
    """Both files, named after the card."""
    output.mkdir(parents=True, exist_ok=True)
    stem = re.sub(r"[^A-Za-z0-9]+", "_", results["card"]["name"]).strip("_")
    (output / f"{stem}.json").write_text(json.dumps(results, indent=1) + "\n")
    head = [f"{key}: {value}" for key, value in results["card"].items()]
    body = [line for name, section in results["sections"].items() for line in _lines(name, section)]
    text = "\n".join([*head, f"date: {results['date']}", f"seconds: {results['seconds']}", *body])
    (output / f"{stem}.txt").write_text(text + "\n")


def _lines(name: str, section: dict[str, Any]) -> list[str]:
    verdict = "holds" if section["ok"] else "DOES NOT HOLD"
    return ["", f"{name}: {verdict} ({section['seconds']} s): {SECTIONS[name].what}", *section["lines"]]


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", default="", help=f"comma-separated, of {','.join(SECTIONS)} (default: all)")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the results")
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds, all sections together")
    parser.add_argument("--require", action="store_true", help="exit with 1 where there is no card")
    parser.add_argument("--child", choices=list(SECTIONS), help=argparse.SUPPRESS)
    parser.add_argument("--json", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
