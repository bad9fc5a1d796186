"""Scores GSM8K's ``#### N``, as published. It does not import torch."""

import re
from typing import Literal

from tandemrl.config import RewardConfig
from tandemrl.data.rows import Row
from tandemrl.rewards.protocol import Score
from tandemrl.tasks.math.tagged import graded

CLIP_CHARS = 300
"""GSM8K answers are looked for in the last 300 characters only, as in verl."""

Gsm8kMode = Literal["strict", "flexible", "tandem", "first"]


def gsm8k(row: Row, text: str, options: RewardConfig) -> Score:
    """GSM8K as published by verl (``strict``, ``flexible``), Tandem-RLVR (``tandem``) and TinyZero (``reward.compat``):
    1 for the string of the ground truth, ``reward.format_score`` for another answer in the right place, else 0.

    Strings are compared: "18.0" and "18." are not "18", and "5/6" is 5.
    """
    answer = gsm8k_answer(text, "first" if options.compat == "tinyzero" else options.gsm8k)
    correct = answer == row.ground_truth
    score = graded(correct, answer, options, 0.1 if options.gsm8k == "tandem" else 0.0)
    score.parts["has_guillemets"] = float(has_guillemets(text))
    return score


def gsm8k_answer(text: str, mode: Gsm8kMode) -> str | None:
    """The number a response gives, as a string; None if there is none.

    ``strict``: the last ``#### N``, without "," and "$" (verl). ``flexible``: the last run of digits, "." and ","
    (verl). ``tandem``: the last ``####`` followed by N with other characters such as "$" between (Tandem-RLVR).
    All look at the last 300 characters only. ``first``: the first ``#### N`` of the whole text (TinyZero).
    """
    if mode != "first":
        text = text[-CLIP_CHARS:]
    if mode == "flexible":
        numbers = re.findall(r"-?[0-9.,]+", text)
        return next((number for number in reversed(numbers) if number != "."), "." if numbers else None)
    pattern = r"#### [^0-9\-]*(-?[0-9.,]+)" if mode == "tandem" else r"#### (-?[0-9.,]+)"
    marked = re.findall(pattern, text)
    return marked[0 if mode == "first" else -1].replace(",", "").replace("$", "") if marked else None


def has_guillemets(text: str) -> bool:
    """Whether a text uses GSM8K's calculator notation ``<<48/2=24>>``, the jargon of its solutions."""
    return "<<" in text or ">>" in text
