"""The two pictures of the case study: how each run went, and the gradient norms of one of them."""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

matplotlib.rcParams.update({"svg.hashsalt": "case study", "font.size": 9, "axes.grid": True, "grid.alpha": 0.3})
SVG = {"metadata": {"Date": None}}  # the same results give the same file


def draw(results: dict[str, Any], folder: Path) -> None:
    """Write case_study_runs.svg and case_study_norms.svg into the folder."""
    _draw_runs(results["runs"], folder / "case_study_runs.svg")
    _draw_norms(results["runs"], folder / "case_study_norms.svg")


def _draw_runs(runs: list[dict[str, Any]], path: Path) -> None:
    """The mIoU on the test scenes after each epoch: a panel for each kind of run, a line for each seed."""
    names = list(dict.fromkeys(run["run"] for run in runs))
    figure, axes = plt.subplots(2, 4, figsize=(10, 4.6), sharex=True, sharey=True, layout="constrained")
    for axis in axes.flat[len(names) :]:
        axis.set_visible(False)
    for name, axis in zip(names, axes.flat, strict=False):
        axis.set_title(name)
        for run in (run for run in runs if run["run"] == name):
            epochs = range(1, len(run["mious"]) + 1)
            (line,) = axis.plot(epochs, run["mious"], linewidth=1.2, label=f"seed {run['seed']}")
            if run["died"] is not None:
                axis.plot(run["died"] + 1, run["mious"][run["died"]], "x", color=line.get_color(), markersize=9)
    figure.supxlabel("epoch (x: from here on the weights are NaN)")
    figure.supylabel("mIoU")
    figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="lower right")
    figure.savefig(path, **SVG)
    plt.close(figure)


def _draw_norms(runs: list[dict[str, Any]], path: Path) -> None:
    """The norm of the gradients before clipping, step by step: with the faults and mended, first seed."""
    figure, axis = plt.subplots(figsize=(10, 3.2), layout="constrained")
    for name, label in (("nanscan", "with the faults"), ("mended, nanscan", "mended")):
        run = next(run for run in runs if run["run"] == name)
        axis.semilogy([norm if norm is not None else float("nan") for norm in run["norms"]], linewidth=0.9, label=label)
        skips = [step for step, norm in enumerate(run["norms"]) if norm is None]
        if skips:
            axis.plot(skips, [2e6] * len(skips), "kv", label="not finite: skipped")
    axis.axhline(1.0, color="gray", linestyle="--", linewidth=0.9, label="clip norm")
    axis.set(xlabel=f"step (seed {run['seed']})", ylabel="gradient norm")
    axis.legend(ncols=4, loc="upper center", bbox_to_anchor=(0.5, 1.2))
    figure.savefig(path, **SVG)
    plt.close(figure)


if __name__ == "__main__":  # python plots.py results.json FOLDER
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
