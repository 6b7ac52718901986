"""Configuration of the documentation site, built by ``make docs``.

The source folder is the repository, so that a relative link that works in a checkout works on the site.
"""

from __future__ import annotations

from pathlib import Path

import econmt

project = "econmt"
author = "the econmt authors"
copyright = author  # noqa: A001  Sphinx reads this name
version = release = econmt.__version__

root_doc = "docs/index"
include_patterns = [
    "docs/**.md",
    "docs/tour.ipynb",
    "ops/**.md",
    "memory/**.md",
    "runtime/README.md",
    "scripts/bench/compare/README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
]
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]

nb_execution_mode = "off"  # the notebook is shown with its own outputs

myst_heading_anchors = 4
myst_enable_extensions = ["fieldlist"]

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_maximum_signature_line_length = 88

html_theme = "furo"
html_title = f"econmt {econmt.__version__}"
html_show_sourcelink = False
html_copy_source = False
html_extra_path = ["site"]
html_static_path = ["static"]
html_css_files = ["wide-tables.css"]
html_search_scorer = str(Path(__file__).parent / "static" / "search-order.js")
