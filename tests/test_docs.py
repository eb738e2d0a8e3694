"""A page for every public name, docstrings that name the arguments that are there, and a build without a warning."""

import dataclasses
import html
import importlib
import inspect
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import jaxbuf
import jaxbuf.recurrence
import jaxbuf.serving
from jaxbuf.cli import app

ROOT = Path(__file__).parent.parent
PAGES = re.findall(r"^   (jaxbuf[\w.]+)$", (ROOT / "docs" / "reference.rst").read_text(), re.MULTILINE)


def find(name: str):
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def test_every_public_name_has_a_page():
    public = [getattr(jaxbuf, name) for name in jaxbuf.__all__ if name != "__version__"]
    for module in (jaxbuf.recurrence, jaxbuf.recurrence.buffered, jaxbuf.serving):
        public += [getattr(module, name) for name in module.__all__ if not inspect.ismodule(getattr(module, name))]
    documented = [find(name) for name in PAGES]
    assert [item.__qualname__ for item in public if item not in documented] == []
    assert len(PAGES) == len(set(PAGES))


def functions() -> list:
    """Every documented function, and the public methods of every documented class."""
    found = []
    for page in PAGES:
        item = find(page)
        if inspect.isclass(item):
            found += [method for name, method in inspect.getmembers(item, inspect.isfunction) if name[0] != "_"]
        else:
            found.append(item)
    return found


def described(docstring: str, section: str) -> list[str]:
    """The names that a section explains: "q, k: ..." are two."""
    block = re.search(rf"^{section}:\n((?:  .*\n|\n)+)", docstring + "\n", re.MULTILINE)
    lines = re.findall(r"^  (\w[\w, ]*):", block[1], re.MULTILINE) if block else []
    return [name.strip() for line in lines for name in line.split(",")]


def unexplained(function) -> list[str]:
    """The arguments that a docstring leaves to guess.

    A section Args has all of them; a docstring without one names them, or the function that takes the same. Arguments
    of a class that has a page are explained there, and those of a drafter's methods in the protocol, which they name.
    """
    docstring = inspect.getdoc(function) or ""
    explained = described(docstring, "Args")
    classes = [find(page).__name__ for page in PAGES if inspect.isclass(find(page))]
    refers = re.search(r"[Aa]s in `|`\w+` for|; see `Drafter\.(init|admit|propose|settle)`\.$", docstring)
    found = []
    for name, parameter in inspect.signature(inspect.unwrap(function)).parameters.items():
        kind = getattr(parameter.annotation, "__name__", str(parameter.annotation))
        if name == "self" or name[0] == "_" or name in explained or kind in classes:
            continue
        if explained or not (refers or re.search(rf"\b{name.removesuffix('s')}s?\b", docstring)):
            found.append(name)
    return found


def test_docstrings_explain_the_arguments_that_are_there_and_no_others():
    wrong = []
    for function in functions():
        extra = set(described(inspect.getdoc(function) or "", "Args"))
        extra -= set(inspect.signature(inspect.unwrap(function)).parameters)
        wrong += [f"{function.__qualname__} has no argument {name}" for name in extra]
        wrong += [f"{function.__qualname__} does not explain {name}" for name in unexplained(function)]
    assert wrong == []


def test_docstrings_of_dataclasses_explain_the_fields_that_are_there_and_no_others():
    wrong = []
    for item in filter(dataclasses.is_dataclass, map(find, PAGES)):
        docstring = inspect.getdoc(item) or ""
        explained, there = set(described(docstring, "Attributes")), {field.name for field in dataclasses.fields(item)}
        wrong += [f"{item.__qualname__} has no field {name}" for name in explained - there]
        missing = {name for name in there - explained if explained or not re.search(rf"\b{name}\b", docstring)}
        wrong += [f"{item.__qualname__} does not explain {name}" for name in missing]
    assert wrong == []


