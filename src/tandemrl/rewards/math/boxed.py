r"""Scores answers to maths problems in LaTeX: ``\boxed{…}``, MATH's strings, DAPO's ``Answer:``. Without torch.

Most answers are decided at once by `equality.quick_equal`, which is fast and bounded whatever the model wrote. The
others go to math-verify, which may run for ever on hostile input such as
``\boxed{\sum_{i=1}^{9^{9^9}} \frac{1}{i}}``; `tandemrl.rewards.scoring.Scorer` runs it in a process that it can kill.
"""

import importlib.util
import itertools
import logging
import re
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

from tandemrl.config import RewardConfig
from tandemrl.data.rows import Row
from tandemrl.rewards.math.claims import (
    admitted,
    drop_label,
    hints_at_a_qualifier,
    identical,
    is_label,
    refused,
    unlabelled,
    without_reason,
)
from tandemrl.rewards.math.equality import MAX_CHARS, Shape, quick_equal, values
from tandemrl.rewards.math.notation import (
    TEXT,
    UNITS,
    clean,
    one_text_macro,
    without_braced_commas,
    without_full_stop,
    without_thousands,
)
from tandemrl.rewards.protocol import Deferred, GraderError, Lost, Score

DAPO_CHARS, DAPO_BOX_CHARS = 300, 100
"""DAPO's grader looks for the answer in the last 300 characters, its strict variant for a box in the last 100."""
SEARCH_CHARS = 2000
"""How much of the end of a response without a box is searched for the answer."""


# ---- scorers: (row, text, options) -> Score | Deferred -------------------------------------------------------------


def boxed(row: Row, text: str, options: RewardConfig) -> Score | Deferred:
    r"""1 if the last ``\boxed{…}`` holds an answer equal to the ground truth, else 0. A box alone earns nothing."""
    return _compared(gold_answer(row), extract_boxed(text))


def hendrycks(row: Row, text: str, options: RewardConfig) -> Score:
    r"""The grader of MATH (arXiv:2103.03874): 1 if the last box equals the ground truth as a normalised string, else 0.

    Like the original it also reads ``\fbox{…}`` and ``\boxed 5``. Equal values in another form, such as 0.25 for 1/4,
    are wrong.
    """
    gold, answer = gold_answer(row), extract_boxed(text, loose=True)
    published = options.compat == "verl"
    if answer is None or len(answer) > MAX_CHARS:
        return verdict(False, answer)
    equal = normalise_math(answer, published) == normalise_math(gold, published)
    return verdict(identical(gold, answer) or (equal and (published or admitted(gold, answer))), answer)


def dapo(row: Row, text: str, options: RewardConfig) -> Score:
    """The grader of DAPO (arXiv:2503.14476): +1 if the last ``Answer: …`` equals the ground truth as a normalised
    string, else -1.

    With ``reward.compat`` = ``verl`` it is as published: text before the last "=" or outside of the first formula is
    dropped, and so are all commas in a number.
    """
    lines = re.findall(r"(?i)Answer\s*:\s*([^\n]+)", text[-DAPO_CHARS:])
    if not lines:
        return _signed(False, None)
    gold, published, line = row.ground_truth, options.compat == "verl", lines[-1]
    if not published and not identical(gold, line):
        line = _STOP_IN_FORMULA.sub("", without_reason(line.strip("* ")))
    answer = normalise_dapo(line, published)
    equal = bool(answer) and answer == normalise_dapo(gold, published)
    if not published and not equal and "=" in line:
        calculated = values(drop_label(gold, clean(line))[1])
        equal = normalise_dapo(gold) in map(normalise_dapo, calculated[-1:])
    return _signed(identical(gold, line) or (equal and (published or admitted(gold, line))), answer)


def dapo_boxed(row: Row, text: str, options: RewardConfig) -> Score:
    """DAPO's strict grader: +1 if a box at the very end holds exactly the text of the ground truth, else -1."""
    answer = extract_boxed(text[-DAPO_BOX_CHARS:])
    return _signed(answer == row.ground_truth.strip(), answer)


