"""Paired comparison, against differences and intervals computed by hand from the same numbers."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import norm, t, ttest_1samp

from runs import cli
from tandemrl.config import load, to_yaml
from tandemrl.evals import EvalResult, Sample, graded, read_samples, summarise
from tandemrl.evals.compare import (
    CompareError,
    _cut,
    compare,
    config_differences,
    contrast,
    judgement,
    run_of,
)
from tandemrl.evals.files import write_result
from tandemrl.evals.measures import legible
from tandemrl.evals.stats import Interval
from tandemrl.training.tracking import write_eval_texts

CONFIG = {
    "model": "m",
    "data": ["rows.jsonl"],
    "eval": {"profile": "tiny", "samples": 2, "k": [1, 2], "seed": 17, "bootstrap": 100},
    "reward": {"gsm8k": "strict"},
    "digests": {"m": "1", "rows.jsonl": "2"},
}


def sample(problem, number=0, *, correct=False, name="a", arm="solo", length=5, cross_entropy=None):
    return Sample(
        problem, f"{name}/{problem}", name, arm, number, 0, "", [7] * length, length, f"S{length}", 1, 1.0, "eos",
        float(correct), correct, "4" if correct else "5", cross_entropy,
    )  # fmt: skip


def store(folder, samples, phase="pass-at-k", **changes):
    """An evaluation folder with one finished phase."""
    measure = legible if phase == "legibility" else lambda problem: graded(problem, k=(1, 2))
    result = EvalResult(summarise(samples, measure, bootstrap=10, seed=0), samples)
    write_result(Path(folder) / f"{phase}.json", phase, CONFIG | changes, result, seeds={})
    return Path(folder)


def rates(*counts, sets=("a",)):
    """Two samples per problem, of which ``counts`` are right."""
    return [
        sample(problem, number, correct=bool(number < right), name=sets[problem % len(sets)])
        for problem, right in enumerate(counts)
        for number in range(2)
    ]


def store_run(folder, *counts, step=20, monitored=(), **settings):
    """A run's folder with the texts of one evaluation during training."""
    folder.mkdir(exist_ok=True)
    overrides = [f"{key.replace('__', '.')}={value}" for key, value in settings.items()]
    config = load(overrides=["eval.train_samples=2", f"output_dir={folder}", *overrides])
    (folder / "config.yaml").write_text(to_yaml(config))
    if counts:
        write_eval_texts(folder, step, {"eval": rates(*counts)} | ({"monitor": rates(*monitored)} if monitored else {}))
    return folder


def by_metric(contrasts):
    return {each.metric: each for each in contrasts}


def interval_by_hand(differences, resamples, seed, level=0.95):
    rng = np.random.default_rng(seed)
    means = [differences[rng.integers(len(differences), size=len(differences))].mean() for _ in range(resamples)]
    return differences.mean(), *np.quantile(means, [(1 - level) / 2, (1 + level) / 2])


def test_one_evaluation_each_is_a_paired_bootstrap_over_problems(tmp_path):
    counts = np.array([2, 2, 1, 2, 0, 1, 2, 2, 1, 2]), np.array([1, 2, 0, 2, 0, 0, 1, 2, 1, 1])
    a, b = store(tmp_path / "a", rates(*counts[0])), store(tmp_path / "b", rates(*counts[1]))
    found = by_metric(compare(a, b, resamples=200, seed=4))
    pass1 = found["pass@1"]
    assert (pass1.phase, pass1.a, pass1.b, pass1.problems) == ("pass-at-k", 0.75, 0.5, 10)
    assert pass1.difference == pytest.approx(interval_by_hand((counts[0] - counts[1]) / 2, 200, 4), abs=1e-12)
    assert (pass1.per_seed, pass1.verdict) == ((pass1.difference,), "A > B")
    assert by_metric(compare(b, a, resamples=200, seed=4))["pass@1"].verdict == "A < B"
    assert found["pass@2"].difference.mean == pytest.approx(np.mean((counts[0] > 0) * 1.0 - (counts[1] > 0)))
    assert found["length"].difference == (0, 0, 0)
    assert found["length"].verdict == "no difference shown"
    assert list(found) == ["pass@1", "pass@2", "maj@2", "truncation_rate", "length"]
    assert list(by_metric(compare(a, b, shown=lambda name: name == "score"))) == ["score"]


