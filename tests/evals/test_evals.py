"""Evaluation: bookkeeping on a fake engine with canned text."""

from functools import partial

import numpy as np
import pytest
import torch

from tandemrl import evals
from tandemrl.cli.evaluate import metrics_table
from tandemrl.config import Config, EvalConfig, JudgeConfig
from tandemrl.data.rows import Prompt, Row
from tandemrl.evals import EvalError, Sample, measures, protocol, sampling_for
from tandemrl.evals.protocol import PROFILES, Profile, same_problems
from tandemrl.rewards.protocol import Score
from tandemrl.rollout.engine import LOST, Completion, Passes, Sampling
from tandemrl.selection import replay, solo
from tandemrl.tasks.rubric.judge import JudgePool

WORDS = ("<eos>", "step", "\n\n", "\n", "right", "wrong", "half")
EOS, STEP, BLANK, NEWLINE, RIGHT, WRONG, HALF = range(len(WORDS))


class WordTokenizer:
    """One word per id; decoding joins them. It has no chat template."""

    eos_token_id = pad_token_id = EOS
    all_special_ids, added_tokens_decoder = [EOS], {}

    def decode(self, tokens):
        return " ".join(WORDS[token] for token in tokens)

    def batch_decode(self, texts):
        return [self.decode(tokens) for tokens in texts]


class CannedEngine:
    """Writes ``texts[prompt's first id]``, one after the other over its samples, by authors from the strategy."""

    policy_version, vocabulary, has_junior, passes = 0, len(WORDS), True, Passes()
    context = 10**6

    def __init__(self, texts, stop_reasons=None):
        self.texts, self.stop_reasons, self.requests = texts, stop_reasons or {}, []

    def generate(self, requests, *, progress=None):
        self.requests += requests
        return [[self.complete(request, i, key) for i, key in enumerate(request.keys)] for request in requests]

    def unused(self, *_):
        raise AssertionError("an evaluation only asks for completions")

    info = abort = load_weights = fingerprint = close = unused

    def complete(self, request, index, key):
        texts = self.texts[request.prompt[0]]
        tokens = np.array(texts[index % len(texts)], dtype=np.int64)
        author = replay(
            request.strategy, torch.tensor([key]), torch.from_numpy(tokens)[None], torch.tensor([len(tokens)])
        ).author[0]
        stop = self.stop_reasons.get(request.prompt[0], "eos" if len(tokens) and tokens[-1] == EOS else "length")
        return Completion(key, tokens, author.numpy().astype(np.int8), np.zeros(len(tokens), np.float32), stop)


class FakeScorer:
    """The last word is the answer; "half" earns a format score that is not an accuracy."""

    def score(self, items, transcripts, **_):
        assert transcripts == [None] * len(items)
        return [self.mark(row, response.plain) for row, response in items]

    def mark(self, row, text):
        answer = (text.split() or [None])[-1]
        right = answer == row.ground_truth
        return Score(1.0 if right else 0.1 * (answer == "half"), {"acc": float(right)}, answer)


def prompt(number, source="a", length=1):
    row = Row(f"{source}/{number}", ({"role": "user", "content": "?"},), source, "right", {})
    return Prompt(row, (number, *[STEP] * (length - 1)))


def run(engine, prompts, arms=None, samples=4, k=(1, 2, 4), **changes):
    settings = dict(profile=PROFILES["tiny"], seed=17) | changes
    bootstrap = settings.pop("bootstrap", 50)
    written = evals.generate_samples(
        arms or {"solo": solo("senior")},
        engine=engine,
        tokenizer=WordTokenizer(),
        prompts=prompts,
        samples=samples,
        **settings,
    )
    marked = evals.grade(written, prompts, FakeScorer())
    metrics = evals.summarise(marked, partial(evals.graded, k=k), bootstrap=bootstrap, seed=settings["seed"])
    return evals.EvalResult(metrics, marked)


# ------------------------------------------------------------------------------------------------------------- metrics


def test_lost_texts_are_not_scored():
    written = run(CannedEngine({0: [[RIGHT, EOS]] * 4}), [prompt(0)]).samples
    lost = [sample._replace(stop_reason=how) for sample, how in zip(written[:2], LOST, strict=True)]
    seen = []

    class Counting(FakeScorer):
        def score(self, items, transcripts, **groups):
            seen.extend(items)
            return super().score(items, transcripts, **groups)

    marked = evals.grade([lost[0], written[2], lost[1], written[3]], [prompt(0)], Counting())
    assert len(seen) == 2
    assert [(sample.score, sample.correct) for sample in marked] == [(None, False), (1.0, True)] * 2


