"""The case study in one command: every recipe on the task with the faults, and two of them on the mended task.

    python examples/segmentation/compare.py                      # 5 seeds; ten minutes on two quiet cores
    python examples/segmentation/compare.py --quick --out /tmp/s # one seed, two short epochs: does it run?
    python examples/segmentation/compare.py --write              # and puts figures and plots into docs/case_study.md

Writes into the folder `--out`: a folder for each run, results.json, table.md and two plots. If it was interrupted, the
same command goes on where it was: runs that have ended are not trained again.
Needs scikit-learn, Pillow (its photographs) and matplotlib.
"""

import argparse
import contextlib
import io
import json
import multiprocessing
import platform
import shutil
import warnings
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import train_loop
import train_nanscan
import train_norm
import train_plain
import train_recovery
from cost import measure_cost
from count_lines import added_lines
from data import load_scenes
from diary import Diary, has_ended, last_checkpoint, read_diary
from plots import draw
from rich.progress import Progress
from tables import tables, write_page
from task import Task

import nanscan

RECIPES = {
    "plain": train_plain.train,
    "loop": train_loop.train,
    "norm": train_norm.train,
    "nanscan": train_nanscan.train,
    "recovery": train_recovery.train,
}
RUNS = {name: (name, False) for name in RECIPES} | {
    "mended, plain": ("plain", True),
    "mended, nanscan": ("nanscan", True),
}


def main() -> None:
    options = arguments()
    same_settings(options)
    results = {"machine": machine(), "settings": settings(options), "runs": all_runs(options)}
    results["cost"] = cost(options)
    results["lines"] = {name: dict(zip(("added", "dropped"), added_lines(name), strict=True)) for name in RECIPES}
    (options.out / "results.json").write_text(json.dumps(results) + "\n")
    text = tables(results)
    (options.out / "table.md").write_text(text)
    draw(results, options.out)
    if options.write:
        write_page(results, options.out)
    print(text)


def same_settings(options: argparse.Namespace) -> None:
    """Runs that are in the folder already are not trained again: they must be runs of the same length."""
    path, now = options.out / "settings.json", {"epochs": options.epochs, "quick": options.quick}
    if path.exists() and json.loads(path.read_text()) != now:
        raise SystemExit(f"{options.out} holds runs with {path.read_text()}, not {now}: choose another --out")
    options.out.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(now))


def make_task(options: argparse.Namespace, seed: int, mended: bool = False) -> Task:
    scenes = load_scenes(train=40, test=20) if options.quick else load_scenes()
    return Task(scenes, seed, options.epochs, batch_size=4 if options.quick else 16, mended=mended)


def all_runs(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every run for every seed, in processes of their own, one thread each."""
    jobs = [(name, seed) for seed in options.seeds for name in RUNS]
    context = multiprocessing.get_context("spawn")
    done = []
    with Progress() as bar, ProcessPoolExecutor(options.jobs, mp_context=context) as pool:
        line = bar.add_task("training", total=len(jobs))
        futures = [pool.submit(one_run, *job, options) for job in jobs]
        for future in as_completed(futures):
            done.append(future.result())
            last = done[-1]
            state = f"mIoU {last['mious'][-1]:.3f}" if last["finite"] else f"dead since epoch {last['died'] + 1}"
            bar.console.print(f"{last['run']}, seed {last['seed']}: {state}, {last['skipped']} steps skipped")
            bar.advance(line)
    return sorted(done, key=lambda run: (list(RUNS).index(run["run"]), run["seed"]))


def one_run(name: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train with one recipe, unless that is done; returns what its diary, its log and its checkpoint say."""
    folder = options.out / f"{name.replace(', ', '-')}-seed{seed}"
    if not has_ended(folder):
        shutil.rmtree(folder, ignore_errors=True)
        train(*RUNS[name], seed, folder, options)
    return {
        "run": name,
        "seed": seed,
        **read_diary(folder),
        **read_log(folder / "run.jsonl"),
        "checkpoint": last_checkpoint(folder),
    }


def train(recipe: str, mended: bool, seed: int, folder: Path, options: argparse.Namespace) -> None:
    """One run of a recipe, until its end or until the guard gives up."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", nanscan.NonFiniteWarning)  # the diary has it
    task = make_task(options, seed, mended)
    model = task.make_model()
    diary, error = Diary(folder, task), None
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            RECIPES[recipe](model, task, diary)
    except nanscan.TrainingDiverged as diverged:
        error = diverged
        diary.end_epoch(model)
    diary.end(error)


def cost(options: argparse.Namespace) -> dict[str, Any]:
    """What a step costs with each recipe; measured once for a folder."""
    path = options.out / "cost.json"
    if not path.exists():
        path.write_text(json.dumps(measure_cost(RECIPES, make_task(options, 0), options.rounds, options.out / "cost")))
    return json.loads(path.read_text())


def read_log(log: Path) -> dict[str, Any]:
    """From nanscan's log: the gradient norm of each step before clipping, None where it is not finite, and the saves
    that were written (in the background, so that the diary can't know). {} for a recipe without such a log."""
    if not log.exists():
        return {}
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    norms = [line["norm"] for line in lines if "kind" not in line]
    saved = sum(line.get("kind") == "checkpoint" and not line.get("error") for line in lines)
    return {"saved": saved, "norms": [None if isinstance(norm, str) else float(f"{norm:.4g}") for norm in norms]}


def machine() -> dict[str, str]:
    with open("/proc/cpuinfo") as file:
        processor = next((line.split(":")[1].strip() for line in file if "model name" in line), platform.processor())
    packages = ("torch", "nanscan", "scikit-learn", "numpy")
    return {"processor": processor, "python": platform.python_version()} | {name: version(name) for name in packages}


def settings(options: argparse.Namespace) -> dict[str, Any]:
    return {"seeds": options.seeds, "epochs": options.epochs, "quick": options.quick}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/segmentation"), help="folder for everything written")
    parser.add_argument("--seeds", type=int, nargs="+", help="default: 0 1 2 3 4")
    parser.add_argument("--epochs", type=int, help="default: 15")
    parser.add_argument("--rounds", type=int, help="steps of each recipe that are timed; default: 200")
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time")
    parser.add_argument("--quick", action="store_true", help="few scenes, one seed, two epochs: does it run?")
    parser.add_argument("--write", action="store_true", help="update docs/case_study.md and its plots")
    options = parser.parse_args()
    options.seeds = options.seeds or ([0] if options.quick else [0, 1, 2, 3, 4])
    options.epochs = options.epochs or (2 if options.quick else 15)
    options.rounds = options.rounds or (5 if options.quick else 200)
    return options


if __name__ == "__main__":
    main()
