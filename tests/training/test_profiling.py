"""The clock, and the traces of one step."""

import gzip
import json
from pathlib import Path

from runs import config, metrics
from tandemrl.training.loop import train


def test_a_profiled_run_accounts_for_its_time(tiny_pair: Path, tmp_path: Path) -> None:
    extra = ("train.profile=true", "train.eval_every=3", "loss.kl_coef=0.1", "train.mini_batch_prompts=2")
    out = train(config(tiny_pair, tmp_path / "run", *extra), quiet=True)
    last = metrics(out)[-1]
    inner = ["update/logprobs", "update/forward_backward", "update/forward_backward/optimizer"]
    outer = ["rollout", "score", "update", "sync", "eval"]
    times = {name.removeprefix("time/"): value for name, value in last.items() if name.startswith("time/")}
    assert times.keys() == {*inner, *outer, "step"}
    assert 0.8 * times["step"] < sum(times[name] for name in outer) <= times["step"]
    assert sum(times[name] for name in inner[:2]) <= times["update"]
    assert (out / "profile" / "trace_rollout.json.gz").exists()
    with gzip.open(out / "profile" / "trace_update.json.gz") as file:
        names = {event["name"] for event in json.load(file)["traceEvents"]}
    assert {"update/logprobs", "update/forward_backward", "aten::mm"} <= names