def test_problems_are_paired_by_id_and_not_by_position(tmp_path):
    a, b = rates(2, 0, 1), rates(2, 0, 1)
    store(tmp_path / "a", a)
    store(tmp_path / "b", [one._replace(problem=2 - one.problem) for one in reversed(b)])
    assert by_metric(compare(tmp_path / "a", tmp_path / "b"))["pass@1"].difference.mean == 0.0


def seeds_of(folder, counts_by_seed, inner=""):
    for seed, counts in counts_by_seed.items():
        store(folder / f"seed-{seed}" / inner, rates(*counts))
    return folder


def test_seeds_give_students_interval_over_their_differences(tmp_path):
    a = {0: (2, 2, 1, 2) * 9, 2: (2, 1, 1, 2) * 9, 10: (2, 2, 2, 2) * 9}
    b = {0: (1, 0, 1, 0) * 9, 2: (1, 1, 1, 0) * 9, 10: (1, 0, 1, 1) * 9}
    found = by_metric(compare(seeds_of(tmp_path / "a", a), seeds_of(tmp_path / "b", b)))["pass@1"]
    differences = [np.mean(np.subtract(a[seed], b[seed])) / 2 for seed in a]
    expected = ttest_1samp(differences, 0).confidence_interval(0.95)
    assert found.difference == pytest.approx((np.mean(differences), expected.low, expected.high))
    assert [each.mean for each in found.per_seed] == pytest.approx(differences)
    assert all(each.low < each.mean < each.high for each in found.per_seed)
    assert found.verdict == "A > B"
    # every seed alone says "A > B", but two that disagree on the size do not
    ids = [*"abcdef"]
    two = contrast(
        "p", "m", [{"s": dict.fromkeys(ids, 1.0)}, {"s": dict.fromkeys(ids, 0.1)}], [{"s": dict.fromkeys(ids, 0.0)}] * 2
    )
    assert [each.low > 0 for each in two.per_seed] == [True, True]
    assert two.verdict == "no difference shown"


@pytest.mark.parametrize("third", [0.25, 0.2500001])
def test_seeds_that_agree_by_luck_are_as_uncertain_as_within_a_seed(third):
    """An interval of no width said "A > B"; what the third seed says in the seventh digit must not matter."""
    rng = np.random.default_rng(1)
    each = [np.repeat([1.0, -1.0, 0.0], [10, 6, 0]), np.repeat([1.0, -1.0, 0.0], [10, 6, 0]), np.full(16, 0.0)]
    each[2][:8] = 2 * third
    sides = [{"s": {str(i): float(x) for i, x in enumerate(rng.permutation(d))}} for d in each]
    nothing = [{"s": dict.fromkeys(map(str, range(16)), 0.0)}] * 3
    found = contrast("p", "m", sides, nothing)
    errors = [(one.high - one.low) / 2 / norm.ppf(0.975) for one in found.per_seed]
    half = t.ppf(0.975, 2) * np.sqrt(np.mean(np.square(errors)) / 3)
    assert found.difference.mean == pytest.approx(0.25)
    assert (found.difference.low, found.difference.high) == pytest.approx((0.25 - half, 0.25 + half))
    assert found.verdict == "no difference shown"


@pytest.mark.parametrize("seeds", [1, 3])
@pytest.mark.parametrize(
    ("problems", "expected"), [(1, "no difference shown"), (5, "no difference shown"), (6, "A > B")]
)
def test_a_few_equal_differences_are_no_verdict(problems, expected, seeds):
    """By a sign test at 5 %: five of five are luck in 1 of 16 cases, six of six in 1 of 32."""
    a, b = ([{"s": {str(i): value for i in range(problems)}}] * seeds for value in (0.5, 0.25))
    assert contrast("p", "m", a, b).verdict == expected


def test_all_ways_to_name_repetitions_mean_the_same(tmp_path):
    a, b = {0: (2, 1), 1: (2, 2)}, {0: (1, 1), 1: (0, 0)}
    seeds_of(tmp_path, a, "eval/tandem")
    seeds_of(tmp_path, b, "eval/grpo")
    folders = [[tmp_path / f"seed-{seed}" / "eval" / arm for seed in (0, 1)] for arm in ("tandem", "grpo")]
    named = compare(*folders)
    assert compare(tmp_path / "seed-*" / "eval" / "tandem", f"{tmp_path}/seed-*/eval/grpo") == named
    assert compare(seeds_of(tmp_path / "A", a), seeds_of(tmp_path / "B", b)) == named
    assert [each.mean for each in by_metric(named)["pass@1"].per_seed] == [0.25, 1.0]


