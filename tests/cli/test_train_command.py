"""``tandemrl train`` and ``plan``: what a dry run prints, what follows a run, and where a run is refused."""

import shlex
import signal
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from click.testing import Result
from typer.testing import CliRunner

import tandemrl.training.build
from runs import SMALL, cli, config, metrics
from tandemrl.cli.main import app
from tandemrl.config import load
from tandemrl.rollout.factory import torch_engine
from tandemrl.training import loop
from tandemrl.training.gates import TrainError


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def keys(pair: Path, out: Path, *more: str) -> list[str]:
    return [*SMALL, f"model.senior={pair}/senior", f"model.junior={pair}/junior", f"output_dir={out}", *more]


def test_a_dry_run_prints_the_keys_that_differ_as_they_are_typed() -> None:
    more = ["train.betas=[0.9, 0.95]", "data.prompt_suffix=Think first.", "reward.scorers.mine=boxed"]
    shown = run("train", "-c", "gsm8k_tandem", *more, "--dry-run").stdout
    head, *changed = shown.partition("\n\nbatch plan per step: ")[0].splitlines()
    assert head == f"{len(changed)} keys differ from the defaults (all: --verbose):"
    assert "  train.betas=[0.9, 0.95]" in changed
    assert load(None, [line.removeprefix("  ") for line in changed]) == load("gsm8k_tandem", more)
    assert "  train.threads=" not in shown  # as by default


def test_a_run_ends_with_the_commands_that_follow(tiny_pair: Path, tmp_path: Path) -> None:
    out = tmp_path / "a run"
    result = cli("train", "-c", "quickstart", *keys(tiny_pair, out, "train.steps=1"))
    *_, report, evaluation, play = result.strip().splitlines()
    assert shlex.split(report) == ["tandemrl", "report", str(out)]
    assert shlex.split(play)[1:] == ["play", "--senior", f"{out}/hf/best", "--junior", f"{tiny_pair}/junior"]
    cli(*shlex.split(evaluation)[1:], "--limit", "2", "--samples", "1", "--k", "1")
    assert (out / "eval" / "pass-at-k.json").is_file()


def test_ctrl_c_ends_after_the_step_and_names_the_command_that_goes_on(tiny_pair, tmp_path, monkeypatch):
    update = loop.update

    def pressed(*arguments: Any, **options: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return update(*arguments, **options)

    monkeypatch.setattr(loop, "update", pressed)
    out = tmp_path / "run"
    result = cli("train", "-c", "quickstart", *keys(tiny_pair, out, "train.steps=2", "train.eval_every=0"), fails=130)
    assert "Traceback" not in result
    assert "stopped by a signal after step 1, which is saved" in result
    assert [line["step"] for line in metrics(out)] == [1]
    monkeypatch.setattr(loop, "update", update)
    (line,) = [line for line in result.splitlines() if line.startswith("to go on from the last checkpoint: ")]
    cli(*shlex.split(line.partition(": ")[2])[1:])
    assert [line["step"] for line in metrics(out)] == [1, 2]


def test_a_folder_with_a_run_of_another_config_is_refused_before_anything_is_loaded(
    tiny_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if that run died before its first checkpoint."""
    out = tmp_path / "run"
    given = keys(tiny_pair, out, "train.steps=1", "train.eval_every=0")
    loop.train(load("quickstart", given), quiet=True)
    monkeypatch.setattr(tandemrl.training.build, "Preflight", lambda *a, **k: pytest.fail("something was read"))

    def said(*more: str) -> tuple[int, str]:
        result = run("train", "-c", "quickstart", *given, *more)
        return result.exit_code, " ".join(result.output.split())

    differs = f"output_dir={out}: the config differs from the checkpoint's: train.lr (checkpoint 0.0003, now 1e-05)"
    for whole in (True, False):
        if not whole:
            (out / "checkpoints").rename(tmp_path / "elsewhere")
        for mode in ([], ["--dry-run"]):
            code, other = said("train.lr=1e-5", *mode)
            assert (code, differs in other, "Choose another output_dir for a new run" in other) == (2, True, True)
            code, never = said("--resume", "never", *mode)
            assert (code, "already holds a run" in never) == (2, True)
    assert f"--resume: {out}: begins anew" in said("--dry-run")[1]


def test_a_run_goes_on_with_what_was_passed_by_name_or_as_an_object(tiny_pair: Path, tmp_path: Path) -> None:
    """Which its stored config names, and the config that is passed does not."""
    given = ["train.save_every=1", "train.eval_every=0"]
    for steps in (1, 2):
        mine = config(tiny_pair, tmp_path, *given, f"train.steps={steps}")
        loop.train(mine, recipe="rloo", strategy="bernoulli", engine=torch_engine, quiet=True)
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2]
    assert load(tmp_path).loss.recipe == "rloo"


def test_a_step_without_any_score_stops_and_names_the_function(tiny_pair: Path, tmp_path: Path) -> None:
    """A reward that returns None for some responses leaves them out; for all of a step there is nothing to learn."""

    def silent_from_step_two(completions: list[str], trainer_state: Any, **columns: Any) -> list[float | None]:
        return [float(i) if trainer_state.global_step == 0 else None for i in range(len(completions))]

    given = config(tiny_pair, tmp_path, "train.eval_every=0")
    with pytest.raises(TrainError, match=r"^step 2, score: silent_from_step_two gave none of the 16 responses a score"):
        loop.train(given, reward=silent_from_step_two, quiet=True)
    assert [line["step"] for line in metrics(tmp_path)] == [1]


def test_a_plan_says_memory_and_hours_and_needs_no_dry_run(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time/step": 90}\n{"step": 2, "time/step": 36}\n')
    result = cli("plan", "-c", "quickstart", "train.steps=500", "--device", "h200", "--times-of", str(tmp_path))
    batches, _, page = result.partition("\n\n")
    assert batches.startswith("batch plan per step: 16 prompts -> ")
    assert page.startswith("plan of 1 process(es) on h200, ")
    assert page.strip().endswith("time: 500 steps of 36 s (median of 1) are 5 hours")


def test_a_plan_is_of_as_many_processes_as_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = Mock()
    monkeypatch.setattr("tandemrl.apps.planning.plan.plan", planned)
    cli("plan", "-c", "quickstart", "--ranks", "2", "--device", "h200")
    assert planned.call_args.args[1:] == (2, "h200")
