"""Experiments: what is run, what is resumed, what is refused, and what is claimed of which numbers."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner

from tandemrl import experiment as experiments
from tandemrl.cli.main import app
from tandemrl.compare import compare
from tandemrl.config import load
from tandemrl.experiment import (
    BASE,
    GRPO,
    TANDEM,
    Arm,
    Experiment,
    ExperimentError,
    Job,
    check_condition,
    paper_claims,
    run,
)

SHORT = (
    "train.steps=2",
    "train.prompts_per_step=2",
    "rollout.group_size=2",
    "train.eval_every=0",
    "rollout.max_tokens=24",
)


class Finished(NamedTuple):
    experiment: Experiment
    out: Path
    results: dict[str, Any]
    said: list[str]


@pytest.fixture(scope="module")
def finished(tiny_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Finished]:
    """A whole experiment, as small as it gets. Both seeds have the same pair, so only training differs."""

    def build(out: Path, **recipe: Any) -> dict[str, Any]:
        if not out.exists():
            shutil.copytree(tiny_pair, out)
        return json.loads((out / "manifest.json").read_text())

    small = Experiment(
        "small",
        (GRPO, TANDEM),
        pairs=("plain",),
        contrasts=(("tandem", "grpo"),),
        seeds=(0, 1),
        overrides=SHORT,
        problems=6,
        samples=2,
    )
    out, said = tmp_path_factory.mktemp("experiment") / "small", list[str]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiments, "build_tiny_pair", build)
        yield Finished(small, out, run(small, out, workers=1, say=said.append), said)


def test_every_part_is_trained_evaluated_and_reported(finished: Finished) -> None:
    _, out, results, said = finished
    assert len(said) == 2 * (1 + 3) + 1
    assert "| tandem GRPO |" in said[-1]
    assert [(row["pair"], row["arm"], row["seed"]) for row in results["rows"]] == [
        ("plain", arm, seed) for arm in (BASE, "grpo", "tandem") for seed in (0, 1)
    ]
    for row in results["rows"]:
        folder = out / "plain" / f"seed-{row['seed']}" / "eval" / row["arm"]
        stored = {phase: json.loads((folder / f"{phase}.json").read_text()) for phase in ("pass-at-k", "legibility")}
        assert row["solo/pass@1"] == stored["pass-at-k"]["metrics"]["macro"]["pass@1"]
        assert row["junior_ce"] == stored["legibility"]["metrics"]["macro"]["cross_entropy"]
        assert stored["pass-at-k"]["config"]["data"] == ["synthetic:plain:heldout:6"]
    assert json.loads((out / "results.json").read_text()) == results
    assert "<html" in (out / "report.html").read_text()


def test_arms_of_a_seed_share_the_pair_and_differ_in_what_they_say(finished: Finished) -> None:
    _, out, _, _ = finished
    configs = {arm: (out / "plain" / "seed-1" / arm / "config.yaml").read_text() for arm in ("grpo", "tandem")}
    differing = {
        line.strip().split(":")[0]
        for a, b in zip(*(text.splitlines() for text in configs.values()), strict=True)
        if a != b
        for line in (a, b)
    }
    assert differing == {"junior", "strategy", "output_dir"}


def test_contrasts_are_those_of_compare(finished: Finished) -> None:
    _, out, results, _ = finished
    sides = ([out / "plain" / f"seed-{seed}" / "eval" / arm for seed in (0, 1)] for arm in ("tandem", "grpo"))
    expected = {(each.phase, each.metric): each.difference.mean for each in compare(*sides)}
    found = {(each["phase"], each["metric"]): each["difference"]["mean"] for each in results["contrasts"]}
    assert found == expected
    assert {(each["A"], each["B"], each["pair"]) for each in results["contrasts"]} == {("tandem", "grpo", "plain")}


def test_a_second_run_does_nothing_again(finished: Finished) -> None:
    small, out, results, _ = finished
    files = {file: file.stat().st_mtime_ns for file in out.rglob("*.jsonl")}
    weights = {file: file.stat().st_mtime_ns for file in out.rglob("*.safetensors")}
    assert run(small, out, workers=1, say=lambda line: None)["rows"] == results["rows"]
    assert {file: file.stat().st_mtime_ns for file in files} == files
    assert {file: file.stat().st_mtime_ns for file in weights} == weights


def test_another_experiment_is_refused_and_more_seeds_are_not(finished: Finished) -> None:
    small, out, _, _ = finished
    with pytest.raises(ExperimentError, match="another problems"):
        run(replace(small, problems=7), out)
    other = replace(small, arms=(GRPO, TANDEM._replace(overrides=("selection.prob_senior=0.3",))))
    with pytest.raises(ExperimentError, match="another arm tandem"):
        run(other, out)
    stored = (out / "experiment.json").read_text()
    experiments._claim_folder(replace(small, seeds=(0, 1, 2)), out)
    assert json.loads((out / "experiment.json").read_text())["seeds"] == [0, 1, 2]
    (out / "experiment.json").write_text(stored)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seeds": ()}, "seeds must be one or more"),
        ({"size": "7b"}, "unknown size '7b'; known: tiny, 46m"),
        ({"seeds": (1, 1)}, "seeds must be one or more different ones"),
        ({"arms": (Arm("base", "x"),)}, "cannot be called 'base'"),
        ({"contrasts": (("tandem", "ppo"),)}, r"unknown arms \['ppo'\]"),
    ],
)
def test_an_experiment_that_makes_no_sense_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ExperimentError, match=message):
        run(Experiment(**({"name": "x", "arms": (GRPO, TANDEM)} | change)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_larger_size_runs_on_its_device_with_smaller_learning_rates(finished: Finished) -> None:
    large = replace(finished.experiment, size="46m", device="cuda")
    overrides = experiments._overrides(large, Job("plain", 0, TANDEM), finished.out)
    assert "model.device=cuda" in overrides
    small = load(finished.out / "plain" / "seed-0" / "tandem" / "config.yaml")
    [rate] = [float(o.removeprefix("train.lr=")) for o in overrides if o.startswith("train.lr=")]
    assert rate == pytest.approx(small.train.lr * 96 / 512, rel=1e-2)
    with pytest.raises(ExperimentError, match="another size, device"):
        run(large, finished.out)


def test_a_failed_part_is_named_the_others_go_on_and_its_followers_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def do(experiment: Experiment, job: Job, out: Path) -> str:
        if str(job) in ("plain/seed-1/pair", "plain/seed-0/grpo"):
            raise OSError(f"disk full at {job}")
        done.append(str(job))
        return "fine"

    done: list[str] = []
    said: list[str] = []
    monkeypatch.setattr(experiments, "do", do)
    two = Experiment("two", (GRPO, TANDEM), pairs=("plain",), seeds=(0, 1))
    with pytest.raises(ExperimentError, match=r"2 of 8 parts failed .*seed-0/grpo: OSError: disk full.*run again"):
        run(two, tmp_path, workers=1, say=said.append)
    assert done == ["plain/seed-0/pair", "plain/seed-0/tandem", "plain/seed-0/base"]
    assert len(said) == 5
    assert not (tmp_path / "results.json").exists()


def test_parts_in_processes_follow_those_that_they_need(tmp_path: Path) -> None:
    def after(job: Job) -> list[Job]:
        return [job._replace(arm=TANDEM), job._replace(arm=GRPO)] if job.arm is None else []

    jobs = [Job("plain", 0), Job("plain", 1)]
    ended = [
        (str(job), outcome if isinstance(outcome, str) else type(outcome))
        for job, outcome in experiments._schedule(jobs, after, lambda job: (int_or_text, job.seed, str(job)), 2)
    ]
    assert sorted(ended, key=str) == [
        ("plain/seed-0/grpo", "plain/seed-0/grpo"),
        ("plain/seed-0/pair", "plain/seed-0/pair"),
        ("plain/seed-0/tandem", "plain/seed-0/tandem"),
        ("plain/seed-1/pair", ValueError),  # and nothing after it
    ]
    names = [name for name, _ in ended]
    assert names.index("plain/seed-0/pair") < names.index("plain/seed-0/grpo")


def test_workers_do_not_outlive_an_experiment_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import test_experiment as t\n"
        "from tandemrl import experiment\n"
        "if __name__ == '__main__':\n"
        "    jobs = [experiment.Job('plain', 0)]\n"
        "    for _ in experiment._schedule(jobs, lambda job: [], lambda job: (t.say_and_sleep, sys.argv[2]), 2): pass\n"
    )
    script, file = tmp_path / "parent.py", tmp_path / "pid"
    script.write_text(code)
    parent = subprocess.Popen([sys.executable, str(script), str(Path(__file__).parent), str(file)])
    deadline = time.monotonic() + 120
    while not file.exists() or not file.read_text():
        assert parent.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    parent.kill()
    parent.wait()
    while Path("/proc", file.read_text()).exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def say_and_sleep(file: str) -> None:
    Path(file).write_text(str(os.getpid()))
    time.sleep(300)


def int_or_text(seed: int, text: str) -> str:
    if seed == 1:
        raise ValueError(text)
    return text


def test_a_jargon_senior_that_is_better_in_plain_words_is_refused() -> None:
    manifest = {"pair": "jargon", "base": {"jargon/pass@1": 0.5, "plain/pass@1": 0.6}}
    with pytest.raises(ExperimentError, match=r"right in 0.500 of its jargon and 0.600 of its plain"):
        check_condition(manifest, Path("runs/pair"))
    check_condition(manifest | {"base": {"jargon/pass@1": 0.9, "plain/pass@1": 0.6}}, Path("runs/pair"))
    check_condition({"pair": "plain", "base": {"solo/pass@1": 0.5}}, Path("runs/pair"))


def _rows(tandem: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Three seeds of base, GRPO and tandem GRPO that meet every bar, but for what is given."""
    arms = {
        "base": {
            "solo/pass@1": [0.7] * 3,
            "handoff/pass@1": [0.4] * 3,
            "junior_ce": [6.0] * 3,
            "jargon_rate": [0.6] * 3,
        },
        "grpo": {
            "solo/pass@1": [0.95, 0.96, 0.97],
            "handoff/pass@1": [0.4] * 3,
            "junior_ce": [10.0] * 3,
            "jargon_rate": [0.9] * 3,
        },
        "tandem": {
            "solo/pass@1": [0.96, 0.95, 0.96],
            "handoff/pass@1": [0.7] * 3,
            "junior_ce": [0.4] * 3,
            "jargon_rate": [0.01] * 3,
            **tandem,
        },
    }
    return [
        {"pair": "jargon", "seed": seed, "arm": arm} | {name: values[seed] for name, values in measures.items()}
        for arm, measures in arms.items()
        for seed in range(3)
    ]


