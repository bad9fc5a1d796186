"""Environments of the real OpenEnv package behind its own server, in which a tiny pair acts by text and by tools."""

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("openenv", reason="needs openenv: make agents-check")

import uvicorn
from fastmcp import FastMCP
from openenv.core import GenericEnvClient
from openenv.core.env_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State

from tandemrl.apps.experiments.tiny import build_tiny_pair
from tandemrl.config import Config, ConfigError, load
from tandemrl.data.loading import load_rows
from tandemrl.data.rows import DataError
from tandemrl.models.loading import load_tokenizer
from tandemrl.rollout.engine import EngineError
from tandemrl.rollout.envs.environment import BrokenEnvironmentError
from tandemrl.rollout.gateway.address import listen, url_of
from tandemrl.rollout.gateway.openenv_source import openenv, shown
from tandemrl.tasks.generated import calculator as generated
from tandemrl.training.loop import train


class Length(Action):
    length: int


class Said(Observation):
    text: str


class Lengths(Environment[Length, Said, State]):
    """Three turns, each of which gives 1 / its length, and two hundredths of the seed."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.seed, self.turns = 0, 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **more: Any) -> Said:
        assert seed is not None
        self.seed, self.turns = seed, 0
        return Said(text=f"What is {seed} + 1?")

    def step(self, action: Length, timeout_s: float | None = None, **more: Any) -> Said:
        self.turns += 1
        gained = 1 / action.length + 0.02 * self.seed
        return Said(text=f"Again: what is {self.turns} + 1?", reward=gained, done=self.turns == 3)

    @property
    def state(self) -> State:
        return State(step_count=self.turns)


class Calculator(MCPEnvironment):
    """A calculator, each of whose results gives a reward of 0.25; the second one ends the episode."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server, self.called = FastMCP("sums"), 0

        @server.tool
        def calculator(expression: str) -> str:
            """Work out an expression of whole numbers."""
            return generated.calculator(expression)

        super().__init__(server)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **more: Any) -> Observation:
        self.called = 0
        return Observation()

    async def step_async(self, action: Action, timeout_s: float | None = None, **more: Any) -> Observation:
        told = await super().step_async(action, timeout_s, **more)
        if isinstance(action, CallToolAction):
            self.called += 1
            told.reward, told.done = 0.25, self.called == 2
        return told

    def _step_impl(self, action: Action, timeout_s: float | None = None, **more: Any) -> Observation:
        raise AssertionError("only tools")

    @property
    def state(self) -> State:
        return State(step_count=self.called)


@contextmanager
def served(made: Callable[[], Any], action: type[Action], observation: type[Observation], places: int) -> Iterator[str]:
    app = create_fastapi_app(made, action, observation, max_concurrent_envs=places)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    with listen("127.0.0.1", 0) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield url_of("127.0.0.1", listening)
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    build_tiny_pair(folder, pair="calculator")
    return folder


def config_of(pair: Path, out: Path, *more: str) -> Config:
    small = ["train.steps=1", "train.prompts_per_step=2", "rollout.group_size=4", "train.eval_every=0"]
    small += ["train.threads=1", "model.device=cpu", "selection.strategy=turn", "rollout.max_turns=6"]
    limits = ["rollout.max_tokens=192", "rollout.turn_tokens=32", "rollout.observation_tokens=512"]
    about = [f"model.senior={pair}/senior", f"model.junior={pair}/junior", f"output_dir={out}"]
    return load(None, [*small, *limits, *about, "data.train=[openenv:2:5]", "data.max_prompt_tokens=256", *more])


def samples(pair: Path, out: Path) -> list[Any]:
    """The samples, with what came before the first turn as ``prompt``."""
    lines = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    tokenizer = load_tokenizer(str(pair / "senior"))
    for line in lines:
        begun = next(i for i, author in enumerate(line["author"]) if author >= 0)
        line["prompt"] = tokenizer.decode(line["tokens"][:begun])
    return lines


def act(text: str) -> dict[str, Any]:
    """The user's function: a turn is an action of as many characters; one without a digit is none."""
    if not re.search(r"\d", text):
        raise ValueError("write a number")
    return {"length": len(text)}