def math_verified(row: Row, text: str, options: RewardConfig) -> Score | Deferred:
    """1 if the response states the ground truth, else 0. The answer is in a box, or without one at the end
    (`stated_answer`)."""
    answer = extract_boxed(text) if r"\boxed" in text else stated_answer(text[-SEARCH_CHARS:])
    return _compared(gold_answer(row), answer)


def gold_answer(row: Row) -> str:
    """The ground truth, without a box around it."""
    return extract_boxed(row.ground_truth) or row.ground_truth.strip()


def verdict(correct: bool, answer: str | None, **extra: float) -> Score:
    """1 for a correct answer, 0 otherwise."""
    parts = {"acc": float(correct), "answer_present": float(answer is not None)}
    return Score(float(correct), parts | extra, answer)


def settled(outcome: bool | Lost, answer: str | None) -> Score:
    """The score for an outcome of the symbolic pool. A lost outcome scores 0 and is counted."""
    if isinstance(outcome, Lost):
        return verdict(False, answer, **{outcome.how: 1.0})
    return verdict(outcome, answer)


def _compared(gold: str, answer: str | None) -> Score | Deferred:
    """1 for an answer equal to the gold answer, else 0. math-verify decides if `quick_equal` cannot."""
    equal = answer is not None and quick_equal(gold, answer)
    if equal is None:
        return Deferred("symbolic", (EQUIVALENT, gold, answer), lambda outcome: settled(outcome, answer))
    return verdict(equal, answer)


def _signed(correct: bool, answer: str | None) -> Score:
    return verdict(correct, answer)._replace(value=1.0 if correct else -1.0)


# ---- extraction and normal forms -----------------------------------------------------------------------------------