@pytest.mark.parametrize(
    ("tandem", "broken"),
    [
        ({}, set()),
        ({"solo/pass@1": [0.91, 0.93, 0.97]}, {"mean over seeds"}),
        ({"solo/pass@1": [0.95, 0.96, 0.91]}, {"solo pass@1"}),  # -.06 in one seed, -.02 on average
        ({"solo/pass@1": [0.84, 0.96, 0.97]}, {"mean over seeds", "solo pass@1", "of tandem GRPO", "before training"}),
        ({"handoff/pass@1": [0.7, 0.59, 0.7]}, {"handoff"}),
        ({"junior_ce": [0.4, 0.4, 2.1]}, {"legibility"}),
        ({"jargon_rate": [0.0, 0.06, 0.0]}, {"after tandem"}),
    ],
)
def test_claims_hold_only_if_every_seed_meets_the_bar(tandem: dict[str, list[float]], broken: set[str]) -> None:
    claims = paper_claims("jargon", _rows(tandem))
    assert len(claims) == 8
    failing = [claim.claim for claim in claims if not claim.holds]
    assert len(failing) == len(broken), failing
    for words in broken:
        assert any(words in claim for claim in failing), (words, failing)


def test_no_claims_without_all_three_models() -> None:
    assert paper_claims("jargon", [row for row in _rows({}) if row["arm"] != "grpo"]) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["nothing"], "unknown experiment 'nothing'; known: quickstart, paper-claims, repair, ablations"),
        (["quickstart", "--seeds", "a"], "--seeds a: expected whole numbers"),
        (["quickstart", "--arms", "grpo,ppo"], "--arms: unknown ppo; known: grpo, tandem"),
        (["quickstart", "--pair", "nothing", "--workers", "1"], "unknown pairs ['nothing']; known: plain, jargon"),
        (["quickstart", "--workers", "1", "train.stps=1"], "train.stps"),
    ],
)
def test_the_command_refuses_what_it_cannot_run(options: list[str], message: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["experiment", *options, "--out", str(tmp_path / "out")])
    assert result.exit_code == 2, result.output
    assert message in result.stderr
