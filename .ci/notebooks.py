"""Executes the notebooks of docs/notebooks and writes them with their outputs: python .ci/notebooks.py [NAME ...].

Each runs in an empty folder. What differs between machines is left out: versions of the kernel, times of cells. Needs
the extras docs, flower and figures, and a Chromium that draws the plotly figures.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent.parent / "docs" / "notebooks"
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
SECONDS = 600  # for a cell


def executed(path: Path, pictures: str = "png") -> dict[str, Any]:
    """Return the notebook with new outputs.

    Args:
        path: the notebook.
        pictures: how plotly figures are kept (a renderer of plotly's); "png" needs kaleido and Chromium.
    """
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    changed = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",  # of `!coterie`
        "PLOTLY_RENDERER": pictures,
        "COTERIE_BACKEND": "plain",  # the same numbers with and without a compiler
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "110",
    }
    before = dict(os.environ)
    os.environ.update(changed)
    try:
        with tempfile.TemporaryDirectory() as folder:
            NotebookClient(notebook, timeout=SECONDS, resources={"metadata": {"path": folder}}).execute()
    finally:
        os.environ.clear()
        os.environ.update(before)
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = joined(cell.outputs)
    notebook.metadata = METADATA
    made: dict[str, Any] = json.loads(nbformat.writes(notebook))
    return made


def joined(outputs: list[Any]) -> list[Any]:
    """Return a cell's outputs with what a program printed in pieces as one, and no line ends of a terminal."""
    made: list[Any] = []
    for output in outputs:
        if output["output_type"] == "stream":
            output["text"] = output["text"].replace("\r\n", "\n")
        if made and output["output_type"] == "stream" and made[-1].get("name") == output["name"]:
            made[-1]["text"] += output["text"]
        else:
            made.append(output)
    return made


def main(names: list[str]) -> None:
    for path in sorted(FOLDER.glob("*.ipynb")):
        if not names or path.stem in names:
            text = json.dumps(executed(path), indent=1, ensure_ascii=False)
            path.write_text(text + "\n", encoding="utf-8")
            print(f"{path.name}: {len(text) // 1000} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
