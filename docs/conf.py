"""The documentation site: `bash scripts/site.sh`, or `python -m sphinx -W --keep-going -b html docs site`.

Pages are Markdown (MyST) and notebooks. Text from the code replaces a comment `<!-- generated: NAME ARGUMENT -->`
(`_ext/generated.py`). Nothing is loaded from the network, neither by the build nor by the pages.
"""

import os
import sys
from importlib.metadata import version as version_of
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path[:0] = [str(DOCS / "_ext")]
# Notebooks run offline, on one thread, without progress bars in their output.
os.environ.update(
    TQDM_DISABLE="1",
    HF_HUB_DISABLE_PROGRESS_BARS="1",
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
    TOKENIZERS_PARALLELISM="false",
)

project = "lm-eval-editing"
author = "lm-eval-editing contributors"
copyright = author
version = release = version_of("lm-eval-editing")

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_design",
    "sphinx_copybutton",
    "generated",
    "links",
    "made",
    "mathml",
]
exclude_patterns = ["README.md", "templates", "_*", "**/.ipynb_checkpoints"]
html_math_renderer = "mathml"

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath", "attrs_block"]
myst_heading_anchors = 4
# Notebooks to execute: none, first (in CI) or all (the published site). A cache would miss changes of our code.
DOCS_NOTEBOOKS = os.environ.get("DOCS_NOTEBOOKS", "none")
nb_execution_mode = "off" if DOCS_NOTEBOOKS == "none" else "force"
NOTEBOOKS = ("first-edit", "compare-editors", "own-editor", "what-an-edit-breaks")
nb_execution_excludepatterns = [f"notebooks/{name}*" for name in NOTEBOOKS[1:] if DOCS_NOTEBOOKS == "first"]
nb_execution_in_temp = True  # they write files
nb_execution_timeout = 600
nb_execution_raise_on_error = True
nb_merge_streams = True
nb_output_stderr = "remove"  # logs and bars of other packages

autodoc_typehints = "description"
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_use_ivar = True

html_theme = "pydata_sphinx_theme"
html_title = "lm-eval-editing"
html_static_path = ["_static"]
html_extra_path = ["_made/pages"]  # the leaderboard page of the gallery's runs, see _ext/made.py
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "header_links_before_dropdown": 8,
    "navigation_with_keys": False,
    "show_prev_next": True,
    "footer_start": ["copyright"],
    "footer_end": ["theme-version"],
    "secondary_sidebar_items": ["page-toc"],
}
html_sidebars = {"index": []}
