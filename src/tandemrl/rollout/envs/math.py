r"""Scores for answers to maths problems: GSM8K's ``#### N`` and LaTeX's ``\boxed{…}``. Imports no torch.

Most answers are decided by comparing normalised strings and plain numbers (`quick_score`): fast, and bounded whatever
the model wrote. What is left goes to math-verify, which may run for ever on hostile input such as
``\boxed{9^{9^{9^9}}}``; `tandemrl.rollout.envs.scoring.Scorer` runs it where it can be killed.
"""

import fnmatch
import importlib.util
import logging
import re
from fractions import Fraction
from functools import cache
from typing import Any, Literal, NamedTuple

from tandemrl.data.rows import DataError, Row

Gsm8kMode = Literal["strict", "flexible", "tandem"]
Kind = Literal["gsm8k", "boxed"]

CLIP_CHARS = 300
"""GSM8K answers are looked for in the last 300 characters only, as in verl."""
MAX_ANSWER_CHARS = 2000
"""A longer boxed answer is wrong unless it equals the ground truth as a string; it never reaches sympy."""

SCORERS: dict[str, Kind] = {
    "openai/gsm8k": "gsm8k",
    "synthetic/*": "boxed",
    "deepscaler*": "boxed",
    "agentica-org/deepscaler*": "boxed",
    "math": "boxed",
    "math500": "boxed",
    "math-500": "boxed",
    "huggingfaceh4/math-500": "boxed",
    "lighteval/math": "boxed",
    "digitallearninggmbh/math-lighteval": "boxed",
    "*hendrycks_math": "boxed",
    "aime*": "boxed",
    "amc*": "boxed",
    "math-ai/*": "boxed",
    "matharena/*": "boxed",
    "minerva*": "boxed",
    "olympiad*": "boxed",
    "hardverify-math": "boxed",
    "gaokao*": "boxed",
    "college_math": "boxed",
    "numina_*": "boxed",
}
"""Which scorer a row's ``data_source`` gets: patterns in lower case, first match."""


class GraderError(RuntimeError):
    """Answers cannot be graded; the message says what to install or change."""


class Score(NamedTuple):
    """``value`` is the reward. ``parts``: ``acc`` and ``answer_present`` (0 or 1), and more by scorer. ``answer`` is
    what was extracted from the text, None if nothing was."""

    value: float
    parts: dict[str, float]
    answer: str | None


class Undecided(NamedTuple):
    """Strings and numbers do not settle it: math-verify has to compare these two."""

    gold: str
    answer: str


def score_text(row: Row, text: str, *, gsm8k: Gsm8kMode = "strict", format_score: float | None = None) -> Score:
    r"""Score a response by its row's ``data_source``. May run for ever on hostile LaTeX: see `scoring.Scorer`.

    Args:
        gsm8k: where the number is looked for; see `gsm8k_answer`.
        format_score: reward of a wrong answer in the right place (GSM8K only); None = 0.1 for ``tandem``, else 0.

    Raises:
        DataError: no scorer is known for the row's ``data_source``.
        GraderError: math-verify is needed and not installed.

    Example:
        >>> row = Row("a", (), "math500", r"\frac{1}{2}", {})
        >>> score_text(row, r"So it is \boxed{0.5}.").value
        1.0
    """
    quick = quick_score(row, text, gsm8k=gsm8k, format_score=format_score)
    if isinstance(quick, Undecided):
        return boxed_score(equivalent(quick.gold, quick.answer), quick.answer)
    return quick


def quick_score(
    row: Row, text: str, *, gsm8k: Gsm8kMode = "strict", format_score: float | None = None
) -> Score | Undecided:
    """`score_text` as far as strings and plain numbers decide; time is linear in the text.

    Raises:
        DataError: no scorer is known for the row's ``data_source``.
    """
    if scorer_kind(row) == "gsm8k":
        return _gsm8k_score(row.ground_truth, text, gsm8k, format_score)
    answer = extract_boxed(text)
    if answer is None:
        return boxed_score(False, None)
    gold = extract_boxed(row.ground_truth) or row.ground_truth
    verdict = quick_equal(gold, answer)
    if verdict is None and len(answer) <= MAX_ANSWER_CHARS:
        return Undecided(gold, answer)
    return boxed_score(bool(verdict), answer)


def boxed_score(correct: bool, answer: str | None, **extra: float) -> Score:
    """1 for a correct answer, 0 otherwise: a box alone earns nothing."""
    parts = {"acc": float(correct), "answer_present": float(answer is not None)}
    return Score(float(correct), parts | extra, answer)


def scorer_kind(row: Row) -> Kind:
    """Which scorer a row gets.

    Raises:
        DataError: none is known; lists the known names.
    """
    source = row.data_source.lower()
    for pattern, kind in SCORERS.items():
        if fnmatch.fnmatchcase(source, pattern):
            return kind
    raise DataError(
        f"row {row.example_id}: no scorer for data_source {row.data_source!r}; rename it to one of: "
        f"{', '.join(SCORERS)}"
    )