def test_parts_of_scores_are_compared_by_hops_where_a_set_has_them(tmp_path):
    """Of the sets a and b only a has em: 1 and 0 of 2 and 3 hops on one side, 0 and 0 on the other."""
    sides = []
    for name, ems in (("x", (1.0, 0.0)), ("y", (0.0, 0.0))):
        asked = [sample(i)._replace(parts={"em": em}, group=f"hops={2 + i}") for i, em in enumerate(ems)]
        asked = [each._replace(sample=n) for each in asked for n in range(2)]
        sides.append(store(tmp_path / name, [*asked, *rates(1, sets=("b",))]))
    found = by_metric(compare(*sides, resamples=20))
    assert [found[metric].difference.mean for metric in ("em", "hops=2/em", "hops=3/em")] == [0.5, 1.0, 0.0]
    assert found["em"].problems == 2
    assert found["pass@1"].problems == 3


def test_texts_that_only_one_side_could_read_are_left_out(tmp_path):
    values = {"a": [1.0, 2.0, None, 4.0], "b": [0.5, None, 3.0, 1.0]}
    for side, cross_entropies in values.items():
        samples = [sample(i, cross_entropy=value) for i, value in enumerate(cross_entropies)]
        store(tmp_path / side, samples, "legibility", junior="j")
    (found,) = compare(tmp_path / "a", tmp_path / "b")
    assert (found.phase, found.metric, found.problems) == ("legibility", "cross_entropy", 2)
    assert (found.a, found.b, found.difference.mean) == (2.5, 0.75, 1.75)


def test_only_phases_that_both_have_are_compared(tmp_path):
    for side in ("a", "b"):
        store(tmp_path / side, rates(1, 2))
    store(tmp_path / "a", rates(1, 2), "tandem", junior="j")
    assert {each.phase for each in compare(tmp_path / "a", tmp_path / "b")} == {"pass-at-k"}
    store(tmp_path / "c", rates(1, 2), "handoff", junior="j")
    with pytest.raises(CompareError, match="have no phase in common"):
        compare(tmp_path / "a", tmp_path / "c")
    seeds_of(tmp_path / "d", {0: (1, 1), 1: (1, 1)})
    store(tmp_path / "d" / "seed-0", rates(1, 1), "tandem", junior="j")
    with pytest.raises(CompareError, match=r"seed-1/tandem\.json is missing"):
        compare(tmp_path / "d", tmp_path / "d")


def test_a_result_file_counts_as_an_evaluation_of_its_phase(tmp_path):
    """What `tandemrl eval PHASE --out FILE.json` wrote, under any name, against a file or a folder."""
    for side, samples in {"a": rates(2, 2, 1), "b": rates(1, 0, 0)}.items():
        store(tmp_path / side, samples)
        store(tmp_path / side, samples, "tandem", junior="j")
        for home in (tmp_path, tmp_path / "seed-0", tmp_path / "seed-1"):
            home.mkdir(exist_ok=True)
            for end in (".json", ".samples.jsonl"):
                shutil.copyfile(tmp_path / side / f"pass-at-k{end}", home / f"{side}{end}")
    folders = [each for each in compare(tmp_path / "a", tmp_path / "b") if each.phase == "pass-at-k"]
    for a, b in (("a.json", "b.json"), ("a.json", "b"), ("a", "b.json"), ("a/pass-at-k.json", "b")):
        assert compare(tmp_path / a, tmp_path / b) == folders
    every = compare(tmp_path / "seed-*" / "a.json", tmp_path / "seed-*" / "b.json")
    assert [each.per_seed for each in every] == [each.per_seed * 2 for each in folders]
    with pytest.raises(CompareError, match=r"have no phase in common \(pass-at-k and tandem\)"):
        compare(tmp_path / "a.json", tmp_path / "b" / "tandem.json")
    (tmp_path / "c.json").write_text('{"schema": 1, "contrasts": []}')
    with pytest.raises(CompareError, match=r"c\.json: not the result of an evaluation"):
        compare(tmp_path / "a.json", tmp_path / "c.json")
    with pytest.raises(CompareError, match=r"a\.samples\.jsonl: not the result of an evaluation \(PHASE\.json, or"):
        compare(tmp_path / "a.samples.jsonl", tmp_path / "b")  # of which read_result says: delete it
    with pytest.raises(CompareError, match=r"a\.jso: no evaluation is there .* did you mean .*a\.json"):
        compare(tmp_path / "a.jso", tmp_path / "b")