# Records that the page of figures leaves out: measurements that newer ones took the place of, smaller or shorter ones
# of what it has, and what is no measurement (checks, trainings).
NOT_SHOWN = set(
    """
    attention_pairs chunked_masks_inside demo_quality demo_training drift drift_kernel drift_split_long
    drift_split_long_mamba2 gpu_checks gpu_checks_around gpu_checks_attention gpu_checks_channels
    gpu_checks_exported gpu_checks_families gpu_checks_kernels gpu_checks_keys_256 gpu_checks_latent
    gpu_checks_mamba2 gpu_checks_others gpu_checks_pairs gpu_checks_prompts gpu_checks_recurrent
    gpu_checks_split gpu_checks_stores gpu_checks_trees gpu_checks_two gpu_checks_windows kernels_kda_verify
    kernels_mamba2_verify kernels_split_batch_4_8 kernels_split_small portability step step_attend
    step_library_out step_one step_project step_small step_split write_gate_hybrid_model
    write_gate_retrieval_bias write_gate_retrieval_bias_short write_gate_retrieval_model
""".split()
)


def test_the_page_of_figures_has_those_of_the_records():
    """`python docs/performance.py` writes it anew."""
    made = runpy.run_path(str(ROOT / "docs" / "performance.py"))
    assert (ROOT / "docs" / "performance.rst").read_text() == made["page"]()
    shown = {name for section in made["SECTIONS"] for name in section.records}
    assert shown | NOT_SHOWN == {path.stem for path in (ROOT / "benchmarks").glob("*.json")}
    assert not shown & NOT_SHOWN


def test_figures_are_rounded_as_people_write_them():
    made = runpy.run_path(str(ROOT / "docs" / "performance.py"))
    written = [made["significant"](value) for value in (0.0696, 4.2, 75.05, 143.6, 18374.6, 999.6)]
    assert written == ["0.0696", "4.20", "75.0", "144", "18,400", "1,000"]
    with pytest.raises(ValueError, match="figures of kernels have"):
        made["find"]("kernels", part="decode")


def console_blocks(page: str) -> list[tuple[str, str]]:
    """The commands that a page shows, and what it says they print."""
    text = (ROOT / "docs" / page).read_text()
    blocks = re.findall(r"^\.\. code-block:: console\n\n((?:   .*\n|\n)+)", text, re.MULTILINE)
    found = [re.sub(r"^   ", "", block, flags=re.MULTILINE).strip().partition("\n") for block in blocks]
    return [(command.removeprefix("$ "), printed) for command, _, printed in found]


def test_plans_on_the_page_of_memory_are_what_the_command_prints():
    blocks = console_blocks("memory.rst")
    assert len(blocks) == 2 and all(command.startswith("jaxbuf plan ") for command, _ in blocks)
    for command, printed in blocks:
        done = CliRunner().invoke(app, command.split()[1:], env={"COLUMNS": "100"})
        assert [line.rstrip() for line in done.stdout.strip().splitlines()] == printed.splitlines(), done.output


def test_the_page_of_what_stays_has_every_public_name():
    page = (ROOT / "docs" / "public_api.rst").read_text()
    public = {*jaxbuf.__all__, *jaxbuf.recurrence.__all__, *jaxbuf.serving.__all__} - {"__version__"}
    assert {name for name in public if f"``{name}``" not in page} == set()


def test_pictures_are_small_and_drawn_by_the_program():
    pictures = sorted((ROOT / "docs").glob("*.png"))
    program = (ROOT / "docs" / "pictures.py").read_text()
    assert len(pictures) == 8 and all(f'"{path.name}")' in program for path in pictures)
    assert [path.name for path in pictures if path.stat().st_size > 60_000] == []


@pytest.mark.slow
def test_the_documentation_builds_without_a_warning(tmp_path):
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("api"))
    for shown in ("benchmarks", "examples", "jaxbuf"):  # pages have plots and programs of these
        (tmp_path / shown).symlink_to(ROOT / shown)
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "docs", "site"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr
    missing = [name for name in PAGES if not (tmp_path / "site" / "api" / f"{name}.html").is_file()]
    assert missing == []
    pages = {name: (tmp_path / "site" / "api" / f"{name}.html").read_text() for name in PAGES}
    assert "max_new_tokens" in pages["jaxbuf.generate"] and "Continues every prompt" in pages["jaxbuf.generate"]
    check_what_is_read(pages)
    assert broken_links(tmp_path / "site") == []
    assert "<math" in (tmp_path / "site" / "buffered.html").read_text()


