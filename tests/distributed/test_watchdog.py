"""What counts as work, what ends a process that does none, and when a run of several processes is watched."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from fake_judge import FakeJudge
from helpers import prepared, qwen3, tokenizer
from tandemrl.config import JudgeConfig, ParallelConfig, RewardConfig
from tandemrl.data.rows import Row
from tandemrl.processes import http as http_client
from tandemrl.processes import world as parallel
from tandemrl.processes.watchdog import EXIT_CODE, GRACE_S, WATCHDOG, StallTimer, Watchdog
from tandemrl.rewards import scoring
from tandemrl.rewards.protocol import Score
from tandemrl.rewards.scoring import Scorer
from tandemrl.rollout import batch_engine
from tandemrl.rollout.collect import CompletionBatch
from tandemrl.rollout.engine import Draws, Request, Sampling
from tandemrl.rollout.torch_engine import TorchEngine
from tandemrl.selection import solo
from tandemrl.tasks.rubric.http import HttpJudge
from tandemrl.training.async_rollouts import AsyncRollouts


def elsewhere(work: Any) -> None:
    """Do ``work`` in another thread, to the end."""
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_only_the_watched_thread_works_unless_it_waits_for_its_own() -> None:
    watchdog = Watchdog()
    watchdog.begin(1e6, "process 0 of 2")
    watchdog.stamp("update")
    elsewhere(lambda: watchdog.stamp("heartbeat"))
    assert watchdog.place == "update"
    with watchdog.shared():
        with watchdog.shared():
            elsewhere(lambda: watchdog.stamp("rollout"))
        elsewhere(lambda: watchdog.stamp("tokens"))
    assert watchdog.place == "tokens"
    elsewhere(lambda: watchdog.stamp("heartbeat"))
    watchdog.stamp()
    assert watchdog.place == "tokens"
    watchdog.end()
    watchdog.stamp("later")
    assert watchdog.place == "tokens"


def test_stillness_is_what_has_passed_since_the_last_stamp() -> None:
    timer = StallTimer(0)
    assert [timer.update(0, 1.5), timer.update(0, 2.0), timer.update(3, 2.0), timer.update(3, 0.5)] == [
        1.5,
        3.5,
        0.0,
        0.5,
    ]


def test_a_process_that_was_stopped_itself_may_go_on() -> None:
    timer = StallTimer(0)
    timer.update(0, 1.0)
    assert timer.update(0, 3600.0) == 1.0 + GRACE_S


HANGS = """
import threading, time
from tandemrl.processes import watchdog

watchdog.GRACE_S = watchdog.POLL_S = 0.05
watchdog.WATCHDOG.begin(0.2, "process 1 of 2")
watchdog.stamp("step 3, update")

def heartbeat():
    while True:
        watchdog.stamp("alive")
        time.sleep(0.01)

threading.Thread(target=heartbeat, daemon=True).start()
def waits_for_a_peer():
    threading.Event().wait()
waits_for_a_peer()
"""


def test_a_hang_ends_with_the_place_and_the_stack() -> None:
    ended = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=120)
    assert ended.returncode == EXIT_CODE
    assert ended.stderr.startswith("error: step 3, update: process 1 of 2 has done nothing for 0 s (parallel.timeout_s")
    assert "in waits_for_a_peer" in ended.stderr


def test_rollouts_in_a_thread_are_work_only_while_the_loop_waits_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    stamped, go_on = threading.Event(), threading.Event()
    shared = WATCHDOG.shared

    @contextmanager
    def waiting() -> Iterator[None]:
        with shared():
            go_on.set()
            yield

    def write(engine: Any, step: int, examples: list[int]) -> CompletionBatch:
        WATCHDOG.stamp("early")
        stamped.set()
        assert go_on.wait(60)
        WATCHDOG.stamp("late")
        return CompletionBatch([], [], Draws(0, 0))

    WATCHDOG.begin(1e6, "process 0 of 2")
    try:
        WATCHDOG.stamp("update")
        with AsyncRollouts(lambda: [0], write, [], Mock(), Mock()) as rollouts:
            rollouts.start_until(1, 1)
            assert stamped.wait(60)
            assert WATCHDOG.place == "update"
            monkeypatch.setattr(WATCHDOG, "shared", waiting)
            rollouts.take(1)
        assert WATCHDOG.place == "late"
    finally:
        WATCHDOG.end()


class Counted(Watchdog):
    """Counts the stamps of any thread that would be watched, or waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.main = threading.get_ident()

    def stamp(self, place: str | None = None) -> None:
        self.count += threading.get_ident() == self.main or self._shared


def decode() -> int:
    engine = TorchEngine(prepared(qwen3()), None, tokenizer())
    engine.generate([Request((2, 3), (1, 2), Sampling(max_tokens=9, ignore_eos=True), solo("senior"))])
    return 9


def run_programs() -> int:
    row = Row("a", (), "codecontests", json.dumps({"inputs": ["1"], "outputs": ["1"]}), {})
    with Scorer(RewardConfig(), code=lambda row, text: Score(1.0, {"acc": 1.0}, text)) as scorer:
        scorer.score([(row, "```python\nprint(1)\n```")] * 5)
    return 5


def call_a_reward_function() -> int:
    with Scorer(RewardConfig(), functions={"short": lambda row, text: 1.0}) as scorer:
        scorer.score([(Row("a", (), "mine", "1", {}), "text")] * 6)
    return 6


def ask_a_judge() -> int:
    with FakeJudge(lambda prompt, _: "re") as judge:
        engine = HttpJudge(JudgeConfig(url=judge.url, concurrency=2))
        engine.ask([[{"role": "user", "content": str(i)}] for i in range(7)])
    return 7


@pytest.mark.parametrize("work", [decode, run_programs, call_a_reward_function, ask_a_judge])
def test_long_work_leaves_a_stamp_per_part(work: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of decoding, a program, a reply: a phase of many of them may take longer than the time-out."""
    counted = Counted()
    for module in (batch_engine, scoring, http_client):
        monkeypatch.setattr(module, "stamp", counted.stamp)
    monkeypatch.setattr(http_client, "WATCHDOG", counted)
    parts = work()
    assert counted.count >= parts


# ------------------------------------------------------------------------------------------------- the order of things


def test_one_process_is_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = Mock()
    monkeypatch.setattr(parallel, "WATCHDOG", begin)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    parallel.init_world(ParallelConfig(), torch.device("cpu"))
    assert begin.mock_calls == []


def test_only_its_own_process_group_is_taken_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one process the group belongs to somebody else, such as a vLLM engine that is still at work."""
    destroyed = Mock()
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(parallel.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(parallel.dist, "destroy_process_group", destroyed)
    parallel.destroy_world()
    assert destroyed.mock_calls == []