def test_two_runs_are_compared_by_their_last_evaluation_during_training(tmp_path):
    """The newest one by number, not by name; of each source on its own."""
    counts = np.array([2, 2, 1, 2, 2]), np.array([1, 0, 1, 2, 0])
    monitor = {"data__monitor": "m.jsonl", "monitored": (2, 0)}
    a = store_run(tmp_path / "a", 0, 0, 0, 0, 0, step=80, **monitor)
    b = store_run(tmp_path / "b", *counts[1], train__lr=2e-5, **monitor)
    store_run(a, *counts[0], step=100, **monitor)
    found = {(each.phase, each.metric): each for each in compare(a, b, resamples=200, seed=4)}
    assert found["held-out", "pass@1"].difference == pytest.approx(
        interval_by_hand((counts[0] - counts[1]) / 2, 200, 4), abs=1e-12
    )
    assert found["held-out", "pass@2"].a == 1.0
    assert (found["monitored", "pass@1"][2:4], found["monitored", "pass@1"].difference.mean) == ((0.5, 0.5), 0.0)
    assert ("held-out", "pass@4") not in found  # of two samples there is none
    assert config_differences(a, b) == {"train.lr": (1e-6, 2e-5)}
    out = tmp_path / "c.json"
    result = cli("compare", a, b, "--resamples", "50", "--out", out)
    assert "of the senior alone: step 100 of A and step 20 of B" in result
    assert "train.lr: 1e-06 in A, 2e-05 in B\n" in result
    assert json.loads(out.read_text())["config"] == {"train.lr": [1e-6, 2e-5]}


def test_of_runs_that_were_evaluated_these_evaluations_are_compared(tmp_path):
    """In the run's folder, or beside it as in an experiment; the configs are still those of the runs."""
    a, b = store_run(tmp_path / "a", 0, 0), store_run(tmp_path / "b", 0, 0, train__seed=3)
    store(a / "eval", rates(2, 2))
    store(tmp_path / "eval" / "b", rates(1, 2), dtype="bfloat16")
    assert {each.phase for each in compare(a, b)} == {"pass-at-k"}
    assert by_metric(compare(a, b))["pass@1"].difference.mean == 0.25
    assert compare(a / "eval", tmp_path / "eval" / "b") == compare(a, b)
    for sides in ((a, b), (a / "eval", tmp_path / "eval" / "b")):
        assert config_differences(*sides) == {"train.seed": (0, 3)}
    alone = store(tmp_path / "elsewhere" / "deep" / "c", rates(1, 2), dtype="bfloat16")
    assert config_differences(a, alone) == {"dtype": (None, "bfloat16")}
    assert {each.phase for each in compare(a, store_run(tmp_path / "d", 1, 1))} == {"held-out"}  # d has no other


def test_what_keeps_two_runs_from_being_compared_is_named(tmp_path):
    a = store_run(tmp_path / "a", 1, 2)
    for name, counts, settings, culprit in (
        ("samples", (1, 2), {"eval__train_samples": 4}, "eval.train_samples: 2 and 4"),
        ("reward", (1, 2), {"reward__gsm8k": "tandem"}, "reward.gsm8k: 'strict' and 'tandem'"),
        ("data", (1, 2), {"data__eval": "other.jsonl"}, "data.eval: "),
        ("problems", (1,), {}, "only 1 of 2 problems are in both"),
    ):
        other = store_run(tmp_path / name, *counts, **settings)
        with pytest.raises(CompareError) as error:
            compare(a, other)
        assert culprit in str(error.value)
        assert "; evaluate both alike: tandemrl eval all --config RUN " in str(error.value)
    fresh = store_run(tmp_path / "fresh")
    for sides in ((fresh, a), (a, fresh)):
        with pytest.raises(CompareError) as error:
            compare(*sides)
        made = f"tandemrl eval all --config {fresh} --model {fresh}/hf/best --out {fresh}/eval"
        assert str(error.value) == f"{fresh}: this run has no evaluation yet; make one: {made}"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eval": CONFIG["eval"] | {"samples": 4}}, r"eval\.samples: 2 and 4"),
        ({"reward": {"gsm8k": "flexible"}}, r"reward\.gsm8k: 'strict' and 'flexible'"),
        ({"digests": {"m": "1", "rows.jsonl": "3"}}, r"data: \['2'\] and \['3'\]"),
        ({"junior": "j", "digests": CONFIG["digests"] | {"j": "5"}}, "junior: None and '5'"),
    ],
)
def test_evaluations_of_different_kinds_are_refused(tmp_path, changes, message):
    store(tmp_path / "a", rates(1, 2))
    store(tmp_path / "b", rates(1, 2), **changes)
    with pytest.raises(CompareError, match=message):
        compare(tmp_path / "a", tmp_path / "b")


