"""Measures how well a verifier accepts right answers that are hard to verify, and refuses wrong ones.

The protocol is that of TinyV (arXiv 2505.14625) on HardVerify-Math, which asks about two answers to every problem: a
right one and a wrong one.
"""

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from tandemrl.config import Config, ConfigError
from tandemrl.data.rows import Row
from tandemrl.files import write_text
from tandemrl.rewards.protocol import GraderError
from tandemrl.rewards.routing import terms_of
from tandemrl.rewards.scoring import Scorer
from tandemrl.rewards.services import code_scorer, judges
from tandemrl.tasks.math.hard_verify import AnswerPair, load_pairs

ALL = "all"
LOST = {"unscored", "timeout", "failure"}
"""Parts of a score that mean that there is no verdict."""
DEFAULTS = ("judge.prompt=tinyv",)
"""The overrides that the protocol uses unless a config sets these keys."""


class Verdicts(NamedTuple):
    """Counts of answers by verdict. A lost verdict (no score in any reply, a time-out, a crash) counts as neither
    accepted nor refused."""

    problems: int
    accepted: int
    """Right answers that were accepted: TinyV's "False Negative Correct"."""
    refused: int
    """Wrong answers that were refused: "True Negative Correct"."""
    false_negatives: int
    """Right answers that were refused."""
    false_positives: int
    """Wrong answers that were accepted."""
    lost: int
    """Answers, right or wrong, without a verdict."""


def bench_verifier(
    config: Config,
    source: str,
    *,
    limit: int | None = None,
    out: Path | None = None,
    stated: Collection[str] | None = None,
) -> dict[str, Verdicts]:
    """The verdicts of the config's scorer for the data source ``HardVerify-Math``, by source of the problems and in
    total.

    That scorer is the judge, unless ``reward.scorers`` names another. The judge is shown the answers as they are,
    without a check by rules before, and accepts scores of at least ``judge.accept``. Any other scorer is shown each
    answer in a box, as graders expect it, and accepts it if the score's ``acc`` is 1.

    Args:
        source: see ``load_pairs``.
        limit: how many rows to use, from the first on. None means all.
        out: a JSON file to write, with the counts and every verdict.
        stated: see ``routing.check_rewards``.

    Raises:
        ConfigError, DataError, GraderError: as ``score_file``.
    """
    pairs = load_pairs(source)[:limit]
    rows = [pair.row for pair in pairs]
    judged = any(term.name == "judge" for term in terms_of(rows[0], config.reward))
    if judged and len(terms_of(rows[0], config.reward)) > 1:
        raise ConfigError("reward.scorers: a sum with a judge in it has no verdict of its own; name the judge alone")
    if judged and config.judge.prompt != "tinyv":
        raise ConfigError(
            f"judge.prompt={config.judge.prompt}: marks whole responses, and these are bare answers; set "
            "judge.prompt=tinyv, or name a scorer without a judge in reward.scorers"
        )
    answers = [(pair.row, answer) for pair in pairs for answer in (pair.right, pair.wrong)]
    verdicts = _of_judge(answers, config) if judged else _of_scorer(answers, config, stated)
    rights, wrongs = verdicts[::2], verdicts[1::2]
    counts = {}
    for name in (*sorted({pair.source for pair in pairs}), ALL):
        chosen = [i for i, pair in enumerate(pairs) if name in (pair.source, ALL)]
        counts[name] = _counts([rights[i] for i in chosen], [wrongs[i] for i in chosen])
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        lines = [_record(*each) for each in zip(pairs, rights, wrongs, strict=True)]
        result = {"data": source, "counts": {name: each._asdict() for name, each in counts.items()}, "rows": lines}
        write_text(out, json.dumps(result, ensure_ascii=False, indent=1) + "\n")
    return counts


def _of_judge(answers: Sequence[tuple[Row, str]], config: Config) -> list[bool | None]:
    """Whether the judge accepts each answer, or None without a verdict."""
    pool = judges(config)
    if pool is None:
        raise GraderError(
            "verifying HardVerify-Math needs a judge; set judge.url to an OpenAI-compatible endpoint or judge.model to "
            "a model's folder, or name a scorer without a judge, as reward.scorers.*=prime"
        )
    marks = pool.marks([(row, answer, answer) for row, answer in answers])
    return [None if mark is None else mark >= config.judge.accept for mark in marks]


def _of_scorer(answers: Sequence[tuple[Row, str]], config: Config, stated: Collection[str] | None) -> list[bool | None]:
    """Whether the scorer accepts each answer, or None without a verdict."""
    with Scorer(config.reward, code=code_scorer(config)) as scorer:
        scorer.check([row for row, _ in answers], stated=stated)
        scores = scorer.score([(row, f"\\boxed{{{answer}}}") for row, answer in answers])
    return [None if LOST & score.parts.keys() else score.parts["acc"] == 1 for score in scores]


def _counts(rights: Sequence[bool | None], wrongs: Sequence[bool | None]) -> Verdicts:
    return Verdicts(
        problems=len(rights),
        accepted=rights.count(True),
        refused=wrongs.count(False),
        false_negatives=rights.count(False),
        false_positives=wrongs.count(True),
        lost=rights.count(None) + wrongs.count(None),
    )


def _record(pair: AnswerPair, right: bool | None, wrong: bool | None) -> dict[str, object]:
    return {
        "example_id": pair.row.example_id,
        "source": pair.source,
        "ground_truth": pair.row.ground_truth,
        "right": {"answer": pair.right, "accepted": right},
        "wrong": {"answer": pair.wrong, "accepted": wrong},
    }