# ---- GSM8K ---------------------------------------------------------------------------------------------------------


def gsm8k_answer(text: str, mode: Gsm8kMode) -> str | None:
    """The number a response gives, as a string; None if there is none.

    ``strict``: the last ``#### N``, without "," and "$" (verl). ``flexible``: the last run of digits, "." and ","
    (verl). ``tandem``: the last ``####`` followed by N with other characters such as "$" between (Tandem-RLVR).
    All look at the last 300 characters only.
    """
    text = text[-CLIP_CHARS:]
    if mode == "flexible":
        numbers = [number for number in re.findall(r"-?[0-9.,]+", text) if number not in ("", ".")]
        return numbers[-1] if numbers else None
    pattern = r"#### (-?[0-9.,]+)" if mode == "strict" else r"#### [^0-9\-]*(-?[0-9.,]+)"
    marked = re.findall(pattern, text)
    return marked[-1].replace(",", "").replace("$", "") if marked else None


def has_guillemets(text: str) -> bool:
    """Whether a text uses GSM8K's calculator notation ``<<48/2=24>>``, the jargon of its solutions."""
    return "<<" in text or ">>" in text


def _gsm8k_score(gold: str, text: str, mode: Gsm8kMode, format_score: float | None) -> Score:
    """Answers are compared as strings, as in verl: "18.0" and "18." are not "18"."""
    answer = gsm8k_answer(text, mode)
    correct = answer is not None and answer == gold
    if format_score is None:
        format_score = 0.1 if mode == "tandem" else 0.0
    value = 1.0 if correct else 0.0 if answer is None else float(format_score)
    parts = {
        "acc": float(correct),
        "answer_present": float(answer is not None),
        "has_guillemets": float(has_guillemets(text)),
    }
    return Score(value, parts, answer)


# ---- \boxed{…} -----------------------------------------------------------------------------------------------------


def extract_boxed(text: str) -> str | None:
    r"""What the last ``\boxed{…}`` holds, braces matched; None if it is missing, unclosed or empty."""
    start = text.rfind(r"\boxed")
    if start < 0 or not text.startswith(r"\boxed{", start):
        return None
    depth = 0
    for brace in re.finditer(r"\\.|[{}]", text[start + len(r"\boxed") :], re.DOTALL):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            content = text[start + len(r"\boxed{") : start + len(r"\boxed") + brace.start()].strip()
            return content or None
    return None


def normalise(answer: str) -> str:
    """An answer without spaces, units, markup and shorthand, for comparison as a string.

    The steps are those of Hendrycks et al. (2021, arXiv:2103.03874), app. of the MATH code, except that labels such as
    "x =" are kept: `quick_equal` drops them only where the other side has none.
    """
    answer = _clean(answer)
    for unwanted in (r"^\circ", r"^{\circ}", r"\%", "%"):
        answer = answer.replace(unwanted, "")
    answer = re.sub(r"(?<=.)\\(?:text|mathrm|textrm|mbox)\{[^{}]*\}(?:\^\{?\d\}?)?$", "", answer.strip()).strip()
    answer = re.sub(r"^\\(?:text|mathrm|textrm|textbf|mathbf|mbox)\{([^{}]*)\}$", r"\1", answer)
    answer = re.sub(r"\s+", "", answer).rstrip(".")
    answer = re.sub(r"(?<!\d)\.(?=\d)", "0.", answer)
    answer = re.sub(r"\\sqrt(\w)", r"\\sqrt{\1}", answer)
    return answer


def quick_equal(gold: str, answer: str) -> bool | None:
    """Whether two answers are equal, as far as strings and plain numbers tell; None where they do not.

    Integers (also written "142.0") are equal exactly, other numbers within a relative 1e-6; "2.55e-10" is a number.
    Words, and letters of a multiple choice, are compared without regard to case.
    """
    percent = ("%" in gold, "%" in answer)
    gold, answer = (normalise(side) for side in _drop_label(_clean(gold), _clean(answer)))
    if gold == answer:
        return True
    if _WORD.fullmatch(gold) and _WORD.fullmatch(answer):
        return gold.strip("()").lower() == answer.strip("()").lower()
    a, b = _number(gold), _number(answer)
    if a is None or b is None or percent[0] != percent[1]:
        return None
    if a.denominator == b.denominator == 1:
        return a == b
    return abs(a - b) <= max(abs(a), abs(b)) / 10**6


def equivalent(gold: str, answer: str) -> bool:
    """Whether math-verify finds two answers equal. Not bounded in time or memory: see `scoring.Scorer`.

    Its timers are off: they use SIGALRM, which only works in a main thread and cannot interrupt a long C call.

    Raises:
        GraderError: math-verify is not installed.
    """
    math_verify = _math_verify()
    targets = [math_verify.LatexExtractionConfig(boxed_match_priority=0), math_verify.ExprExtractionConfig()]
    parsed = [
        math_verify.parse(
            f"${_SCIENTIFIC.sub(_TIMES_TEN, side)}$",
            extraction_config=targets,
            fallback_mode="no_fallback",
            extraction_mode="first_match",
            parsing_timeout=None,
        )
        for side in _drop_label(_clean(gold), _clean(answer))
    ]
    return bool(math_verify.verify(*parsed, timeout_seconds=None)) and not _equal_by_rounding(*parsed)


