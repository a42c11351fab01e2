"""Sphinx configuration: ``make docs`` builds the pages with every warning an error."""

from __future__ import annotations

import sys
from importlib.metadata import version as installed_version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

project = "tree-attn-op"
copyright = "the authors of tree-attn-op"
version = release = installed_version("tree-attn-op")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"tree-attn-op {release}"

# Docstrings write `name` for code in some modules and ``name`` in others.
default_role = "literal"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_custom_sections = [("Args and attributes", "params_style")]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_mock_imports = ["megatron", "transformers"]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

# References to this project's functions and modules must lead somewhere; those to the types of
# PyTorch and of the standard library would need their inventories from the network.
nitpicky = True
nitpick_ignore_regex = [("py:(class|exc|obj|data|attr)", r".*"), ("py:.*", r"torch.*")]