def broken_links(site: Path) -> list[tuple[str, str]]:
    """Links of built pages to files or headings that are not there, but for those to other sites and to sources."""
    pages = {page: page.read_text() for page in site.rglob("*.html") if "_modules" not in page.parts}
    anchors = {page: set(re.findall(r'\bid="([^"]+)"', text)) for page, text in pages.items()}
    broken = []
    for page, text in pages.items():
        for link in map(html.unescape, re.findall(r'(?:href|src)="([^"]+)"', text)):
            if re.match(r"[a-z]+:", link):
                continue
            file, _, anchor = link.partition("#")
            there = (page.parent / file.partition("?")[0]).resolve() if file else page
            if not there.exists() or (anchor and there in anchors and anchor not in anchors[there]):
                broken.append((page.name, link))
    return broken


def check_what_is_read(pages: dict[str, str]) -> None:
    """What Sphinx and napoleon make of a docstring that they read otherwise than we write it."""
    equations, families = preformatted(pages["jaxbuf.recurrence.RecurrenceSpec"])
    decayed, update, added, read = equations.splitlines()
    assert decayed == "S̃ = S · diag(exp(log_decay))" and update.startswith("u = beta · (v − S̃ k)            with the")
    assert (added, read) == ("S ← S̃ + u ⊗ k", "o = S q")
    assert len(families.splitlines()) == 7 and families.splitlines()[5].startswith("Gated DeltaNet            decay=")
    returns = fields(pages["jaxbuf.generate"], "Returns")
    assert returns[0].startswith("One result a prompt, in order: that of its first sample, which has all of them")
    wrong = {}
    for name, page in pages.items():
        article = page[page.index("<article") : page.index("</article>")]
        shown = html.unescape(
            re.sub(r"<[^>]+>", "", re.sub(r"<(code|pre).*?</\1>|<dt class=\"sig.*?</dt>", "", article, flags=re.S))
        )
        symptoms = {
            "a sentence for a type": [
                found for label in ("Return type", "Yield type", "Type") for found in fields(article, label)
            ],
            "an equation that was not read": re.findall(r":math:.*|\\\w+\{.*", shown),
            "a table of empty lines": re.findall(r"Alias for field number.*", shown),
            "an attribute for another's type": re.findall(r"\w+ \((?:\w+, ?)+\)", "\n".join(fields(article, "Fields"))),
            "marks that were not read": re.findall(r".*`.*|.*\*\*\w+\*\*.*", shown),
            "letters that nobody typed": re.findall(r".*[“”‘’–]\w.*", shown),
            "a module's own name of arrays": re.findall(r"jaxbuf[.\w]*\.Array\b|jaxtyping\.\w+", shown),
            "a problem of Sphinx": re.findall(r"system-message|problematic", article),
        }
        wrong |= {(name, symptom): found for symptom, found in symptoms.items() if found}
    assert wrong == {}


def preformatted(page: str) -> list[str]:
    """The text of every block that is set as it stands, outside of signatures."""
    return [
        html.unescape(re.sub(r"<[^>]+>", "", block)).rstrip() for block in re.findall(r"<pre>(.*?)</pre>", page, re.S)
    ]


def fields(page: str, label: str) -> list[str]:
    """The text of every field of a page that has this label: Parameters, Returns, ..."""
    pattern = rf'<dt class="field-[^>]*>{label}<span class="colon">:</span></dt>\s*<dd[^>]*>(.*?)</dd>'
    return [" ".join(html.unescape(re.sub(r"<[^>]+>", "", found)).split()) for found in re.findall(pattern, page, re.S)]
