"""The notebook runs from its first cell to its last."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "examples/notebook.ipynb"


@pytest.mark.timeout(900)
def test_the_notebook_runs(tiny_model, monkeypatch):
    monkeypatch.setenv("STEPS", "2")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    shown = [
        output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs
    ]
    text = "".join(output.get("text", "") for output in shown)
    assert "all checks passed" in text and "▌" in text and "done: 2 steps" in text
    kinds = {kind for output in shown for kind in output.get("data", {})}
    assert "image/svg+xml" in kinds
    assert sum("<iframe" in output.get("data", {}).get("text/html", "") for output in shown) == 1
