"""Sphinx's settings: a page for every public name, from its docstring. `scripts/docs` builds them."""

import jaxbuf

project = "jaxbuf"
author = copyright = "The jaxbuf authors"
version = release = jaxbuf.__version__

extensions = ["sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
nitpicky = False
default_role = "code"  # `name` is code, as in Markdown
html_theme = "furo"
html_title = f"jaxbuf {version}"

autosummary_generate = True
autosummary_imported_members = True
autodoc_default_options = {"members": True, "undoc-members": False, "exclude-members": "__init__, __new__"}
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_custom_sections = [("Source", "Source")]
