"""Measures how well a verifier accepts right answers that are hard to verify, and refuses wrong ones.

The protocol is that of TinyV (arXiv 2505.14625) on HardVerify-Math, which asks about two answers to every problem: a
right one and a wrong one.

The 250 published rows are in ``benchmarks/HardVerify-Math.json`` of uw-nsl/TinyV, and in zhangchenxu/HardVerify-Math on
the hub. They have ``id``, ``source``, ``question``, ``ground_truth``, ``fn_output``, a right answer that rules took for
wrong (a false negative), and ``tn_output``, a wrong answer (a true negative). The outputs are bare answers. The same
rows in verl's schema, as TinyV writes them, can be read, too. The module does not import torch.
"""

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from tandemrl.config import Config, ConfigError
from tandemrl.config.hints import hint
from tandemrl.data.rows import DataError, Row
from tandemrl.data.sources import Origin, Record, flattened, read
from tandemrl.files import write_text
from tandemrl.rewards.protocol import GraderError
from tandemrl.rewards.routing import terms_of
from tandemrl.rewards.scoring import Scorer
from tandemrl.rewards.services import code_scorer, judges

HARD_VERIFY = "HardVerify-Math"
"""The ``data_source`` of its rows."""
ALL = "all"
DEFAULTS = ("judge.prompt=tinyv",)
"""The overrides that the protocol uses unless a config sets these keys."""


class AnswerPair(NamedTuple):
    """A problem, an answer to be accepted and one to be refused."""

    row: Row
    right: str
    wrong: str


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
    verdicts = _verdicts([(pair.row, answer) for pair in pairs for answer in pair[1:]], config, stated)
    both = [*zip((pair.row.extra_info["source"] for pair in pairs), verdicts[::2], verdicts[1::2], strict=True)]
    counts = {}
    for name in (*sorted({each for each, *_ in both}), ALL):
        rights, wrongs = zip(*((right, wrong) for each, right, wrong in both if name in (each, ALL)), strict=True)
        found = rights.count(True), wrongs.count(False), rights.count(False), wrongs.count(True)
        counts[name] = Verdicts(len(rights), *found, (rights + wrongs).count(None))
    if out is not None:
        lines = [
            {
                "example_id": pair.row.example_id,
                "source": name,
                "ground_truth": pair.row.ground_truth,
                "right": {"answer": pair.right, "accepted": right},
                "wrong": {"answer": pair.wrong, "accepted": wrong},
            }
            for pair, (name, right, wrong) in zip(pairs, both, strict=True)
        ]
        result = {"data": source, "counts": {name: each._asdict() for name, each in counts.items()}, "rows": lines}
        out.parent.mkdir(parents=True, exist_ok=True)
        write_text(out, json.dumps(result, ensure_ascii=False, indent=1) + "\n")
    return counts


def _verdicts(answers: Sequence[tuple[Row, str]], config: Config, stated: Collection[str] | None) -> list[bool | None]:
    """Whether the judge or the scorer accepts each answer, or None without a verdict."""
    names = [term.name for term in terms_of(answers[0][0], config.reward)]
    if "judge" not in names:
        with Scorer(config.reward, code=code_scorer(config)) as scorer:
            scorer.check([row for row, _ in answers], stated=stated)
            scores = scorer.score([(row, f"\\boxed{{{answer}}}") for row, answer in answers])
        lost = [not score.scored or not score.parts.keys().isdisjoint(("timeout", "failure")) for score in scores]
        return [None if none else score.parts["acc"] == 1 for score, none in zip(scores, lost, strict=True)]
    if len(names) > 1:
        raise ConfigError("reward.scorers: a sum with a judge in it has no verdict of its own; name the judge alone")
    if config.judge.prompt != "tinyv":
        raise ConfigError(
            f"judge.prompt={config.judge.prompt}: marks whole responses, and these are bare answers; set "
            "judge.prompt=tinyv, or name a scorer without a judge in reward.scorers"
        )
    pool = judges(config)
    if pool is None:
        raise GraderError(
            "verifying HardVerify-Math needs a judge; set judge.url to an OpenAI-compatible endpoint, or name a scorer "
            "without a judge, as reward.scorers.*=prime"
        )
    marks = pool.marks([(row, answer, answer) for row, answer in answers])
    return [None if mark is None else mark >= config.judge.accept for mark in marks]


def load_pairs(source: str) -> list[AnswerPair]:
    """The rows of a ``.json`` file (one list), a ``.jsonl`` or ``.parquet`` file, or of ``hf:REPO:CONFIG:SPLIT``.

    Raises:
        DataError: there is no such file, or a row lacks a field; the message names the row (from 1) and the field.
    """
    path = Path(source)
    if source.startswith("hf:"):
        _, *parts = source.split(":")
        if len(parts) != 3 or not all(parts):
            raise DataError(f"{source}: expected hf:REPO:CONFIG:SPLIT")
        records = read(Origin(parts[0], parts[2], parts[1]), None)
    elif not path.is_file():
        raise DataError(
            f"{source}: no such file{hint(path)}; the published rows are benchmarks/HardVerify-Math.json of "
            "https://github.com/uw-nsl/TinyV"
        )
    else:
        records = read(Origin(HARD_VERIFY), path)
    pairs = [_pair(each) for each in records]
    if not pairs:
        raise DataError(f"{source}: no rows")
    return pairs


def _pair(record: Record) -> AnswerPair:
    each = Record(record.where, flattened(record.fields))
    names = ("source", "question", "ground_truth", "fn_output", "tn_output")
    source, question, truth, right, wrong = map(each.text, names)
    extra = {"question": question, "source": source}
    messages = ({"role": "user", "content": question},)
    name = f"{HARD_VERIFY}/{each.text('id', 'index')}"
    return AnswerPair(Row(name, messages, HARD_VERIFY, truth, extra, ability="math"), right, wrong)
