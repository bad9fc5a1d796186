"""Components of the user's own, as docs/howto/extend.md shows them: one new file each, and nothing else changes."""

import re
import shlex
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import agents as small
from runs import cli, lines, metrics
from tandemrl import train
from tandemrl.config import Config, ConfigError, load, stated_keys
from tandemrl.rewards.protocol import GraderError
from tandemrl.rollout.envs.retrieval import make_retriever
from tandemrl.tasks.generated.rows import generated_rows
from tandemrl.training.checkpoint import CheckpointError
from tandemrl.training.preflight import Preflight

PAGE = (Path(__file__).parents[1] / "docs" / "howto" / "extend.md").read_text()
FILES = dict(re.findall(r'```python title="(\w+)\.py"\n(.*?)```', PAGE, re.DOTALL))
SECTION = {"my_strategy": "selection", "my_loss": "loss", "my_reward": "reward"}
WHOLE = PAGE.replace("\\\n", "").splitlines()  # commands in a line each
COMMANDS = {name: next(line for line in WHOLE if f"{name}:" in line and line.startswith("tandemrl")) for name in FILES}


@pytest.fixture
def here(tmp_path: Path, without_math: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with the page's files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for name, text in FILES.items():
        (tmp_path / f"{name}.py").write_text(text)
    yield tmp_path
    for name in FILES:
        sys.modules.pop(name, None)


def overrides(*names: str) -> list[str]:
    """What the page's commands set, but for where they write."""
    words = [word for name in names for word in shlex.split(COMMANDS[name])]
    return [word for word in words if "=" in word and not word.startswith("output_dir=")]


def config(agents: Path, out: Path, *names: str, extra: tuple[str, ...] = ()) -> Config:
    turns = () if "my_environment" in names else ("rollout.max_turns=10", "rollout.turn_tokens=null")
    return load(None, small.overrides(agents, out, "train.steps=2", *turns, *overrides(*names), *extra))


def test_a_run_of_components_of_ones_own(agents: Path, here: Path) -> None:
    """Strategy, loss, engine and scorer, each from its file; what it did is what they say."""
    mine = config(agents, here / "run", "my_strategy", "my_loss", "my_engine", "my_reward")
    train(mine, quiet=True)
    assert [line["step"] for line in metrics(here / "run")] == [1, 2]
    assert {line["reward/mean"] for line in metrics(here / "run")} == {0.0}  # random models: never right
    for sample in lines(here / "run" / "samples.jsonl"):
        authors = np.array(sample["author"])
        authors = authors[authors >= 0]
        assert (authors[:12] == 1).all()
        assert (authors[12:] == 0).all()
    card = next((here / "run" / "hf").glob("step_*/README.md")).read_text()
    assert "| who wrote the training texts | `my_strategy:relay` |" in card
    assert "| recipe | `my_loss:successes` |" in card
    assert load(here / "run") == mine
    text = (here / "my_strategy.py").read_text()
    (here / "my_strategy.py").write_text(text.replace("tokens < opening, Written", "tokens <= opening, Written"))
    sys.modules.pop("my_strategy")
    with pytest.raises(CheckpointError, match="written with another strategy"):
        train(mine, quiet=True)


def test_an_engine_as_an_argument_is_that_of_its_name_and_recorded(agents: Path, here: Path) -> None:
    from my_engine import LongestFirst

    train(config(agents, here / "run", "my_reward"), engine=partial(LongestFirst, rows=8), quiet=True)
    saved = load(here / "run")
    assert saved.rollout.engine == "my_engine:LongestFirst"
    assert saved.functions.engine is not None
    assert saved.functions.engine.name == "partial(my_engine.LongestFirst)"
    for other in (None, LongestFirst):  # another number of rows is another engine
        with pytest.raises(ConfigError, match=r"functions\.engine: this config belongs to a run with partial"):
            train(saved, engine=other, quiet=True)
    for engine, message in (
        (LongestFirst, r"rollout\.host_every=4: must be auto with rollout\.engine=my_engine:LongestFirst"),
        ("torhc", "rollout.engine=torhc: must be one of .*; did you mean torch"),
        (3, "engine=3: pass the class, or a function that makes one"),
    ):
        with pytest.raises(ConfigError, match=message):
            train(load(overrides=["rollout.host_every=4"]), engine=engine)


def test_an_environment_of_ones_own(agents: Path, here: Path) -> None:
    turns = ("rollout.max_turns=4", "rollout.max_tokens=40", "rollout.turn_tokens=8", "data.max_prompt_tokens=24")
    mine = config(agents, here / "run", "my_environment", "my_reward", extra=(*turns, "rollout.observation_tokens=99"))
    train(mine, quiet=True)
    assert max(line["env/turns"] for line in metrics(here / "run")) == 3.0  # a turn, and one after each doubt


def test_a_retriever_of_ones_own(here: Path) -> None:
    mine = load("hops_tandem", overrides("my_retriever"))
    [row] = generated_rows("hops", "heldout", 1, 0)
    search = make_retriever(mine.retrieval)
    known = search(row, "nothing of this", 3)
    assert known == [] or len(known) <= 3
    document = row.extra_info["docs"][0]
    text = " ".join(str(value) for value in document.values())
    assert 1 <= len(search(row, text, 2)) <= 2


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("selection.parameters.openin=3", r"my_strategy:relay: has no parameter 'openin'; did you mean opening\?"),
        (
            "selection.strategy=my_strategy:rely",
            r"selection\.strategy=my_strategy:rely: cannot be imported: Attr.*; did you mean relay\?$",
        ),
        (
            "selection.strategy=my_strateg:relay",
            r"No module named 'my_strateg'; did you mean my_strategy\? A module is",
        ),
        ("loss.recipe=my_loss:succeses", r"loss\.recipe=my_loss:succeses: cannot be .*; did you mean successes\?$"),
        ("selection.strategy=my_strategy:Written", r"my_strategy:Written: has no parameter 'opening'; its own are: t"),
        ("selection={strategy: my_reward:concise, parameters: {}}", r"concise: its parameter 'row' has no value; give"),
        ("loss={recipe: my_strategy:relay, parameters: {}}", r"my_strategy:relay: is a Strategy; name a Recipe"),
        ("loss.parameters.floor=low", r"recipe grpo: the surrogate function failed"),
        ("reward.parameters.concise.widest=3", r"reward\.parameters: my_reward:concise has no parameter 'widest'"),
        ("reward.parameters.brief.longest=3", r"reward\.parameters\.brief: no reward of that name"),
    ],
)
def test_what_cannot_work_is_refused_before_the_run(agents: Path, here: Path, override: str, message: str) -> None:
    names = [name for name in ("my_strategy", "my_loss", "my_reward") if not override.startswith(SECTION[name] + "={")]
    mine = config(agents, here / "run", *names, extra=(override,))
    with pytest.raises((ConfigError, GraderError), match=message):
        Preflight(mine, stated=stated_keys([override])).require()


def test_a_task_of_ones_own(here: Path) -> None:
    for command in WHOLE:
        if "backwards" in command and command.startswith("tandemrl "):
            shown = cli(*shlex.split(command)[1:])
    assert "backwards/train/0  [backwards]  ground truth: 0drow" in shown
    assert "backwards: exact_match gives 1 for the ground truth" in shown
