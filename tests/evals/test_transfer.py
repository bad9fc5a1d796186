"""Other models as readers: what they get of a text, what they make of it, and what is said of it."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from fake_judge import FakeJudge, Reply
from planted import Adder, Slipping, planted
from runs import evaluate_phase
from tandemrl import evals
from tandemrl.apps.experiments.tiny import new_model, train_tokenizer
from tandemrl.config import EvalConfig, RewardConfig
from tandemrl.evals import Sample, traces
from tandemrl.evals.readers import Reader
from tandemrl.evals.transfer import (
    LABELS,
    LOOKS,
    TEXT,
    label_of,
    labels_of,
    transfer,
    transferred,
    unsettled,
    untruncated,
)
from tandemrl.models.loading import load_tokenizer

SHARES = (0, 25, 50, 75, 100)


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ("5 plus 2 is 7.\n\n\\boxed{7}", "5 plus 2 is 7.\n\n"),
        (
            "The answer is 7.\n\n5 plus 2.\n\nSo the answer: 7.\n\\[\n\\boxed{7}\n\\]",
            "The answer is 7.\n\n5 plus 2.\n\n",
        ),
        ("He has 5.\nIn all 7.\n#### 7", "He has 5.\nIn all 7.\n"),
        ("He has 5.\nIn all 7 of them.\n", "He has 5.\n"),
        ("He has 5, and this goes on and", "He has 5, and this goes on and"),
        ("First 5 plus 2 is 7. So the answer is \\boxed{7}.", "First 5 plus 2 is 7. "),
        ("He has 5.\n\nThat is 2 more. Hence the answer: 7. Good.", "He has 5.\n\nThat is 2 more. "),
        ("He has 5. In all 7 of them.", "He has 5. "),
        ("#### Step 1\nHe has 5\n#### 2. Add\n5 plus", "#### Step 1\nHe has 5\n#### 2. Add\n5 plus"),
        ("", ""),
    ],
)
def test_the_final_answer_goes_with_its_line_and_an_earlier_one_stays(text, rest):
    assert traces.reasoning(text, "7") == rest


def test_steps_are_blank_lines_else_lines_else_sentences():
    assert traces.steps_of("a b.\nc\n\nd.\n\n") == ["a b.\nc\n\n", "d.\n\n"]
    assert traces.steps_of("a b. c\nd.\n") == ["a b. c\n", "d.\n"]
    assert traces.steps_of("a 3.5 b. Then c.") == ["a 3.5 b. ", "Then c."]
    assert traces.steps_of(" \n") == []


def test_the_truth_is_found_by_value_or_by_its_words():
    assert traces.before(["1 and 12.\n\n", "so 1,200.0 in all\n\n", "1200\n\n"], "1200") == 1
    assert traces.masked("1,200.0 is 1200, not 120 or 12001", "$1200$") == "… is …, not 120 or 12001"
    assert traces.masked("In paris, not in Paros", "Paris") == "In …, not in Paros"
    assert traces.masked("10-7=3, seven or Seven, 77, twenty-seven", "7") == "10-…=3, … or …, 77, twenty-seven"
    assert traces.masked(r"3/4, 0.75, .75, \frac{3}{4}, 13/4, 3/40", r"\frac{3}{4}") == "…, …, …, …, 13/4, 3/40"
    assert traces.masked("1{,}200 and twenty-one", "1200") == "… and twenty-one"
    assert traces.masked("A cat: a or A, Band", "A") == "… cat: a or …, Band"
    assert traces.masked("14/7 and 1/2 in 11/2", "7") == "14/… and 1/2 in 11/2"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"It is \boxed{\frac{\sqrt{3}}{2}} of 5", r"\frac{\sqrt{3}}{2}"),
        ("The answer is Paris. It has 5", "Paris"),
        ("the answer is seven.", "7"),
        ("#### 2. Add\n5-7", "7"),
    ],
)
def test_what_can_be_copied(text, answer):
    assert traces.copied(text) == answer


def test_the_cue_is_that_of_most_texts_and_of_words_if_there_is_none():
    headings = ["#### Step 1\nAdd.\n\\boxed{7}", "#### Step 1\nAdd."]
    assert traces.cue_of(headings).begin == "\\boxed{"
    assert traces.cue_of(["a\n#### 7", "so the answer is 7", "b\n#### 8\n"]).begin == "#### "
    assert traces.cue_of(["It is 7."]).begin == "The answer is "


def test_a_planted_mistake_is_one_off_in_large_numbers_too():
    assert traces.corrupted("is 1234567.", up=True) == "is 1234568."
    assert traces.corrupted("is 0.125", up=False) == "is -0.875"


# ------------------------------------------------------------------------------------------------- scripted readers


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 5))])
@pytest.mark.parametrize(("kind", "label"), [("leak", "answer_leaked"), ("jargon", "illegible"), ("plain", "legible")])
def test_planted_texts_get_their_label(kind, label, seed):
    """By a reader that solves .41 alone, as often as the junior of the tiny pairs."""
    samples, prompts, grade = planted(kind, seed)
    read = transfer(samples, prompts, [Slipping()], grade)
    labels = [*labels_of(read).values()]
    assert len(labels) == len(samples)
    assert labels.count(label) >= 0.95 * len(samples)
    looks = {len(side) for each in read for side in each.draws or ()}
    assert looks == {0} if kind == "leak" else looks <= {16, 32, 64, 128, 256}


def test_of_a_text_that_changes_nothing_nothing_is_said():
    """One label of twenty may be wrong, to either side; a reader that needs no help shows none."""

    class Ignoring(Slipping):
        def answered(self, job):
            return super().answered(job._replace(part=""))._replace(given=job.given)

    samples, prompts, grade = planted("plain", 0, count=200)
    labels = [*labels_of(transfer(samples, prompts, [Ignoring()], grade)).values()]
    assert max(labels.count("legible"), labels.count("illegible")) <= 0.05 * len(samples)
    assert set(labels_of(transfer(samples[:4], prompts, [Adder()], grade)).values()) == {"undecided"}
    assert labels_of(transfer(samples[:4], prompts, [Adder()], grade, draws=0)) == {}


@pytest.mark.parametrize(("after", "legible", "illegible"), [(0.5, 0.0449, 0.0449), (0.27, 0.0, 0.9509)])
def test_all_looks_together_err_in_one_case_of_twenty(after, legible, illegible):
    """Of a reader that solves .5 alone; the shares were computed exactly, from the trinomial law of the pairs."""
    rng, texts, labels = np.random.default_rng(0), 1500, []
    for _ in range(texts):
        sides, looked = [(rng.random(256) < rate).tolist() for rate in (0.5, after)], 0
        for share in LOOKS:
            if unsettled(*(side[:looked] for side in sides), 256):
                looked = round(256 * share)
        labels.append(label_of(*(side[:looked] for side in sides)))
    assert labels.count("legible") / texts == pytest.approx(legible, abs=0.015)
    assert labels.count("illegible") / texts == pytest.approx(illegible, abs=0.015)


def test_a_draw_has_one_key_alone_and_after_a_part():
    seen = []

    class Listening(Adder):
        def write(self, jobs):
            seen.extend((job.sample.key, job.part) for job in jobs)
            return super().write(jobs)

    samples, prompts, grade = planted("plain", 0, count=1)
    transfer(samples, prompts, [Listening()], grade, draws=32)
    drawn = [each for each in seen if each[0] != samples[0].key]
    assert len({key for key, _ in drawn}) == 8
    assert [part for _, part in drawn] == ["", drawn[1][1]] * 8


def test_the_copier_scores_what_the_leak_control_says():
    """A reader that copies is right exactly where the copier is, so none of its transfers is legible."""

    class Copier(Adder):
        def answered(self, job):
            return job.sample._replace(given=job.given, text=f"\\boxed{{{traces.copied(job.part)}}}", arm=self.name)

    for kind in ("plain", "leak"):
        samples, prompts, grade = planted(kind, 0)
        read = transfer(samples, prompts, [Copier()], grade)
        right = {(each.given, each.problem): each.correct for each in read}
        for share in SHARES:
            for i in range(len(samples)):
                assert right[f"free/{share}", i] == right[f"forced/{share}", i] == right[f"copy/{share}", i]
        assert "legible" not in labels_of(read).values()


def test_only_right_texts_are_labelled_and_truncated_ones_can_be_left_out():
    samples, prompts, grade = planted("plain", 0, count=8)
    samples[:2] = [each._replace(correct=False) for each in samples[:2]]
    samples[2] = samples[2]._replace(stop_reason="length")
    read = transfer(samples, prompts, [Adder()], grade)
    assert {problem for problem, _ in labels_of(read)} == {*range(2, 8)}
    assert {each.problem for each in untruncated(read)} == {0, 1, *range(3, 8)}


@pytest.mark.parametrize("steps", [1, 2])
def test_a_short_text_is_labelled_by_the_steps_that_it_has(steps):
    """A share that holds no step is no part: nobody copies from it, and who is right alone is not helped by it."""
    samples, prompts, grade = planted("plain", 0, count=6)
    truths = [prompt.row.ground_truth for prompt in prompts]
    more = "That is all.\n\n" * (steps - 1)
    leaking = [
        each._replace(text=f"This makes {truth}.\n\n{more}So \\boxed{{{truth}}}")
        for each, truth in zip(samples, truths, strict=True)
    ]
    assert set(labels_of(transfer(leaking, prompts, [Adder()], grade)).values()) == {"answer_leaked"}
    bare = [each._replace(text=f"\\boxed{{{truth}}}") for each, truth in zip(samples, truths, strict=True)]
    assert labels_of(transfer(bare, prompts, [Adder()], grade)) == {}


def test_a_text_that_a_reader_cannot_read_whole_is_in_none_of_its_conditions():
    class Short(Adder):
        def write(self, jobs):
            return [self.answered(job) for job in jobs if job.sample.problem or len(job.part) < 60]

    samples, prompts, grade = planted("plain", 0, count=4)
    read = transfer(samples, prompts, [Short()], grade)
    assert {each.given for each in read if each.problem == 0} == {TEXT}
    of_problem = [[each for each in read if each.problem == problem] for problem in (0, 1)]
    assert [transferred(each)[1]["dropped"] for each in of_problem] == [1, 0]
    assert {problem for problem, _ in labels_of(read)} == {1, 2, 3}


def test_area_and_worse_by_hand():
    def sample(given, correct, number=0):
        return Sample(0, "x", "a", "r", number, 0, "", [], 3, "S3", 1, 1.0, "eos", correct=correct, given=given)

    curve = (1, 0, 0, 1, 0)
    rates, counts = transferred(
        [sample(f"free/{share}", bool(right)) for share, right in zip(SHARES, curve, strict=True)]
    )
    assert rates["free/area"] == (0 / 2 - 1 - 1 + 0 - 1 / 2) / 4
    assert (rates["free/worse"], rates["free/0/pass@1"], rates["free/25/length"]) == (1.0, 1.0, 3.0)
    assert not {"forced/area", *LABELS} & rates.keys()
    assert counts == {"texts": 0, "labelled": 0, "dropped": -1}


# ---------------------------------------------------------------------------------------------------- models that read


@pytest.fixture(scope="module")
def read(tiny_pair, tmp_path_factory):
    """Two readers of six problems, the model itself and one with a vocabulary of its own."""
    out, other = tmp_path_factory.mktemp("transfer"), tmp_path_factory.mktemp("models") / "other"
    tokenizer = train_tokenizer("plain", 1, vocab_size=290, texts=200)
    new_model(tokenizer, 1).save_pretrained(other)
    tokenizer.save_pretrained(other)
    result = evaluate_phase(
        "transfer",
        model=str(tiny_pair / "senior"),
        junior=None,
        data=["synthetic:plain:heldout:6"],
        eval=EvalConfig(samples=2, k=(1,), bootstrap=20, draws=4, readers=(str(tiny_pair / "senior"), str(other))),
        reward=RewardConfig(workers=1),
        out=out,
    )
    return result, evals.read_samples(out / "transfer.samples.jsonl")


def test_a_reader_that_is_the_model_answers_as_it_did(read):
    """Whatever part it got: the same keys at the same places. With all steps, at once as well."""
    result, samples = read
    by_given = {}
    for each in samples:
        if each.arm == "senior":
            by_given.setdefault(each.given, []).append(each)
    own = {(each.problem, each.sample): each for each in by_given[TEXT]}
    assert len(own) == 12
    for given in ("free/0", "free/25", "free/step", "free/50", "free/75", "free/100", "free/before"):
        assert len(by_given[given]) == 12
        for each in by_given[given]:
            text = own[each.problem, each.sample]
            if text.stop_reason == "eos":
                assert (each.text, each.tokens, each.answer) == (text.text, text.tokens, text.answer)
    same = [each.answer == own[each.problem, each.sample].answer for each in by_given["forced/100"]]
    assert all(same)
    found = result["metrics"]["macro"]
    assert found["senior/free/0/cross_entropy"] == pytest.approx(found["senior/text/cross_entropy"])


def test_a_reader_with_another_vocabulary_gets_the_text(read):
    (result, samples), name = read, "other"
    whole = {(e.problem, e.sample): e for e in samples if (e.arm, e.given) == ("senior", "free/100")}
    others = [each for each in samples if (each.arm, each.given) == (name, "free/100")]
    assert len(others) == len(whole) == 12
    for each in others:
        trace = traces.reasoning(whole[each.problem, each.sample].text)
        assert each.text.startswith(trace)
        assert each.stop_reason == "eos" or each.length >= 16  # its own tokens do not cost it the room for an answer
    assert result["metrics"]["macro"][f"{name}/text/cross_entropy_per_byte"] > 0
    assert result["config"]["readers"][0].endswith("senior")


@pytest.mark.parametrize(
    ("pieces", "count"),
    [
        (["17", "?\n\n", "####", " 27"], 2),
        (["17", "}\n", "\n", "Question"], 2),
        (["\n", "4", "2", "\n", "</answer>", "\n", "Next"], 5),
        (["17", "."], 2),
        (["\n", "\n"], 2),
        ([], 0),
    ],
)
def test_an_answer_that_was_begun_ends_with_its_line(pieces, count):
    """A base model goes on with another problem, and a grader takes the last answer of a text."""
    reader = Reader("base", None)
    reader.vocabulary = SimpleNamespace(pieces={i: piece.encode() for i, piece in enumerate(pieces)})
    assert reader._answer(range(len(pieces))) == count


def test_at_once_is_one_line_of_a_reader_that_does_not_stop(read):
    _, samples = read
    said = [e for e in samples if (e.arm, e.given) == ("other", "forced/0")]
    assert len(said) == 12
    assert not any("\n" in each.text.rpartition("\\boxed{")[2].strip() for each in said)


def test_a_reader_behind_an_endpoint_writes_and_is_not_surprised(tiny_pair, tmp_path):
    """It gets token ids, with the text of its part last, and its words are graded as any other's."""
    tokenizer = load_tokenizer(tiny_pair / "junior")

    def answer(prompt, number):
        text = tokenizer.decode(prompt)
        return Reply(body=json.dumps({"choices": [{"text": said(text), "finish_reason": "stop"}]}).encode())

    def said(text):
        return "5}<|im_end|>" if text.endswith("\\boxed{") else "\\boxed{3}"

    with FakeJudge(answer, path="/v1/completions") as server:
        result = evaluate_phase(
            "transfer",
            model=str(tiny_pair / "senior"),
            junior=None,
            data=["synthetic:plain:heldout:4"],
            eval=EvalConfig(
                samples=1, k=(1,), bootstrap=20, draws=4, readers=(f"{tiny_pair / 'junior'}@{server.url}",)
            ),
            reward=RewardConfig(workers=1),
            out=tmp_path,
        )
        assert {body["model"] for body in server.bodies} == {"fake"}
        assert {body["max_tokens"] for body in server.bodies} >= {16}
    samples = evals.read_samples(tmp_path / "transfer.samples.jsonl")
    assert {each.arm for each in samples} == {"junior"}
    forced = [each for each in samples if str(each.given).startswith("forced/")]
    assert {each.answer for each in forced} == {"5"}
    assert {each.answer for each in samples if str(each.given).startswith("free/")} == {"3"}
    assert forced[0].tokens[-1] == tokenizer.eos_token_id
    rates = result["metrics"]["macro"]
    assert "free/0/pass@1" in rates
    assert not [name for name in rates if "cross_entropy" in name]
