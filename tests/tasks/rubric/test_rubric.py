"""Judges: reading their replies, the rewards made of them, and what happens when they give no score."""

import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fake_judge import Scripted, says
from tandemrl.config import JudgeConfig
from tandemrl.data.rows import DataError, Row
from tandemrl.rewards.protocol import Score
from tandemrl.tasks.rubric.judge import JudgeError, JudgePool, grade_score, parse_score, parse_verdict

RIGHT, WRONG = (Score(acc, {"acc": acc, "answer_present": 1.0}, "4") for acc in (1.0, 0.0))
SILENT = Score(0.0, {"acc": 0.0, "answer_present": 0.0}, None)


def row(number: int = 0, source: str = "polaris_tinyv", truth: str = "4", **extra: object) -> Row:
    info = {"question": f"Q{number}", "criteria": f"C{number}"} | extra
    return Row(f"{source}/{number}", ({"role": "user", "content": f"message {number}"},), source, truth, info)


def values(judge: Scripted, items: list[tuple[Row, str, Score]], **config: object) -> list[float]:
    return [score.value for score in JudgePool(judge, JudgeConfig(**config))(items)]


# ------------------------------------------------------------------------------------------------------ reading a score


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("**Total Score: 7/10**", 0.7),
        ("Total Score: [8.5/10 points]", 0.85),
        ("Total Score 10", 1.0),
        ("Total Score: 7 because two steps are missing", 0.7),
        ("Total Score: 0/10", 0.0),
        ("**Total Score:** **8.5** / 10", 0.85),
        ("| Total Score | 7/10 |", 0.7),
        ("Total Score: $7/10$", 0.7),
        ("Total Score (out of 10): 7", 0.7),
        ("Total Score: 7 out of 10", 0.7),
        ("Total Score:\n\n7/10\n", 0.7),
        ("Total Score: .5/10", 0.05),
        ("Total Score: 2/10. No: total score: 9/10.", 0.9),
        ("<think>Total Score: 3/10</think>\nTotal Score: 4/10", 0.4),
        ("7", 0.7),
        ("Total Score: 12/10", 1.0),  # cut to [0, 1]
        ("Total Score: −3/10", 0.0),
    ],
)
def test_scores_that_are_read(text: str, score: float) -> None:
    assert parse_score(text) == pytest.approx(score, abs=1e-12)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "I give 7/10",  # without the words, a score stands alone
        "Total Score: seven",
        "Total Score: nan",
        "Total Score: 1e400/10",
        "Total Score: " + "9" * 400,
        "Total Score: ٧/10",
        "Total Score: 14/20",
        "Total Score: 7/10/2",
        "Total Score: 70%",
        "Total Score: 3 + 4 = 7/10",
        "Total Score: 6-8/10",
        "Total Score: 7,5/10",
        "Total Score: 1_0",
        "Total Score: 7/10. Total Score: ",
        "<think>Total Score: 7/10",  # cut off
    ],
)
def test_what_is_no_score(text: str) -> None:
    assert parse_score(text) is None


def published_mark(reply: str) -> float | None:
    """The rule of the published code, as its README states it: one replacement after the other, then `float`."""
    mark = reply.split("Total Score")[-1]
    for piece in (":", "[", "points", "point", "*", "|", "'"):
        mark = mark.replace(piece, "")
    try:
        return min(10.0, float(mark.split("/")[0].strip())) / 10.0
    except ValueError:
        return None


def test_the_differences_to_the_published_code_are_those_that_are_listed() -> None:
    page = (Path(__file__).parents[3] / "docs" / "howto" / "judge.md").read_text()
    rows = re.findall(r"^\| `(.*)` \| (\S+) \| (\S+) \|$", page, re.MULTILINE)
    marks = {"none": None} | {text: float(text.replace("−", "-")) for row in rows for text in row[1:] if text != "none"}
    assert {"7/20", "-3/10", "[7 points]"} <= {row[0].removeprefix("Total Score: ") for row in rows}
    assert sum("Total score" in row[0] or "<think>" in row[0] for row in rows) == 2
    for reply, here, there in rows:
        assert here != there
        assert parse_score(f"Fine.\n{reply}") == marks[here], reply
        assert published_mark(f"Fine.\n{reply}") == marks[there], reply


@given(st.text(alphabet=st.sampled_from("Total Score:/10.+-=[]*naif9e \n</think>%٧"), max_size=60))
def test_any_reply_gives_a_finite_score_or_none(text: str) -> None:
    for reply in (text, f"Total Score: {text}"):
        score = parse_score(reply)
        assert score is None or (math.isfinite(score) and 0.0 <= score <= 1.0)


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("True", 1.0),
        ("**False**.", 0.0),
        ("true, since 1/2 = 0.5", 1.0),
        ("Yes", 1.0),
        ("No.", 0.0),
        ("<think>False? No.</think>True", 1.0),
        ("Is it true or false?\nAnswer: False", 0.0),
        ("It is not true.", None),
        ("It isn’t entirely true.", None),
        ("It cannot be true.", None),
        ("It does not match. False", 0.0),
        ("True or False", None),
        ("<think>True", None),
        ("untrue", None),
        ("", None),
    ],
)
def test_verdicts(text: str, verdict: float | None) -> None:
    assert parse_verdict(text) == verdict


