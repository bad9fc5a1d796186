r"""Random and adversarial responses: no scorer crashes, none takes long, and none gives garbage the full reward.

The ground truths are answers that the generated text contains by no accident, so that every full reward is a false one.
"""

import gc
import json
import random
import string
import time
from collections.abc import Iterable, Iterator, Sequence

import pytest

from tandemrl.config import RewardConfig
from tandemrl.data.messages import Response
from tandemrl.data.rows import Row
from tandemrl.rewards.protocol import Item, Score
from tandemrl.rewards.routing import terms_of
from tandemrl.rewards.scoring import Scorer

LIMIT_S = 0.3
"""CPU time for one response and one string grader; a thousandth of it is typical."""

NUMBER = "271828182845904523"
FORMULA = r"\frac{x^{7}-12345}{y+\sqrt{77}}"
LIST = r"\left(\frac{271}{828}, 1828, -45\right)"
WORD = r"\text{Ouagadougou}"
PUZZLE = json.dumps({"target": 999983, "numbers": [7919, 104729, 15485863]})

PLAIN, VERL = RewardConfig(), RewardConfig(compat="verl", gsm8k="tandem")
OLD_TINYZERO = RewardConfig(compat="tinyzero")
COHLEM, OLD_COHLEM = RewardConfig(countdown="cohlem"), RewardConfig(countdown="cohlem", compat="cohlem")
GRADERS = [
    *(("openai/gsm8k", NUMBER, options) for options in (PLAIN, VERL, OLD_TINYZERO, RewardConfig(gsm8k="flexible"))),
    *(("math500", gold, PLAIN) for gold in (NUMBER, FORMULA, LIST, WORD)),
    *(("lighteval/MATH", FORMULA, VERL), ("aime24", NUMBER, VERL), ("math_dapo", FORMULA, PLAIN)),
    ("math500", NUMBER, RewardConfig(scorers={"math500": "dapo_boxed"})),
    *(("countdown", PUZZLE, options) for options in (PLAIN, COHLEM, OLD_TINYZERO, OLD_COHLEM)),
    *(("multiply", NUMBER, PLAIN), ("searchR1_nq", "Ouagadougou", PLAIN)),
]
MATHS = [
    *(("math500", gold, PLAIN) for gold in (NUMBER, FORMULA)),
    *(("x_mathverify", gold, PLAIN) for gold in (NUMBER, FORMULA)),
]

FRAGMENTS = (
    *(r"\boxed{", r"\boxed ", r"\fbox{", "}", "{", "#### ", "####", "<answer>", "</answer>", "Answer:", "answer is "),
    *("is the answer", "are answers", "=", ". ", "\n", "\n\n", " ", "$", "$$", r"\$", r"\(", r"\)", r"\[", r"\]"),
    *("%", r"\%", r"\frac", r"\frac12", r"\frac{1}{0}", r"\dfrac{3}{4}", r"\sqrt", r"\sqrt[3]{", r"\sqrt2", r"\pi"),
    *(r"\binom{9}{4}", r"\infty", r"\cup", r"\pm", r"\text{", r"\text{ cm}", r"\mathrm{", r"\left(", r"\right)"),
    *(r"\begin{pmatrix}", r"\\", r"\end{pmatrix}", "&", r"\sum_{i=1}^{n}", r"\int_0^1", r"\lim_{x \to 0}", r"\log_2"),
    *(r"\sin", r"\cos^2 x", r"\overline{3}", r"^\circ", "^{", "^", "**", "//", "_", "_{7}", "9^9^9^9", "9^{9^{9^9}}"),
    *("9999999!", "(((((9!)!)!)!)!)!", "1e309", "-1e-309", "0", "1", "2", "7", "12", "42", "3.14", ".5", "1,000"),
    *("-3", "2.55e-10", "+5", "1/2", "7 3/4", "0/0", "1/0", "NaN", "inf", "x", "y", "k", "e", "i", "x=", "f(x)="),
    *("x^2", "p(s) = ", "and", " or ", ", ", ";", "(", ")", "[", "]", "|", "!", "*", "/", "cm", " degrees"),
    *(" dollars", "percent", "million", "True", "None", "__import__('os')", "().__class__", "lambda: 0", "Matrix(["),
    *("Point(", "Interval(0, 1)", "Symbol('x')", "\\", "\\\\", "\x00", "\x1b[31m", "\u202e", "\ud800", "İ", "ß", "٣"),
    *("２", "−", "×", "√", "π", "∞", "½", "²", "𝟙", "👍", "é", "Step 2:", "<think>", "</think>", "<<1+1=2>>", "\t"),
    *("\r\n", "\u2028", "\u200b", "\u200d", "\u2060", "\u2063", "\ufeff", "\u00ad", "\u0338", "４２", "＝", "x+3="),
    *("2x=", "602=600", "I(", r"\text{not }", r"\text{ or more}", "at least ", "between ", "about ", "either "),
    *(" to ", " or so", "maybe ", r"\approx ", r"\neq ", r"\equiv ", r"\to ", r"\in ", r"\phantom{", r"\cancel{"),
    *(r"\mathrm{th}", "...", r"\ldots", "'", "?", "f(0)"),
)
# What turns an answer into another one, several, or none, however often and in whatever order it is put before or
# behind it.
BEFORE = (
    *("x+3=", "2x=", "xy = ", "n(n+1) = ", "y=7, x=", "x > ", r"x \neq ", "602 = ", r"\sqrt{2}=", "f(x)+1=", "not "),
    *("AZYUK", "7&", "7|", "7\u200b", "7\u2060", "\u202e", "\u2063", "7#", "7 ", "7;", "5, ", "5 or ", "~5 or "),
    *(r"\text{not }", r"\neg ", r"\text{about }", "at least ", "between 5 and ", r"5 \\ ", r"5\implies "),
    *(r"\phantom{5}", "f(0)+", "v", "7_", "7:"),
)
BEHIND = (
    *(" or 5", " or more", r" \text{ or more}", ", 5", "; 5", "&7", "|7", "\u2063", "\x00", "?", "...", r"\ldots"),
    *("'", r" \neq 5", " = 5", " = x+3", "=7=7", r"\text{ dozen}", r"\text{ fifths}", "/", "^", " to 5"),
    *(r" \approx 5", "#5", " % 5", r"\cancel{5}", "{5}", " 5", ":5", r"\text{ (wrong)}", r" \text{ thousand}"),
    *(r" \mid 5", "†", "\u0338", " below zero"),
)
BRACKETS = (("(", ")"), ("{", "}"), (r"\frac{", "}{2}"), (r"\sqrt{", "}"), (r"\boxed{", "}"), ("[", "]"))
WRAPPERS = (
    "{}",
    r"\boxed{{{}}}",
    r"so \boxed{{{}}}.",
    "#### {}",
    "Answer: {}",
    "The answer is {}.",
    "<answer>{}</answer>",
    "<think>{}",
)


