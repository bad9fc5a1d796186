"""The how-to pages, as a reader would follow them: their files, their Python, and the commands that a test names."""

import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from runs import cli, metrics, samples
from tandemrl.config import load
from tandemrl.data.loading import load_rows

HOWTO = Path(__file__).parents[1] / "docs" / "howto"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FEW = ["train.steps=1", "train.prompts_per_step=4", "rollout.group_size=4", "train.eval_every=0", "train.threads=1"]
FEW += ["data.limit=64", "reward.workers=1"]


@pytest.fixture
def reader(tmp_path: Path, tiny_pair: Path, without_math: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a pair in ``runs/tiny``, whose modules can be named and are forgotten afterwards."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "tiny").symlink_to(tiny_pair)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", None)):
            del sys.modules[name]


def blocks(page: str, language: str) -> list[str]:
    """The code of a page. Python that begins with ``# NAME.py`` is written to that file instead."""
    found = []
    for each, code in BLOCK.findall((HOWTO / f"{page}.md").read_text()):
        if each != language:
            continue
        if name := re.match(r"# (\w+\.py)\n", code):
            Path(name[1]).write_text(code)
        else:
            found.append(code)
    return found


def commands(page: str) -> list[list[str]]:
    """The arguments of every `tandemrl` command of a page."""
    lines = "".join(blocks(page, "")).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("tandemrl ")]


def shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``load`` of a page's Python set `FEW` beside what the page sets."""
    monkeypatch.setattr("tandemrl.load", lambda name, overrides=(): load(name, [*overrides, *FEW]))


def test_own_rows_with_an_own_reward(reader: Path) -> None:
    [program] = blocks("data", "python")
    exec(program, {})
    rows = load_rows(["train.jsonl", "heldout.jsonl"])
    assert (rows[0].example_id, rows[-1].example_id) == ("train/1", "heldout/128")
    given = json.loads((reader / "train.jsonl").read_text().splitlines()[0])["question"]
    assert rows[0].messages == ({"role": "user", "content": given},)  # a string in the file
    checking, training = (words for words in commands("data") if "output_dir=runs/mine" in words)
    assert "my_reward:last_number" in cli(*checking)
    cli(*training, *FEW)
    truths = {row.example_id: row.ground_truth for row in rows}
    written = samples(Path("runs/mine"))
    assert len(written) == 16
    for sample in written:
        numbers = re.findall(r"\d+", sample["text"])
        assert sample["reward"] == float(numbers[-1:] == [truths[sample["example_id"]]])


def test_rows_and_rewards_of_other_libraries(reader: Path) -> None:
    [program] = blocks("coming_from", "python")
    exec(program, {})
    first, second = load_rows(["rows.jsonl"])
    assert (first.ground_truth, first.extra_info) == ("4", {"level": 1})
    assert (second.ground_truth, second.extra_info["info"]) == ("15", {"level": 2})
    scored = commands("coming_from")
    assert len(scored) == 3
    for arguments in scored:
        cli(*arguments)
        out = Path(arguments[arguments.index("--out") + 1])
        assert [json.loads(line)["score"] for line in out.read_text().splitlines()] == [1.0, 0.0]
    parts = [json.loads(line)["parts"] for line in Path("verl.jsonl").read_text().splitlines()]
    assert [each["verl_length"] for each in parts] == [11, 9]


OWN_TOOL = """\
from tandemrl.tasks.countdown.grader import evaluate

def calculator(expression: str) -> str:
    \"""Work out an expression.

    Args:
        expression: Whole numbers, + - * / and brackets.
    \"""
    return f"{float(evaluate(expression)):g}"
"""


def test_a_custom_tool_in_place_of_the_tiny_agents(reader: Path) -> None:
    Path("my_tools.py").write_text(OWN_TOOL)
    build, training = (
        [words for words in commands("tools") if word in words] for word in ("calculator", "output_dir=runs/my-tool")
    )
    cli(*build[0])
    cli(*training[0], *FEW)
    [line] = metrics(Path("runs/my-tool"))
    assert line["env/tool_calls"] > 0.4
    assert line["env/invalid_calls"] < 0.2
    assert {sample["reward"] for sample in samples(Path("runs/my-tool"))} <= {0.0, 1.0}


def test_an_agent_of_the_readers_own(reader: Path) -> None:
    assert blocks("agents", "python") == []
    training, *_ = commands("agents")
    cli(*training, *FEW, "output_dir=runs/mine")
    [line] = metrics(Path("runs/mine"))
    assert (line["agent/failed"], line["agent/forks"]) == (0, 0)
    assert line["agent/requests"] > 1


def test_a_strategy_by_training_step(reader: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shortened(monkeypatch)
    [annealed] = blocks("strategy", "python")
    exec(annealed, {})
    assert len(metrics(Path("runs/annealed"))) == 1


def test_a_run_continues_with_another_learning_rate(reader: Path) -> None:
    [again] = [words for words in commands("resume") if "train.lr=1e-4" in words]
    cli("train", "--config", "quickstart", "output_dir=runs/mine", *FEW)
    cli(*(word.replace("step_50", "step_1") for word in again))
    config, before = load("runs/mine-lower", []), load("runs/mine", [])
    assert (config.train.lr, config.train.seed, config.model.junior) == (1e-4, 1, before.model.junior)
    first, second = ({each["example_id"] for each in samples(Path("runs", run))} for run in ("mine", "mine-lower"))
    assert first != second  # other prompts
    [line] = metrics(Path("runs/mine-lower"))
    assert (line["step"], line["lr"]) == (1, 1e-4)
