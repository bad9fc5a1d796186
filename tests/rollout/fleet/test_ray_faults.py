"""A run on a real Ray cluster of several nodes on this machine, with faults at random moments: it ends, and is the run
without them, bit for bit."""

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import psutil
import pytest
from ray_faults import NODE, NODES, SETTINGS, FaultyRun, Kind, drawn, start_s, steps_for
from test_ray import gone, session_of_ray

from runs import config, metrics
from tandemrl.config import to_yaml
from tandemrl.training.loop import train

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("ray") is None, reason="needs the ray extra")]
FAULTS = int(os.environ.get("TANDEMRL_FLEET_FAULTS", "12"))
SEED, WORKERS, STOP_S = 0, 2, 30.0
RUN = (
    f"train.steps={steps_for(FAULTS)}",
    "train.eval_every=0",
    "data.eval=[]",
    "train.async_steps=1",
    "train.keep_exports=1",
    "rollout.unit_groups=1",
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head without processors, on which the driver runs, and nodes with one each, all on 127.0.0.1."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SETTINGS.items():
            patch.setenv(name, value)
        import ray
        from ray.cluster_utils import Cluster

        made = Cluster(initialize_head=True, head_node_args={**NODE, "num_cpus": 0})
        try:
            for _ in range(NODES):
                made.add_node(**NODE, num_cpus=1)
            ray.init(made.address, log_to_driver=False, logging_level="error", namespace="tandemrl")
            session = session_of_ray()
            yield made
        finally:
            ray.shutdown()
            made.shutdown()
        assert gone(session)


def listeners() -> set[str]:
    """The addresses at which this process and those that it started listen."""
    everyone = [psutil.Process(), *psutil.Process().children(recursive=True)]
    found = (each for process in everyone for each in process.net_connections("inet"))
    return {each.laddr.ip for each in found if each.status == psutil.CONN_LISTEN}


def test_a_run_with_faults_is_that_without(cluster: Any, tiny_pair: Path, tmp_path: Path) -> None:
    alone = train(config(tiny_pair, tmp_path / "alone", *RUN), quiet=True)
    here = tmp_path / "here"
    here.mkdir()
    start = start_s()
    timeout = 60 + 4 * start
    fleet = (f"rollout.workers={WORKERS}", f"rollout.ray={cluster.address}", f"rollout.worker_timeout_s={timeout:.0f}")
    (here / "config.yaml").write_text(to_yaml(config(tiny_pair, here / "run", *RUN, *fleet)))
    times = {"stop_s": STOP_S, "stuck_s": 3 * timeout}
    run = FaultyRun(cluster, here / "config.yaml", here / "run", workers=WORKERS, seed=SEED, **times)
    run.finish(faults := drawn(FAULTS, SEED))
    assert listeners() <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
    for file in ("samples.jsonl", f"hf/step_{steps_for(FAULTS)}/model.safetensors"):
        assert (here / "run" / file).read_bytes() == (alone / file).read_bytes(), file
    assert {fault.kind for fault in faults} == {*get_args(Kind)}
    assert run.drivers == 1 + sum(fault.kind == "driver killed" for fault in faults)
    assert sum(step["fleet/restarts"] for step in metrics(here / "run")) >= 1
