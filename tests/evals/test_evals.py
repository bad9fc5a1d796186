"""Evaluation: bookkeeping on canned texts."""

from functools import partial

import pytest

from fake_judge import Scripted
from tandemrl import evals
from tandemrl.cli.evaluate import metrics_table
from tandemrl.config import Config, EvalConfig, JudgeConfig
from tandemrl.data.rows import Prompt, Row
from tandemrl.evals import EvalError, Sample, measures, protocol, sampling_for
from tandemrl.evals.protocol import PROFILES, Profile, same_problems
from tandemrl.rewards.protocol import Score
from tandemrl.rollout.engine import LOST, Sampling
from tandemrl.tasks.rubric.judge import JudgePool


def prompt(number, source="a", length=1, **extra):
    row = Row(f"{source}/{number}", ({"role": "user", "content": "?"},), source, "right", extra)
    return Prompt(row, (number,) * length)


def texts(prompts, answers, arm="solo"):
    """Graded texts of the senior. ``answers``: of each prompt, one a sample, by their last words."""
    same = same_problems(prompts, episodes=False)
    written = []
    for problem, (each, words) in enumerate(zip(prompts, answers, strict=True)):
        row = each.row
        for number, text in enumerate(words.split(", ")):
            answer = text.split()[-1]
            right, length = answer == "right", len(text.split()) + 1  # and the end
            of_text = (text, [], length, f"S{length}", 1, 1.0, "eos", 1.0 if right else 0.1 * (answer == "half"), right)
            sample = Sample(problem, row.example_id, row.data_source, arm, number, 0, *of_text, answer)
            written.append(sample._replace(same_as=same[problem]))
    return written


def summary(samples, k=(1, 2, 4), bootstrap=50):
    return evals.summarise(samples, partial(evals.graded, k=k), bootstrap=bootstrap, seed=17)


# ------------------------------------------------------------------------------------------------------------- metrics


def test_lost_texts_are_not_scored():
    written = texts([prompt(0)], ["right, right, right, right"])
    written[::2] = [each._replace(stop_reason=how) for each, how in zip(written[::2], LOST, strict=True)]
    seen = []

    class Scorer:
        def score(self, items, transcripts, **_):
            seen.extend(transcripts)
            return [Score(1.0, {"acc": 1.0}, "right")] * len(items)

    marked = evals.grade([each._replace(score=None, correct=None) for each in written], [prompt(0)], Scorer())
    assert seen == [None, None]
    assert [(sample.score, sample.correct) for sample in marked] == [(None, False), (1.0, True)] * 2


PAIR = [prompt(0), prompt(1)]
ONE_OF_FOUR = "right, wrong, wrong, half"


def test_solo_metrics_of_one_set():
    macro = summary(texts(PAIR, [ONE_OF_FOUR, ", ".join(["step right"] * 4)]))["macro"]
    assert macro["pass@1"] == (0.25 + 1) / 2
    assert macro["pass@2"] == (0.5 + 1) / 2
    assert macro["pass@4"] == 1.0
    assert macro["maj@4"] == 0.5  # problem 0: "wrong" has two of four votes
    assert macro["score"] == pytest.approx(((1 + 0.1) / 4 + 1) / 2)
    assert macro["length"] == 2.5
    assert (macro["senior_share"], macro["rounds"], macro["truncation_rate"]) == (1.0, 1.0, 0.0)
    assert (macro["problems"], macro["samples"], macro["unfinished"]) == (2, 8, 0)
    assert macro["pass@1/low"] == 0.25
    assert macro["pass@1/high"] == 1.0


