"""The results as Markdown tables, and these put into the page of the case study."""

import shutil
import statistics
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "case_study.md"
PLOTS = ("case_study_runs.svg", "case_study_norms.svg")


def tables(results: dict[str, Any]) -> str:
    """All tables, with the machine and the settings above them."""
    parts = [_where(results), _runs(results["runs"]), _cost(results["cost"]), _lines(results["lines"])]
    return "\n\n".join(parts) + "\n"


def write_page(results: dict[str, Any], folder: Path) -> None:
    """Tables go between the marks of docs/case_study.md, plots into docs/images, the results beside the code."""
    text = PAGE.read_text()
    begin, end = "<!-- results: begin -->", "<!-- results: end -->"
    before, after = text[: text.index(begin)], text[text.index(end) :]
    PAGE.write_text(f"{before}{begin}\n{tables(results)}{after}")
    for name in PLOTS:
        (PAGE.parent / "images").mkdir(exist_ok=True)
        shutil.copy(folder / name, PAGE.parent / "images" / name)
    shutil.copy(folder / "results.json", Path(__file__).resolve().parent / "results.json")


def _where(results: dict[str, Any]) -> str:
    machine, settings = results["machine"], results["settings"]
    return (
        f"{machine['processor']}, Python {machine['python']}, torch {machine['torch']}, nanscan {machine['nanscan']}; "
        f"{settings['epochs']} epochs, seeds {', '.join(map(str, settings['seeds']))}."
    )


def _runs(runs: list[dict[str, Any]]) -> str:
    rows = ["| run | alive at the end | dies in epoch | skipped | rollbacks | saves | wait | last file | mIoU |"]
    rows.append("|---|---|---|---|---|---|---|---|---|")
    for name in dict.fromkeys(run["run"] for run in runs):
        same = [run for run in runs if run["run"] == name]
        scores = [run["mious"][-1] for run in same]
        cells = [
            name,
            f"{sum(run['finite'] for run in same)} of {len(same)}",
            ", ".join(str(run["died"] + 1) for run in same if run["died"] is not None) or "–",
            _spread([run["skipped"] for run in same]),
            _spread([run["rollbacks"] for run in same]),
            f"{sum(run['saved'] for run in same)} of {sum(run['saves'] for run in same)}",
            f"{statistics.median(wait for run in same for wait in run['save_ms']):.0f} ms",
            ", ".join(sorted({run["checkpoint"] for run in same})),
            f"{statistics.fmean(scores):.3f} ({min(scores):.3f} to {max(scores):.3f})",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _spread(numbers: list[int]) -> str:
    return str(numbers[0]) if len(set(numbers)) == 1 else f"{min(numbers)} to {max(numbers)}"


def _cost(cost: dict[str, Any]) -> str:
    rows = [f"Milliseconds a step, {cost['steps']} steps of each recipe, one thread.{_busy(cost['plain'])}", ""]
    rows.append("| recipe | processor, median | more than plain, median | mean | clock, median | more than plain |")
    rows.append("|---|---|---|---|---|---|")
    for name in (name for name in cost if name != "steps"):
        cpu, wall = cost[name]["cpu"], cost[name]["wall"]
        more = [f"{value:+.2f}" for value in (cpu["added_ms"], cpu["added_mean_ms"], wall["added_ms"])]
        more = ["–"] * 3 if name == "plain" else more
        rows.append(f"| {name} | {cpu['step_ms']:.1f} | {more[0]} | {more[1]} | {wall['step_ms']:.1f} | {more[2]} |")
    return "\n".join(rows)


def _busy(plain: dict[str, dict[str, float]]) -> str:
    """A warning where other programs had the processor for much of the time."""
    share = plain["cpu"]["step_ms"] / plain["wall"]["step_ms"]
    if share > 0.8:
        return ""
    return f" The machine was busy: the training had {share:.0%} of a core, and differences of a few ms are noise."


def _lines(lines: dict[str, dict[str, int]]) -> str:
    rows = ["| recipe | lines added to plain | lines of plain dropped |", "|---|---|---|"]
    rows += [f"| {name} | {count['added']} | {count['dropped']} |" for name, count in lines.items() if name != "plain"]
    return "\n".join(rows)
