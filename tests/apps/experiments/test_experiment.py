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

import pytest
import torch
from typer.testing import CliRunner

from tandemrl.apps import report
from tandemrl.apps.experiments import experiment as experiments
from tandemrl.apps.experiments.claims import BASE, claims_of, paper_claims
from tandemrl.apps.experiments.experiment import (
    EXPERIMENTS,
    GRPO,
    TANDEM,
    Arm,
    Experiment,
    ExperimentError,
    Job,
    about_left,
    run_experiment,
)
from tandemrl.apps.experiments.families import PAIRS, WORDED, Recipe
from tandemrl.apps.experiments.pair import PairError
from tandemrl.cli.main import app
from tandemrl.config import load, stated_keys
from tandemrl.evals.compare import compare

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

    def build(out: Path, recipe: Recipe, **options: Any) -> dict[str, Any]:
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
        evaluation_overrides=("eval.profile=custom", "eval.max_tokens=40"),
    )
    out, said = tmp_path_factory.mktemp("experiment") / "small", list[str]()
    with pytest.MonkeyPatch.context() as patch:
        copied = WORDED._replace(build=build, identity=lambda recipe: {"seed": 0})  # of the pair that is copied
        patch.setitem(PAIRS, "plain", copied)
        yield Finished(small, out, run_experiment(small, out, workers=1, say=said.append), said)