def extract_boxed(text: str, *, loose: bool = False) -> str | None:
    r"""The content of the last ``\boxed{…}``, with matched braces; None if it is missing, unclosed or empty.

    A box within a box belongs to the outer one: ``\boxed{\boxed{7} or 8}`` holds "{7} or 8".

    Args:
        loose: also accept ``\fbox{…}`` if there is no ``\boxed``, and ``\boxed 5`` up to the next "$".
    """
    text = re.sub(r"\\boxed +\{", r"\\boxed{", text)
    start = text.rfind(r"\boxed")
    if loose and start < 0:
        start = text.rfind(r"\fbox")
    if start < 0:
        return None
    if text.find(r"\boxed") < start:
        start = _outermost_box(text, start)
    rest = text[start:].removeprefix(r"\boxed").removeprefix(r"\fbox")
    if loose and rest.startswith(" "):
        return rest.partition("$")[0].strip() or None
    if not rest.startswith("{"):
        return None
    depth = 0
    for brace in re.finditer(r"\\.|[{}]", rest, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return _unboxed(rest[1 : brace.start()].strip()) or None
    return None


def _unboxed(content: str) -> str:
    """What a box holds, without the boxes in it: none around all of it, plain braces around a part."""
    layers = content.count(r"\boxed{")
    inside = content.removeprefix(r"\boxed{" * layers).removesuffix("}" * layers)
    depths = itertools.accumulate((brace == "{") - (brace == "}") for brace in inside)
    if len(inside) == len(content) - layers * len(r"\boxed{}") and min(depths, default=0) >= 0:
        return inside.strip()
    return content.replace(r"\boxed{", "{")


def _outermost_box(text: str, start: int) -> int:
    """Where the outermost closed box around a position begins; the position if there is none."""
    outermost, opened = start, list[int | None]()
    for brace in re.finditer(r"\\boxed\{|\\.|[{}]", text, re.DOTALL):
        if brace.group() == "}":
            box = opened.pop() if opened else None
            if box is not None and box < start < brace.start():
                outermost = box
        elif brace.group() in ("{", r"\boxed{"):
            opened.append(brace.start() if brace.group() != "{" else None)
    return outermost


def stated_answer(text: str) -> str | None:
    r"""The answer that a response without a box gives; None if there is no number and no formula.

    It is the rest of the sentence after "the answer is". Without these words it is the last clause with a number or a
    formula in it, from behind "is", "so", "therefore" and the like. If the clause has a single formula, the answer is
    this formula alone.

    Examples:
        >>> stated_answer("Since $x^2 = 16$, the answer is 4."), stated_answer(r"so $x = \frac{1}{2}$ holds")
        ('4', 'x = \\frac{1}{2}')
    """
    text = _in_line(re.sub(r"\*\*([^*\n]+)\*\*", r"\1", re.sub(r"</?answer>", " ", text)))
    if marked := _ANSWER_IS.split(text)[1:]:
        clause = _SENTENCE_END.split(marked[-1].strip())[0]
    else:
        ends = [end for end in _CLAUSE_END.finditer(text) if end["end"]]
        starts, stops = [0, *(end.end() for end in ends)], [*(end.start() for end in ends), len(text)]
        clauses = [text[start:stop] for start, stop in zip(starts, stops, strict=True)]
        clause = next(filter(_STATEMENT.search, reversed(clauses)), "")
    clause = without_reason(clause).strip(" ,;:")
    return _only_formula(clause) or _only_number(clause) or clause or None


def _only_formula(clause: str) -> str | None:
    """The formula of prose such as "the value is $5$", without its dollar signs; None if the prose says more."""
    formulas = list(_FORMULA.finditer(clause))
    if len(formulas) != 1 or not _leaves_as_is(clause[: formulas[0].start()], clause[formulas[0].end() :]):
        return None
    return re.sub(r"^(?:\$+|\\[(\[])|(?:\$+|\\[)\]])$", "", formulas[0][0]).strip()


def _leaves_as_is(before: str, behind: str) -> bool:
    """Whether what stands around an answer is prose that does not change it: "the value is", but not "-" or "log"."""
    before, behind = (TEXT.sub(r"\g<text>", side.replace("**", "")) for side in (before, behind))
    if _PROSE_BEFORE.fullmatch(before) is None or _PROSE_BEHIND.fullmatch(behind) is None:
        return False
    lead = _VERB.split(before)[-1].split()
    near = [word.strip(",.:;()") for word in (*lead[-1:], *behind.split()[:1])]
    if any(len(word) == 1 and word not in "aAI" and word not in UNITS for word in near):
        return False
    if lead[-1:] == ["of"] and lead[-2:-1] not in ([], ["total"], ["value"], ["area"], ["volume"], ["probability"]):
        return False
    changed = _CHANGING.search(" ".join(lead)) or _JOINS.match(behind)
    return not changed and not refused("", f"{before} {behind}")


def _in_line(text: str) -> str:
    """A text with display formulas on one line, behind the colon or "answer is" before them."""
    text = _DISPLAY.sub(lambda formula: re.sub(r"[.,]? ?(?=\$\$$|\\\]$)", "", " ".join(formula[0].split())), text)
    return _LEAD_TO_DISPLAY.sub(r"\1 ", text)


def _only_number(clause: str) -> str | None:
    """The number of prose such as "Tom has 5 apples", with its unit if known; None if it says anything else.

    Two numbers, a qualifier such as "about", or a number that counts steps is not an answer to take out of its words.
    """
    words = clause.split()
    at = [i for i, word in enumerate(words) if any(map(str.isdigit, word))]
    if len(at) != 1 or len(words) == 1:
        return None
    number, before, behind = words[at[0]].strip("(),;:!"), words[: at[0]], words[at[0] + 1 :]
    prose = " ".join(before + behind)
    if _PROSE_NUMBER.fullmatch(number) is None or (before and _COUNTED.fullmatch(before[-1])):
        return None
    if before[-1:] == ["of"] and _CHANGING.fullmatch(before[-2] if before[1:] else ""):  # "square root of 5"
        return None
    if _PROSE.fullmatch(prose) is None or refused("", prose) or hints_at_a_qualifier(prose):
        return None
    units = itertools.takewhile(lambda word: word.strip(",").lower() in UNITS, behind)
    return " ".join([number.removeprefix("\\").removeprefix("$"), *units])


def normalise_math(answer: str, published: bool = False) -> str:
    """The normal form of Hendrycks et al. (2021, arXiv:2103.03874), in the order of the MATH code.

    Two bugs are not kept: "7 3/4" is not 73/4, and ``5\\text{ or }6`` is not 5.

    Args:
        published: drop any two characters before a "=", rather than a bare label of at most two characters, and know
            no macro for words but ``\\text``.
    """
    original, answer = answer, answer if published else one_text_macro(answer)
    for old, new in _MATH_REWRITES:
        answer = answer.replace(old, new)
    if published and r"\text{ " in answer:
        if answer.count(r"\text{ ") > 1:  # where the published code fails, and compares what was written
            return original
        answer = answer.partition(r"\text{ ")[0]
    elif re.search(r"\\text\{ ?(?:tr|b|m)illion", answer) is None:
        answer = re.sub(r"\\text\{ [^{}\d]*\}(?:\^\{?\d\}?)?$", "", answer)
    answer = answer.replace(r"\%", "").replace(" .", " 0.").replace("{.", "{0.")
    answer = f"0{answer}" if answer.startswith(".") else answer
    left, equals, right = answer.partition("=")
    if equals and "=" not in right and len(left) <= 2 and (published or is_label(left.strip())):
        answer = right
    answer = re.sub(r"(?<=\d) +(?=\d+/\d)", "_", answer)
    answer = re.sub(r"\\sqrt([^{])", r"\\sqrt{\1}", answer).replace(" ", "")
    answer = re.sub(r"\\frac([^{])([^{])", r"\\frac{\1}{\2}", answer)
    answer = re.sub(r"\\frac([^{])\{", r"\\frac{\1}{", answer)
    if answer == "0.5":
        return r"\frac{1}{2}"
    return re.sub(r"^(-?[0-9]+)/(-?[0-9]+)$", r"\\frac{\1}{\2}", answer)


def normalise_dapo(answer: str, published: bool = False) -> str:
    """The normal form of verl's math_dapo, after Lewkowycz et al. (Minerva, arXiv:2206.14858), appendix D.

    Args:
        published: drop all before the last "=", rather than a bare label, and every comma between digits.
    """
    if published:
        answer = answer.rpartition("=")[2]
    else:
        answer = without_full_stop(one_text_macro(answer))
        answer = (_only_formula(answer) or answer).replace(r"\$", "").replace("$", "").strip()
        marked = r",\!" in answer or "{,}" in answer  # commas that can only stand between thousands
        answer = without_braced_commas(answer.replace(r"\!", ""))
        answer = unlabelled(without_thousands(answer) if marked else answer)
    listed = re.search(r"[0-9], +[0-9]", answer) is not None
    if not published:  # 1 1/2 is not 11/2, and a repeating decimal no finite one
        answer = re.sub(r"(?<=\d) +(?=\d+ ?/ ?\d)", "_", answer)
        answer = re.sub(r"(?<=[\d.])\\overline(?=\{\d)", r"\\repeating", answer)
    for old, new in _DAPO_REWRITES:
        answer = answer.replace(old, new)
    answer = re.sub(r"^.*?\$(.*?)\$.*$", r"$\1$", answer) if published else answer
    for macro in ("text", "textbf", "overline"):
        answer = re.sub(rf"\\{macro}\{{(.*?)\}}", r"\1", answer)
    answer = re.sub(r"\\boxed\{(.*)\}", r"\1", answer)
    answer = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", answer)
    answer = re.sub(r"sqrt([^{])", r"sqrt{\1}", answer).replace("$", "")
    digits = answer.replace(",", "") if published else without_thousands(answer)
    return (digits if digits.isdigit() and (published or not listed) else answer).strip()


_MATH_REWRITES = (
    ("\n", ""),
    (r"\!", ""),
    ("\\\\", "\\"),
    ("tfrac", "frac"),
    ("dfrac", "frac"),
    (r"\left", ""),
    (r"\right", ""),
    (r"^\circ", ""),
    (r"^{\circ}", ""),
    (r"\$", ""),
)
_ANSWER_IS = re.compile(r"(?i)\banswers?(?: is| are|:)[: ]")
_SENTENCE_END = re.compile(r"\.\s|\.$|\n")
_FORMULA = re.compile(r"\$\$?[^$]+\$\$?|\\\((?:[^\\]|\\(?!\)))+\\\)|\\\[(?:[^\\]|\\(?!\]))+\\\]")

_STOP_IN_FORMULA = re.compile(r"(?<!\.)\.(?=\s*(?:\$|\\[)\]]))")
_DISPLAY = re.compile(r"\$\$[^$]+\$\$|\\\[(?:[^\\]|\\(?!\]))+\\\]")
_LEAD_TO_DISPLAY = re.compile(r"(:|\b[Aa]nswers? (?:is|are))\s*\n\s*(?=\$|\\[(\[])")
_PROSE = re.compile(r"(?:(?:#+|[A-Z]?[a-z]+(?:['’][a-z]{1,2})?|[A-Z])[,.]*(?: |$))*")
"""Words as they are written: in others a qualifier could hide, as in "AZYUKnot"."""
_PROSE_WORD = r"(?:#+|[A-Z]?[a-z]+(?:['’][a-z]{1,2})?(?:-[a-z]+)*|[A-Z]{1,4})[,.:;]*"
_PROSE_BEFORE = re.compile(rf"\s*(?:{_PROSE_WORD}\s+)*")
_PROSE_BEHIND = re.compile(rf"(?: ?\\?%| ?°)?[,.:;]*(?:\s+\(?{_PROSE_WORD}\)?[,.]*)*\s*")
_VERB = re.compile(r":|\b(?:is|are|was|be|equals?|gets?|gives?|yields?|has|have|obtain)\b")
_CHANGING = re.compile(
    r"(?i)\b(?:log|logarithm|sin|cos|tan|cot|sec|csc|exp|ln|sqrt|roots?|or|and|nor|multiples?|factor|divisor|divisible|congruent"
    r"|power|square|cube|up|times)\b"
)
"""Words between a verb and an answer that make another value of it, or one of several."""
_JOINS = re.compile(r"[,;]?\s+(?:or|and|times)\b")
_PROSE_NUMBER = re.compile(r"-?(?:\\?\$)?-?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+|/[0-9]+)?\\?%?")
_COUNTED = re.compile(
    r"(?i)step|case|part|problem|question|equation|figure|example|exercise|option|page|line|chapter|section"
)
"""What a number behind it counts, so that it is no answer."""
_CLAUSE_END = re.compile(
    rf"{_FORMULA.pattern}|(?P<end>\.\s|\.$|\n"
    r"|(?<!not )(?<!n['’]t )(?<!never )"
    r"\b(?i:is|are|be|was|gets?|gives?|equals?|yields?|makes?|so|then|thus|hence|therefore)\b)"
)
_STATEMENT = re.compile(r"\d|\$|\\[(\[]")
_DAPO_REMOVED = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", r"\ldots", "sue", "points"),
    *("feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students"),
    *("childrentickets", "multiples", r"\text{s}", r"\text{.}", "\\text{\ns}", r"\text{}^2", r"\text{}^3"),
    *("\\text{\n}", r"\text{}", r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', r"\dots"),
)
_DAPO_REWRITES = (
    *(("an ", ""), ("a ", ""), (".$", "$"), (r"\$", ""), (r"\ ", ""), (" ", ""), ("mbox", "text")),
    *((r",\text{and}", ","), (r"\text{and}", ","), (r"\text{m}", r"\text{}")),
    *((phrase, "") for phrase in _DAPO_REMOVED),
)


# ---- math-verify ---------------------------------------------------------------------------------------------------

EQUIVALENT = f"{__name__}:equivalent"


def equivalent(gold: str, answer: str) -> bool:
    """Whether math-verify finds two answers equal. Time and memory are not bounded: see `scoring.Scorer`.

    math-verify's own timers are off, since they use SIGALRM, which only works in a main thread and cannot interrupt a
    long C call.

    Raises:
        GraderError: math-verify is not installed.
    """
    gold, answer = drop_label(clean(gold), clean(answer))
    return _verify(_formula(gold), _formula(answer)) and _as_often(gold, answer)


def require_math_verify() -> None:
    """Check that math-verify is installed.

    Raises:
        GraderError: math-verify, or a package that it needs, is not installed.
    """
    for module in ("math_verify", "latex2sympy2_extended", "sympy"):
        if importlib.util.find_spec(module) is None:
            raise GraderError(f"grading needs {module}, which is not installed: pip install 'math-verify>=0.9'")


_SCIENTIFIC = re.compile(r"(?<![\w.\\])(\d+(?:\.\d+)?)[eE]([-+]?\d+)(?![\w.])")
_TIMES_TEN = r"\1 \\times 10^{\2}"
"""LaTeX would read the literal 2.55e-10 as 2.55·e − 10."""


@lru_cache(256)
def _formula(cleaned: str) -> Sequence[Any]:
    return _parse(f"${_SCIENTIFIC.sub(_TIMES_TEN, cleaned)}$")


def _parse(text: str) -> Sequence[Any]:
    """The LaTeX of a text as sympy objects. Its other reader, for plain arithmetic, would `eval`; it is left out."""
    library = _math_verify()
    return tuple(
        library.parse(
            text,
            extraction_config=[library.LatexExtractionConfig(boxed_match_priority=0)],
            fallback_mode="no_fallback",
            extraction_mode="first_match",
            parsing_timeout=None,
        )
    )


def _verify(gold: Sequence[Any], answer: Sequence[Any]) -> bool:
    equal = _math_verify().verify(list(gold), list(answer), timeout_seconds=None)
    return bool(equal) and not _equal_by_rounding(gold, answer)


def _equal_by_rounding(gold: Sequence[Any], answer: Sequence[Any]) -> bool:
    """Whether math-verify called two different small numbers equal: it rounds to 6 decimals, so 2e-10 "is" 3e-10."""
    from sympy import Basic, Float

    pair = [side[0] for side in (gold, answer) if side and isinstance(side[0], Basic) and side[0].is_number]
    if len(pair) < 2:
        return False
    tolerance = 1e-6 if any(side.has(Float) for side in pair) else 1e-9
    try:
        a, b = (_significant(side.doit().evalf(20)) for side in pair)
        size = max(abs(a), abs(b))
        return bool(size < 1e-3 and abs(a - b) > tolerance * size)
    except (TypeError, ValueError, OverflowError):  # infinities
        return False


def _significant(number: Any) -> Any:
    """A number of sympy without real or imaginary parts that are nothing but rounding errors."""
    real, imaginary = (0 if part == 0 or getattr(part, "_prec", 2) == 1 else part for part in number.as_real_imag())
    return real + imaginary * 1j if imaginary else real


def _as_often(gold: str, answer: str) -> bool:
    """Whether two lists have each entry equally often. math-verify reads lists as sets."""
    left, right = Shape.of(gold), Shape.of(answer)
    if not {left.kind, right.kind} <= {"list", "set"}:
        return True
    others = list(right.parts)
    for part in left.parts:
        at = next((at for at, other in enumerate(others) if _verify(_formula(part), _formula(other))), None)
        if at is None:
            return False
        others.pop(at)
    return not others


@cache
def _math_verify() -> Any:
    require_math_verify()
    import math_verify

    # It warns once that its timers are off, which is intended here.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return math_verify
