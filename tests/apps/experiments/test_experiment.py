"""Experiments: what is run, what is resumed, what is refused, and what is claimed of which numbers."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest

from runs import cli
from tandemrl.apps.experiments import experiment as experiments
from tandemrl.apps.experiments.arms import (
    BASE,
    GRPO,
    LIKELIHOOD,
    MATCHED,
    TANDEM,
    Arm,
    Experiment,
    ExperimentError,
)
from tandemrl.apps.experiments.claims import claims_of
from tandemrl.apps.experiments.experiment import PAIRS, WORDED, Job, run_experiment
from tandemrl.apps.experiments.pair import PairError
from tandemrl.apps.experiments.tiny import build_tiny_readers
from tandemrl.config import load
from tandemrl.evals import read_samples
from tandemrl.evals.compare import compare

SHORT = (
    "train.steps=2",
    "train.prompts_per_step=2",
    "rollout.group_size=2",
    "train.eval_every=0",
    "rollout.max_tokens=24",
    "data.limit=8",
)


class Finished(NamedTuple):
    experiment: Experiment
    out: Path
    results: dict[str, Any]
    said: list[str]


@pytest.fixture(scope="module")
def finished(tiny_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Finished]:
    """A whole experiment, as small as it gets. Both seeds have the same pair, so only training differs."""

    def build(out: Path, **options: Any) -> dict[str, Any]:
        if not out.exists():
            shutil.copytree(tiny_pair, out)
        return json.loads((out / "manifest.json").read_text())

    small = Experiment(
        "small",
        (TANDEM,),
        pairs=("plain",),
        contrasts=(("tandem", "base"),),
        seeds=(0, 1),
        overrides=SHORT,
        problems=4,
        samples=2,
        readers=1,
        evaluation_overrides=("eval.profile=custom", "eval.max_tokens=40"),
    )

    def train(out: Path, *, steps: None, **options: Any) -> list[Path]:
        return build_tiny_readers(out, steps=2, **options)

    out, said = tmp_path_factory.mktemp("experiment") / "small", list[str]()
    with pytest.MonkeyPatch.context() as patch:
        identity = {"seed": 0}  # of the pair that is copied
        copied = WORDED._replace(build=build, identity=lambda **recipe: identity, readers=train)
        patch.setitem(PAIRS, "plain", copied)
        yield Finished(small, out, run_experiment(small, out, workers=1, command="make small", say=said.append), said)


def test_every_part_is_trained_evaluated_and_reported(finished: Finished) -> None:
    _, out, results, said = finished
    assert len(said) == 2 * (1 + 2) + 1
    assert re.search(r"^  tandem +\d\.\d+ \[", said[-1], re.MULTILINE)
    assert [(row["pair"], row["arm"], row["seed"]) for row in results["rows"]] == [
        ("plain", arm, seed) for arm in (BASE, "tandem", "junior") for seed in (0, 1)
    ]
    once = [out / "plain" / f"seed-{seed}" / "eval" / BASE / "junior.json" for seed in (0, 1)]
    assert sorted(out.rglob("junior.json")) == once  # not for every arm
    assert "junior alone</th>" in (out / "report.html").read_text()
    for row in results["rows"][:4]:
        folder = out / "plain" / f"seed-{row['seed']}" / "eval" / row["arm"]
        stored = {phase: json.loads((folder / f"{phase}.json").read_text()) for phase in ("pass-at-k", "legibility")}
        assert row["solo/pass@1"] == stored["pass-at-k"]["metrics"]["macro"]["pass@1"]
        assert row["junior_ce"] == stored["legibility"]["metrics"]["macro"]["cross_entropy"]
        assert stored["pass-at-k"]["config"]["data"] == ["synthetic:plain:heldout:4"]
    assert json.loads((out / "results.json").read_text()) == results


def test_readers_that_no_arm_was_trained_with_read_every_arm(finished: Finished) -> None:
    """Apart from the junior, and beside what they solve alone, which is the same for all arms of a seed."""
    _, out, results, _ = finished
    rows = {(row["arm"], row["seed"]): row for row in results["rows"]}
    for arm, seed in [(arm, seed) for arm in (BASE, "tandem") for seed in (0, 1)]:
        samples = read_samples(out / "plain" / f"seed-{seed}" / "eval" / arm / "transfer.samples.jsonl")
        assert {sample.arm for sample in samples} == {"junior", "reader-1"}
        assert {sample.sample for sample in samples} == {0}
        for who, names in (("seen", ["junior"]), ("unseen", ["reader-1"])):
            for name, given in (("pass@1", "free/before"), ("forced/50", "forced/50"), ("free/masked", "free/masked")):
                right = [bool(each.correct) for each in samples if each.arm in names and each.given == given]
                assert len(right) == 4 * len(names)
                assert rows[arm, seed][f"{who}/{name}"] == pytest.approx(sum(right) / len(right))
            assert rows[arm, seed][f"{who}/free/0"] == rows[BASE, seed][f"{who}/free/0"]
        assert (rows[arm, seed]["start/kl"] > 0) == (arm != BASE)
    assert "unseen/pass@1" not in rows["junior", 0]
    page = (out / "report.html").read_text()
    for title in ("Solo against transfer", "What readers make of parts of the texts", "Trained one way, evaluated"):
        assert f"<figcaption>{title}" in page
    mean = sum(rows["tandem", seed]["seen/free/step"] for seed in (0, 1)) / 2
    assert f">{mean:.2f}</tspan>" in page or f">{mean:.2f}<" in page


def test_contrasts_are_those_of_compare(finished: Finished) -> None:
    _, out, results, _ = finished
    sides = ([out / "plain" / f"seed-{seed}" / "eval" / arm for seed in (0, 1)] for arm in ("tandem", BASE))
    expected = {(each.phase, each.metric): each.difference.mean for each in compare(*sides)}
    found = {(each["phase"], each["metric"]): each["difference"]["mean"] for each in results["contrasts"]}
    assert found == {key: expected[key] for key in found}
    assert {("pass-at-k", "pass@1"), ("handoff", "pass@1"), ("legibility", "cross_entropy"), ("drift", "kl")} <= set(
        found
    )
    assert {(each["A"], each["B"], each["pair"]) for each in results["contrasts"]} == {("tandem", "base", "plain")}


def test_a_second_run_does_nothing_again(finished: Finished) -> None:
    small, out, results, _ = finished
    files = {file: file.stat().st_mtime_ns for file in out.rglob("*.jsonl")}
    weights = {file: file.stat().st_mtime_ns for file in out.rglob("*.safetensors")}
    assert run_experiment(small, out, workers=1, say=lambda line: None)["rows"] == results["rows"]
    assert {file: file.stat().st_mtime_ns for file in files} == files
    assert {file: file.stat().st_mtime_ns for file in weights} == weights


def test_another_experiment_is_refused_and_more_seeds_are_not(finished: Finished) -> None:
    small, out, _, _ = finished
    with pytest.raises(ExperimentError, match="another problems"):
        run_experiment(replace(small, problems=7), out)
    other = replace(small, arms=(TANDEM._replace(overrides=("selection.prob_senior=0.3",)),))
    with pytest.raises(ExperimentError, match="another arm tandem"):
        run_experiment(other, out)
    stored = (out / "experiment.json").read_text()
    experiments._reserve_folder(replace(small, seeds=(0, 1, 2)), out)
    assert json.loads((out / "experiment.json").read_text())["seeds"] == [0, 1, 2]
    (out / "experiment.json").write_text(stored)


def test_added_readers_read_what_is_finished(finished: Finished) -> None:
    small, out, _, _ = finished
    home = out / "plain" / "seed-0" / "eval" / "tandem"
    before = {file: file.read_bytes() for file in home.glob("transfer*")}
    weights = {file: file.stat().st_mtime_ns for file in out.rglob("*.safetensors")}
    experiments.run_job(replace(small, readers=2), Job("plain", 0, TANDEM), out)
    arms = {sample.arm for sample in read_samples(home / "transfer.samples.jsonl")}
    assert arms == {"junior", "reader-1", "reader-2"}
    assert {file: file.stat().st_mtime_ns for file in weights} == weights
    for file, content in before.items():
        file.write_bytes(content)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pairs": ("nothing",)}, r"unknown pairs \['nothing'\]; known: plain, jargon"),
        ({"arms": (Arm("base", "x"),)}, "cannot be called 'base'"),
        ({"contrasts": (("tandem", "ppo"),)}, r"unknown arms \['ppo'\]"),
        ({"overrides": ("train.seed=7", "model={junior: null}")}, r"model\.junior, train\.seed is set for each run"),
        ({"overrides": ("selection.strategy=word",)}, r"selection\.strategy is what the arm grpo sets"),
        ({"overrides": ("train.epochs=2",)}, r"say train\.steps=N"),
        ({"arms": (GRPO, MATCHED)}, r"the arm matched is made of tandem, which must be arms that are trained: --arms"),
        ({"pairs": ("hops",), "readers": 1}, "there are no readers for hops; choose among plain, jargon"),
    ],
)
def test_an_experiment_that_makes_no_sense_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ExperimentError, match=message):
        run_experiment(Experiment(**({"name": "x", "arms": (GRPO, TANDEM)} | change)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_failed_part_is_named_the_others_go_on_and_its_followers_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What follows a pair are its arms, and an arm that is made of others follows them."""

    def run_job(experiment: Experiment, job: Job, out: Path) -> str:
        if str(job) in failing:
            raise OSError(f"disk full at {job}")
        done.append(str(job))
        return "fine"

    failing, done, said = ["plain/seed-1/pair", "plain/seed-0/grpo"], list[str](), list[str]()
    monkeypatch.setattr(experiments, "run_job", run_job)
    two = Experiment("two", (GRPO, TANDEM), pairs=("plain",), seeds=(0, 1))
    with pytest.raises(ExperimentError, match=r"2 of 8 parts failed .*seed-0/grpo: OSError: disk full.*run again"):
        run_experiment(two, tmp_path / "two", workers=1, say=said.append)
    assert done == ["plain/seed-0/pair", "plain/seed-0/tandem", "plain/seed-0/base"]
    assert len(said) == 5
    assert re.fullmatch(r"\[2/8, \d+ s\] plain/seed-1/pair: OSError: disk full at .*", said[1])
    assert re.fullmatch(r"\[4/8, \d+ s, about \d+ s left\] plain/seed-0/tandem: fine", said[3])
    assert not (tmp_path / "two" / "results.json").exists()
    failing = ["plain/seed-1/tandem"]
    three = replace(two, name="three", arms=(MATCHED, GRPO, TANDEM))
    with pytest.raises(ExperimentError, match="1 of 10 parts failed"):
        run_experiment(three, tmp_path / "three", workers=1, say=said.append)
    assert done[-1] == "plain/seed-0/matched"
    assert "plain/seed-1/matched" not in done


