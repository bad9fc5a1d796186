"""A small training run, its files, when two runs are the same, and how one is evaluated."""

import importlib
import itertools
import json
import multiprocessing
import os
import re
import signal
import sys
import tempfile
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import pyarrow.parquet
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from tandemrl.cli.main import app
from tandemrl.config import Config, DataConfig, ModelConfig, load, packaged_configs
from tandemrl.evals import evaluate

SMALL = [
    "model.device=cpu",  # also where there is a GPU, which `test_cuda` is about
    "train.threads=1",
    "train.steps=3",
    "train.prompts_per_step=4",
    "rollout.group_size=4",
    "rollout.max_tokens=48",
    "train.save_every=2",
    "train.eval_every=2",
    "train.lr=3e-4",
    "eval.train_problems=4",
    "eval.train_samples=2",
    "eval.bootstrap=10",
    "data.train=synthetic:plain:train:64",
    "data.eval=synthetic:plain:heldout:16",
    "data.max_prompt_tokens=128",
]


UNDECIDED = {
    "deepscaler_kl": ["loss.kl_coef=0.001"],
    "rrm_policy": ["train.steps=1"],
    "rrm_outcome": ["train.steps=1"],
    "rrm_train": ["model.senior=Qwen/Qwen3-4B-Instruct-2507", "train.steps=1"],
}
"""What packaged configs leave to the user."""


def launch_of(name: str) -> tuple[int, list[str]]:
    """How many processes the head of a packaged config starts it with, and how it splits them (``parallel.*``)."""
    command = rf"torchrun --nproc-per-node (\d+) --no-python tandemrl train --config {name}( .*)?\n"
    found = re.search(command, packaged_configs()[name].read_text())
    if found is None:
        return 1, []
    return int(found[1]), [word for word in (found[2] or "").split() if word.startswith("parallel.")]


FORKED = multiprocessing.get_context("forkserver")
"""Processes forked from one that has imported the library, once per test session: in each, that takes five seconds."""
FORKED.set_forkserver_preload(
    [
        "torch.distributed.fsdp",
        "tandemrl.cli.main",
        "tandemrl.training.loop",
        "transformers.models.qwen3.modeling_qwen3",
        "peft",  # left out if it is not installed
    ]
)


def kill(command: Sequence[str], function: str, call: int, *, before: bool = False, timeout: float = 600.0) -> None:
    """Run a command of ``tandemrl`` in a process that ends in a SIGKILL at a call of a function: before it, or after.

    Args:
        function: ``module:name``, or ``module:Class.name``; call: which one, from 1.
    """
    with tempfile.NamedTemporaryFile() as log:
        process = FORKED.Process(target=_dying, args=(log.name, [*command], function, call, before))
        process.start()
        process.join(timeout)
        ended = process.exitcode
        process.kill()
        assert ended == -signal.SIGKILL, Path(log.name).read_text()


def _dying(log: str, command: list[str], function: str, call: int, before: bool) -> None:
    """In the process that dies."""
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), stream)
    module, _, path = function.partition(":")
    holder, _, name = path.rpartition(".")
    owner = attrgetter(holder)(importlib.import_module(module)) if holder else importlib.import_module(module)
    original, calls = getattr(owner, name), itertools.count(1)

    def dying(*arguments: Any, **options: Any) -> Any:
        number = next(calls)
        if before and number == call:
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*arguments, **options)
        if number == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, dying)
    sys.argv = ["tandemrl", *command]
    importlib.import_module("tandemrl.cli.main").main()
    sys.exit("the call never came")


def cli(*arguments: object, fails: int = 0) -> str:
    """What a command of ``tandemrl`` says. fails: the exit code that it is to end with."""
    done = CliRunner().invoke(app, [*map(str, arguments)])
    assert done.exit_code == fails, f"{arguments}\n{done.output}\n{done.exception!r}"
    return done.output


def put(file: Path, *records: Any) -> Path:
    """Write records: Parquet or JSON lines, by the name of the file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([*records]), file)
    else:
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def config(pair: Path, out: Path, *extra: str) -> Config:
    paths = [f"model.senior={pair}/senior", f"model.junior={pair}/junior", f"output_dir={out}"]
    return load(None, [*SMALL, *paths, *extra])


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def metrics(out: Path) -> list[dict[str, Any]]:
    return lines(out / "metrics.jsonl")


def samples(out: Path) -> list[dict[str, Any]]:
    return lines(out / "samples.jsonl")


def timeless(out: Path) -> list[dict[str, Any]]:
    """Metrics that two identical runs share: all but the times and what became of workers."""
    own = ("time/", "tokens/s", "fleet/")
    return [{k: v for k, v in line.items() if not k.startswith(own)} for line in metrics(out)]


def weights(out: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(out / "hf" / f"step_{step}" / "model.safetensors")


def assert_same_run(a: Path, b: Path, step: int) -> None:
    assert timeless(a) == timeless(b)
    assert (a / "samples.jsonl").read_text() == (b / "samples.jsonl").read_text()
    left, right = weights(a, step), weights(b, step)
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def evaluate_with(
    *, data: Sequence[str], model: str | Path, junior: str | Path | None = None, device: str = "cpu", **settings: Any
) -> dict[str, dict[str, Any]]:
    """``evaluate``. ``settings``: sections of the config such as ``eval``, and arguments of ``evaluate``."""
    sections = {name: settings.pop(name) for name in list(settings) if name in Config.__dataclass_fields__}
    models = ModelConfig(junior=None if junior is None else str(junior), device=device)
    config = Config(**{"model": models, "data": DataConfig(eval=tuple(data))} | sections)
    return evaluate(config, model=model, **settings)


def evaluate_phase(phase: Any, **settings: Any) -> dict[str, Any]:
    """``evaluate_with`` of one phase."""
    return evaluate_with(phases=(phase,), **settings)[phase]