def test_every_part_is_trained_evaluated_and_reported(finished: Finished) -> None:
    _, out, results, said = finished
    assert len(said) == 2 * (1 + 3) + 1
    assert re.search(r"^  tandem GRPO +\d\.\d+ \[", said[-1], re.MULTILINE)
    assert [(row["pair"], row["arm"], row["seed"]) for row in results["rows"]] == [
        ("plain", arm, seed) for arm in (BASE, "grpo", "tandem", "junior") for seed in (0, 1)
    ]
    once = [out / "plain" / f"seed-{seed}" / "eval" / BASE / "junior.json" for seed in (0, 1)]
    assert sorted(out.rglob("junior.json")) == once  # not for every arm
    assert "junior alone</th>" in (out / "report.html").read_text()
    for row in results["rows"][:6]:
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
    assert found == {key: expected[key] for key in found}
    assert {("pass-at-k", "pass@1"), ("handoff", "pass@1"), ("legibility", "cross_entropy"), ("drift", "kl")} <= set(
        found
    )
    assert {(each["A"], each["B"], each["pair"]) for each in results["contrasts"]} == {("tandem", "grpo", "plain")}


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
    other = replace(small, arms=(GRPO, TANDEM._replace(overrides=("selection.prob_senior=0.3",))))
    with pytest.raises(ExperimentError, match="another arm tandem"):
        run_experiment(other, out)
    stored = (out / "experiment.json").read_text()
    assert experiments._reserve_folder(replace(small, seeds=(0, 1, 2)), out) == ""
    assert json.loads((out / "experiment.json").read_text())["seeds"] == [0, 1, 2]
    says = experiments._reserve_folder(replace(small, seeds=(2, 3)).only(["tandem"]), out)
    assert says.startswith("results.json will be without seeds 0, 1; arms grpo of earlier commands:")
    (out / "experiment.json").write_text(stored)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seeds": ()}, "seeds must be one or more"),
        ({"size": "7b"}, "unknown size '7b'; known: tiny, 1m, 4m, 46m"),
        ({"seeds": (1, 1)}, "seeds must be one or more different ones"),
        ({"arms": (Arm("base", "x"),)}, "cannot be called 'base'"),
        ({"contrasts": (("tandem", "ppo"),)}, r"unknown arms \['ppo'\]"),
        ({"overrides": ("train.seed=7", "model={junior: null}")}, r"model\.junior, train\.seed is set for each run"),
        ({"overrides": ("selection.strategy=word",)}, r"selection\.strategy is what the arm grpo sets"),
        ({"overrides": ("train.epochs=2",)}, r"say train\.steps=N"),
    ],
)
def test_an_experiment_that_makes_no_sense_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ExperimentError, match=message):
        run_experiment(Experiment(**({"name": "x", "arms": (GRPO, TANDEM)} | change)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_a_run_sets_is_refused_but_for_settings_of_training(finished: Finished) -> None:
    overrides = experiments._run_overrides(finished.experiment, Job("plain", 0, TANDEM), finished.out)
    assert stated_keys(overrides) - experiments.OF_RUN == {"train.lr", "train.threads"}
    asked = replace(EXPERIMENTS["ablations"], overrides=("selection.prob_senior=0.5", "train.lr=1e-4"))
    with pytest.raises(ExperimentError, match=r"prob_senior is what the arm p_0\.25 sets"):
        experiments._check_experiment(asked)
    experiments._check_experiment(asked.only(["tandem", "K_2"]))


def test_what_is_set_of_the_task_holds_in_evaluations_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Any] = []

    def evaluate(config: Any, **_: Any) -> dict[str, Any]:
        seen.append(config)
        return {"pass-at-k": {"metrics": {"macro": {"pass@1": 0.5}}}}

    monkeypatch.setattr(experiments.evals, "evaluate", evaluate)
    overrides = ("data.prompt_suffix=Think #1: hard.", "reward.gsm8k=flexible", "train.lr=1e-4", "eval.seed=5")
    experiment = replace(EXPERIMENTS["quickstart"], overrides=overrides)
    experiments.run_job(experiment, Job("plain", 0, Arm(BASE, "before")), tmp_path)
    [config] = seen
    assert (config.data.prompt_suffix, config.reward.gsm8k) == ("Think #1: hard.", "flexible")
    assert (config.train.lr, config.eval.seed) == (load().train.lr, load().eval.seed)


def test_a_larger_size_runs_on_its_device_with_smaller_learning_rates(finished: Finished) -> None:
    large = replace(finished.experiment, size="46m", device="cuda")
    overrides = experiments._run_overrides(large, Job("plain", 0, TANDEM), finished.out)
    assert "model.device=cuda" in overrides
    small = load(finished.out / "plain" / "seed-0" / "tandem" / "config.yaml")
    [rate] = [float(o.removeprefix("train.lr=")) for o in overrides if o.startswith("train.lr=")]
    assert rate == pytest.approx(small.train.lr * 96 / 512, rel=1e-2)
    with pytest.raises(ExperimentError, match="another size, device"):
        run_experiment(large, finished.out)


@pytest.mark.slow
def test_models_of_two_tokenizers_are_compared_in_all_but_drift(
    tiny_pair: Path, other_junior: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(out: Path, recipe: Recipe, **options: Any) -> dict[str, Any]:
        for name, folder in {"senior": tiny_pair / "senior", "junior": other_junior}.items():
            shutil.copytree(folder, out / name, dirs_exist_ok=True)
        return json.loads((tiny_pair / "manifest.json").read_text())

    short = (*SHORT, "selection.max_untranslatable=1", "train.save_every=2")
    asked = replace(EXPERIMENTS["two-tokenizers"].only(["tandem"]), seeds=(0,), overrides=short, problems=4, samples=1)
    [pair] = asked.pairs
    monkeypatch.setitem(PAIRS, pair, PAIRS[pair]._replace(build=build))
    rows = run_experiment(asked, tmp_path, workers=1, say=lambda line: None)["rows"]
    assert [row["arm"] for row in rows] == [BASE, "tandem", "junior"]
    for row in rows[:2]:
        assert row.keys() >= {
            "handoff/senior_first",
            "handoff/junior_first",
            "tandem/pass@1",
            "junior_ce",
            "jargon_rate",
        }
        assert "drift/kl" not in row
        assert "acceptance" not in row


def test_a_failed_part_is_named_the_others_go_on_and_its_followers_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_job(experiment: Experiment, job: Job, out: Path) -> str:
        if str(job) in ("plain/seed-1/pair", "plain/seed-0/grpo"):
            raise OSError(f"disk full at {job}")
        done.append(str(job))
        return "fine"

    done: list[str] = []
    said: list[str] = []
    monkeypatch.setattr(experiments, "run_job", run_job)
    two = Experiment("two", (GRPO, TANDEM), pairs=("plain",), seeds=(0, 1))
    with pytest.raises(ExperimentError, match=r"2 of 8 parts failed .*seed-0/grpo: OSError: disk full.*run again"):
        run_experiment(two, tmp_path, workers=1, say=said.append)
    assert done == ["plain/seed-0/pair", "plain/seed-0/tandem", "plain/seed-0/base"]
    assert len(said) == 5
    assert re.fullmatch(r"\[3/8, \d+ s, about 0 s left\] plain/seed-0/tandem: fine", said[2])
    assert re.fullmatch(r"\[5/8, \d+ s\] plain/seed-1/pair: OSError: disk full at .*", said[4])
    assert not (tmp_path / "results.json").exists()


def test_the_time_left_is_that_of_parts_of_the_same_kind() -> None:
    def parts(seed: int) -> list[Job]:
        return [Job("plain", seed, arm) for arm in (None, GRPO, TANDEM, Arm(BASE, "before training"))]

    pair, grpo, tandem, base = parts(0)
    others = [*parts(1), *parts(2)]
    assert about_left({pair: 30.0}, [grpo, tandem, base, *others], 1) == ""  # no arm yet
    times = {pair: 30.0, base: 60.0, tandem: 900.0}  # as in several processes; GRPO takes as long as the other arm
    assert about_left(times, [grpo, *others], 1) == "about 78 min left"  # 900 + 2 (30 + 900 + 900 + 60)
    times[grpo] = 300.0
    assert about_left(times, others, 1) == "about 43 min left"  # 2 (30 + 300 + 900 + 60)
    assert about_left(times, others, 2) == "about 22 min left"
    assert about_left(times, others[2:3], 2) == "about 15 min left"  # a single part is not divided
    times[others[2]] = 1500.0
    assert about_left(times, [others[6]], 1) == "about 20 min left"  # in the median
    assert about_left(times, [], 1) == ""


def test_parts_in_processes_follow_those_that_they_need(tmp_path: Path) -> None:
    def after(job: Job) -> list[Job]:
        return [job._replace(arm=TANDEM), job._replace(arm=GRPO)] if job.arm is None else []

    jobs = [Job("plain", 0), Job("plain", 1)]
    ended = [
        (str(job), outcome if isinstance(outcome, str) else type(outcome))
        for job, outcome in experiments._run_jobs(jobs, after, lambda job: (int_or_text, job.seed, str(job)), 2)
    ]
    assert sorted(ended, key=str) == [
        ("plain/seed-0/grpo", "plain/seed-0/grpo"),
        ("plain/seed-0/pair", "plain/seed-0/pair"),
        ("plain/seed-0/tandem", "plain/seed-0/tandem"),
        ("plain/seed-1/pair", ValueError),  # and nothing after it
    ]
    names = [name for name, _ in ended]
    assert names.index("plain/seed-0/pair") < names.index("plain/seed-0/grpo")


@pytest.mark.slow
def test_workers_do_not_outlive_an_experiment_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import test_experiment as t\n"
        "from tandemrl.apps.experiments import experiment\n"
        "if __name__ == '__main__':\n"
        "    jobs = [experiment.Job('plain', 0)]\n"
        "    for _ in experiment._run_jobs(jobs, lambda job: [], lambda job: (t.say_and_sleep, sys.argv[2]), 2): pass\n"
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


def test_a_refused_pair_is_counted_and_the_others_are_compared(
    finished: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And if all are refused there is nothing to compare."""
    small, out, results, _ = finished

    def build(folder: Path, recipe: Recipe, **options: Any) -> dict[str, Any]:
        if recipe.seed in refused:
            raise PairError(f"{folder}: refused")
        return json.loads((folder / "manifest.json").read_text())

    refused = {1}
    monkeypatch.setitem(PAIRS, "plain", PAIRS["plain"]._replace(build=build))
    found = run_experiment(small, out, workers=1, say=lambda line: None)
    assert [row["seed"] for row in found["rows"]] == [0, 0, 0, 0]  # three arms and the junior
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
    other = PAIRS["plain"]._replace(identity=lambda recipe: {"seed": 0, "schema": 99})
    monkeypatch.setitem(PAIRS, "plain", other)
    with pytest.raises(ExperimentError, match=r"seed-0: its runs began with a pair of another recipe, "):
        run_experiment(small, out, workers=1, say=lambda line: None)


def test_results_name_the_cpu_and_what_was_set_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in experiments.NUMERIC_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    found = experiments.numerics()
    assert set(found) == {"cpu", "capability", "MKL_CBWR"}
    assert found["capability"] == torch.backends.cpu.get_cpu_capability()


def test_only_the_quickstart_takes_the_packaged_pair() -> None:
    assert [name for name, each in EXPERIMENTS.items() if each.packaged_pairs] == ["quickstart"]


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
    claims = paper_claims("jargon", _rows(tandem), _difference(0.0, -0.01, 0.01))
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
        ((0.5, -0.04, 1.04), "holds", "holds"),
        ((-0.01, -0.05, 0.03), "holds", "holds"),
        ((0.0, -0.06, 0.06), "undecided", "holds"),
        ((-0.03, -0.04, -0.02), "holds", "fails"),  # worse, but by less than the margin
        ((-0.10, -0.21, 0.01), "undecided", "fails"),
        ((-0.10, -0.14, -0.06), "fails", "fails"),
    ],
)
def test_equal_solo_skill_is_to_be_no_worse_by_the_margin(
    difference: tuple[float, float, float], inferiority: str, mean: str
) -> None:
    first, second, *_ = paper_claims("jargon", _rows({}), _difference(*difference))
    assert (first.bar, first.values, first.verdict) == (">= -0.05", difference[1:2], inferiority)
    assert (second.bar, second.values, second.verdict) == (">= -0.02", difference[:1], mean)
    assert "not inferior" in first.claim
    assert "interval over seeds" in first.claim
    assert "mean over seeds" in second.claim


@pytest.mark.parametrize("gain", [0.0, 0.01, 0.038, 0.2])
def test_one_seed_is_asked_nothing_about_seeds_and_fails_nothing_by_being_better(gain: float) -> None:
    rows = [row for row in _rows({"solo/pass@1": [0.95 + gain] * 3}) if row["seed"] == 0]
    claims = paper_claims("jargon", rows, _difference(gain, gain - 0.02, gain + 0.02))
    assert [claim.claim for claim in claims if claim.verdict == "fails"] == []
    about_seeds = [claim for claim in claims if "seed" in claim.claim]
    assert [(claim.verdict, claim.values) for claim in about_seeds] == [("not asked of one seed", ())]
    assert (claims[0].verdict, claims[0].values) == ("holds", (gain - 0.02,))
    assert "interval over problems" in claims[0].claim


def test_the_report_of_one_seed_that_is_better_shows_no_cross(tmp_path: Path) -> None:
    rows = [row for row in _rows({"solo/pass@1": [0.99] * 3}) if row["seed"] == 0]
    claims = [
        {"pair": "jargon"} | claim._asdict() for claim in paper_claims("jargon", rows, _difference(0.04, 0.02, 0.06))
    ]
    run_folder = tmp_path / "jargon" / "seed-0" / "tandem"
    run_folder.mkdir(parents=True)
    (run_folder / "metrics.jsonl").write_text('{"step": 1}\n')
    (tmp_path / "results.json").write_text(json.dumps({"claims": claims}))
    page = report.write_report(report.build_report(tmp_path)).read_text()
    assert (page.count("✓"), page.count("✗"), page.count("not asked of one seed")) == (7, 0, 1)
    assert "tandem - GRPO in solo pass@1, mean over seeds</th><td>&gt;= -0.02</td><td>–</td>" in page


def test_no_claims_without_all_three_models() -> None:
    solo = _difference(0.0, -0.01, 0.01)
    assert paper_claims("jargon", [row for row in _rows({}) if row["arm"] != "grpo"], solo) == []
    assert paper_claims("jargon", _rows({}), [solo[0] | {"metric": "pass@4"}]) == []


@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [
        ("paper-claims", {}, "tandemrl experiment paper-claims"),
        ("ablations", {"seeds": (0,)}, "tandemrl experiment ablations --seeds 0"),
        (
            "paper-claims",
            {"pairs": ("plain", "jargon"), "arms": (TANDEM, GRPO), "contrasts": (("tandem", "grpo"),), "problems": 8},
            "tandemrl experiment paper-claims --pair plain --pair jargon --arms tandem,grpo --problems 8",
        ),
        ("quickstart", {"overrides": (*experiments.RECIPE, "x=a b")}, "tandemrl experiment quickstart 'x=a b'"),
        ("quickstart", {"overrides": ("x=1",)}, None),
        ("quickstart", {"pair_steps": 3}, None),
        ("quickstart", {"arms": (GRPO, TANDEM, Arm("mine", "mine"))}, None),
        ("quickstart", {"arms": (GRPO, TANDEM._replace(overrides=("x=1",)))}, None),
        ("quickstart", {"name": "mine"}, None),
    ],
)
def test_the_command_of_an_experiment_is_named_where_one_runs_it(
    name: str, change: dict[str, Any], expected: str | None
) -> None:
    assert experiments.command_line(replace(experiments.EXPERIMENTS[name], **change)) == expected


def test_results_name_the_commit_the_date_and_the_command(finished: Finished) -> None:
    _, out, results, _ = finished
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True)
    assert head.returncode != 0 or results["versions"]["git_revision"] == head.stdout.strip()
    [made] = results["evaluated_by"]
    assert made == {key: results["versions"][key] for key in ("git_revision", "git_dirty")}
    assert results["command"] is None  # no command runs an experiment of one's own
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", results["date"])
    file = out / "plain" / "seed-1" / "eval" / "grpo" / "pass-at-k.json"
    kept = file.read_text()
    stored = json.loads(kept)
    stored["versions"]["git_revision"] = "0" * 40
    file.write_text(json.dumps(stored))
    folders = [out / "plain" / f"seed-{seed}" / "eval" / "grpo" for seed in (0, 1)]
    assert [each["git_revision"][:3] for each in experiments.evaluated_by(folders)].count("000") == 1
    assert len(experiments.evaluated_by(folders)) == 2
    file.write_text(kept)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["nothing"], "unknown experiment 'nothing'; known: quickstart, paper-claims, two-tokenizers, repair"),
        (["quickstart", "--seeds", "a"], "--seeds a: expected whole numbers"),
        (["quickstart", "--arms", "grpo,ppo"], "quickstart: unknown arms ppo; known: grpo, tandem"),
        (["quickstart", "--pair", "nothing", "--workers", "1"], "unknown pairs ['nothing']; known: plain, jargon"),
        (["quickstart", "--workers", "1", "train.stps=1"], "train.stps"),
        (["quickstart", "--workers", "1", "train.lr=["], "train.lr=[: not readable as YAML"),
    ],
)
def test_the_command_refuses_what_it_cannot_run(options: list[str], message: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["experiment", *options, "--out", str(tmp_path / "out")])
    assert result.exit_code == 2, result.output
    assert message in result.stderr


# ------------------------------------------------------------------------------------------------------------- agents


def _agents(**changed: list[float]) -> list[dict[str, Any]]:
    """Three seeds of the hops_jargon pair that meet every bar; ``changed``: other values of ``arm__measure``."""
    arms: dict[str, dict[str, list[float]]] = {
        BASE: {"solo/pass@1": [0.70, 0.68, 0.72]},
        "grpo": {
            "solo/pass@1": [0.97, 0.96, 0.97],
            "handoff/senior_then_junior": [0.17, 0.2, 0.15],
            "handoff/senior_first_turns": [0.2, 0.2, 0.2],
            "junior_ce": [5.0] * 3,
            "jargon_rate": [0.95] * 3,
        },
        "turns": {
            "solo/pass@1": [0.96, 0.96, 0.96],
            "handoff/senior_then_junior": [0.47, 0.4, 0.45],
            "handoff/senior_first_turns": [0.57, 0.5, 0.5],
            "junior_ce": [0.4] * 3,
            "jargon_rate": [0.01] * 3,
        },
    }
    for name, values in changed.items():
        arm, measure = name.split("__")
        arms[arm][measure] = values
    return [
        {"pair": "hops_jargon", "seed": seed, "arm": arm} | {name: values[seed] for name, values in measures.items()}
        for arm, measures in arms.items()
        for seed in range(3)
    ]


_SOLO_OF_AGENTS = [
    {"pair": "hops_jargon", "A": "turns", "B": "grpo", "phase": "pass-at-k", "metric": "pass@1"}
    | {"difference": {"mean": -0.01, "low": -0.03, "high": 0.01}}
]


@pytest.mark.parametrize(
    ("changed", "broken"),
    [
        ({}, None),
        ({"turns__solo/pass@1": [0.96, 0.82, 0.96]}, "gain of tandem by turns"),
        ({"turns__handoff/senior_then_junior": [0.47, 0.34, 0.45]}, "senior's first turn"),
        ({"turns__handoff/senior_first_turns": [0.34, 0.5, 0.5]}, "every turn"),
        ({"turns__junior_ce": [0.4, 0.4, 2.6]}, "legibility"),
        ({"grpo__jargon_rate": [0.95, 0.7, 0.95]}, "after GRPO"),
        ({"turns__jargon_rate": [0.01, 0.01, 0.3]}, "jargon rate after tandem"),
    ],
)
def test_claims_about_jargon_agents(changed: dict[str, list[float]], broken: str | None) -> None:
    claims = claims_of("hops_jargon", _agents(**changed), _SOLO_OF_AGENTS)
    assert len(claims) == 8
    failing = [claim.claim for claim in claims if claim.verdict != "holds"]
    assert len(failing) == (broken is not None), failing
    assert broken is None or broken in failing[0]


def test_plain_agents_are_to_gain_a_quarter_in_every_seed() -> None:
    rows = [row | {"pair": "hops"} for row in _agents() if row["arm"] != "turns"]
    (claim,) = claims_of("hops", rows, [])
    assert (claim.bar, claim.verdict) == (">= 0.25", "holds")
    assert claim.values == pytest.approx((0.27, 0.28, 0.25))
    lower = [row | {"solo/pass@1": 0.75} if row["arm"] == BASE else row for row in rows]
    assert claims_of("hops", lower, [])[0].verdict == "fails"


def test_nothing_is_claimed_of_arms_that_are_missing() -> None:
    assert claims_of("hops_jargon", [row for row in _agents() if row["arm"] != "turns"], _SOLO_OF_AGENTS) == []
    assert claims_of("hops_jargon", _agents(), []) == []
    assert claims_of("repair", _agents(), []) == []


def test_the_arms_of_the_hops_experiment_differ_in_who_writes() -> None:
    hops = EXPERIMENTS["hops"]
    experiments._check_experiment(hops)
    configs = {arm.name: load(hops.config, [*arm.overrides, *hops.overrides]) for arm in hops.arms}
    assert {name: config.selection.strategy for name, config in configs.items()} == {
        "grpo": "solo",
        "turns": "turn",
        "words": "word",
    }
    assert configs["grpo"].model.junior is None
    assert {config.rollout.environment for config in configs.values()} == {"multihop"}
    assert hops.problems >= 1000
    assert len(hops.seeds) == 5
    assert load(hops.evaluation).rollout == configs["turns"].rollout