def test_solo_metrics_of_one_set():
    texts = {
        0: [[RIGHT, EOS], [WRONG, EOS], [WRONG, EOS], [HALF, EOS]],  # one of four
        1: [[STEP, RIGHT, EOS]] * 4,  # all
    }
    macro = run(CannedEngine(texts), [prompt(0), prompt(1)]).metrics["macro"]
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
    canned = CannedEngine({0: [[RIGHT, EOS], [WRONG, EOS]], 1: [[WRONG, EOS]], 2: [[RIGHT, EOS]]})

    def repeat(number, copy, source="a"):
        row = Row(f"{source}/{number}#{copy}", ({"role": "user", "content": "?"},), source, "right", {"index": copy})
        return Prompt(row, (number,))

    rows = [repeat(0, 0), repeat(1, 0), repeat(0, 1), repeat(0, 2), repeat(2, 0), repeat(0, 0, "b"), repeat(1, 0, "b")]
    found = run(canned, rows, samples=2, k=(1, 2))
    macro, by_set = found.metrics["macro"], found.metrics["by_set"]
    assert [each.same_as for each in found.samples[::2]] == [None, None, "a/0#0", "a/0#0", None, "a/0#0", "a/1#0"]
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
    texts = {number: [[RIGHT, EOS], [WRONG, EOS], [WRONG, EOS], [HALF, EOS]] for number in (0, 1)}
    samples = run(CannedEngine(texts), [prompt(0), prompt(1)]).samples
    graded = partial(evals.graded, k=(1, 2, 4))
    mute = [each._replace(answer=None, arm=arm) for arm in ("one", "other") for each in samples]
    metrics = evals.summarise(mute, graded, bootstrap=10, seed=0)
    assert not any("maj@" in name for name in [*metrics["macro"], *metrics["by_set"][samples[0].set]])
    assert metrics["macro"]["pass@2"] == metrics["macro"]["one/pass@2"] == 0.5
    other = [each._replace(set="other", problem=each.problem + 2, example_id=f"x{each.example_id}") for each in samples]
    alone = [each._replace(answer=None) for each in samples]
    mixed = evals.summarise([*alone, *other], graded, bootstrap=10, seed=0)
    assert mixed["macro"]["maj@4"] == mixed["by_set"]["other"]["maj@4"]
    columns = [[str(cell) for cell in column.cells] for column in metrics_table("", mixed).columns]
    assert next(row for row in zip(*columns, strict=True) if row[0] == "maj@4")[1] == "—"


def test_macro_is_the_mean_over_sets_not_over_problems():
    texts = {i: [[RIGHT, EOS]] for i in range(3)} | {3: [[WRONG, EOS]]}
    prompts = [*(prompt(i, "large") for i in range(3)), prompt(3, "small")]
    metrics = run(CannedEngine(texts), prompts).metrics
    assert metrics["by_set"]["large"]["pass@1"] == 1.0
    assert metrics["by_set"]["small"]["pass@1"] == 0.0
    assert metrics["macro"]["pass@1"] == 0.5  # pooled, it would be 0.75
    assert metrics["macro"]["problems"] == 4


def test_the_mean_over_arms_is_taken_problem_by_problem():
    """One arm solves problem 0, the other problem 1: each has the mean 0.5. An arm's interval is wider."""

    class ArmEngine(CannedEngine):
        def complete(self, request, index, key):
            junior_starts = not bool(request.strategy.init(torch.tensor([key]))[0])
            self.texts = {0: [[WRONG if junior_starts else RIGHT]], 1: [[RIGHT if junior_starts else WRONG]]}
            return super().complete(request, index, key)

    arms = {"senior": solo("senior"), "junior": solo("junior")}
    macro = run(ArmEngine({}), [prompt(0), prompt(1)], arms=arms, samples=1, k=(1,)).metrics["macro"]
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


class Marker:
    """Gives the number after "mark"; a response that says "mark x" never gets one."""

    model = "marker"

    def __init__(self):
        self.asked = []

    def ask(self, prompts, usable=None):
        texts = [prompt[-1]["content"].rpartition("mark ")[2].split()[0] for prompt in prompts]
        self.asked += texts
        return [f"Total Score: {text}/10" for text in texts]


def marked(problem, text, correct, name="a"):
    return Sample(problem, f"{name}/{problem}", name, "solo", 0, 0, text, [], 0, "", 0, 1.0, "eos", 0.0, correct, "4")


def test_a_correct_sample_is_verified_if_the_judge_accepts_its_reasoning():
    prompts = [prompt(0), prompt(1)]
    marks = [("10", True), ("9", True), ("10", False), ("x", True)] + [("10", True)] * 3 + [("9.5", True)]
    samples = [marked(i // 4, f"mark {mark}", correct) for i, (mark, correct) in enumerate(marks)]
    judge = Marker()
    read = protocol.verify(
        samples, prompts, JudgePool(judge, JudgeConfig(prompt="reasoning", retries=0, max_failure_rate=0.2))
    )
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
    lenient = protocol.verify(samples, prompts, JudgePool(Marker(), config))
    assert [sample.verified for sample in lenient] == [True, True, False, False, True, True, True, True]