def test_a_pair_acts_by_text(pair: Path, tmp_path: Path) -> None:
    """Rewards are the sum over the steps, by hand; the server has fewer places than episodes."""
    with served(Lengths, Length, Said, places=2) as url:
        train(config_of(pair, tmp_path), rollouts=openenv(url, act), quiet=True)
    lines = samples(pair, tmp_path)
    assert len(lines) == 8
    for line in lines:
        said, seed = line["transcript"]["messages"], int(line["example_id"].removeprefix("openenv/"))
        turns = [each["content"] for each in said if each["role"] == "assistant"]
        acted = [len(turn) for turn in turns if re.search(r"\d", turn)]
        assert line["reward"] == pytest.approx(sum(1 / n + 0.02 * seed for n in acted))
        asked = [each["content"] for each in said if each["role"] == "user"]
        assert all(each.startswith("Again: what is") or each == "Error: write a number" for each in asked)
        assert len(acted) == 3 or len(turns) > 3  # over, or at a limit
        assert f"Begin.\n\nWhat is {seed} + 1?" in line["prompt"]
    assert {line["example_id"] for line in lines} == {"openenv/5", "openenv/6"}
    assert any(line["reward"] for line in lines)


def test_a_pair_calls_the_tools(pair: Path, tmp_path: Path) -> None:
    with served(Calculator, CallToolAction, CallToolObservation, places=8) as url:
        named = ["rollout.environment=tandemrl:openenv", f"rollout.environment_parameters={{server: '{url}'}}"]
        prompts = tmp_path / "rows.jsonl"
        rows = load_rows(("synthetic:calculator:train:2",))
        text = "".join(
            json.dumps({"prompt": row.messages[-1]["content"], "answer": "1", "extra_info": {"reset": {}}}) + "\n"
            for row in rows
        )
        prompts.write_text(text)
        train(config_of(pair, tmp_path / "run", *named, f"data.train=[{prompts}]"), quiet=True)
    lines = samples(pair, tmp_path / "run")
    for line in lines:
        said = line["transcript"]["messages"]
        calls = [call for message in said for call in message.get("tool_calls") or ()]
        assert line["reward"] == 0.25 * min(2, len(calls))
        results = [each["content"] for each in said if each["role"] == "tool"]
        assert results == [
            generated.calculator(call["function"]["arguments"]["expression"]) for call in calls[: len(results)]
        ]
    assert any(line["reward"] for line in lines)


def test_what_cannot_be_played_is_said(pair: Path, tmp_path: Path) -> None:
    gone = openenv("http://127.0.0.1:1", act)
    with pytest.raises(BrokenEnvironmentError, match="start its server"):
        train(config_of(pair, tmp_path / "gone"), rollouts=gone, quiet=True)
    with served(Lengths, Length, Said, places=8) as url:
        with pytest.raises(ConfigError, match=r"no extra_info\.reset"):
            train(
                config_of(pair, tmp_path / "rows", "data.train=[synthetic:calculator:train:2]"),
                rollouts=openenv(url, act),
                quiet=True,
            )
        with pytest.raises(ConfigError, match="no tools; pass `act`"):
            train(config_of(pair, tmp_path / "tools"), rollouts=openenv(url), quiet=True)
    with pytest.raises(ConfigError, match="no_such"):
        openenv("http://127.0.0.1:1", "no_such:act")
    with pytest.raises(DataError, match="expected openenv:COUNT"):
        load_rows(("openenv:0",))


def test_a_client_may_be_made(pair: Path, tmp_path: Path) -> None:
    """By a function, such as one that starts a container; and observations are shown by another."""
    with served(Lengths, Length, Said, places=8) as url:
        source = openenv(
            lambda: GenericEnvClient(base_url=url), lambda text: Length(length=9), show=lambda o: o["text"][:4]
        )
        train(config_of(pair, tmp_path), rollouts=source, quiet=True)
    for line in samples(pair, tmp_path):
        asked = [each["content"] for each in line["transcript"]["messages"] if each["role"] == "user"]
        assert asked == ["Agai"] * 2
        assert re.search(r"\n\nWhat(?! is)", line["prompt"])
        assert line["reward"] in (pytest.approx(3 / 9 + 0.3), pytest.approx(3 / 9 + 0.36))


def test_only_what_the_models_wrote_wrong_is_told_to_them(pair: Path, tmp_path: Path) -> None:
    """A fault of `show` fails the episode: it is none of the models'."""
    with served(Lengths, Length, Said, places=8) as url:
        source = openenv(url, act, show=lambda o: o["text"] if o["text"].startswith("What") else str(int(o["text"])))
        with pytest.raises(EngineError, match=r"8 of 8 episodes failed.*invalid literal"):
            train(config_of(pair, tmp_path), rollouts=source, quiet=True)


def test_observations_are_shown() -> None:
    assert shown({"text": "a", "metadata": {}, "reward": 1.0}) == "a"
    assert shown(Said(text="b", reward=2, done=True)) == "b"
    assert shown({"board": [1, 2], "left": 3, "hint": None}) == '{"board": [1, 2], "left": 3}'