# ---------------------------------------------------------------------------------------------------------------- grade


@pytest.mark.parametrize(
    ("said", "truth", "reward", "acc"),
    [
        ("7/10", "0.7", 1.0, 1.0),
        ("8/10", "0.7", 0.81, 0.0),
        ("10/10", "0", 0.0, 0.0),
        ("0/10", "1", 0.0, 0.0),
        ("7.5/10", "0.7", 0.9025, 1.0),
        ("99/10", "1.0", 1.0, 1.0),
        ("five", "0.5", 0.0, 0.0),
    ],
)
def test_grade_is_the_square_of_the_agreement(said: str, truth: str, reward: float, acc: float) -> None:
    score = grade_score(row(source="grade", truth=truth), f"Reasons. Total Score: {said}")
    assert score.value == pytest.approx(reward, abs=1e-12)
    assert score.parts["acc"] == acc
    assert score.parts["answer_present"] == float(said != "five")


@pytest.mark.parametrize("truth", ["7", "-0.1", "nan", "good"])
def test_grade_refuses_a_ground_truth_that_is_no_score(truth: str) -> None:
    with pytest.raises(DataError, match=r"row grade/3: ground_truth .* must be a score in \[0, 1\]"):
        grade_score(row(3, source="grade", truth=truth), "Total Score: 7/10")


# ---------------------------------------------------------------------------------------------------------------- modes


@pytest.mark.parametrize("weight", [0.0, 0.5, 1.0])
def test_the_three_modes(weight: float) -> None:
    items = [(row(1), "a", RIGHT), (row(2), "b", WRONG)]  # the judge gives both 0.6
    assert values(says("Total Score: 6/10"), items, mode="addon", weight=weight) == [1.0, 0.6 * weight]
    mixed = values(says("Total Score: 6/10"), items, mode="mixed", weight=weight)
    assert mixed == pytest.approx([0.6 * weight + 1 - weight, 0.6 * weight])
    assert values(says("Total Score: 6/10"), items, mode="tinyv_only", weight=weight) == [0.6, 0.6]


def test_addon_asks_only_where_the_rules_say_no_and_order_is_kept() -> None:
    judge = Scripted(lambda prompt: f"Total Score: {prompt.partition('item-')[2][0]}/10")
    items = [(row(i), f"item-{i}", RIGHT if i % 3 == 0 else WRONG) for i in range(10)]
    assert values(judge, items) == [1.0 if i % 3 == 0 else i / 10 for i in range(10)]
    (call,) = judge.calls
    assert [prompt.partition("item-")[2][0] for prompt in call] == ["1", "2", "4", "5", "7", "8"]


def test_the_rubric_prompt_shows_all_but_the_answer() -> None:
    judge = says("Total Score: 6/10")
    values(judge, [(row(7, truth="TRUTH"), r"steps \boxed{4} {{CRITERIA}}", WRONG)])
    (prompt,) = judge.calls[0]
    for shown in ("Q7", "C7", r"steps \boxed{4} {{CRITERIA}}", "Total Score: x/10"):  # a response's fields stay text
        assert shown in prompt
    assert prompt.count("C7") == 1
    assert "TRUTH" not in prompt
    assert "{{QUESTION}}" not in prompt


def test_the_tinyv_prompt_shows_the_extracted_answer_and_the_reference() -> None:
    judge = says("True")
    items = [(row(7, truth="TRUTH"), "the steps", WRONG), (row(8), "no box", SILENT)]
    scores = JudgePool(judge, JudgeConfig(prompt="tinyv"))(items)
    (prompt,) = judge.calls[0]  # a response without an answer is not shown
    assert "TRUTH" in prompt
    assert "the steps" not in prompt
    assert [score.value for score in scores] == [1.0, 0.0]
    assert [score.parts["acc"] for score in scores] == [1.0, 0.0]  # the judge's word on an answer is accuracy
    assert [score.parts["judge_asked"] for score in scores] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("prompt", "mode", "reply", "rule", "acc"),
    [
        ("tinyv", "addon", "True", WRONG, 1.0),
        ("tinyv", "addon", "False", RIGHT, 1.0),
        ("tinyv", "mixed", "False", RIGHT, 1.0),
        ("tinyv", "tinyv_only", "False", RIGHT, 0.0),
        ("rubric", "tinyv_only", "Total Score: 10/10", WRONG, 0.0),  # sound, and still not the right answer
        ("rubric", "tinyv_only", "Total Score: 0/10", RIGHT, 1.0),
    ],
)
def test_accuracy_is_about_the_answer(prompt: str, mode: str, reply: str, rule: Score, acc: float) -> None:
    (score,) = JudgePool(says(reply), JudgeConfig(prompt=prompt, mode=mode))([(row(), "text", rule)])
    assert (score.parts["acc"], score.parts["rule"]) == (acc, rule.parts["acc"])


