"""The notebooks: executed in their short form, held against what is committed; and what may be committed.

`make notebooks-check` executes all of them, `make test` none.
"""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
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


@pytest.mark.slow
def test_a_strategy_is_written_checked_and_trained_with(
    runs: Path, tiny_pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = execute(NAMES[0], runs, monkeypatch)
    manifest = "manifest.json"
    assert (runs / "tiny" / manifest).read_text() == (tiny_pair / manifest).read_text()  # not built again
    assert "background: #0072b2" in said["rollout"]  # the senior's words
    assert "text-decoration: underline" in said["rollout"]  # and the junior's
    assert "every author as replayed" in said["replay"]
    assert "forged: completion" in said["replay"]
    assert "token 3 is recorded" in said["replay"]
    shares = re.findall(r"p (\S+): senior's share (\S+) ± (\S+), same texts: (\w+)", said["share"])
    assert [p for p, *_ in shares] == ["0.10", "0.25", "0.50", "0.75", "0.90"]
    for p, share, two_errors, same in shares:
        assert abs(float(share) - float(p)) <= 2 * float(two_errors)  # four standard errors
        assert same == "True"
    steps = metrics(runs / "relay")
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert steps[0]["tandem/senior_frac"] > steps[-1]["tandem/senior_frac"]  # the schedule goes from 0.9 to 0.5
    assert all("<image>" in said[cell] for cell in ("picture", "share", "train"))


@pytest.mark.slow
def test_a_loss_is_written_checked_by_hand_and_trained(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = execute(NAMES[1], runs, monkeypatch)
    rows = [line.split() for line in said["toy"].splitlines()[1:]]
    assert [who for who, *_ in rows] == ["prompt", "senior", "junior", "senior", "prompt", "junior", "senior", "senior"]
    for who, *values in rows:
        at_0, by_hand_0, at_1, by_hand_1 = map(float, values)
        assert (at_0, at_1) == pytest.approx((by_hand_0, by_hand_1), abs=1e-4)
        assert (at_0 != 0, at_1 != 0) == (who == "senior", who != "prompt")
    assert float(said["split"].rpartition(":")[2]) < 1e-6
    assert all("<image>" in said[cell] for cell in ("curves", "plots"))

    grpo, soft = (metrics(runs / "loss" / name) for name in ("grpo", "soft_gate"))
    assert grpo[0]["reward/mean"] == soft[0]["reward/mean"] > 0  # the same texts, and something to learn from
    assert {step["updates"] for step in grpo + soft} == {2.0}
    assert all(step["clip_fraction"] == 0 for step in soft)  # it has no range to leave
    weights = [(runs / "loss" / name / "hf/step_3/model.safetensors").read_bytes() for name in ("grpo", "soft_gate")]
    assert weights[0] != weights[1]


@pytest.mark.slow
def test_a_run_is_read(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = execute(NAMES[2], runs, monkeypatch)
    seen = re.search(
        r"(\d+) of (\d+) draws are the senior's: (\S+)\n.*?(\S+)σ away; in metrics.jsonl: (\S+)", said["gates"]
    )
    assert seen is not None
    senior, total, share, sigmas, recorded = map(float, seen.groups())
    assert (share, recorded) == pytest.approx((senior / total, senior / total), abs=1e-4)
    assert abs(sigmas) < 6
    assert "gate: " in said["gates"]
    assert "selection.prob_senior is 0.9" in said["gates"]
    assert "‹" in said["samples"]

    file, samples = (line.partition(":")[2].strip() for line in said["evaluation"].splitlines()[:2])
    macro = json.loads((runs / "read/eval/tandem/pass-at-k.json").read_text())["metrics"]["macro"]
    assert file == samples
    assert file == "pass@1 {pass@1:.4f} [{pass@1/low:.4f}, {pass@1/high:.4f}]".format(**macro)
    assert "| handoff | senior_first/pass@1 |" in said["compare"]
    assert "One seed" in said["report"]
    assert "</html>" in (runs / "read" / "report.html").read_text()
    assert all("<image>" in said[cell] for cell in ("metrics", "evaluation", "compare"))


@pytest.mark.slow
def test_the_claims_are_shown_and_a_small_run_is_measured(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = execute(NAMES[3], runs, monkeypatch)
    assert "Blorp" in said["languages"]
    full = json.loads((NOTEBOOKS.parent / "docs" / "paper_claims_jargon.json").read_text())
    titles = {"grpo": "GRPO", "kl": "KL-regularised GRPO", "tandem": "tandem GRPO", "base": "before training"}
    for arm, title in titles.items():
        values = [row["solo/pass@1"] for row in full["rows"] if row["arm"] == arm]
        assert len(values) == 5
        assert f"| {title} | {sum(values) / 5:.3f} [" in said["table"]
    assert f"at commit {full['evaluated_by'][0]['git_revision'][:7]}, seeds [0, 1, 2, 3, 4]" in said["table"]
    assert said["claims"].startswith(f"{len(full['claims'])} claims")
    assert said["claims"].count("| holds |") == [claim["verdict"] for claim in full["claims"]].count("holds") > 0

    small = json.loads((runs / "paper-claims" / "results.json").read_text())
    arms = ["base", "grpo", "tandem"]
    assert [row["arm"] for row in small["rows"]] == arms
    for row in small["rows"]:
        assert f"| {titles[row['arm']]} | {row['solo/pass@1']:.3f} [" in said["run"]
    assert all(f"<b>{arm}</b>" in said["texts"] for arm in arms)
    assert "<image>" in said["plots"]


@pytest.mark.slow
def test_a_reward_is_written_weighed_and_trained_with(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = execute(NAMES[4], runs, monkeypatch)
    assert [line.split()[-2:] for line in said["reward"].splitlines()] == [
        ["0.920", "1.0"],  # of 16 characters
        ["0.920", "0.5"],
        ["0.970", "0.0"],
    ]
    assert [line[36:] for line in said["sum"].splitlines()] == [
        "1.4600 = 1 + 0.5 * 0.9200",
        "1.4175 = 1 + 0.5 * 0.8350",  # of 33 characters
        "0.4600 = 0 + 0.5 * 0.9200",
    ]
    assert said["refused"].count("refused: ") == 3
    assert "did you mean synthetic/plain?" in said["refused"]
    assert "did you mean brevity?" in said["refused"]
    assert "reward broken, row a: expected a finite number" in said["refused"]
    for step in metrics(runs / "reward" / "right_and_short"):
        assert step["reward/mean"] == pytest.approx(step["reward/boxed"] + 0.5 * step["reward/brevity"])
        assert 0 < step["reward/brevity"] < 1
    assert "<image>" in said["plots"]


@pytest.mark.slow
def test_an_environment_is_written_tried_and_trained_in(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = execute(NAMES[5], runs, monkeypatch)
    assert list(json.loads(said["tool"])) == ["left", "sign", "right"]
    assert said["call"].splitlines() == [
        "8 | state {'sums': 1} | over False",
        "Error: times is neither plus nor minus | state {} | over False",
        "Error: argument 'left' of calculate must be integer | state {} | over False",
        "Error: a <tool_call> is not closed by </tool_call> | state {} | over False",
        "| state {} | over True",
    ]
    assert said["environment"].splitlines() == [
        "First 5 plus 3 is 9. → 5 plus 3 is 8. What is 5 plus 3? | over False",
        "First 5 plus 3 is 8. → | over True",
    ]
    for step in metrics(runs / "environment"):
        assert 1 < step["env/turns"] <= 3
        assert 0 < step["env/wrong_sums"] <= step["env/turns"]
    turns = re.search(r"(\d) turns, tokens of the junior (\d+), senior (\d+)", said["episode"])
    assert turns is not None
    assert said["episode"].count("assistant: ") == int(turns[1]) > 1
    assert min(int(turns[2]), int(turns[3])) > 0
    assert "<image>" in said["plots"]


def test_these_are_all_notebooks() -> None:
    assert sorted(path.name for path in NOTEBOOKS.iterdir() if not path.name.startswith(".")) == [
        f"{name}.ipynb" for name in NAMES
    ]


@pytest.mark.parametrize("name", NAMES)
def test_the_cells_of_a_notebook(name: str) -> None:
    notebook = load(name)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    assert set(notebook.metadata) == {"kernelspec", "language_info", "executed"}
    assert set(notebook.metadata.language_info) == {"name"}  # a version would change with every editor
    assert 8 <= len(notebook.cells) <= 15
    for cell in notebook.cells:
        assert not cell.metadata
        assert not ABSOLUTE_PATH.search(cell.source), f"{cell.id}: an absolute path"
    first = notebook.cells[0]
    assert first.cell_type == "markdown"
    assert re.match(r"# \d\. .*\n\nYou will see ", first.source), "the first sentence says what there is to see"
    settings = [cell.id for cell in notebook.cells if "os.environ" in cell.source]
    assert settings == ["settings"] == [cell.id for cell in notebook.cells if cell.cell_type == "code"][:1]


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


@pytest.mark.parametrize("command", ["check", "format --check"])
def test_cells_are_clean(command: str) -> None:
    ruff = [sys.executable, "-m", "ruff", *command.split(), "--no-cache", str(NOTEBOOKS)]
    done = subprocess.run(ruff, cwd=NOTEBOOKS.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