def test_rows_with_the_same_prompt_are_one_problem():
    """Rows that differ in their index only, unevenly often, one of them under another data_source."""
    answers = {0: "right, wrong", 1: "wrong, wrong", 2: "right, right"}
    named = [("a", 0, 0), ("a", 1, 0), ("a", 0, 1), ("a", 0, 2), ("a", 2, 0), ("b", 0, 0), ("b", 1, 0)]
    rows = [
        Row(f"{source}/{number}#{copy}", ({"role": "user", "content": "?"},), source, "right", {"index": copy})
        for source, number, copy in named
    ]
    prompts = [Prompt(row, (number,)) for row, (_, number, _) in zip(rows, named, strict=True)]
    samples = texts(prompts, [answers[number] for _, number, _ in named])
    macro, by_set = (summary(samples, k=(1, 2))[name] for name in ("macro", "by_set"))
    assert [each.same_as for each in samples[::2]] == [None, None, "a/0#0", "a/0#0", None, "a/0#0", "a/1#0"]
    assert by_set["a"]["pass@1"] == pytest.approx((0.5 + 0 + 1) / 3)
    assert by_set["a"]["pass@2"] == pytest.approx((1 - 3 / 15 + 0 + 1) / 3)  # three of six are right
    assert by_set["b"]["pass@1"] == pytest.approx(0.25)
    assert (by_set["a"]["problems"], by_set["b"]["problems"], macro["samples"]) == (3, 2, 14)
    # in the environment of an episode rows may differ in what their prompts do not show
    prompts = [
        Prompt(Row(str(i), (), "a", truth, {"index": i, "docs": docs}), ())
        for i, (truth, docs) in enumerate([("x", "d"), ("x", "d"), ("y", "d"), ("x", "e")])
    ]
    assert same_problems(prompts, episodes=True) == [None, "0", None, None]


def test_without_any_answer_there_is_no_majority():
    """As with a reward that is a number; tables show a dash where another set has one."""
    samples = texts(PAIR, [ONE_OF_FOUR] * 2)
    mute = [each._replace(answer=None, arm=arm) for arm in ("one", "other") for each in samples]
    metrics = summary(mute)
    assert not any("maj@" in name for name in [*metrics["macro"], *metrics["by_set"][samples[0].set]])
    assert metrics["macro"]["pass@2"] == metrics["macro"]["one/pass@2"] == 0.5
    other = [each._replace(set="other", problem=each.problem + 2, example_id=f"x{each.example_id}") for each in samples]
    alone = [each._replace(answer=None) for each in samples]
    mixed = summary([*alone, *other])
    assert mixed["macro"]["maj@4"] == mixed["by_set"]["other"]["maj@4"]
    columns = [[str(cell) for cell in column.cells] for column in metrics_table("", mixed).columns]
    assert next(row for row in zip(*columns, strict=True) if row[0] == "maj@4")[1] == "—"


def test_macro_is_the_mean_over_sets_not_over_problems():
    prompts = [*(prompt(i, "large") for i in range(3)), prompt(3, "small")]
    metrics = summary(texts(prompts, [*["right"] * 3, "wrong"]), k=(1,))
    assert metrics["by_set"]["large"]["pass@1"] == 1.0
    assert metrics["by_set"]["small"]["pass@1"] == 0.0
    assert metrics["macro"]["pass@1"] == 0.5  # pooled, it would be 0.75
    assert metrics["macro"]["problems"] == 4


def test_the_mean_over_arms_is_taken_problem_by_problem():
    """One arm solves problem 0, the other problem 1: each has the mean 0.5. An arm's interval is wider."""
    arms = {"senior": ["right", "wrong"], "junior": ["wrong", "right"]}
    samples = [each for arm, answers in arms.items() for each in texts(PAIR, answers, arm)]
    macro = summary(samples, k=(1,))["macro"]
    assert macro["pass@1"] == 0.5
    assert 0 < macro["pass@1/low"] < macro["pass@1/high"] < 1
    assert macro["senior/pass@1"] == 0.5
    assert (macro["senior/pass@1/low"], macro["senior/pass@1/high"]) == (0.0, 1.0)


# ------------------------------------------------------------------------------------------------------------ profiles


