"""Execute the notebooks and keep what their cells put out. `make notebooks`.

    python docs/notebooks.py                    # all of them, a quarter of an hour on two cores
    python docs/notebooks.py 04_paper_claims    # one

A cell that fails ends it, and leaves every notebook as it was. The cells train in runs/notebooks/.
"""

import hashlib
import os
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

from tandemrl.files import write_text

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "JUPYTER_PREFER_ENV_PATH": "1",  # the kernel of this Python
}


def executed(file: Path) -> NotebookNode:
    """The notebook with the outputs of its cells, run from top to bottom in a kernel of their own, in its folder.

    Raises:
        CellExecutionError: a cell failed; the message is its traceback.
    """
    notebook = nbformat.read(file, as_version=4)
    place = {"metadata": {"path": str(file.parent)}}
    client = NotebookClient(
        notebook,
        timeout=3600,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,
        resources=place,
    )
    client.execute()
    notebook.metadata.language_info = {"name": "python"}  # a version would change with every kernel
    notebook.metadata.executed = fingerprint(notebook)
    return notebook


def fingerprint(notebook: NotebookNode) -> str:
    """Of the code: outputs beside another one are not what these cells put out."""
    code = "\0".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    return hashlib.sha256(code.encode()).hexdigest()[:16]


def main() -> None:
    os.environ.update(SETTINGS)
    names = sys.argv[1:] or sorted(file.stem for file in NOTEBOOKS.glob("*.ipynb"))
    texts: dict[Path, str] = {}
    for name in names:
        file = NOTEBOOKS / f"{name}.ipynb"
        texts[file] = nbformat.writes(executed(file)) + "\n"
        print(f"{file.relative_to(NOTEBOOKS.parent)}: executed, {len(texts[file]) / 1000:.0f} kB", flush=True)
    for file, text in texts.items():  # at the end: a changed file would be an uncommitted change, which reports name
        write_text(file, text)


if __name__ == "__main__":
    main()
