"""`nanscan bench`: a quick look at the speed on this machine; the full suites are `make bench`."""

from __future__ import annotations

import math

import click

from nanscan.cli.output import common_options, print_json
from nanscan.cli.progress import working
from nanscan.cli.verb import Verb

ROWS = ("small", "lora", "mlp", "resnet50", "bert", "gpt2")  # those of nanscan.bench, which imports PyTorch
DTYPES = ("float32", "bfloat16", "float16")


def _finite(ctx: click.Context, param: click.Parameter, value: float) -> float:
    if not math.isfinite(value):
        raise click.BadParameter(f"{value} is no time that ends.")
    return value


@click.command(
    "bench",
    cls=Verb,
    short_help="Measure the scan and the guarded step on this machine.",
    examples={
        "nanscan bench --seconds 30": "all workloads, longer",
        "nanscan bench --row gpt2 --dtype bfloat16": "one of them",
    },
    exits="0.",
)
@click.option(
    "--row", "rows", multiple=True, type=click.Choice(ROWS), metavar="NAME", help=f"{', '.join(ROWS)}; may be repeated."
)
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    type=click.Choice(DTYPES),
    metavar="NAME",
    help=f"{', '.join(DTYPES)}; may be repeated.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(0, min_open=True),
    callback=_finite,
    metavar="N",
    default=12.0,
    show_default=True,
    help="To measure.",
)
@click.option("--steps/--no-steps", default=True, help="Guarded steps, too.  [default: --steps]")
@common_options
def command(rows: tuple[str, ...], dtypes: tuple[str, ...], seconds: float, steps: bool, as_json: bool) -> int:
    """Time nanscan against other ways to check gradients, and print ratios: above 1, nanscan is faster."""
    with working("importing PyTorch") as tell:
        from nanscan.bench import quick_bench

        result = quick_bench(
            rows or None,
            dtypes or DTYPES[:1],
            seconds=seconds,
            steps=steps,
            progress=lambda what: tell(f"measuring: {what}"),
        )
    if as_json:
        print_json({"exit_code": 0, **result.to_dict()})
    else:
        result.print()
    return 0
