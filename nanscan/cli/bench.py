"""`nanscan bench`: a quick look at the speed on this machine; the full suites are `make bench`."""

from __future__ import annotations

import click

from nanscan.cli.output import common_options, print_json, status_console


@click.command("bench", short_help="Measure the scan and the guarded step on this machine.")
@click.option(
    "--row", "rows", multiple=True, help="Only this workload (may be repeated): small, lora, mlp, resnet50, …"
)
@click.option("--dtype", "dtypes", multiple=True, help="float32 (default), bfloat16, float16; may be repeated.")
@click.option(
    "--seconds", type=click.FloatRange(0, min_open=True), default=12.0, show_default=True, help="Measuring time."
)
@click.option("--steps/--no-steps", default=True, show_default=True, help="Measure guarded optimizer steps too.")
@common_options
def command(rows: tuple[str, ...], dtypes: tuple[str, ...], seconds: float, steps: bool, as_json: bool) -> int:
    """Time nanscan against the other ways to check gradients, interleaved in random order, and print ratios.

    A figure above 1 means that nanscan is faster. Goals are printed beside the figures.
    """
    from nanscan.bench import quick_bench

    console = status_console()

    def tell(what: str) -> None:
        if not as_json:
            console.print(f"measuring: {what}", markup=False)

    try:
        result = quick_bench(rows or None, dtypes or ("float32",), seconds=seconds, steps=steps, progress=tell)
    except ValueError as error:  # an unknown row or dtype; the message names those that are known
        raise click.UsageError(str(error)) from error
    if as_json:
        print_json(result.to_dict())
    else:
        result.print()
    return 0
