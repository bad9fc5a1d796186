"""What becomes of a run of two processes when one of them is signalled, fails, or dies with its node."""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from processes import run
from runs import SMALL, assert_same_run, metrics
from tandemrl.config import Config, load
from tandemrl.training.checkpoint import latest
from tandemrl.training.faults import Stopped

TINY = [*SMALL, "train.steps=4", "train.save_every=2", "train.eval_every=0", "train.prompts_per_step=2"]
TINY += ["rollout.max_tokens=16", "loss.entropy_coef=0.01"]  # a gradient in every step, whatever the rewards


def overrides(pair: Path, out: Path) -> list[str]:
    return [*TINY, f"model.senior={pair}/senior", f"model.junior={pair}/junior", f"output_dir={out}"]


def settings(pair: Path, out: Path) -> Config:
    return load(None, overrides(pair, out))


@pytest.fixture(scope="module")
def whole(tiny_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two processes that nothing disturbs."""
    out = tmp_path_factory.mktemp("restarts") / "whole"
    run(trained, 2, settings(tiny_pair, out), None)
    assert all(line["grad_norm"] > 0 for line in metrics(out))
    return out


def trained(config: Config, event: str | None) -> Any:
    """Train; in the update of step 3 something happens to process 1. Returns the exit code, or the error's text."""
    import tandemrl.training.loop as module

    update, calls, rank = module.update, [], int(os.environ["RANK"])

    def disturbed(*args: Any, **options: Any) -> Any:
        calls.append(None)
        if rank == 1 and len(calls) == 3:
            if event == "signal":
                signal.raise_signal(signal.SIGTERM)
            elif event == "leave":
                raise EOFError
            elif event == "no memory":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return update(*args, **options)

    module.update = disturbed
    try:
        module.train(config, quiet=True)
    except Stopped as stopped:
        return stopped.code
    except EOFError:
        return "gone"  # and the connections with it
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return 0


def test_a_signal_to_one_process_stops_both_after_the_same_step(tiny_pair: Path, whole: Path, tmp_path: Path) -> None:
    config = settings(tiny_pair, tmp_path / "run")
    assert run(trained, 2, config, "signal") == [143, 143]
    assert latest(tmp_path / "run") == tmp_path / "run" / "checkpoints" / "step_3"
    assert run(trained, 2, config, None) == [0, 0]
    assert_same_run(whole, tmp_path / "run", step=4)


@pytest.mark.parametrize(
    ("event", "said"), [("leave", "gone"), ("no memory", "OutOfMemoryError: step 3, update: out of memory. It needs")]
)
def test_the_others_say_where_they_lost_a_process(event: str, said: str, tiny_pair: Path, tmp_path: Path) -> None:
    left, ended = run(trained, 2, settings(tiny_pair, tmp_path / "run"), event)
    assert ended.startswith(said)
    assert left.startswith("LostProcessError: step 3, update")
    assert "process 0 of 2 lost another one" in left
    assert latest(tmp_path / "run") == tmp_path / "run" / "checkpoints" / "step_2"


WORKER = """
import os, signal, sys
if {dies}:
    import tandemrl.training.tracking as module
    step = module.Tracker.step
    def dying(tracker, number, metrics):
        if number == 3:  # the node goes: its agent and its process
            os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        step(tracker, number, metrics)
    module.Tracker.step = dying
from tandemrl.cli.main import main
main()
"""


@pytest.mark.slow
def test_a_node_that_dies_and_comes_back(tiny_pair: Path, whole: Path, tmp_path: Path) -> None:
    """Two torchrun agents on loopback, one process each. The second node is killed in step 3 and started again."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def agent(number: int, *, dies: bool) -> subprocess.Popen[bytes]:
        script = tmp_path / f"worker_{number}_{dies}.py"
        script.write_text(WORKER.format(dies=dies))
        rendezvous = f"is_host={1 - number},keep_alive_interval=1,keep_alive_max_attempt=3,join_timeout=90"
        launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=2"]
        launch += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=run"]
        launch += ["--monitor-interval=0.2", f"--rdzv-conf={rendezvous}", "--local-addr=127.0.0.1"]
        (tmp_path / "empty.yaml").write_text("train: {}\n")
        command = ["train", "--config", str(tmp_path / "empty.yaml"), *overrides(tiny_pair, tmp_path / "run")]
        # Agents that share the workers' store do not tell a node that comes later where it is (torch 2.13).
        environment = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with open(tmp_path / f"agent_{number}.log", "ab") as log:
            return subprocess.Popen([*launch, str(script), *command], stdout=log, stderr=log, env=environment)

    agents = [agent(0, dies=False), agent(1, dies=True)]
    try:
        assert agents[1].wait(300) == -signal.SIGKILL
        agents[1] = agent(1, dies=False)
        codes = [process.wait(300) for process in agents]
    finally:
        for process in agents:
            process.kill()
            process.wait()
    stayed, replaced = ((tmp_path / f"agent_{number}.log").read_text() for number in range(2))
    assert codes == [0, 0], stayed + replaced
    # Either node can be rank 0, before and after.
    assert re.search(r"error: step 3, .*process [01] of 2 lost another one", stayed), stayed
    assert "resumed after step 2" in stayed + replaced
    assert_same_run(whole, tmp_path / "run", step=4)
