"""The real verifiers package against the server: its own evaluation, by its chat client and its training client."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

vf = pytest.importorskip("verifiers.v1", reason="needs verifiers: make agents-check")

from served import Server, serving  # noqa: E402
from verifiers.v1.cli.eval.runner import run_eval  # noqa: E402
from verifiers.v1.configs.cli.eval import EvalConfig  # noqa: E402

from tandemrl.apps.experiments.tiny import build_tiny_pair  # noqa: E402
from tandemrl.rollout.gateway import verifiers_parts  # noqa: E402

RENDERER = {"name": "custom", "import_path": f"{verifiers_parts.__name__}:ChatRenderer"}
CLIENTS: dict[str, dict[str, Any]] = {"eval": {}, "train": {"renderer": RENDERER}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    verifiers_parts.register()
    folder = tmp_path_factory.mktemp("served")
    build_tiny_pair(folder, pair="calculator")
    with serving("torch", folder / "senior", folder / "junior", folder / "log.txt", context=256) as started:
        yield started


def evaluated(server: Server, taskset: str, client: str, out: Path) -> list[Any]:
    """The traces of verifiers' own evaluation, in the order of the tasks."""
    agent = {"harness": {"id": verifiers_parts.HARNESS}, "runtime": {"type": "subprocess"}}
    config = EvalConfig.model_validate(
        {
            "env": {"taskset": {"id": taskset}, "agent": agent},
            "model": server.model,
            "client": {"type": client, "base_url": f"{server.url}/v1", **CLIENTS[client]},
            "sampling": {"max_tokens": 48, "seed": 7, "temperature": 1.0},
            "select": {"limit": 6},
            "output_dir": out / client,
            "rich": None,
            "push": False,
        }
    )
    episodes = asyncio.run(run_eval(config))
    assert [(episode.ok, episode.errors) for episode in episodes] == [(True, [])] * 6
    return [trace for episode in episodes for trace in episode.traces]


@pytest.mark.parametrize(("taskset", "tools"), [("vf_sums", False), ("vf_calculator", True)])
def test_rewards_are_those_of_its_own_evaluation(server: Server, taskset: str, tools: bool, tmp_path: Path) -> None:
    chats, trained = (evaluated(server, taskset, client, tmp_path) for client in ("eval", "train"))
    said = [[(m.role, m.content or None) for m in trace.messages] for trace in chats]
    assert [[(m.role, m.content or None) for m in trace.messages] for trace in trained] == said
    assert [trace.rewards for trace in trained] == [trace.rewards for trace in chats]
    assert len({trace.reward for trace in trained}) > 1
    assert any(role == "tool" for trace in said for role, _ in trace) == tools
    for trace in trained:
        (branch,) = trace.branches  # what was sampled was never tokenised again
        assert len(branch.logprobs) == len(branch.token_ids) == len(branch.sampled_mask)
        own = [logprob for logprob, sampled in zip(branch.logprobs, branch.sampled_mask, strict=True) if sampled]
        assert own
        assert all(-60 < logprob <= 0 for logprob in own)
