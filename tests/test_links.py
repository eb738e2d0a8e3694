"""What pages refer to is there: files, headings, and names of Python. No network is asked for."""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MARKDOWN = sorted(
    [*ROOT.glob("*.md"), ROOT / "benchmarks" / "README.md", ROOT / "jaxbuf" / "models" / "demo" / "README.md"]
)
PAGES = sorted((ROOT / "docs").glob("*.rst"))
FOLDERS = "benchmarks|docs|examples|jaxbuf|scripts|tests"
HISTORY = ROOT / "CHANGELOG.md"  # names files that a later version may not have


def names(pages: list[Path]) -> list[str]:
    return [str(page.relative_to(ROOT)) for page in pages]


def anchors(page: Path) -> set[str]:
    """The headings of a page in Markdown as links name them: in lower case, without punctuation, words with hyphens."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", names(MARKDOWN))
def test_links_of_a_page_in_markdown_lead_somewhere(page):
    path, wrong = ROOT / page, []
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if re.match(r"https?:|mailto:", target):
            continue
        file, _, anchor = target.partition("#")
        there = path.parent / file if file else path
        if not there.exists() or (anchor and anchor not in anchors(there)):
            wrong.append(target)
    assert wrong == []


@pytest.mark.parametrize("page", names([path for path in (*MARKDOWN, *PAGES) if path != HISTORY]))
def test_files_that_a_page_names_are_there(page):
    """Those in a folder of the repository; `<name>` and `NAME` stand for others, and `*` for several."""
    wrong = []
    for named in re.findall(rf"`((?:{FOLDERS})/[\w./*<>-]+)`", (ROOT / page).read_text()):
        if not re.search(r"[<>]|\b[A-Z]+\b(?!\.)|_NAME", named) and not list(ROOT.glob(named)):
            wrong.append(named)
    assert wrong == []


@pytest.mark.parametrize("page", names(PAGES))
def test_names_of_python_that_a_page_links_are_there(page):
    """Sphinx leaves a link to a name that it does not know as text, and says nothing."""
    reference = (ROOT / "docs" / "reference.rst").read_text()
    wrong = []
    for target in re.findall(r":(?:func|class|mod|meth):`(?:[^`<]*<)?~?([\w.]+)>?`", (ROOT / page).read_text()):
        module, _, attribute = target.rpartition(".")
        if not hasattr(importlib.import_module(module), attribute) or f"   {target}\n" not in reference:
            wrong.append(target)
    assert wrong == []
