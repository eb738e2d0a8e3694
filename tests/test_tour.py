"""The notebook of examples runs, and what is committed of it is what a run shows."""

import re
import warnings
from pathlib import Path

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of the notebook's own packages
    import nbclient
    import nbformat

PATH = Path(__file__).parent.parent / "examples" / "tour.ipynb"
MOST_BYTES = 400_000


def outputs(notebook) -> list[set[str]]:
    """Of each cell of code what kinds of output it has."""
    return [
        {kind for output in cell.outputs for kind in output.get("data", {output.output_type: None})}
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


def text_of(notebook) -> str:
    return "\n".join(str(output.get("data", output)) for cell in notebook.cells for output in cell.get("outputs", []))


def test_the_committed_notebook_is_small_and_has_its_results():
    notebook = nbformat.read(PATH, as_version=4)
    nbformat.validate(notebook)
    assert PATH.stat().st_size < MOST_BYTES
    shown = outputs(notebook)
    assert all(shown)
    assert sum("text/html" in kinds for kinds in shown) == 2 and sum("image/png" in kinds for kinds in shown) == 2
    assert re.findall(r"(?:/root|/home|/tmp|Warning)\S*", text_of(notebook)) == []


@pytest.mark.slow
def test_the_notebook_runs_and_shows_what_is_committed(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(PATH.parent.parent / ".pytest_cache" / "compilations"))
    committed, notebook = (nbformat.read(PATH, as_version=4) for _ in range(2))
    for cell in notebook.cells:
        cell.update({"outputs": []} if cell.cell_type == "code" else {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nbclient.NotebookClient(notebook, timeout=500, resources={"metadata": {"path": tmp_path}}).execute()
    assert outputs(notebook) == outputs(committed)
    assert "Warning" not in text_of(notebook)
    kept, drafted = map(int, re.search(r"(\d+) of (\d+) drafts were kept", text_of(notebook)).groups())
    assert 0 < kept < drafted
    assert text_of(notebook).count("a draft that was kept") >= kept