@pytest.mark.parametrize(("length", "budget"), [(1, 3000), (1088, 3000), (1089, 2999), (4087, 1)])
def test_response_budget_is_what_the_context_leaves(length, budget):
    assert sampling_for(PROFILES["paper"], prompt(0, length=length)).max_tokens == budget
    assert sampling_for(PROFILES["tiny"], prompt(0, length=length)).max_tokens == 64


@pytest.mark.parametrize("k", [(), (0,), (1, 5)])
def test_k_out_of_range_is_refused_before_anything_is_written(k, tmp_path):
    """In a config that was made in Python, which nothing has checked."""
    config = Config(eval=EvalConfig(samples=4, k=k))
    with pytest.raises(EvalError, match=r"eval\.samples \(4\)"):
        evals.evaluate(config, model="/nowhere", out=tmp_path, phases=("pass-at-k",))


def test_custom_profile_reads_the_config_and_named_ones_refuse_overrides():
    for unread in (EvalConfig(temperature=0.5), EvalConfig(profile="paper", context=128)):
        with pytest.raises(EvalError, match="profile=custom"):
            evals.profile_of(unread)

    custom = EvalConfig(profile="custom", temperature=0.5, top_p=0.9, top_k=5, max_tokens=9, context=20)
    profile = evals.profile_of(custom)
    assert profile == Profile(Sampling(max_tokens=9, temperature=0.5, top_p=0.9, top_k=5), context=20)
    assert evals.profile_of(EvalConfig(temperature=1.0)) == PROFILES["tiny"]


# ------------------------------------------------------------------------------------------------------------- verified


def test_a_correct_sample_is_verified_if_the_judge_accepts_its_reasoning():
    marks = [("10", True), ("9", True), ("10", False), ("x", True)] + [("10", True)] * 3 + [("9.5", True)]
    answers = [f"mark {mark} {'right' if correct else 'wrong'}" for mark, correct in marks]
    samples = texts(PAIR, [", ".join(answers[:4]), ", ".join(answers[4:])])
    judge = Scripted(lambda prompt: f"Total Score: {prompt.rpartition('mark ')[2].split()[0]}/10")
    config = JudgeConfig(prompt="reasoning", retries=0, max_failure_rate=0.2)
    read = protocol.verify(samples, PAIR, JudgePool(judge, config))
    assert [sample.verified for sample in read] == [True, False, False, False, True, True, True, False]
    assert [sample.judge for sample in read] == [1.0, 0.9, None, None, 1.0, 1.0, 1.0, 0.95]
    assert [sample.correct for sample in read] == [sample.correct for sample in samples]
    macro = evals.summarise(read, partial(measures.accepted, k=(1, 2, 4)), bootstrap=20, seed=0)["macro"]
    # problem 0: 3 of 4 correct, 1 verified; problem 1: 4 correct, 3 verified
    assert (macro["pass@1"], macro["pass@4"]) == ((3 / 4 + 1) / 2, 1.0)
    assert (macro["verified_pass@1"], macro["verified_pass@4"]) == ((1 / 4 + 3 / 4) / 2, 1.0)
    assert macro["verified_pass@2"] == (1 / 2 + 1) / 2  # 1 - C(3,2)/C(4,2), and 1 - C(1,2)/C(4,2)
    assert macro["rejected_rate"] == (2 / 4 + 1 / 4) / 2
    assert (macro["judged"], macro["judge_failures"], macro["samples"]) == (7, 1, 8)
    assert macro["verified_pass@1/low"] <= macro["verified_pass@1"] <= macro["verified_pass@1/high"]

    config = JudgeConfig(prompt="reasoning", accept=0.9, max_failure_rate=0.2)
    lenient = protocol.verify(samples, PAIR, JudgePool(judge, config))
    assert [sample.verified for sample in lenient] == [True, True, False, False, True, True, True, True]
