"""How Sphinx builds the site: `make docs`. The pages are Markdown, the reference comes from the docstrings."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import nanscan

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

warnings.filterwarnings("ignore", "No ccache found")  # of importing Paddle

project = "nanscan"
author = "The nanscan developers"
copyright = "The nanscan developers, Apache-2.0"
version = release = nanscan.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "docstrings",
    "public_names",
    "tree_pages",
]
exclude_patterns = ["_ext", "_static"]
source_suffix = {".md": "markdown"}

# ---- pages -----------------------------------------------------------------------------------------------------------

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4  # `guide.md#the-log` leads to the heading here as it does on a code host
smartquotes_action = "D"  # dashes; a quote in a sentence may be one of the code
nitpicky = True  # a name that is written as a link and leads nowhere fails the build

# ---- reference -------------------------------------------------------------------------------------------------------

default_role = "literal"  # `x` in a docstring is code, as in Markdown
nitpick_ignore_regex = [
    ("py:class", r"'.*'"),  # a value of a Literal
    ("py:class", r"(\w+\.)*_?[RT](_co)?"),  # a type variable
    ("py:class", r"(torch|collections|os|pathlib|lightning|transformers|accelerate|paddle)\..*"),  # other projects'
]
autodoc_inherit_docstrings = False
python_use_unqualified_type_names = True
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
maximum_signature_line_length = 130
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_custom_sections = [("Warns", "Raises")]
python_display_short_literal_types = True

# The inventories of other projects are fetched from the network; without them their types are named, not linked.
intersphinx_mapping = (
    {
        "python": ("https://docs.python.org/3", None),
        "torch": ("https://docs.pytorch.org/docs/stable", None),
    }
    if os.environ.get("NANSCAN_DOCS_INTERSPHINX") == "1"
    else {}
)

# ---- looks -----------------------------------------------------------------------------------------------------------

html_theme = "furo"
html_title = f"nanscan {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_search_summary = False  # it would fetch each page found, which a browser refuses for files
html_show_sphinx = False
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {"navigation_with_keys": True, "top_of_page_buttons": []}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True


def name_the_language(app: Any, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """What is read aloud, and in which of a reader's fonts."""
    if page.startswith("zh/"):
        context["language"] = "zh-CN"


def setup(app: Any) -> None:
    app.connect("html-page-context", name_the_language)
