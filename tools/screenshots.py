"""The pictures of docs/screenshots.md, from real runs: `python tools/screenshots.py` (about two minutes on two cores).

Needs a Chromium on PATH (or NANSCAN_CHROMIUM), and playwright, rich and scikit-learn from requirements-dev.txt.
"""

from __future__ import annotations

import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import Any

import torch
from playwright.sync_api import sync_playwright
from rich.console import Console
from rich.text import Text

import nanscan

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
COLUMNS = 108
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
NANSCAN = [sys.executable, "-m", "nanscan"]


def main() -> None:
    IMAGES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder) / "night"
        work.mkdir()
        shutil.copy(ROOT / "tools" / "night_run.py", work / "train.py")
        picture_follow(work)
        log = work / "run.jsonl"
        log.write_text(log.read_text().replace(str(work.resolve()), "/home/me/night"))
        subprocess.run([*NANSCAN, "report", "run.jsonl"], cwd=work, check=True)
        picture_terminal("demo", ["demo", "--log", "demo.jsonl"], work)
        make_checkpoints(work / "models")
        picture_terminal("scan", ["scan", "models"], work)
        notebook = make_notebook(work)
        with browser() as pages:
            picture_report(pages, work / "run.html")
            picture_notebook(pages, notebook)
    total = sum(path.stat().st_size for path in IMAGES.iterdir())
    print(f"{len(list(IMAGES.iterdir()))} pictures in {IMAGES}, {total / 1e6:.2f} MB together")


def picture_follow(work: Path) -> None:
    """A run, and what `--follow` prints in a pipe meanwhile."""
    with subprocess.Popen(
        [*NANSCAN, "report", "--follow", "run.jsonl"], cwd=work, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as follow:
        subprocess.run([sys.executable, "train.py", "run.jsonl", "400", "0.02"], cwd=work, check=True)
        output, _ = follow.communicate(timeout=60)
    lines = output.decode().replace(f"{work.resolve()}/", "").splitlines()
    svg("follow", ["nanscan report --follow run.jsonl"], "\n".join(lines[-24:]))


def picture_terminal(name: str, arguments: list[str], work: Path) -> None:
    """What a command prints on a terminal, with its colours."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "TERM": "xterm-256color"}
    environment.pop("NO_COLOR", None)
    with subprocess.Popen(
        [*NANSCAN, *arguments], cwd=work, stdout=theirs, stderr=subprocess.DEVNULL, env=environment
    ) as child:
        os.close(theirs)
        output = b"".join(chunks(ours))
        child.wait()
    os.close(ours)
    text = output.decode().replace("\r\n", "\n").replace(f"{work.resolve()}/", "")
    svg(name, [f"nanscan {' '.join(arguments)}"], text)


def chunks(terminal: int) -> Iterator[bytes]:
    while True:
        try:
            chunk = os.read(terminal, 1 << 16)
        except OSError:  # Linux says so when the other side is closed
            return
        if not chunk:
            return
        yield chunk


def svg(name: str, commands: list[str], output: str) -> None:
    """A picture of a terminal; it names no font that would have to be fetched."""
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
    for command in commands:
        console.print(Text(f"$ {command}", style="bold"))
    console.print(Text.from_ansi(output.rstrip()), soft_wrap=False)
    picture = console.export_svg(title="nanscan", unique_id=name)
    (IMAGES / f"{name}.svg").write_text(re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL))


def make_checkpoints(folder: Path) -> None:
    """Three checkpoints, one of them with a NaN and an Inf."""
    folder.mkdir()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64), torch.nn.Linear(64, 10))
    for step in (100, 200, 300):
        if step == 300:
            with torch.no_grad():
                model[0].weight[3, 5] = float("nan")
                model[2].bias[7] = float("inf")
        torch.save({"model": model.state_dict(), "step": step}, folder / f"step-{step}.pt")


def make_notebook(work: Path) -> Path:
    """A page that shows a few objects as a notebook does."""
    torch.manual_seed(0)
    warnings.simplefilter("ignore", nanscan.NonFiniteWarning)  # the picture shows it
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = nanscan.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, clip_norm=1.0)
    batches = torch.randn(60, 16, 4)
    batches[41, 3, 2] = float("nan")
    for inputs in batches:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    bad = next(report for report in optimizer.history if report.skipped)
    cells = {"optimizer.history": optimizer.history, "bad": bad}
    body = "".join(
        f"<pre>In [{number}]: {escape(code)}</pre>{shown._repr_html_()}"
        for number, (code, shown) in enumerate(cells.items(), 1)
    )
    page = work / "notebook.html"
    page.write_text(f"<!DOCTYPE html><meta charset=utf-8><style>{NOTEBOOK_STYLE}</style><main>{body}</main>")
    return page


NOTEBOOK_STYLE = """
body { margin: 0; font: 14px/1.5 sans-serif; color-scheme: light dark } main { padding: 12px 18px; width: 820px }
table { border-collapse: collapse; margin: 6px 0 } th, td { padding: 2px 10px; text-align: left }
tr:nth-child(even) { background: #8882 } pre { background: #8881; padding: 6px 10px; margin: 14px 0 6px }
"""


@contextmanager
def browser() -> Iterator[Any]:
    path = os.environ.get("NANSCAN_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        raise SystemExit("no Chromium on PATH: apt-get install chromium, or set NANSCAN_CHROMIUM to one")
    with sync_playwright() as running:
        opened = running.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield opened
        opened.close()


def picture_report(pages: Any, file: Path) -> None:
    for scheme in ("light", "dark"):
        page = pages.new_page(viewport={"width": 1100, "height": 1160}, color_scheme=scheme)
        page.goto(file.as_uri())
        page.wait_for_timeout(1000)
        page.screenshot(path=IMAGES / f"report_{scheme}.png")
        if scheme == "light":
            page.locator(".origin").first.screenshot(path=IMAGES / "origin.png")
            page.locator("#layers").screenshot(path=IMAGES / "layers.png")
            page.locator("#ranges").screenshot(path=IMAGES / "ranges.png")
        page.close()


def picture_notebook(pages: Any, file: Path) -> None:
    page = pages.new_page(viewport={"width": 860, "height": 500})
    page.goto(file.as_uri())
    page.locator("main").screenshot(path=IMAGES / "notebook.png")
    page.close()


if __name__ == "__main__":
    main()
