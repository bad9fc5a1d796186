r"""The default grader of mathematics: `math` for an answer anywhere, `boxed` for one in ``\boxed{…}``. Without torch.

Most answers are decided at once by `equality.quick_equal`, which is fast and bounded whatever the model wrote. The
others go to math-verify, which may run for ever on hostile input such as
``\boxed{\sum_{i=1}^{9^{9^9}} \frac{1}{i}}``; `tandemrl.rewards.scoring.Scorer` runs it in a process that it can kill.
"""

import itertools
import re

from tandemrl.config import RewardConfig
from tandemrl.data.rows import Row
from tandemrl.rewards.protocol import Deferred, Lost, Score
from tandemrl.tasks.math.equality import equal, quick_equal
from tandemrl.tasks.math.published import verdict
from tandemrl.tasks.math.words import harmless

SEARCH_CHARS = 2000
"""How much of the end of a response without a box is searched for the answer."""
EQUIVALENT = f"{equal.__module__}:equal"


def boxed(row: Row, text: str, options: RewardConfig) -> Score | Deferred:
    r"""1 if the last ``\boxed{…}`` holds an answer equal to the ground truth, else 0. A box alone earns nothing."""
    return _compared(row, extract_boxed(text))


def math(row: Row, text: str, options: RewardConfig) -> Score | Deferred:
    """1 if the response states the ground truth, else 0: in a box, or without one behind "####" or at the end
    (`stated_answer`)."""
    return _compared(row, extract_boxed(text) if r"\boxed" in text else stated_answer(text))


def settled(outcome: bool | Lost, answer: str | None) -> Score:
    """The score for an outcome of the symbolic pool. A lost outcome scores 0 and is counted."""
    return outcome.score(answer) if isinstance(outcome, Lost) else verdict(outcome, answer)


def _compared(row: Row, answer: str | None) -> Score | Deferred:
    """1 for an answer equal to the ground truth, else 0. math-verify decides if `quick_equal` cannot."""
    gold = extract_boxed(row.ground_truth) or row.ground_truth.strip()
    outcome = answer is not None and quick_equal(gold, answer)
    if outcome is None:
        return Deferred("symbolic", (EQUIVALENT, gold, answer), lambda outcome: settled(outcome, answer))
    return verdict(outcome, answer)


# ---- where the answer is -------------------------------------------------------------------------------------------


def extract_boxed(text: str) -> str | None:
    r"""The content of the last ``\boxed{…}``, with matched braces; None if it is missing, unclosed or empty.

    A box within a box belongs to the outer one: ``\boxed{\boxed{7} or 8}`` holds "{7} or 8".
    """
    if r"\boxed" not in text:
        return None
    text = re.sub(r"\\boxed +\{", r"\\boxed{", text)
    start = text.rfind(r"\boxed{")
    if start < 0 or text.rfind(r"\boxed") > start:
        return None
    ends, opened = dict[int, int](), list[int]()
    for brace in re.finditer(r"\\boxed\{|\\.|[{}]", text, re.DOTALL):
        if brace.group() in ("{", r"\boxed{"):
            opened.append(brace.end())
        elif brace.group() == "}" and opened:
            ends[opened.pop()] = brace.start()
    around = [begin for begin, end in ends.items() if begin - len(r"\boxed{") <= start < end]
    boxes = [begin for begin in around if text.startswith(r"\boxed{", begin - len(r"\boxed{"))]
    return _unboxed(text[min(boxes) : ends[min(boxes)]].strip()) or None if boxes else None


def _unboxed(content: str) -> str:
    """What a box holds, without the boxes in it: none around all of it, plain braces around a part."""
    layers = content.count(r"\boxed{")
    inside = content.removeprefix(r"\boxed{" * layers).removesuffix("}" * layers)
    depths = itertools.accumulate((brace == "{") - (brace == "}") for brace in inside)
    if len(inside) == len(content) - layers * len(r"\boxed{}") and min(depths, default=0) >= 0:
        return inside.strip()
    return content.replace(r"\boxed{", "{")


def stated_answer(text: str) -> str | None:
    r"""The answer that a response without a box gives; None if there is no number and no formula.

    It is the line behind the last "####", or the rest of the sentence after "the answer is". Without these it is the
    last clause with a number or a formula in it, from behind "is", "so", "therefore" and the like. If the clause has a
    single formula in words that do not change it, the answer is this formula alone.

    Examples:
        >>> stated_answer("Since $x^2 = 16$, the answer is 4."), stated_answer(r"so $x = \frac{1}{2}$ holds")
        ('4', 'x = \\frac{1}{2}')
    """
    text = re.sub(r"\*\*([^*\n]+)\*\*", r"\1", re.sub(r"</?answer>", " ", text[-SEARCH_CHARS:]))
    if "####" in text:
        line = text.rpartition("####")[2].strip().partition("\n")[0].strip(" *")
        return _only_formula(_ANSWER_IS.split(line)[-1]) if re.search(r"\d", line) else None
    text = _DISPLAY.sub(lambda formula: re.sub(r"[.,]? ?(\$\$|\\\])$", r"\1", " ".join(formula[0].split())), text)
    text = _LEAD_TO_DISPLAY.sub(r"\1 ", text)
    if marked := _ANSWER_IS.split(text)[1:]:
        clause = re.split(r"\.\s|\.$|\n", marked[-1].strip())[0]
    else:
        ends = [end for end in _CLAUSE_END.finditer(text) if end["end"]]
        starts, stops = [0, *(end.end() for end in ends)], [*(end.start() for end in ends), len(text)]
        clauses = [text[start:stop] for start, stop in zip(starts, stops, strict=True)]
        clause = next((each for each in reversed(clauses) if re.search(r"\d|\$|\\[(\[]", each)), "")
    return _only_formula(re.split(",? (?:because|since|as) ", clause)[0].strip(" ,;:")) or None


def _only_formula(clause: str) -> str:
    """The formula of prose such as "the value is $5$"; the whole clause if there is more than one, or none."""
    formulas = list(_FORMULA.finditer(clause))
    if len(formulas) != 1 or not harmless(clause[: formulas[0].start()], clause[formulas[0].end() :]):
        return clause
    return re.sub(r"^(?:\$+|\\[(\[])|(?:(?<!\.)\.)? ?(?:\$+|\\[)\]])$", "", formulas[0][0]).strip()


_ANSWER_IS = re.compile(r"(?i)\banswers?(?: is| are|:)[: ]")
_FORMULA = re.compile(r"\$\$?[^$]+\$\$?|\\\((?:[^\\]|\\(?!\)))+\\\)|\\\[(?:[^\\]|\\(?!\]))+\\\]")
_DISPLAY = re.compile(r"\$\$[^$]+\$\$|\\\[(?:[^\\]|\\(?!\]))+\\\]")
_LEAD_TO_DISPLAY = re.compile(r"(:|\b[Aa]nswers? (?:is|are))\s*\n\s*(?=\$|\\[(\[])")
_CLAUSE_END = re.compile(
    rf"{_FORMULA.pattern}|(?P<end>\.\s|\.$|\n"
    r"|(?<!not )(?<!n['’]t )(?<!never )"
    r"\b(?i:is|are|be|was|gets?|gives?|equals?|yields?|makes?|so|then|thus|hence|therefore)\b)"
)
