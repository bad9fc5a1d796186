r"""The graders of MATH and DAPO, equal to verl 0.9.1's ``math_reward`` and ``math_dapo``, faults included.

They compare strings. What is wrong with them stays: MATH's takes 4 of ``\boxed{3=4}``, 73/4 of "7 3/4" and 5 of
``5\text{ or 6}``, and 0.25 is not 1/4; DAPO's takes 4 of "x + 3 = 4" and 34 of "3, 4".
"""

import re

from tandemrl.config import RewardConfig
from tandemrl.data.rows import Row
from tandemrl.rewards.protocol import Score

DAPO_CHARS, DAPO_BOX_CHARS = 300, 100
"""DAPO's grader looks for the answer in the last 300 characters, and for a box in the last 100."""


def hendrycks(row: Row, text: str, options: RewardConfig) -> Score:
    r"""The grader of MATH (arXiv:2103.03874): 1 if the last box equals the ground truth as a normalised string, else 0.

    ``\boxed 5`` is a box up to the next "$", and goes before any other; ``\fbox{…}`` is none.
    """
    if r"\boxed " in text:
        answer: str | None = text.rpartition(r"\boxed ")[2].partition("$")[0]
    else:
        answer = _last_box(text, r"\boxed")
    return verdict(answer is not None and math_equal(answer, row.ground_truth), answer)


def dapo(row: Row, text: str, options: RewardConfig) -> Score:
    """The grader of DAPO (arXiv:2503.14476): +1 if the last ``Answer: …`` equals the ground truth as a normalised
    string, else -1. Without one, as `dapo_boxed`."""
    lines = re.findall(r"(?i)Answer\s*:\s*([^\n]+)", text[-DAPO_CHARS:])
    if not lines:
        return dapo_boxed(row, text, options)
    answer = normalise_dapo(lines[-1])
    return _signed(answer == normalise_dapo(row.ground_truth), answer)


def dapo_boxed(row: Row, text: str, options: RewardConfig) -> Score:
    """DAPO's strict grader: +1 if a box at the very end holds exactly the text of the ground truth, else -1."""
    answer = _last_box(text[-DAPO_BOX_CHARS:], r"\boxed{")
    return _signed(answer == row.ground_truth, answer)


def verdict(correct: bool, answer: str | None) -> Score:
    """1 for a correct answer, 0 otherwise."""
    return Score(float(correct), {"acc": float(correct), "answer_present": float(answer is not None)}, answer)


def math_equal(answer: str, gold: str) -> bool:
    """Whether two answers have the same normal form; as they are written if one has none."""
    try:
        return normalise_math(answer) == normalise_math(gold)
    except ValueError:
        return answer == gold


def normalise_math(answer: str) -> str:
    r"""The normal form of Hendrycks et al. (2021), in the order of the MATH code.

    Raises:
        ValueError: the published code fails, as with two units, or a root of nothing.
    """
    for old, new in _MATH_REWRITES:
        answer = answer.replace(old, new)
    if answer.count(r"\text{ ") > 1:
        raise ValueError(answer)
    answer = answer.partition(r"\text{ ")[0].replace(r"\\%", "").replace(r"\%", "")
    answer = answer.replace(" .", " 0.").replace("{.", "{0.")
    if not answer:
        return answer
    answer = f"0{answer}" if answer.startswith(".") else answer
    left, _, right = answer.partition("=")
    answer = right if answer.count("=") == 1 and len(left) <= 2 else answer
    if re.search(r"\\sqrt(?:$|\\sqrt)", answer):
        raise ValueError(answer)
    answer = re.sub(r"\\sqrt([^{])", r"\\sqrt{\1}", answer, flags=re.DOTALL).replace(" ", "")
    if re.search(r"\\frac(?:$|\\frac)", answer):
        raise ValueError(answer)
    if not re.search(r"\\frac[^{](?:$|\\frac)", answer):  # there the published code gives up on all fractions
        answer = re.sub(r"\\frac([^{])([^{])", r"\\frac{\1}{\2}", answer)
        answer = re.sub(r"\\frac([^{])\{", r"\\frac{\1}{", answer)
    if answer == "0.5":
        return r"\frac{1}{2}"
    return re.sub(r"^(0|-?[1-9][0-9]*)/(0|-?[1-9][0-9]*)\Z", r"\\frac{\1}{\2}", answer)


def normalise_dapo(answer: str) -> str:
    """The normal form of verl's math_dapo, after Lewkowycz et al. (Minerva, arXiv:2206.14858), appendix D."""
    answer = answer.rpartition("=")[2]
    for old, new in _DAPO_REWRITES:
        answer = answer.replace(old, new)
    for pattern, new in _DAPO_PATTERNS:
        answer = re.sub(pattern, new, answer)
    answer = answer.replace("$", "")
    digits = answer.replace(",", "")
    return (digits if digits.isdigit() else answer).strip()


def _last_box(text: str, opening: str) -> str | None:
    start = text.rfind(opening)
    return braced(text[start:]) if start >= 0 and text.startswith(r"\boxed{", start) else None


def braced(text: str) -> str | None:
    """What stands between the first brace of a text and the one that closes it. Braces with a backslash count, as in
    the published code."""
    depth, first = 0, -1
    for brace in re.finditer("[{}]", text):
        if brace[0] == "{":
            first = brace.end() if first < 0 else first
            depth += 1
        else:
            depth -= 1
            if depth == 0:
                return text[first : brace.start()] if first >= 0 else None
    return None


def _signed(correct: bool, answer: str | None) -> Score:
    return verdict(correct, answer)._replace(value=1.0 if correct else -1.0)


_MATH_REWRITES = (
    *(("\n", ""), (r"\!", ""), ("\\\\", "\\"), ("tfrac", "frac"), ("dfrac", "frac"), (r"\left", ""), (r"\right", "")),
    *((r"^{\circ}", ""), (r"^\circ", ""), (r"\$", "")),
)
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
_DAPO_PATTERNS = (
    *((r".*?\$(.*?)\$.*", r"$\1$"), (r"\\text\{(.*?)\}", r"\1"), (r"\\textbf\{(.*?)\}", r"\1")),
    *((r"\\overline\{(.*?)\}", r"\1"), (r"\\boxed\{(.*)\}", r"\1")),
    *((r"frac([^{])(.)", r"frac{\1}{\2}"), (r"sqrt([^{])", r"sqrt{\1}")),
)