def require_math_verify() -> None:
    """Raises:
    GraderError: math-verify, or a package that it needs, is not installed."""
    for module in ("math_verify", "latex2sympy2_extended", "sympy"):
        if importlib.util.find_spec(module) is None:
            raise GraderError(f"grading needs {module}, which is not installed: pip install 'math-verify>=0.9'")


# --------------------------------------------------------------------------------------------------------------------

_DIGITS = r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)"
_DECIMAL = re.compile(rf"(?P<mantissa>{_DIGITS})(?:[eE](?P<exponent>[-+]?\d{{1,3}}))?")
_POWER_OF_TEN = re.compile(
    rf"(?:(?P<mantissa>{_DIGITS})(?:\\times|\\cdot|\*|×))?10\^(?:\{{(?P<exponent>[-+]?\d{{1,3}})\}}|(?P<digit>\d))"
)
_FRACTION = re.compile(r"(?P<sign>[-+]?)(?:\\frac\{(-?\d+)\}\{(-?\d+)\}|(\d+)/(\d+))")
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_MAX_NUMBER_CHARS = 100

_SCIENTIFIC = re.compile(r"(?<![\w.\\])(\d+(?:\.\d+)?)[eE]([-+]?\d+)(?![\w.])")
_TIMES_TEN = r"\1 \\times 10^{\2}"
"""LaTeX would read the literal 2.55e-10 as 2.55·e − 10."""

_WORD = re.compile(r"[A-Za-z]{4,}|[A-Za-z]|\([A-Za-z]\)")
_LABEL = re.compile(
    r"\s*(?:\\text\{[^{}]*\}|\\?[A-Za-z]+)(?:_\{?\w+\}?)?'*\s*(?:\([^()=]*\))?\s*=\s*(?P<value>[^=<>]+)"
)
_REWRITES = (
    ("\n", " "),
    (r"\$", ""),
    ("$", ""),
    (r"\!", ""),
    (r"\,", ""),
    (r"\;", ""),
    ("{,}", ","),
    ("{:}", ":"),
    ("\N{MINUS SIGN}", "-"),
    (r"\displaystyle", ""),
    (r"\tfrac", r"\frac"),
    (r"\dfrac", r"\frac"),
)


def _clean(answer: str) -> str:
    r"""Markup that changes nothing is removed, ``\frac12`` is written out; spaces stay."""
    for old, new in _REWRITES:
        answer = answer.replace(old, new)
    answer = re.sub(r"\\(?:left|right)(?![A-Za-z])", "", answer)
    answer = re.sub(r"\\frac\s*(\d|\\pi(?![A-Za-z]))", r"\\frac{\1}", answer)
    return re.sub(r"(\\frac\{[^{}]*\})\s*(\d)", r"\1{\2}", answer).strip()


def _drop_label(gold: str, answer: str) -> tuple[str, str]:
    """Where exactly one side is an equation such as "x = 5" or "p(s) = s^2", keep its right-hand side only."""
    label = _LABEL.fullmatch(gold if "=" in gold else answer)
    if label is None or ("=" in gold) == ("=" in answer):
        return gold, answer
    return (label["value"], answer) if "=" in gold else (gold, label["value"])


def _number(text: str) -> Fraction | None:
    """The exact value of a plain number in normalised notation: decimal, scientific or integer fraction."""
    if len(text) > _MAX_NUMBER_CHARS:
        return None
    if _THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    if found := _DECIMAL.fullmatch(text):
        return Fraction(found["mantissa"]) * Fraction(10) ** int(found["exponent"] or 0)
    if found := _POWER_OF_TEN.fullmatch(text):
        return Fraction(found["mantissa"] or 1) * Fraction(10) ** int(found["exponent"] or found["digit"])
    if found := _FRACTION.fullmatch(text):
        numerator, denominator = (int(part) for part in found.groups()[1:] if part is not None)
        if denominator != 0:
            return Fraction(numerator, denominator) * (-1 if found["sign"] == "-" else 1)
    return None


def _equal_by_rounding(gold: list[Any], answer: list[Any]) -> bool:
    """Whether math-verify called two different small numbers equal: it rounds to 6 decimals, so 2e-10 "is" 3e-10."""
    from sympy import Basic, Float

    pair = [side[0] for side in (gold, answer) if side and isinstance(side[0], Basic) and side[0].is_number]
    if len(pair) < 2 or not any(side.has(Float) for side in pair):
        return False
    try:
        a, b = (complex(side.doit()) for side in pair)
    except (TypeError, ValueError, OverflowError):  # infinities
        return False
    return abs(a) < 1e-3 and abs(a - b) > 1e-6 * abs(a)


@cache
def _math_verify() -> Any:
    require_math_verify()
    import math_verify

    # It warns once that its timers are off, which is intended here.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return math_verify
