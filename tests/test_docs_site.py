"""The site that `make docs` makes: complete, without a dead link, readable offline and on a narrow screen."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sphinx.util.inventory import InventoryFile

import nanscan
from tests.chromium import Chromium, needs_chromium, once_more_if_silent
from tests.chromium import chromium as chromium  # a fixture

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
INTEGRATIONS = {
    name: next(path for path in (folder / f"{name}.py", folder / name / "__init__.py") if path.exists())
    for folder in [ROOT / "nanscan" / "integrations"]
    for name in nanscan.integrations.__all__
}


def sphinx(source: Path, target: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-d", f"{target}-doctrees", "-c", str(DOCS)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([*command, str(source), str(target)], env=environment, capture_output=True, text=True)


def dead_links(folder: Path) -> tuple[list[str], int]:
    """The links of a folder's pages to files or places that aren't there, and how many links there are."""
    lychee = Path(sys.executable).with_name("lychee")
    command = [
        str(lychee),
        "--offline",
        "--include-fragments",
        "--no-progress",
        "--format",
        "json",
        f"{folder}/**/*.html",
    ]
    found = json.loads(subprocess.run(command, capture_output=True, text=True).stdout)
    return sorted(link["url"] for links in found["error_map"].values() for link in links), found["total"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built without a warning."""
    target = tmp_path_factory.mktemp("docs") / "site"
    done = sphinx(DOCS, target)
    assert done.returncode == 0, done.stderr
    return target


def public_names() -> set[str]:
    names = {f"nanscan.{name}" for name in nanscan.__all__}
    for integration, file in INTEGRATIONS.items():
        tree = ast.parse(file.read_text())
        listed = next(
            node.value for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == "__all__"
        )  # type: ignore[attr-defined]
        names |= {f"nanscan.integrations.{integration}.{name}" for name in ast.literal_eval(listed)}
    return names


def test_every_public_name_stands_in_the_reference(site: Path) -> None:
    inventory = InventoryFile.loads((site / "objects.inv").read_bytes(), uri="")
    described = {name for kind in inventory.data if kind.startswith("py:") for name in inventory.data[kind]}
    assert len(public_names()) > 50
    assert public_names() - described == set()


def test_every_link_leads_somewhere(site: Path) -> None:
    dead, links = dead_links(site)
    assert dead == []
    assert links > 2000


def test_a_dead_link_and_a_dead_anchor_are_noticed(tmp_path: Path) -> None:
    (tmp_path / "other.html").write_text('<h1 id="here">x</h1>')
    (tmp_path / "page.html").write_text(
        '<a href="other.html#here">1</a><a href="other.html#nowhere">2</a><a href="gone.html">3</a>'
    )
    dead, links = dead_links(tmp_path)
    assert [url.rpartition("/")[2] for url in dead] == ["gone.html", "other.html#nowhere"]
    assert links == 3


@pytest.mark.parametrize("link", ["other.md#nowhere", "gone.md"])
def test_a_dead_link_in_markdown_fails_the_build(link: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "other.md").write_text("# Other\n\n## Here\n")
    text = "# Page\n\n[right](other.md#here) {link}\n\n```{{toctree}}\nother\n```\n"
    (source / "index.md").write_text(text.format(link=f"[wrong]({link})"))
    done = sphinx(source, tmp_path / "site")
    assert done.returncode != 0
    assert [line for line in done.stderr.splitlines() if "WARNING" in line and link.rpartition("#")[2] in line]


def test_every_example_stands_on_its_page_and_is_linked_to_there(site: Path) -> None:
    page = (site / "examples.html").read_text()
    scripts = [path.name for path in (ROOT / "examples").glob("*.py")]
    assert [name for name in scripts if f'href="#{name.replace(".", "-").replace("_", "-")}"' not in page] == []


# ---- in a browser ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def opened(chromium: Chromium, url: str, width: int = 1200) -> Iterator[Any]:
    """A page of the site, opened from disk; nothing may be fetched from elsewhere."""
    viewport = {"width": width, "height": 900}
    with chromium.open(url, lambda asked: asked.startswith(("file:", "data:")), viewport=viewport) as page:
        yield page


def test_the_chinese_page_says_that_it_is_chinese(site: Path) -> None:
    assert '<html class="no-js" lang="zh-CN"' in (site / "zh" / "index.html").read_text()
    assert '<html class="no-js" lang="en"' in (site / "index.html").read_text()


@needs_chromium
@once_more_if_silent
@pytest.mark.parametrize("width", [1200, 360])
@pytest.mark.parametrize("path", ["index.html", "api/guard.html", "zh/index.html"])
def test_a_page_opens_from_disk_and_fits_the_screen(path: str, width: int, site: Path, chromium: Chromium) -> None:
    with opened(chromium, (site / path).as_uri(), width) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.locator("article h1").is_visible()


@needs_chromium
@once_more_if_silent
def test_the_search_works_from_disk(site: Path, chromium: Chromium) -> None:
    with opened(chromium, (site / "search.html").as_uri() + "?q=clip_grad_norm_") as page:
        page.wait_for_selector("#search-results li a", timeout=20_000)
        hrefs = page.eval_on_selector_all("#search-results li a", "links => links.map(link => link.href)")
        assert any("api/scan.html#nanscan.clip_grad_norm_" in href for href in hrefs)


@needs_chromium
@once_more_if_silent
def test_code_in_a_sentence_leads_to_the_reference(site: Path, chromium: Chromium) -> None:
    with opened(chromium, (site / "recovery.html").as_uri()) as page:
        page.locator("article p a[href$='#nanscan.Recovery'] code").first.click()
        page.wait_for_url("**/api/recovery.html#nanscan.Recovery")
        assert "snapshot_every" in page.locator("dt[id='nanscan.Recovery']").inner_text()
