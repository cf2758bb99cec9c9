"""`nanscan demo`: progress while it trains, a table at the end."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from nanscan.cli.output import common_options, print_json, results_console, status_console
from nanscan.errors import NonFiniteWarning

if TYPE_CHECKING:
    from rich.console import Console

    from nanscan.demo import Cost, DemoResult, RunResult

PHASES = {"plain": "plain PyTorch", "guarded": "guarded by nanscan", "cost": "cost of each check"}
PASS_MARK = 0.9  # of the test digits; a guess gets 0.1


@click.command("demo", short_help="Train on real digits with a real fault, plain and guarded.")
@click.option("--epochs", type=click.IntRange(1), default=20, show_default=True, help="Passes over the training data.")
@click.option("--rounds", type=click.IntRange(1), default=300, show_default=True, help="Times each check is timed.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of data, weights and order.")
@click.option(
    "--log",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("nanscan-demo.jsonl"),
    show_default=True,
    help="The guarded run's step log (JSON lines), written anew.",
)
@common_options
def command(epochs: int, rounds: int, seed: int, log: Path, as_json: bool) -> int:
    """Train a small network on 1,797 handwritten digits, twice, with the same seed and the same fault.

    The loss is averaged within each class, then over the classes. Now and then a batch holds no sample of some class:
    0/0. Plain PyTorch never recovers from that step; the guarded run skips it and says whose gradient was bad.

    Exit code: 0 if the guarded run ends finite and reads more than 90 % of the test digits, else 1.
    """
    from nanscan.demo import run_demo
    from nanscan.demo.run import Settings
    from nanscan.reporting.page import write_page
    from nanscan.reporting.reading import read_log

    settings = Settings(epochs=epochs, seed=seed, cost_rounds=rounds)
    with _Progress(hidden=as_json) as progress, warnings.catch_warnings():
        warnings.simplefilter("ignore", NonFiniteWarning)  # the table says it, and the log
        result = run_demo(log.absolute(), settings, progress.update)
    report = log.absolute().with_suffix(".html")
    write_page(read_log(log), report)
    if as_json:
        print_json({**result.to_dict(), "report": str(report)})
    else:
        _print(result, report)
    return 0 if result.guarded.finite and result.guarded.accuracy > PASS_MARK else 1


class _Progress:
    """A bar per phase on a terminal; one line per phase in a log file."""

    def __init__(self, hidden: bool) -> None:
        self._console = status_console()
        self._lines = not hidden and not self._console.is_terminal
        columns = TextColumn("{task.description:<20}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        self._bars = Progress(*columns, console=self._console, disable=hidden or self._lines)
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> _Progress:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def update(self, phase: str, done: int, total: int) -> None:
        if phase not in self._tasks:
            self._tasks[phase] = self._bars.add_task(PHASES[phase], total=total)
        self._bars.update(self._tasks[phase], completed=done)
        if self._lines and done == total:
            self._console.print(f"{PHASES[phase]}: {done} of {total}")


def _print(result: DemoResult, report: Path) -> None:
    console = results_console()
    console.print("[bold]Same seed, same data, same fault[/bold]")
    console.print(_runs_table(result.plain, result.guarded))
    _print_fault(console, result.guarded)
    _print_cost(console, result.cost, result.engine)
    console.print(f"\nStep log of the guarded run: {result.log}", soft_wrap=True, markup=False)
    console.print(f"Its report, to open in a browser: {report}", soft_wrap=True, markup=False)


def _runs_table(plain: RunResult, guarded: RunResult) -> Table:
    table = Table()
    table.add_column("")
    table.add_column("plain PyTorch", justify="right")
    table.add_column("nanscan.wrap", justify="right")
    pair = plain, guarded
    table.add_row("steps", *(f"{run.steps:,}" for run in pair))
    table.add_row("skipped", *(f"{run.skipped:,}" for run in pair))
    table.add_row("first bad step", *(_or_none(run.first_bad_step) for run in pair))
    table.add_row("NaN or Inf weights at the end", *(f"{run.bad_weights:,} of {run.weights:,}" for run in pair))
    table.add_row("test accuracy", *(f"{run.accuracy:.1%}" for run in pair))
    return table


def _or_none(step: int | None) -> str:
    return "none" if step is None else f"{step:,}"


def _print_fault(console: Console, run: RunResult) -> None:
    if run.first_bad_step is None:
        console.print("No batch lacked a class in this run: nothing went wrong (try another --seed).")
        return
    absent = ", ".join(str(digit) for digit in run.absent_classes)
    console.print(f"Step {run.first_bad_step}: no sample of class {absent} in the batch, so the loss was 0/0.")
    console.print(f"Culprit, as the guard names it: {run.culprit}", markup=False)


def _print_cost(console: Console, cost: Cost, engine: str) -> None:
    console.print("\n[bold]What checking and clipping add to a step, on this machine, just now[/bold]")
    console.print(_cost_table(cost))
    console.print(
        f"Fused AdamW, {cost.tensors} gradients, {cost.elements:,} numbers, clipping active, one thread, "
        f"engine {engine}; medians of {cost.rounds} rounds in random order."
    )


def _cost_table(cost: Cost) -> Table:
    table = Table()
    table.add_column("")
    table.add_column("µs a step", justify="right")
    table.add_column("÷ nanscan", justify="right")
    table.add_row("the bare step (no check, no clip)", f"{cost.step_us:,.0f}", "")
    ways = {
        "Python loop: isnan().any(), norm, clip": cost.loop_us,
        "torch clip_grad_norm_ (checks nothing)": cost.torch_clip_us,
        "nanscan.wrap: checks, names, clips": cost.nanscan_us,
    }
    for name, added in ways.items():
        ratio = f"{added / cost.nanscan_us:.1f}" if cost.nanscan_us > 0 else ""
        table.add_row(name, f"{added:+,.0f}", ratio)
    return table