def test_what_does_not_change_the_numbers_may_differ(tmp_path):
    store(tmp_path / "a", rates(1, 2), junior="x/junior", digests=CONFIG["digests"] | {"x/junior": "5"})
    moved = {"model": "n", "data": ["copy/rows.jsonl"], "junior": "y/junior", "dtype": "bfloat16"}
    changed = moved | {"eval": CONFIG["eval"] | {"k": [1], "bootstrap": 7}}
    store(tmp_path / "b", rates(1, 2), **changed, digests={"n": "9", "copy/rows.jsonl": "2", "y/junior": "5"})
    assert "pass@2" not in by_metric(compare(tmp_path / "a", tmp_path / "b"))
    assert by_metric(compare(tmp_path / "a", tmp_path / "b"))["pass@1"].difference.mean == 0.0


def test_other_problems_or_seeds_are_refused(tmp_path):
    store(tmp_path / "a", rates(1, 2, 1))
    store(tmp_path / "b", rates(1, 2))
    for sides in (("a", "b"), ("b", "a")):
        with pytest.raises(CompareError, match=r"a/pass-at-k\.json.*: only 2 of 3 problems are in both; evaluate one"):
            compare(*(tmp_path / side for side in sides))
    seeds_of(tmp_path / "c", {0: (1, 1), 1: (1, 1)})
    seeds_of(tmp_path / "d", {0: (1, 1), 2: (1, 1)})
    with pytest.raises(CompareError, match="seed-0, seed-1 and seed-0, seed-2"):
        compare(tmp_path / "c", tmp_path / "d")
    with pytest.raises(CompareError, match="one evaluation without seeds"):
        compare(tmp_path / "c", tmp_path / "a")
    for nothing in (tmp_path, tmp_path / "nowhere", tmp_path / "a" / "seed-*"):
        with pytest.raises(CompareError, match=r"no evaluation is there|no folder seed-N is there"):
            compare(nothing, tmp_path / "a")


def test_matched_by_truncation_only_what_ended_by_itself_on_both_sides_counts(tmp_path):
    """A is right wherever it is not cut; B is cut elsewhere, and wrong in what it finishes of problem 2."""

    def ends(correct, cut):
        both = [sample(p, n, correct=bool(correct[p][n])) for p in range(3) for n in range(2)]
        return [one._replace(stop_reason="length") if (one.problem, one.sample) in cut else one for one in both]

    a = store(tmp_path / "a", ends([[0, 1], [1, 1], [1, 1]], {(0, 0)}))
    b = store(tmp_path / "b", ends([[1, 1], [1, 0], [0, 0]], {(1, 1)}))
    found = by_metric(compare(a, b))
    assert (found["pass@1"].a, found["pass@1"].b) == pytest.approx((5 / 6, 1 / 2))
    assert found["pass@1"].truncated == pytest.approx((1 / 6, 1 / 6))
    found = by_metric(compare(a, b, match=("truncation",)))
    assert (found["pass@1"].a, found["pass@1"].b) == pytest.approx((1, 2 / 3))  # one sample of 0 and of 1, two of 2
    assert (found["pass@2"].a, found["pass@2"].b, found["pass@2"].problems) == (1, 0, 1)
    assert (found["truncation_rate"].a, found["pass@1"].truncated) == (0, (0, 0))
    all_cut = store(tmp_path / "c", [one._replace(stop_reason="length") for one in rates(1, 1, 1)])
    with pytest.raises(CompareError, match="no text is left by --match truncation"):
        compare(a, all_cut, match=("truncation",))


def test_the_share_that_is_cut_is_that_of_a_metrics_condition():
    """Answers that were begun for a reader have few tokens by design."""
    ends = {"free/0": "eos", "free/100": "length", "forced/100": "length", "copy/100": "eos"}
    one = rates(1)[0]
    samples = [one._replace(arm="r", given=given, stop_reason=end) for given, end in ends.items()]
    named = {"free/0/pass@1": 0, "free/100/gain": 1, "r/free/100/pass@1": 1, "forced/100/pass@1": 0, "free/area": 0.5}
    assert {metric: _cut(samples, metric) for metric in named} == named


