"""The command of ``docs/howto/nodes.md`` for a cluster: a run that is a job on a real Ray cluster on this machine."""

import os
import re
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from ray_faults import SETTINGS
from test_ray import gone

from runs import config, metrics
from tandemrl.config import to_yaml
from tandemrl.training.loop import train

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(any(find_spec(name) is None for name in ("ray", "aiohttp_cors")), reason="needs ray[default]"),
]
HOWTO = Path(__file__).parents[3] / "docs" / "howto" / "nodes.md"
RAY = (sys.executable, "-m", "ray.scripts.scripts")
SECONDS = 600.0
STEPS = 10
REWARD = """
import time
from pathlib import Path

def unhurried(row, text, hurry):
    if not Path(hurry).exists():
        time.sleep(0.2)
    return float(f"boxed{{{row.ground_truth}}}" in text)
"""
CONNECT = "import sys; from tandemrl.rollout.fleet.ray_workers import *; RayWorkers(print, Cluster(sys.argv[1], 1))"
RUN = (
    f"train.steps={STEPS}",
    f"train.save_every={STEPS}",
    "train.eval_every=0",
    "data.eval=[]",
    "rollout.unit_groups=1",
    "reward.scorers.*=my_reward:unhurried",
    "reward.workers=1",
)


def until(holds: Callable[[], object], what: str, seconds: float = SECONDS) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"no {what} in {seconds:g} s"
        time.sleep(0.2)


class RayCluster:
    """A head with two processors, a dashboard and a token, all on 127.0.0.1."""

    def __init__(self, folder: Path) -> None:
        programs = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self.env = {**os.environ, **SETTINGS, **token, "PATH": programs, "OMP_NUM_THREADS": "1"}
        port, dashboard, client = (free_port() for _ in range(3))
        self.gcs, self.address, log = f"127.0.0.1:{port}", f"http://127.0.0.1:{dashboard}", folder / "head.log"
        here = ("--node-ip-address=127.0.0.1", "--dashboard-host=127.0.0.1", f"--port={port}")
        ports = (
            f"--dashboard-port={dashboard}",
            "--dashboard-agent-listen-port=0",
            f"--ray-client-server-port={client}",
        )
        small = ("--dashboard-agent-listen-port=0", "--num-cpus=2", f"--object-store-memory={100 * 2**20}")
        command = (*RAY, "start", "--head", *here, *ports, *small, "--block")
        with open(log, "w") as file:
            self.process = subprocess.Popen(command, cwd=folder, env=self.env, stdout=file, stderr=subprocess.STDOUT)
        until(lambda: "Ray runtime started" in log.read_text() or self.process.poll(), "Ray cluster")
        assert self.process.poll() is None, log.read_text()
        [session] = set(re.findall(r"/(session_[\w-]+)/", log.read_text()))
        self.session = Path(session)

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)

    def ask(self, *words: str) -> str:
        """What a command of the client says on both streams."""
        done = subprocess.run([*RAY, *words], env=self.env, capture_output=True, text=True, timeout=SECONDS)
        return done.stdout + done.stderr


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RayCluster]:
    made = RayCluster(tmp_path)
    try:
        yield made
    finally:
        made.end()
        assert gone(made.session)


def documented(replaced: dict[str, list[str]]) -> list[str]:
    """The command of the page after ``ray``, with other words for some of its own, each of which it must have."""
    [command] = re.findall(r"^ray (job submit (?:.*\\\n)*.*)$", HOWTO.read_text(), re.MULTILINE)
    words = shlex.split(command.replace("\\\n", " "))
    assert replaced.keys() <= set(words)
    return [new for word in words for new in replaced.get(word, [word])]


def test_a_job_that_is_stopped_and_submitted_again_makes_the_run(
    cluster: RayCluster, tiny_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its module travels with it; stopped, it ends its step; resumed, it is the run without workers, bit for bit."""
    modules, hurry = tmp_path / "modules", tmp_path / "hurry"
    modules.mkdir()
    (modules / "my_reward.py").write_text(REWARD)
    parameter = f"reward.parameters.unhurried.hurry={hurry}"
    asked = config(tiny_pair, tmp_path / "run", *RUN, parameter)
    (tmp_path / "config.yaml").write_text(to_yaml(asked))

    def submit(name: str) -> list[str]:
        return documented(
            {
                "http://HEAD:8265": [cluster.address, "--submission-id", name, "--working-dir", str(modules)],
                "--entrypoint-num-gpus": ["--entrypoint-num-cpus"],
                "1": ["0"],
                "gsm8k_tandem": [str(tmp_path / "config.yaml")],
                "model.device=cuda": [],
                "rollout.workers=8": ["rollout.workers=2"],
                "output_dir=/shared/runs/gsm8k": [f"output_dir={tmp_path / 'run'}"],
            }
        )

    at = ("--address", cluster.address)
    said = cluster.ask(*submit("first")[:2], "--no-wait", *submit("first")[2:])
    lines = tmp_path / "run" / "metrics.jsonl"
    until(lambda: lines.exists() and lines.read_text().count("\n") >= 2, f"second step; {said}")
    assert "was stopped" in cluster.ask("job", "stop", *at, "first")
    log = cluster.ask("job", "logs", *at, "first")
    assert "SIGTERM: the run stops after this step and saves it" in log
    [step] = map(int, re.findall(r"stopped by a signal after step (\d+), which is saved", log))
    assert 2 <= step == len(metrics(tmp_path / "run")) < STEPS
    hurry.touch()
    said = cluster.ask(*submit("second"))
    assert re.search(r"Job 'second' succeeded", said), said
    assert f"step {step + 1}/{STEPS}" in said
    assert f"step {step}/{STEPS}" not in said
    actors = cluster.ask("list", "actors", *at, "--format=json")
    assert actors.count('"RayWorker"') == 4, actors  # two of each job, in this cluster

    without = {name: value for name, value in cluster.env.items() if not name.startswith("RAY_AUTH")}
    command = [sys.executable, "-c", CONNECT, cluster.gcs]
    refused = subprocess.run(command, env=without, capture_output=True, text=True, timeout=SECONDS)
    assert "if it has a token, set RAY_AUTH_MODE=token" in refused.stderr

    monkeypatch.syspath_prepend(modules)
    alone = train(config(tiny_pair, tmp_path / "alone", *RUN, parameter), quiet=True)
    for file in ("samples.jsonl", f"hf/step_{STEPS}/model.safetensors"):
        assert (alone / file).read_bytes() == (tmp_path / "run" / file).read_bytes(), file