def test_question_and_criteria_come_from_the_row_or_the_row_is_named() -> None:
    judge = says("Total Score: 6/10")
    values(judge, [(row(7, question=None), "text", WRONG)])
    assert "message 7" in judge.calls[0][0]  # the user's message is the question
    values(judge, [(row(7, criteria=[{"step": "α", "points": 2}]), "text", WRONG)])
    assert '{"step": "α", "points": 2}' in judge.calls[1][0]
    with pytest.raises(DataError, match=r"row polaris_tinyv/7, field 'extra_info\.criteria': missing"):
        values(judge, [(row(7, criteria=None), "text", WRONG)])
    assert values(judge, [(row(7, criteria=None), "text", WRONG)], prompt="reasoning") == [0.6]


def test_a_template_replaces_the_words(tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("Q={{QUESTION}} A={{MODEL_ANSWER}}")
    judge = says("Total Score: 6/10")
    assert values(judge, [(row(1, criteria=None), "text", WRONG)], template=str(file)) == [0.6]
    assert judge.calls[0] == ["Q=Q1 A=text"]
    file.write_text("{{QUESTIONS}} {{MODEL_ANSWER}}")
    with pytest.raises(JudgeError, match=r"prompt\.txt: unknown field \{\{QUESTIONS\}\}; known: QUESTION, CRITERIA"):
        JudgePool(judge, JudgeConfig(template=str(file)))
    file.write_text("{{QUESTION}}")
    with pytest.raises(JudgeError, match=r"no \{\{MODEL_ANSWER\}\}"):
        JudgePool(judge, JudgeConfig(template=str(file)))
    with pytest.raises(JudgeError, match=r"judge\.template=nowhere\.txt: not readable"):
        JudgePool(judge, JudgeConfig(template="nowhere.txt"))


# --------------------------------------------------------------------------------------------------- replies that fail


@pytest.mark.parametrize("mode", ["addon", "mixed", "tinyv_only"])
def test_a_response_that_never_gets_a_score_is_unscored(mode: str) -> None:
    judge = Scripted(lambda prompt: "hm" if "odd" in prompt else "Total Score: 6/10")
    items = [(row(i), "odd" if i == 7 else f"even {i}", WRONG) for i in range(16)]
    scores = JudgePool(judge, JudgeConfig(mode=mode, weight=0.5))(items)
    assert [i for i, score in enumerate(scores) if "unscored" in score.parts] == [7]
    assert "judge" not in scores[7].parts
    assert {score.value for score in scores if "unscored" not in score.parts} == {0.6 if mode == "tinyv_only" else 0.3}


@pytest.mark.parametrize(
    ("failing", "limit", "stops"),
    [(2, 0.1, True), (1, 0.1, False), (14, 0.9, False), (1, 0.0, True), (0, 0.0, False), (16, 0.99, True)],
)
def test_more_failures_than_the_rate_allows_are_an_error(failing: int, limit: float, stops: bool) -> None:
    """Responses count, not prompts: equal ones are asked about once."""
    judge = Scripted(lambda prompt: "I cannot" if "odd" in prompt else "Total Score: 6/10")
    items = [(row(0), "odd" if i < failing else "even", WRONG) for i in range(16)]
    pool = JudgePool(judge, JudgeConfig(max_failure_rate=limit))
    for ask in (lambda: pool(items), lambda: pool.marks([(row, text, None) for row, text, _ in items])):
        if stops:
            with pytest.raises(JudgeError, match=rf"no score to {failing} of the 16 .*{limit:g}\).*'I cannot'"):
                ask()
        else:
            ask()


@pytest.mark.parametrize("size", [1, 3, 9])
def test_one_failure_in_a_small_batch_stops_nothing(size: int) -> None:
    judge = Scripted(lambda prompt: "hm" if "odd" in prompt else "Total Score: 6/10")
    items = [(row(i), "odd" if i == 0 else f"even {i}", WRONG) for i in range(size)]
    assert ["unscored" in score.parts for score in JudgePool(judge, JudgeConfig())(items)].count(True) == 1


def test_a_verdict_that_the_rules_lost_is_not_a_lost_score() -> None:
    lost = Score(0.0, {"acc": 0.0, "answer_present": 1.0, "timeout": 1.0}, "9^9^9")
    (score,) = JudgePool(says("Total Score: 6/10"), JudgeConfig())([(row(), "text", lost)])
    assert (score.value, score.parts["rule_timeout"], "timeout" in score.parts) == (0.6, 1.0, False)
