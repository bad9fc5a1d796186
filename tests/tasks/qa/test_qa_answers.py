"""Answers to questions: SQuAD's exact match and F1, MuSiQue's official scores, held against the rules spelt out."""

import random
import re

import pytest

from tandemrl.tasks.qa.grader import exact_match, f1, set_f1, with_figures

WORDS = ["the", "The", "a", "An", "another", "Paris", "paris", "New-York", "1912", "1,912"]
WORDS += ["U.S.", "of", "café", "...", "'s"]
GAPS = [" ", "  ", "\t", ", ", "-", ""]


# The rules of the official script, written out: no code of the library.


def rule_tokens(text: str) -> list[str]:
    """Lower case; drop ASCII punctuation; drop the words a, an, the; split at white space."""
    kept = "".join(char for char in text.lower() if char not in "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")
    words = re.split(r"(\w+)", kept)  # words at odd places, as \b sees them
    words[1::2] = [" " if word in ("a", "an", "the") else word for word in words[1::2]]
    return "".join(words).split()


def rule_f1(answer: str, reference: str) -> float:
    ours, theirs = rule_tokens(answer), rule_tokens(reference)
    if not ours or not theirs:
        return 1.0 if ours == theirs else 0.0
    left, common = list(theirs), 0
    for token in ours:
        if token in left:
            left.remove(token)
            common += 1
    if common == 0:
        return 0.0
    precision, recall = common / len(ours), common / len(theirs)
    return 2 * precision * recall / (precision + recall)


def rule_em(answer: str, reference: str) -> float:
    return 1.0 if " ".join(rule_tokens(answer)) == " ".join(rule_tokens(reference)) else 0.0


def rule_support(predicted: set[int], gold: set[int]) -> float:
    hits = sum(1 for each in predicted if each in gold)
    misses, extra = len(gold) - hits, len(predicted) - hits
    precision = hits / (hits + extra) if hits + extra else 0.0
    recall = hits / (hits + misses) if hits + misses else 0.0
    found = 2 * precision * recall / (precision + recall) if precision + recall else 0.0
    return 1.0 if not predicted and not gold else found


def phrase(draw: random.Random) -> str:
    return "".join(draw.choice(WORDS) + draw.choice(GAPS) for _ in range(draw.choice([0, 1, 1, 2, 3, 5])))


def test_exact_match_and_f1_follow_the_official_rules() -> None:
    draw = random.Random(0)
    seen = {"equal": 0, "some": 0, "none": 0}
    for _ in range(2000):
        references = [phrase(draw) for _ in range(draw.choice([1, 2, 3]))]
        reference = draw.choice(references)
        answer = draw.choice([phrase(draw), reference, reference.upper() + ".", f"{reference} {phrase(draw)}"])
        expected = max(rule_f1(answer, reference) for reference in references)
        assert f1(answer, references) == pytest.approx(expected, abs=1e-12), (answer, references)
        assert exact_match(answer, references) == max(rule_em(answer, reference) for reference in references)
        seen["equal" if expected == 1 else "some" if expected else "none"] += 1
    assert min(seen.values()) > 150


def test_the_f1_of_supporting_documents_follows_the_official_rules() -> None:
    draw = random.Random(0)
    for _ in range(300):
        cited, gold = (set(draw.sample(range(6), draw.choice([0, 1, 2, 4]))) for _ in range(2))
        assert set_f1(cited, gold) == pytest.approx(rule_support(cited, gold), abs=1e-12)


def test_numbers_and_ordinals_may_be_in_figures() -> None:
    assert with_figures(["Ten", "The Second World War"]) == ["Ten", "The Second World War", "10", "the 2nd world war"]
    assert with_figures(["ten men", "Secondary school"])[2:] == ["secondary school"]  # not "2ndary"
    assert exact_match("2nd", with_figures(["second"])) == 1
    assert exact_match("2nd", ["second"]) == 0
