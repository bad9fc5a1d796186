"""Short answers in a fixed place, against tables written by hand."""

import json
import re

import pytest

from scored import score_text
from tandemrl.config import RewardConfig
from tandemrl.data.rows import DataError, Row
from tandemrl.tasks.gsm8k.grader import gsm8k_answer
from tandemrl.tasks.math.tagged import tagged_answer


def row(gold, source="openai/gsm8k"):
    return Row("r", ({"role": "user", "content": "?"},), source, gold, {})


# ---- GSM8K ---------------------------------------------------------------------------------------------------------

LONG = "x" * 300


@pytest.mark.parametrize(
    ("text", "strict", "flexible", "tandem"),
    [
        ("so 9+9\n#### 18", "18", "18", "18"),
        ("#### 17\n#### 18", "18", "18", "18"),  # the last marker counts
        ("#### -1,234.5", "-1234.5", "-1,234.5", "-1234.5"),
        ("#### $18", None, "18", "18"),
        ("#### $1,000", None, "1,000", "1000"),
        ("####18", None, "18", None),
        ("#### 18.", "18.", "18.", "18."),
        ("#### 18 apples, not 20", "18", "20", "18"),
        ("#### about 18", None, "18", "18"),
        ("#### approx -18", None, "-18", "-18"),
        ("Answer: 300", None, "300", None),
        ("it is 18 .", None, "18", None),  # a lone "." is not a number
        ("", None, None, None),
        ("#### 18" + LONG, None, None, None),  # pushed out of the last 300 characters
        ("#### 18" + LONG[7:], "18", "18", "18"),
    ],
)
def test_gsm8k_extraction(text, strict, flexible, tandem):
    assert gsm8k_answer(text, "strict") == strict
    assert gsm8k_answer(text, "flexible") == flexible
    assert gsm8k_answer(text, "tandem") == tandem


@pytest.mark.parametrize(
    ("gold", "text", "mode", "value"),
    [
        ("18", "#### 18", "strict", 1.0),
        ("18", "#### 18.0", "strict", 0.0),  # strings are compared
        ("18", "#### 18.", "strict", 0.0),
        ("1000", "#### $1,000", "tandem", 1.0),
        ("18", "#### 20", "tandem", 0.1),
        ("300", "Answer: 300", "tandem", 0.0),
        ("300", "Answer: 300", "flexible", 1.0),
    ],
)
def test_gsm8k_scores(gold, text, mode, value):
    assert score_text(row(gold), text, RewardConfig(gsm8k=mode)).value == value


def test_gsm8k_format_score_and_parts():
    options = RewardConfig(format_score=0.25)
    wrong = score_text(row("18"), "<<4*5=20>> #### 20", options)
    assert wrong == (0.25, {"acc": 0.0, "answer_present": 1.0, "has_guillemets": 1.0}, "20")
    none = score_text(row("18"), "18", options)
    assert none == (0.0, {"acc": 0.0, "answer_present": 0.0, "has_guillemets": 0.0}, None)
    assert score_text(row("18"), "#### 20", RewardConfig(gsm8k="tandem", format_score=0.0)).value == 0.0


def test_tinyzero_took_the_first_marker_of_the_whole_response():
    text = "#### 17" + LONG + "#### 18"
    assert score_text(row("17"), text, RewardConfig(compat="tinyzero")).value == 1.0
    assert score_text(row("17"), text).value == 0.0
    assert score_text(row("18"), text).value == 1.0


# ---- <answer>…</answer> --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "answer", "published"),
    [
        ("<answer>5</answer>", "5", "5"),
        ("<answer> 5\n+ 6 </answer>", "5\n+ 6", "5\n+ 6"),
        ("<answer>5</answer> no, <answer>6</answer>", "6", "6"),
        ("<answer>5</answer> or <answer>6", None, "5"),
        ("<answer>1 <answer>2</answer>", None, "1 <answer>2"),
        ("<answer>5</answer> as I said</answer>", None, "5"),
        ("<answer>4</answer> no <answer>5</answer></answer></answer>", None, "5"),
        ("</answer><answer>5</answer>", None, "5"),
        ("5</answer>", None, None),
        ("<answer>5", None, None),
        ("</answer><answer>", None, None),
        ("<answer></answer>", "", ""),
        ("", None, None),
    ],
)
def test_the_last_answer_counts_where_every_tag_has_its_pair(text, answer, published):
    matches = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)  # Search-R1's rule
    assert published == (matches[-1].strip() if matches else None)
    assert tagged_answer(text) == answer
    assert tagged_answer(text, published=True) == published


@pytest.mark.parametrize("source", ["searchR1_nq", "multiply", "countdown"])
def test_a_response_that_rambles_on_after_its_answer_is_not_paid(source):
    """What made tandem seniors forget to stop: their juniors ended the texts, and the answer had been found."""
    gold = json.dumps({"target": 5, "numbers": [2, 3]}) if source == "countdown" else "5"
    answer = "2 + 3" if source == "countdown" else "5"
    rambling = f"<answer>{answer}</answer>\n<answer> with 3, keep 5.</answer>{answer}</answer>"
    assert score_text(row(gold, source), f"<answer>{answer}</answer>").value == 1
    assert score_text(row(gold, source), rambling).value == 0


@pytest.mark.parametrize("source", ["multiply", "arithmetic", "tiny-multiply-3"])
@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<answer>-56088</answer>", 1.0),
        ("<answer> -56088 </answer>", 1.0),
        ("<answer>-56089</answer>", 0.1),
        ("<answer>-123*456</answer>", 0.0),  # not a whole number
        ("<answer>-56088.0</answer>", 0.0),
        ("<answer>" + "9" * 5000 + "</answer>", 0.0),
        ("-56088", 0.0),
    ],
)
def test_multiplication_and_arithmetic(source, text, value):
    assert score_text(row("-56088", source), text).value == value


def test_arithmetic_needs_a_whole_number_as_ground_truth():
    with pytest.raises(DataError, match=r"row r: ground truth of multiply must be a whole number, found '1\.5'"):
        score_text(row("1.5", "multiply"), "<answer>1</answer>")


@pytest.mark.parametrize(
    ("gold", "text", "value"),
    [
        ("Paris", "<answer>the Paris!</answer>", 1.0),
        ('{"target": ["NYC", "New York City"]}', "<answer>new york  city.</answer>", 1.0),
        ('["1912"]', "<answer>1912</answer>", 1.0),
        ("1912", "<answer>1912</answer>", 1.0),  # JSON would be a number
        ("Paris", "<answer>Paris, France</answer>", 0.0),
        ("Paris", "Paris", 0.0),
        ("Paris", "<answer>x</answer>" * 9 + "<answer>Paris</answer>", 1.0),
        ("Paris", "<answer>x</answer>" * 10 + "<answer>Paris</answer>", 0.25),
    ],
)
def test_search_r1_exact_match(gold, text, value):
    assert score_text(row(gold, "searchR1_nq"), text).value == value


@pytest.mark.parametrize("gold", ['{"target": 5}', '{"target": [5]}', '{"target": []}', '{"answers": ["5"]}', "[]"])
def test_exact_match_needs_texts_as_ground_truth(gold):
    with pytest.raises(DataError, match="row r: ground truth of searchR1_nq must be a text, a list of texts, or"):
        score_text(row(gold, "searchR1_nq"), "<answer>5</answer>")