def test_an_arm_names_its_pair_s_junior(tmp_path: Path) -> None:
    job = Job("plain", 3, LIKELIHOOD)
    config = load("quickstart", experiments._run_overrides(Experiment("x", (LIKELIHOOD,)), job, job.home(tmp_path)))
    assert config.reward.parameters["junior_likelihood"]["model"] == str(tmp_path / "plain" / "seed-3" / "pair/junior")
    assert config.model.junior is None


@pytest.mark.slow
def test_workers_do_not_outlive_an_experiment_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from functools import partial\n"
        "import test_experiment as t\n"
        "from tandemrl.apps.experiments import experiment\n"
        "if __name__ == '__main__':\n"
        "    jobs = [experiment.Job('plain', 0)]\n"
        "    for _ in experiment._run_jobs(jobs, partial(t.say_and_sleep, sys.argv[2]), 2): pass\n"
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


def say_and_sleep(file: str, job: Job) -> None:
    Path(file).write_text(str(os.getpid()))
    time.sleep(300)


def test_a_refused_pair_is_counted_and_the_others_are_compared(
    finished: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And if all are refused there is nothing to compare."""
    small, out, results, _ = finished

    def build(folder: Path, *, seed: int, **options: Any) -> dict[str, Any]:
        if seed in refused:
            raise PairError(f"{folder}: refused")
        return json.loads((folder / "manifest.json").read_text())

    refused = {1}
    monkeypatch.setitem(PAIRS, "plain", PAIRS["plain"]._replace(build=build))
    found = run_experiment(small, out, workers=1, say=lambda line: None)
    assert [row["seed"] for row in found["rows"]] == [0, 0, 0]  # two arms and the junior
    assert found["refused"] == [{"pair": "plain", "seed": 1, "reason": f"{out}/plain/seed-1/pair: refused"}]
    assert [(claim["bar"], claim["values"], claim["verdict"]) for claim in found["claims"]] == [("<= 0", [1], "fails")]
    assert "refused" in (out / "report.html").read_text()
    refused = {0, 1}
    with pytest.raises(ExperimentError, match=r"every pair was refused: .*seed-0.*seed-1"):
        run_experiment(small, out, workers=1, say=lambda line: None)
    monkeypatch.undo()
    assert results["refused"] == []


def test_runs_keep_the_pair_that_they_began_with(finished: Finished, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pair of another recipe would replace it; their evaluations would then be of two pairs."""
    small, out, _, _ = finished
    other = PAIRS["plain"]._replace(identity=lambda **recipe: {"seed": 0, "schema": 99})
    monkeypatch.setitem(PAIRS, "plain", other)
    with pytest.raises(ExperimentError, match=r"seed-0: its runs began with a pair of another recipe; "):
        run_experiment(small, out, workers=1, say=lambda line: None)


def _rows(tandem: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Three seeds of base, GRPO and tandem GRPO that meet every bar, but for what is given."""
    names = ("solo/pass@1", "handoff/pass@1", "junior_ce", "jargon_rate")
    values = {
        "base": ([0.7] * 3, [0.4] * 3, [6.0] * 3, [0.6] * 3),
        "grpo": ([0.95, 0.96, 0.97], [0.4] * 3, [10.0] * 3, [0.9] * 3),
        "tandem": ([0.96, 0.95, 0.96], [0.7] * 3, [0.4] * 3, [0.01] * 3),
    }
    arms = {arm: dict(zip(names, own, strict=True)) for arm, own in values.items()}
    arms["tandem"] |= tandem
    return [
        {"pair": "jargon", "seed": seed, "arm": arm} | {name: own[seed] for name, own in measures.items()}
        for arm, measures in arms.items()
        for seed in range(3)
    ]


def _difference(mean: float, low: float, high: float) -> list[dict[str, Any]]:
    """The contrast of tandem GRPO and GRPO in solo pass@1."""
    named = {"pair": "jargon", "A": "tandem", "B": "grpo", "phase": "pass-at-k", "metric": "pass@1"}
    return [named | {"difference": {"mean": mean, "low": low, "high": high}}]


@pytest.mark.parametrize(
    ("tandem", "broken"),
    [
        ({}, set()),
        ({"solo/pass@1": [0.84, 0.96, 0.97]}, {"solo pass@1 of tandem GRPO", "before training"}),
        ({"handoff/pass@1": [0.7, 0.59, 0.7]}, {"handoff"}),
        ({"junior_ce": [0.4, 0.4, 2.1]}, {"legibility"}),
        ({"jargon_rate": [0.0, 0.06, 0.0]}, {"after tandem"}),
    ],
)
def test_claims_of_every_seed_hold_only_if_every_seed_meets_the_bar(
    tandem: dict[str, list[float]], broken: set[str]
) -> None:
    claims = claims_of("jargon", _rows(tandem), _difference(0.0, -0.01, 0.01))
    assert len(claims) == 8
    failing = [claim.claim for claim in claims if claim.verdict == "fails"]
    assert len(failing) == len(broken), failing
    assert all("every seed" in claim for claim in failing)
    for words in broken:
        assert any(words in claim for claim in failing), (words, failing)


@pytest.mark.parametrize(
    ("difference", "inferiority", "mean"),
    [
        ((0.04, 0.02, 0.06), "holds", "holds"),  # better: no fault
        ((-0.01, -0.05, 0.03), "holds", "holds"),
        ((0.0, -0.06, 0.06), "undecided", "holds"),
        ((-0.03, -0.04, -0.02), "holds", "fails"),  # worse, but by less than the margin
        ((-0.10, -0.14, -0.06), "fails", "fails"),
    ],
)
def test_equal_solo_skill_is_to_be_no_worse_by_the_margin(
    difference: tuple[float, float, float], inferiority: str, mean: str
) -> None:
    first, second, *_ = claims_of("jargon", _rows({}), _difference(*difference))
    assert (first.bar, first.values, first.verdict) == (">= -0.05", difference[1:2], inferiority)
    assert (second.bar, second.values, second.verdict) == (">= -0.02", difference[:1], mean)
    assert "not inferior" in first.claim
    assert "interval over seeds" in first.claim
    assert "mean over seeds" in second.claim


@pytest.mark.parametrize("gain", [0.0, 0.2])
def test_one_seed_is_asked_nothing_about_seeds(gain: float) -> None:
    rows = [row for row in _rows({"solo/pass@1": [0.95 + gain] * 3}) if row["seed"] == 0]
    claims = claims_of("jargon", rows, _difference(gain, gain - 0.02, gain + 0.02))
    assert [claim.claim for claim in claims if claim.verdict == "fails"] == []
    about_seeds = [claim for claim in claims if "seed" in claim.claim]
    assert [(claim.verdict, claim.values) for claim in about_seeds] == [("not asked of one seed", ())]
    assert (claims[0].verdict, claims[0].values) == ("holds", (gain - 0.02,))
    assert "interval over problems" in claims[0].claim


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["quickstart", "--seeds", "a"], "--seeds a: expected whole numbers"),
        (["quickstart", "--arms", "grpo,ppo"], "quickstart: unknown arms ppo; known: grpo, tandem"),
        (["quickstart", "--workers", "1", "train.stps=1"], "train.stps"),
    ],
)
def test_the_command_refuses_what_it_cannot_run(options: list[str], message: str, tmp_path: Path) -> None:
    assert message in cli("experiment", *options, "--out", str(tmp_path / "out"), fails=2)


def test_further_measures_are_of_the_texts_of_their_phase(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    further = {"solo": {"letters": len}, "handoff": {"handoff/letters": len}}
    monkeypatch.setitem(PAIRS, "jargon", PAIRS["jargon"]._replace(**further))
    monkeypatch.setattr(experiments, "measured", lambda *_: {"solo/pass@1": 0.5})
    monkeypatch.setattr(experiments.evals, "read_result", lambda file: {"samples": file.stem})
    said = {"pass-at-k": ["a", "bcd"], "handoff": ["efgh"]}
    monkeypatch.setattr(experiments.evals, "read_samples", lambda file: [Mock(text=text) for text in said[file.name]])
    found = experiments._row(Job("jargon", 0), tmp_path, "tandem")
    assert found == {"solo/pass@1": 0.5, "letters": 2.0, "handoff/letters": 4.0}
