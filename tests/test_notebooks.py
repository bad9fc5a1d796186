"""The notebooks: executed in their short form, held against what is committed; and what may be committed.

`make notebooks-check` executes all of them, `make test` none.
"""

import importlib.util
import re
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import nbformat
import pytest

from runs import metrics

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
NAMES = ("01_selection_strategy", "02_loss", "03_read_a_run", "04_paper_claims", "05_reward", "06_environment")


ABSOLUTE_PATH = re.compile(r"(^|[\s\"'=(])(~/|/[a-z]+/|[A-Z]:\\)")
UNSUITABLE = re.compile("/(home|root|Users|tmp)/|0x[0-9a-f]{6}|Traceback|Warning")
"""In outputs: paths of a machine, addresses in memory, failures."""
PICTURE, TEXTS = "image/png", ("text/plain", "text/markdown", "text/html")


def load(name: str) -> Any:
    return nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("notebooks", NOTEBOOKS.parent / "docs" / "notebooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def kinds(notebook: Any) -> dict[str, list[list[str]]]:
    """What each code cell puts out: streams by name, everything else by its MIME types. Without stderr:
    libraries warn there of what an environment lacks."""
    return {
        cell.id: [
            [o.name] if o.output_type == "stream" else sorted(o.get("data", {}))
            for o in cell.outputs
            if o.get("name") != "stderr"
        ]
        for cell in notebook.cells
        if cell.cell_type == "code"
    }


def texts(output: Any) -> list[str]:
    if output.output_type == "stream":
        return [output.text]
    return [output.data[kind] for kind in TEXTS if kind in output.get("data", {})]


@pytest.fixture(scope="module")
def runs(tiny_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The notebooks' folder, with the pair that the first cells would build: the tests have the same one already."""
    folder = tmp_path_factory.mktemp("notebooks")
    for place in ("tiny", "paper-claims/plain/seed-0/pair"):
        shutil.copytree(tiny_pair, folder / place)
    return folder


def execute(name: str, runs: Path, patch: pytest.MonkeyPatch) -> dict[str, str]:
    """Run all cells in a kernel of their own; returns the text that each of them put out, by cell id.

    What they put out is of the same kind as what is committed: texts, tables, pictures.

    Raises:
        CellExecutionError: a cell failed; the message is its traceback.
    """
    settings = {
        "TANDEMRL_NOTEBOOKS": "short",
        "TANDEMRL_NOTEBOOKS_RUNS": str(runs),
        "IPYTHONDIR": str(runs / ".ipython"),  # nothing is written to the user's home
        "JUPYTER_RUNTIME_DIR": str(runs / ".jupyter"),
    }
    script = load_script()
    for variable, value in (script.SETTINGS | settings).items():
        patch.setenv(variable, value)
    notebook = script.executed(NOTEBOOKS / f"{name}.ipynb")
    assert kinds(notebook) == kinds(load(name)), "the committed outputs are of another kind: run `make notebooks`"
    said = {}
    for cell in notebook.cells:
        outputs = cell.get("outputs", [])
        shown = [text for output in outputs for text in texts(output)]
        said[cell.id] = "".join([*shown, *("<image>" for output in outputs if PICTURE in output.get("data", {}))])
    return said


TRAINED = {
    "01_selection_strategy": ["relay"],
    "02_loss": ["loss/grpo", "loss/soft_gate"],
    "03_read_a_run": ["read"],
    "04_paper_claims": [],
    "05_reward": ["reward/right_and_short"],
    "06_environment": ["environment"],
}
"""The runs of each notebook."""


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs(name: str, runs: Path, tiny_pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = execute(name, runs, monkeypatch)
    manifest = "manifest.json"
    assert (runs / "tiny" / manifest).read_text() == (tiny_pair / manifest).read_text()  # not built again
    assert any("<image>" in text for text in said.values())
    for run in TRAINED[name]:
        assert [step["step"] for step in metrics(runs / run)][:3] == [1, 2, 3]
    if name == "01_selection_strategy":
        assert "every author as replayed" in said["replay"]
        assert "forged: completion" in said["replay"]
    if name == "02_loss":  # library and NumPy, token by token
        for _, *values in (line.split() for line in said["toy"].splitlines()[1:]):
            at_0, by_hand_0, at_1, by_hand_1 = map(float, values)
            assert (at_0, at_1) == pytest.approx((by_hand_0, by_hand_1), abs=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_the_outputs_of_a_notebook_are_those_of_its_cells_and_can_be_shown(name: str) -> None:
    notebook = load(name)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert notebook.metadata.executed == load_script().fingerprint(notebook), "the code is newer: run `make notebooks`"
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    for cell in code:
        for output in cell.outputs:
            assert output.output_type != "error", f"{cell.id}: failed"
            assert output.get("name") != "stderr", f"{cell.id}: {output.text}"
            for text in texts(output):
                assert not ABSOLUTE_PATH.search(text), f"{cell.id}: an absolute path"
                assert not UNSUITABLE.search(text), f"{cell.id}: {text}"
            assert len(output.get("data", {}).get(PICTURE, "")) < 150_000, f"{cell.id}: a large picture"
    assert any(PICTURE in output.get("data", {}) for output in code[-1].outputs), "it ends with a picture"
    assert (NOTEBOOKS / f"{name}.ipynb").stat().st_size < 400_000
