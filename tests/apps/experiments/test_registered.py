"""Statements before a run: power against a simulation, Holm's procedure against its definition, tests against scipy."""

import numpy as np
import pytest
from scipy.stats import ttest_1samp

from tandemrl.apps.experiments.arms import EXPERIMENTS
from tandemrl.apps.experiments.registered import REGISTERED, paired_tests, smallest_difference, stated, verdicts
from tandemrl.config import load
from tandemrl.evals.stats import holm


def test_the_smallest_difference_is_found_with_the_stated_power() -> None:
    """The formula with a central t for the power is near the exact one, so by simulation."""
    least = smallest_difference(0.1, 5, tests=8)
    draws = np.random.default_rng(0).normal(least, 0.1, (20_000, 5))
    found = ttest_1samp(draws, 0, axis=1).pvalue < 0.05 / 8
    assert 0.72 < found.mean() < 0.95
    assert smallest_difference(0.1, 1, tests=8) == float("inf")


def test_holm_rejects_as_its_procedure_does() -> None:
    rng = np.random.default_rng(1)
    for _ in range(200):
        values = rng.uniform(0, 0.2, 6).tolist()
        rejected: set[int] = set()
        for rank, index in enumerate(sorted(range(6), key=lambda i: values[i])):
            if values[index] > 0.05 / (6 - rank):
                break
            rejected.add(index)
        assert {i for i, p in enumerate(holm(values)) if p <= 0.05} == rejected
    assert holm([]) == []


def test_tests_are_paired_by_seed_and_corrected_over_the_family() -> None:
    rng, rows = np.random.default_rng(2), []
    for seed in range(5):
        for arm in ("grpo", "tandem", "brevity"):
            solo, handoff = rng.normal(0.8, 0.02), rng.normal(0.9 if arm == "tandem" else 0.6, 0.02)
            measures = {"solo/pass@1": solo, "handoff/pass@1": handoff, "unseen/pass@1": rng.normal(0.5, 0.02)}
            rows.append({"pair": "jargon", "arm": arm, "seed": seed} | measures)
    found = paired_tests("frontier", list(reversed(rows)))
    assert [(each["a"], each["b"], each["measure"]) for each in found] == [
        ("tandem", other, measure)
        for other in ("grpo", "brevity")
        for measure in ("solo/pass@1", "handoff/pass@1", "unseen/pass@1")
    ]
    of = {arm: [row["handoff/pass@1"] for row in rows if row["arm"] == arm] for arm in ("tandem", "grpo")}
    expected = ttest_1samp(np.subtract(of["tandem"], of["grpo"]), 0)
    assert found[1]["p"] == pytest.approx(expected.pvalue)
    assert (found[1]["low"], found[1]["high"]) == pytest.approx(tuple(expected.confidence_interval()))
    assert [each["holm"] for each in found] == pytest.approx(holm([each["p"] for each in found]))
    assert found[1]["holm"] < 0.05 < found[0]["holm"]
    claimed = [(each["claim"].split(" in ")[1], each["verdict"]) for each in verdicts("frontier", found)]
    assert claimed == 2 * [("handoff/pass@1, Holm's p", "holds"), ("unseen/pass@1, Holm's p", "fails")]
    below = [each | {"mean": -each["mean"]} for each in found]
    assert {each["verdict"] for each in verdicts("frontier", below)} == {"fails"}
    assert paired_tests("frontier", [row for row in rows if row["seed"] == 0]) == []
    assert paired_tests("repair", rows) == stated("repair", ["repair"], ["grpo"], 5) == []


def test_every_pair_has_tests_of_its_own_and_claims_are_of_the_pair_that_they_were_made_for() -> None:
    rng = np.random.default_rng(3)
    rows = [
        {"pair": pair, "arm": arm, "seed": seed, "handoff/pass@1": rng.normal(0.5 + 0.4 * (arm == "tandem"), 0.02)}
        for pair in ("plain", "jargon")
        for arm in ("grpo", "tandem")
        for seed in range(4)
    ]
    found = paired_tests("frontier", rows)
    apart = [paired_tests("frontier", [row for row in rows if row["pair"] == pair]) for pair in ("plain", "jargon")]
    assert found == apart[0] + apart[1]
    assert [(each["pair"], each["seeds"], each["holm"] == each["p"]) for each in found] == [
        ("plain", 4, True),
        ("jargon", 4, True),
    ]
    assert [(each["pair"], each["values"]) for each in verdicts("frontier", found)] == [("jargon", [found[1]["holm"]])]
    assert not any("beforehand" in line for line in stated("frontier", ["plain"], ["grpo", "tandem"], 4))


@pytest.mark.parametrize("name", REGISTERED)
def test_what_is_stated_is_of_the_experiment_s_arms(name: str) -> None:
    experiment = EXPERIMENTS[name]
    arms = [arm.name for arm in experiment.arms]
    assert {arm for pair in REGISTERED[name].contrasts for arm in pair} <= {*arms}
    assert {*REGISTERED[name].contrasts} <= {*experiment.contrasts}
    first, *least = stated(name, experiment.pairs, arms, 5)
    assert first.startswith(f"stated beforehand of the {experiment.pairs[0]} pair: ")
    assert [line.partition(":")[0] for line in least] == [
        f"smallest detectable difference in {measure}" for measure in ("solo/pass@1", "handoff/pass@1", "unseen/pass@1")
    ]
    for arm in experiment.arms:
        load(experiment.config, [*arm.overrides, *experiment.overrides])
