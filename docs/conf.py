"""Sphinx's settings: a page for every public name, from its docstring. `scripts/docs` builds them."""

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from itertools import takewhile

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.domains.python import PyObject

import jaxbuf

project = "jaxbuf"
author = copyright = "The jaxbuf authors"
version = release = jaxbuf.__version__

extensions = ["sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
nitpicky = False
default_role = "code"  # `name` is code, as in Markdown
highlight_language = "none"  # what stands as it is: equations, tables and output; Python says that it is Python
smartquotes = False  # "bfloat16" is typed as it stands, and so is --limit
html_theme = "furo"
html_title = f"jaxbuf {version}"
html_math_renderer = "mathml"  # what browsers render themselves: pages need no script and no network
html_static_path = ["_static"]
html_css_files = ["pages.css"]

templates_path = ["_templates"]
autosummary_generate = True
autosummary_imported_members = True
autodoc_default_options = {"members": True, "undoc-members": False, "exclude-members": "__init__, __new__"}
autodoc_typehints = "signature"
maximum_signature_line_length = 88  # longer ones have a line for each parameter
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Yields):")
FIGURE = re.compile(r"[-\d][\d.,e-]*( (%|times|[kMG]?B))?|-")
COLON = "\ue000"  # stands for a colon while napoleon reads
RESULTS = {"Returns:": ":returns:", "Yields:": ":Yields:"}


def follow_conventions(app, what, name, obj, options, lines: list[str]) -> None:
    """Makes our docstrings what reStructuredText and napoleon read in the same way, before napoleon reads them.

    An indented block outside of a section is set as it stands: equations, tables, and examples, which are highlighted.
    Returns and Yields hold sentences, of which napoleon would take what stands before a colon for a type.
    """
    lines[:] = _rewritten(list(lines))
    if what in ("property", "attribute", "data") and lines:
        lines[0] = lines[0].replace(":", COLON)  # before a colon napoleon expects a type here, and we say what it is


def _rewritten(lines: list[str]) -> Iterator[str]:
    place = 0
    while place < len(lines):
        line = lines[place]
        place += 1
        if line.strip() and not line.startswith(" ") and not SECTION.fullmatch(line):
            yield line
            continue
        if not line.strip():
            yield line
            continue
        block = list(takewhile(lambda text: not text.strip() or text.startswith(" "), lines[place:]))
        place += len(block)
        if line in RESULTS:
            text = [each.strip() for each in block]
            yield from ["", f"{RESULTS[line]} {text[0]}", *(f"    {each}".rstrip() for each in text[1:]), ""]
        elif line.startswith(" "):
            yield from ["", ".. code-block:: python" if _is_python([line, *block]) else "::", "", line, *block, ""]
        elif line == "Attributes:":
            yield from [line, *_one_by_one(block)]
        else:
            yield from [line, *block]


def _is_python(block: list[str]) -> bool:
    try:
        ast.parse(inspect.cleandoc("\n".join(block)))
    except SyntaxError:
        return False
    return True


def _one_by_one(block: list[str]) -> Iterator[str]:
    """Attributes that share an explanation ("a, b: ..."), of which Sphinx would take the first for the other's type."""
    starts = [place for place, line in enumerate(block) if re.match(r"  \w[\w, ]*:( |$)", line)]
    for start, end in zip(starts, [*starts[1:], len(block)], strict=True):
        names, colon, first = block[start].partition(":")
        for name in names.split(","):
            yield from [f"  {name.strip()}{colon}{first}", *block[start + 1 : end]]


def follow_napoleon(app, what, name, obj, options, lines: list[str]) -> None:
    """Mends what napoleon wrote: arrays' types as they are written, without the name of jaxtyping before them."""
    lines[:] = [re.sub(r"\bjaxtyping\.(?=\w+\[)", "", line).replace(COLON, ":") for line in lines]


def skip_fields(app, what, name: str, obj, skip: bool, options) -> bool | None:
    """Leaves out the fields of dataclasses and named tuples, which the docstring of the class explains."""
    document = app.env.current_document
    if what != "class" or not document.autodoc_class:
        return None
    owner = getattr(importlib.import_module(document.autodoc_module), document.autodoc_class)
    return True if name in {*getattr(owner, "__dataclass_fields__", ()), *getattr(owner, "_fields", ())} else None


def join_with_dashes(app, doctree: nodes.document, page: str) -> None:
    """Writes a dash between a parameter and its explanation, where Sphinx has two hyphens."""
    for text in list(doctree.findall(nodes.Text)):
        if text == " -- ":
            text.parent.replace(text, nodes.Text(" \N{EN DASH} "))


def align_figures(app, doctree: nodes.document, page: str) -> None:
    """Aligns columns of figures at the right, so that they stand below one another by their last digit."""
    for table in doctree.findall(nodes.tgroup):
        rows = [row.children for row in table.findall(nodes.row)]
        if len({len(row) for row in rows}) != 1:  # cells that go over several columns or rows
            continue
        for heading, *cells in zip(*rows, strict=True):
            if cells and all(FIGURE.fullmatch(cell.astext()) for cell in cells):
                for cell in (heading, *cells):
                    cell["classes"].append("text-right")  # which Furo knows


def visit_math(translator, node: nodes.math) -> None:
    """Writes an equation within a line."""
    translator.body.append(tex2mathml(node.astext()))
    raise nodes.SkipNode


def visit_displayed_math(translator, node: nodes.math_block) -> None:
    """Writes an equation of its own; several lines are aligned at their `&`, as in LaTeX's aligned."""
    text = node.astext()
    if r"\\" in text or "&" in text:
        text = rf"\begin{{aligned}}{text}\end{{aligned}}"
    translator.body.append(f'<div class="math">{tex2mathml(text, as_block=True)}</div>')
    raise nodes.SkipNode


def setup(app) -> None:
    """Called by Sphinx."""
    for field in PyObject.doc_field_types:
        if field.name == "variable":
            field.label = "Fields"  # which is what Attributes are in a dataclass
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_displayed_math, None))
    app.connect("autodoc-skip-member", skip_fields)
    app.connect("autodoc-process-docstring", follow_conventions, priority=400)  # napoleon has 500
    app.connect("doctree-resolved", align_figures)
    app.connect("doctree-resolved", join_with_dashes)
    app.connect("autodoc-process-docstring", follow_napoleon, priority=600)
