"""The clock, and the table against hand-made numbers."""

import gzip
import json
import time
from pathlib import Path

import pytest

from runs import config, metrics
from tandemrl.training.loop import train
from tandemrl.training.profiling import (
    Clock,
)


def test_the_clock_adds_up_nested_and_repeated_phases() -> None:
    clock = Clock()
    with clock("update"):
        for _ in range(2):
            with clock("logprobs"):
                time.sleep(0.01)
        time.sleep(0.02)
    with clock("sync"):
        pass
    time.sleep(0.01)
    assert list(clock.seconds) == ["update", "update/logprobs", "sync"]
    assert clock.seconds["update/logprobs"] >= 0.02
    assert clock.seconds["update"] >= clock.seconds["update/logprobs"] + 0.02
    own = clock.own()
    assert own["update"] == pytest.approx(clock.seconds["update"] - clock.seconds["update/logprobs"])
    assert own["idle"] >= 0.01
    assert sum(own.values()) == pytest.approx(clock.total(), abs=0.01)
    metrics = clock.metrics(tokens=100.0)
    assert metrics.keys() == {"time/step", "tokens/s", "time/update", "time/sync"}
    assert metrics["tokens/s"] == pytest.approx(100.0 / metrics["time/step"])


def test_a_profiled_run_accounts_for_its_time(tiny_pair: Path, tmp_path: Path) -> None:
    extra = ("train.profile=true", "train.eval_every=3", "loss.kl_coef=0.1", "train.mini_batch_prompts=2")
    out = train(config(tiny_pair, tmp_path / "run", *extra), quiet=True)
    table = json.loads((out / "profile" / "table.json").read_text())
    phases = ["rollout", "score", "update", "update/logprobs", "update/forward_backward"]
    phases += ["update/forward_backward/optimizer", "sync", "eval", "idle"]
    assert list(table["phases"]) == phases
    last = metrics(out)[-1]
    assert table["steps"] == 1  # the third
    assert table["step_s"] == pytest.approx(last["time/step"], rel=0.2)
    assert table["phases"]["idle"]["share"] < 0.2
    speed = last["tokens/response"] / last["time/rollout"]
    assert table["tokens_per_s"]["rollout (written)"] == pytest.approx(speed, rel=0.1)
    assert (out / "profile" / "trace_rollout.json.gz").exists()
    with gzip.open(out / "profile" / "trace_update.json.gz") as file:
        names = {event["name"] for event in json.load(file)["traceEvents"]}
    assert {"update/logprobs", "update/forward_backward", "aten::mm"} <= names
