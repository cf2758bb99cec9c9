"""Files of the source tree that are pages of the site as well: the READMEs, CONTRIBUTING, CHANGELOG and the examples.

The pages in `docs/` link to them by their paths in the tree, as a code host wants it; on the site the same links lead
to the pages that stand for them.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1]
ROOT = DOCS.parent
PAGE_OF = {
    "readme": "README.md",
    "contributing": "CONTRIBUTING.md",
    "changelog": "CHANGELOG.md",
    "examples": "examples/README.md",
    "segmentation": "examples/segmentation/README.md",
}
EXAMPLES = ROOT / "examples"
LINK = re.compile(r"(?<=\]\()(?!\w+:)([^)#\s]+)(#[^)\s]*)?(?=\))")


def page_for(target: Path, anchor: str) -> tuple[Path, str]:
    """The page of the site, and the place in it, that stands for a file or folder of the tree; itself if none does."""
    for page, file in PAGE_OF.items():
        if target == ROOT / file or target == (ROOT / file).parent != ROOT:
            return DOCS / f"{page}.md", anchor
    if target.parent == EXAMPLES and target.suffix == ".py":
        return DOCS / "examples.md", "#" + target.name.replace(".", "")
    return target, anchor


def relinked(text: str, written_in: Path, shown_in: Path) -> str:
    """Markdown whose relative links, right in the folder where it was written, are right in the site's folder."""

    def relink(match: re.Match[str]) -> str:
        target = Path(os.path.normpath(written_in / match[1]))
        page, anchor = page_for(target, match[2] or "")
        return os.path.relpath(page, shown_in) + anchor

    return LINK.sub(relink, text)


def listed_examples() -> str:
    """Each example with its source."""
    listing = "\n## {name}\n\n```{{literalinclude}} ../examples/{name}\n:language: python\n```\n"
    return "".join(listing.format(name=path.name) for path in sorted(EXAMPLES.glob("*.py")))


def read_page(app: Any, name: str, source: list[str]) -> None:
    """What is read for a page: a file of the root for those that stand for one, and links that lead to pages."""
    written_in = shown_in = (DOCS / name).parent
    if name in PAGE_OF:
        written_in = (ROOT / PAGE_OF[name]).parent
        source[0] = (ROOT / PAGE_OF[name]).read_text()
        app.env.note_dependency(str(ROOT / PAGE_OF[name]))
    source[0] = relinked(source[0], written_in, shown_in)
    if name == "examples":
        source[0] += listed_examples()
        app.env.note_dependency(str(EXAMPLES))


def setup(app: Any) -> dict[str, Any]:
    app.connect("source-read", read_page)
    return {"parallel_read_safe": True}