def test_matched_by_truncation_an_arm_that_is_cut_leaves_every_arm(tmp_path):
    both = [one._replace(arm=arm) for arm in ("x", "y") for one in rates(2, 2)]
    cut = [
        one._replace(stop_reason="length", correct=False) if (one.arm, one.problem) == ("y", 0) else one for one in both
    ]
    store(tmp_path / "a", both, "handoff")
    store(tmp_path / "b", cut, "handoff")
    found = by_metric(compare(tmp_path / "a", tmp_path / "b", shown=lambda name: name.endswith("pass@1")))
    assert (found["y/pass@1"].truncated, found["x/pass@1"].truncated, found["pass@1"].truncated) == (
        (0, 0.5), (0, 0), (0, 0.25),
    )  # fmt: skip
    found = by_metric(compare(tmp_path / "a", tmp_path / "b", match=("truncation",)))
    assert (found["x/pass@1"].problems, found["y/pass@1"].difference.mean) == (1, 0.0)


def test_matched_by_problems_only_those_of_both_sides_count(tmp_path):
    a, b = store(tmp_path / "a", rates(1, 2, 0)), store(tmp_path / "b", rates(0, 2))
    assert by_metric(compare(a, b, match=("problems",)))["pass@1"][2:4] == (0.75, 0.5)
    out = tmp_path / "c.json"
    assert "matched by problems: 2 problems are left" in cli("compare", a, b, "--match", "problems", "--out", out)
    assert json.loads(out.read_text())["match"] == ["problems"]
    assert "--match length: expected truncation or problems" in cli("compare", a, b, "--match", "length", fails=2)


def test_half_of_a_character_in_an_answer_does_not_lose_an_evaluation(tmp_path):
    """A reward function may give any text as the answer."""
    store(tmp_path, [each._replace(answer="4\ud800") for each in rates(1, 2)])
    assert {each.answer for each in read_samples(tmp_path / "pass-at-k.samples.jsonl")} == {"4?"}


@pytest.mark.parametrize(
    ("metric", "above", "below"),
    [
        ("pass@1", "better", "worse"),
        ("hops=3/em", "better", "worse"),
        ("cross_entropy_per_byte", "worse", "better"),
        ("format_errors", "higher", "lower"),  # a user's, whose good end is unknown
    ],
)
def test_better_is_said_where_a_metric_has_a_good_end(metric, above, below):
    assert [judgement(metric, Interval(*d)) for d in ((2, 1, 3), (-2, -3, -1))] == [above, below]
    assert judgement(metric, Interval(2, -1, 3)) == "no difference shown"


def test_the_command_prints_a_table_and_writes_what_the_function_returns(tmp_path):
    a, b = store(tmp_path / "a", rates(2, 2, 1, 2, 2)), store(tmp_path / "b", rates(1, 0, 0, 1, 0))
    out = tmp_path / "c.json"
    result = cli("compare", a, b, "--resamples", "50", "--out", out)
    lines = [" ".join(line.split()) for line in result.splitlines()]
    (expected,) = compare(a, b, shown=lambda name: name == "pass@1", resamples=50)
    low, high = expected.difference[1:]
    assert f"pass@1 0.900 0.200 +0.700 [{low:+.3f}, {high:+.3f}] A > B: better" in lines
    assert "length 5.000 5.000 +0.000 [+0.000, +0.000] no difference shown" in lines
    assert lines[lines.index("pass-at-k") + 1] == "cut by a limit 0.0% 0.0%"
    assert "bootstrap over 5 problems" in result
    assert tuple(json.loads(out.read_text())["contrasts"][0]["difference"].values()) == tuple(expected.difference)
    only = cli("compare", a, b, "--metric", "pass@2")
    assert ("pass@2" in only, "pass@1" in only) == (True, False)
    assert "--metric pas@1: no phase" in cli("compare", a, b, "--metric", "pas@1", fails=2)


def test_a_folder_may_be_relative(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_of(Path("mine") / "pass-at-k.json") is None
    assert run_of(Path("eval/grpo/pass-at-k.json")) is None
    Path("grpo").mkdir()
    Path("grpo/config.yaml").touch()
    assert run_of(Path("eval/grpo/pass-at-k.json")) == Path("grpo")