def garbage(rng: random.Random) -> str:
    """A response: fragments, noise, or one of them very often or deeply nested, in the place of an answer or not."""
    kind = rng.random()
    if kind < 0.7:
        text = "".join(rng.choices(FRAGMENTS, k=rng.randint(0, 25)))
    elif kind < 0.85:
        text = "".join(rng.choices(string.printable, k=rng.randint(0, 120)))
    elif kind < 0.95:
        text = rng.choice(FRAGMENTS) * rng.choice((3, 30, 300, 3000))
    else:
        depth = rng.choice((5, 50, 500))
        left, right = rng.choice(BRACKETS)
        text = left * depth + rng.choice(FRAGMENTS) + right * rng.choice((depth, depth - 1))
    return rng.choice(WRAPPERS).format(text)


def spoilt(rng: random.Random, gold: str) -> str:
    """A response with the ground truth in it that does not give it as the answer."""
    before, behind = rng.choices(BEFORE, k=rng.randint(0, 2)), rng.choices(BEHIND, k=rng.randint(0, 2))
    if not before + behind:
        before = [rng.choice(BEFORE)]
    opening, closing = rng.choice((("", ""), ("$", "$"), ("x = ", ""), (" ", "."), (r"\left(", r"\right)"), ("{", "}")))
    answer = "".join([opening, *before, gold, *behind, closing])
    return rng.choice(WRAPPERS[1:]).format(answer)


@pytest.fixture(autouse=True)
def _only_own_garbage() -> Iterator[None]:
    """While a grader is timed, Python's collector does not look through what earlier tests left."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def string_graders(texts: Iterable[str], graders: Sequence[tuple[str, str, RewardConfig]] = GRADERS) -> None:
    """Every text through every scorer's own part, which decides or defers."""
    scorers = [
        (Row("r", (), source, gold, {}), options, terms_of(Row("r", (), source, gold, {}), options)[0].begin)
        for source, gold, options in graders
    ]
    for text in texts:
        for row, options, scorer in scorers:
            begin = time.thread_time()
            score = scorer([Item(row, Response.of(text))], options, None)
            seconds = time.thread_time() - begin
            assert seconds < LIMIT_S, (row.data_source, seconds, text[:200])
            if isinstance(score, Score):
                assert score.parts["acc"] == 0.0, (row.data_source, row.ground_truth, text)
                assert score.value in (0.0, 0.1, 0.01, 0.02, -1.0), (row.data_source, row.ground_truth, text)


def symbolic_graders(texts: list[str], limit_s: float) -> None:
    """Every text through math-verify, in processes; hanging and dying are allowed, but counted and bounded."""
    golds = {"x_mathverify": (NUMBER, FORMULA, LIST), "math500": (FORMULA, LIST)}
    with Scorer(RewardConfig(timeout_s=limit_s, workers=2)) as scorer:
        for start in range(0, len(texts), 100):
            batch = [
                (Row("r", (), source, gold, {}), text)
                for i, text in enumerate(texts[start : start + 100])
                for source, each in golds.items()
                for gold in (each[i % len(each)],)
            ]
            begin = time.monotonic()
            scores = scorer.score(batch)
            lost = sum(bool(score.parts.keys() & {"timeout", "failure"}) for score in scores)
            assert time.monotonic() - begin < 60 + len(batch) + 2 * limit_s * lost
            for (row, text), score in zip(batch, scores, strict=True):
                assert score.value == 0.0, (row.ground_truth, text, score)
        assert scorer.score([(Row("r", (), "math500", "8", {}), r"\boxed{\int_0^4 t \, dt}")])[0].value == 1.0


def test_garbage_through_the_string_graders():
    rng = random.Random(1)
    string_graders(garbage(rng) for _ in range(400))


@pytest.mark.parametrize("gold", [NUMBER, FORMULA])
def test_spoilt_answers_through_the_string_graders(gold):
    rng = random.Random(5)
    string_graders((spoilt(rng, gold) for _ in range(100)), [grader for grader in MATHS if grader[1] == gold])


def test_garbage_and_spoilt_answers_through_the_symbolic_graders():
    rng = random.Random(2)
    texts = [spoilt(rng, gold) for gold in (NUMBER, FORMULA, LIST) for _ in range(12)]
    symbolic_graders(texts + [garbage(rng) for _ in range(20)], limit_s=3.0)
