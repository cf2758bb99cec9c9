"""`nanscan demo`: progress while it trains, a table at the end."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nanscan.cli.output import common_options, print_json, print_lines, printable
from nanscan.cli.progress import bars, running, working
from nanscan.cli.replacing import replaced
from nanscan.cli.verb import FileName, Verb
from nanscan.errors import NonFiniteWarning
from nanscan.tables import print_table

if TYPE_CHECKING:
    from rich.progress import TaskID

    from nanscan.demo import Cost, DemoResult, RunResult

PHASES = {"plain": "plain PyTorch", "guarded": "guarded by nanscan", "cost": "cost of each check"}
MAX_SEED = 2**32 - 1  # what generators of all kinds take
PASS_MARK = 0.9  # of the test digits; a guess gets 0.1


@click.command(
    "demo",
    cls=Verb,
    short_help="Train on real digits with a real fault, plain and guarded.",
    examples={"nanscan demo": "the whole", "nanscan demo --epochs 6 --seed 3": "shorter, other batches"},
    exits="0 if the guarded run ends well (more than 90 % right), else 1.",
)
@click.option(
    "--epochs", type=click.IntRange(1), metavar="N", default=20, show_default=True, help="Passes over the data."
)
@click.option(
    "--rounds", type=click.IntRange(1), metavar="N", default=300, show_default=True, help="Times each check is timed."
)
@click.option(
    "--seed",
    type=click.IntRange(0, MAX_SEED),
    metavar="N",
    default=0,
    show_default=True,
    help="Of data, weights and order.",
)
@click.option(
    "--log",
    type=FileName(dir_okay=False, path_type=Path),
    default=Path("nanscan-demo.jsonl"),
    show_default=True,
    help="The step log to write.",
)
@common_options
def command(epochs: int, rounds: int, seed: int, log: Path, as_json: bool) -> int:
    """Train twice on 1,797 handwritten digits: same seed, same fault.

    The loss is averaged within each class, then over the classes. A batch without a sample of some class gives 0/0.
    Plain PyTorch never recovers from that step; the guarded run skips it.
    """
    _check(log)
    with working("importing PyTorch"):
        from nanscan.demo import run_demo
        from nanscan.demo.run import Settings
        from nanscan.reporting.page import write_page
        from nanscan.reporting.reading import read_log

    settings = Settings(epochs=epochs, seed=seed, cost_rounds=rounds)
    with _Progress().shown() as progress, warnings.catch_warnings():
        warnings.simplefilter("ignore", NonFiniteWarning)  # the table says it, and the log
        result = run_demo(log.absolute(), settings, progress.update)
    report = log.absolute().with_suffix(".html")
    with replaced(report) as new:
        write_page(read_log(log), new)
    code = 0 if result.guarded.finite and result.guarded.accuracy > PASS_MARK else 1
    if as_json:
        print_json({"exit_code": code, **result.to_dict(), "report": str(report)})
    else:
        _print(result, report)
    return code


def _check(log: Path) -> None:
    shown = printable(str(log))
    if log.exists() and not log.is_file():
        raise click.ClickException(f"'{shown}' is no file: give one, such as run.jsonl")
    if log.suffix == ".html":
        raise click.ClickException(f"the page goes to '{shown}': choose another name, such as run.jsonl")


class _Progress:
    """A bar for each phase."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

        columns = TextColumn("{task.description:<20}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        self._bars = bars(*columns, kept=True)
        self._tasks: dict[str, TaskID] = {}

    @contextlib.contextmanager
    def shown(self) -> Iterator[_Progress]:
        with running(self._bars):
            yield self

    def update(self, phase: str, done: int, total: int) -> None:
        if phase not in self._tasks:
            self._tasks[phase] = self._bars.add_task(PHASES[phase], total=total)
        self._bars.update(self._tasks[phase], completed=done)


def _print(result: DemoResult, report: Path) -> None:
    _print_runs(result.plain, result.guarded)
    _print_fault(result.guarded)
    _print_cost(result.cost, result.engine)
    print_lines([f"Step log of the guarded run: {result.log}", f"Its report, to open in a browser: {report}"])


def _print_runs(plain: RunResult, guarded: RunResult) -> None:
    pair = plain, guarded
    rows = [
        ("steps", *(f"{run.steps:,}" for run in pair)),
        ("skipped", *(f"{run.skipped:,}" for run in pair)),
        ("first bad step", *(_or_none(run.first_bad_step) for run in pair)),
        ("NaN or Inf weights at the end", *(f"{run.bad_weights:,} of {run.weights:,}" for run in pair)),
        ("test accuracy", *(f"{run.accuracy:.1%}" for run in pair)),
    ]
    print_table(("", "plain PyTorch", "nanscan.wrap"), rows, sys.stdout, title="Same seed, same data, same fault")


def _or_none(step: int | None) -> str:
    return "none" if step is None else f"{step:,}"


def _print_fault(run: RunResult) -> None:
    if run.first_bad_step is None:
        print_lines(["No batch lacked a class in this run: nothing went wrong (try another --seed)."])
        return
    absent = ", ".join(str(digit) for digit in run.absent_classes)
    print_lines(
        [
            f"Step {run.first_bad_step}: no sample of class {absent} in the batch, so the loss was 0/0.",
            f"First of the bad gradients: {run.culprit}",
            "",
        ]
    )


def _print_cost(cost: Cost, engine: str) -> None:
    ways = {
        "Python loop: isnan().any(), norm, clip": cost.loop_us,
        "torch clip_grad_norm_ (checks nothing)": cost.torch_clip_us,
        "nanscan.wrap: checks, names, clips": cost.nanscan_us,
    }
    ratios = [f"{added / cost.nanscan_us:.1f}" if cost.nanscan_us > 0 else "" for added in ways.values()]
    rows = [("the bare step (no check, no clip)", f"{cost.step_us:,.0f}", "")]
    rows += [(name, f"{added:+,.0f}", ratio) for (name, added), ratio in zip(ways.items(), ratios, strict=True)]
    print_table(
        ("", "µs a step", "÷ nanscan"),
        rows,
        sys.stdout,
        title="What checking and clipping add to a step, on this machine, just now",
        note=f"Fused AdamW, {cost.tensors} gradients, {cost.elements:,} numbers, clipping active, one thread, "
        f"engine {engine}; medians of {cost.rounds} rounds in random order.",
    )
