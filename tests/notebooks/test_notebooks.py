"""Every notebook runs from top to bottom, and stays thin: functions belong in the package, where tests reach them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
LONGEST_CELL = 10  # lines
RANDOM = re.compile(r"\bat 0x[0-9a-f]+")  # an object's address, other each time
MACHINE = re.compile(r"(?<![\w.])/(?:home|root|tmp|usr|Users|mnt)/\w")

sys.path.insert(0, str(ROOT / "tests" / "report"))
from synthetic import make_run  # noqa: E402
from synthetic_studies import add_studies  # noqa: E402


def code_cells(path: Path) -> list[str]:
    return [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def faults(cells: list[str]) -> list[str]:
    """What makes a notebook thick, one line a fault."""
    found = [
        f"cell {i}: defines a function or class" for i, c in enumerate(cells) if re.search(r"^\s*(def|class) ", c, re.M)
    ]
    found += [f"cell {i}: {n} lines" for i, c in enumerate(cells) if (n := len(c.splitlines())) > LONGEST_CELL]
    if not any(re.search(r"^\s*(from|import) analysis", cell, re.M) for cell in cells):
        found.append("imports nothing from analysis")
    return found


def outputs(notebook: nbformat.NotebookNode) -> str:
    """Every text that a notebook's outputs hold, pictures left out."""
    made = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    shown = [output["text"] for output in made if "text" in output]
    shown += [text for output in made for kind, text in output.get("data", {}).items() if kind.startswith("text/")]
    return "\n".join(shown)


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_thin(path):
    nbformat.validate(nbformat.read(path, as_version=4))
    assert not faults(code_cells(path))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_outputs_are_the_same_on_every_machine(path):
    stored = outputs(nbformat.read(path, as_version=4))
    assert stored, "run `make notebooks`"
    assert not RANDOM.findall(stored) and not MACHINE.findall(stored)


def test_an_address_and_a_path_are_found():
    assert RANDOM.search("<Styler at 0x7f61>") and MACHINE.search("PosixPath('/tmp/run')")
    assert not MACHINE.search("PosixPath('../home/x') data/tmp/x")


def test_a_thick_notebook_is_found():
    assert len(faults(["def f():\n    pass", "x = 1\n" * 11])) == 3


@pytest.fixture
def run_of_notebooks(tmp_path, monkeypatch):
    """The environment that the notebooks read: a synthetic run with its studies, and this source tree on the path."""
    run = add_studies(make_run(tmp_path / "run", layers=16, calls=4))
    for name in ("SHRINKAGE_RUN", "SHRINKAGE_CLOSED_LOOP"):
        monkeypatch.setenv(name, str(run))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.mark.usefixtures("run_of_notebooks")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path):
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(path.parent)}}).execute()
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code")
    assert not RANDOM.findall(outputs(notebook))


def test_missing_run_is_said_clearly(tmp_path, monkeypatch):
    from nbclient.exceptions import CellExecutionError

    monkeypatch.setenv("SHRINKAGE_RUN", str(tmp_path / "nowhere"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(ROOT / "notebooks" / "01_shrinkage.ipynb", as_version=4)
    client = NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(ROOT / "notebooks")}})
    with pytest.raises(CellExecutionError, match="shrinkage measure --world tiny"):
        client.execute()
