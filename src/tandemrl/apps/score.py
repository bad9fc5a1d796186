"""Scores a file of stored responses, a batch at a time."""

import json
import time
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from tandemrl.config import Config
from tandemrl.data.loading import load_rows
from tandemrl.data.messages import Response, Transcript
from tandemrl.data.responses import read_responses
from tandemrl.data.rows import DataError, Row
from tandemrl.rewards.functions import means_of
from tandemrl.rewards.protocol import GraderError
from tandemrl.rewards.scoring import Scorer
from tandemrl.rewards.services import code_scorer, judges

BATCH = 1000
"""How many responses are in memory at once."""


class Summary(NamedTuple):
    """The result of `score_file`.

    ``by_set`` holds for each ``data_source`` the number of ``responses``, and the means of ``score`` and of the parts.
    Responses to which a judge gave no score are no part of the means, as in training; ``unscored`` is their share.
    """

    by_set: dict[str, dict[str, float]]
    responses: int
    seconds: float


def score_file(
    config: Config,
    data: Sequence[str],
    responses: Path,
    *,
    out: Path | None = None,
    batch: int = BATCH,
    stated: Collection[str] | None = None,
) -> Summary:
    """Score a JSONL file of responses to the rows of ``data``.

    Args:
        data: the sources of the rows, as in ``data.train``.
        responses: a JSONL file (`read_responses`). A line may have more, as in ``samples.jsonl``: the ``transcript`` of
            an episode, the text
            without special tokens (``plain``), what the chat template wrote of it (``opened``), ``tokens`` with their
            ``author`` or ``completion_ids``; lines of other steps or groups are not compared with each other.
        out: a JSONL file to write, with one line per response in the same order: ``example_id``, ``score``, ``parts``,
            ``answer``, and ``logged`` if reward functions logged something about it. Its name ends in ``.part`` until
            everything is scored.
        batch: how many responses are scored at once; all of them, if a function gets all to a prompt together.
        stated: dotted keys of ``reward.*`` that must be used for this data. None means all (see ``check_rewards``).

    Raises:
        ConfigError: a pattern of ``reward.scorers`` or a name in ``reward.weights`` is not used.
        DataError: a file cannot be read, a line is malformed or belongs to no row, or a row cannot be scored.
        GraderError: a scorer, a sandbox or a judge is missing or fails.
    """
    if out is not None and out.resolve() in [Path(each).resolve() for each in (str(responses), *data)]:
        raise DataError(f"{out} is what is read: write the scores into another file")
    rows = load_rows(data, columns=config.data.columns)
    parts: dict[str, list[Mapping[str, float]]] = {}
    begin = time.perf_counter()
    with ExitStack() as stack:
        scorer = stack.enter_context(Scorer(config.reward, code=code_scorer(config), judge=judges(config)))
        scorer.check(rows, episodes=True, stated=stated)  # whether there are transcripts, each line says
        file = None
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            part = out.with_name(f"{out.name}.part")
            # Half of a surrogate pair, which UTF-8 cannot hold, becomes JSON's escape of it.
            file = stack.enter_context(open(part, "w", encoding="utf-8", errors="backslashreplace"))
        grouped = any(term.grouped for row in rows for term in scorer.terms_of(row))
        lines = _lines(rows, responses, grouped=grouped)
        while read := [*islice(lines, None if grouped else batch)]:
            answers, transcripts, groups = zip(*read, strict=True)
            graded = scorer.graded(answers, transcripts, groups=groups)
            for (row, _), (score, _, extra, _) in zip(answers, graded, strict=True):
                parts.setdefault(row.data_source, []).append({"score": score.value, **score.parts})
                shown = {"example_id": row.example_id, "score": score.value, "parts": score.parts}
                shown |= {"answer": score.answer} | ({"logged": extra} if extra else {})
                if file is not None:
                    file.write(json.dumps(shown, ensure_ascii=False) + "\n")
    if not parts:
        raise DataError(f"{responses}: no responses")
    if out is not None:
        part.replace(out)
    count = sum(map(len, parts.values()))
    return Summary({source: means(each) for source, each in parts.items()}, count, time.perf_counter() - begin)


def means(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The means over the scores and parts of responses, without those that a judge gave no score."""
    scored = [each for each in parts if not each.get("unscored")]
    unscored = 1 - len(scored) / len(parts)
    return {"responses": len(parts), **means_of(scored)} | ({"unscored": unscored} if unscored else {})


def own_answers(config: Config, rows: Iterable[Row]) -> dict[str, str]:
    """What the graders of the first row of each data source give for its ground truth, in words (`Scorer.tried`)."""
    found: dict[str, str] = {}
    with Scorer(config.reward, code=code_scorer(config)) as scorer:
        for row in rows:
            if row.data_source not in found:
                try:
                    found[row.data_source] = "; ".join(each.words for each in scorer.tried(row))
                except (DataError, GraderError) as error:
                    found[row.data_source] = str(error)
    return found


def _lines(
    rows: Sequence[Row], responses: Path, *, grouped: bool
) -> Iterator[tuple[tuple[Row, Response], Transcript | None, Hashable]]:
    """Yield what every line of the file says, in order: a response to a row, its transcript, and what is equal for
    responses to one prompt.

    Args:
        grouped: whether responses to one prompt are scored together.
    """
    count, unnamed = 0, False
    for where, number, text, record in read_responses(responses, rows):
        row, count = rows[number], count + 1
        unnamed = not any(record.get(key) is not None for key in ("example_id", "index"))
        place = [record.get(key) for key in ("source", "step", "group", "arm")]
        group = json.dumps([row.data_source, row.ability, row.messages, row.ground_truth, *place]) if grouped else None
        try:
            told = record.get("transcript")
            line = (row, _response(text, record)), None if told is None else Transcript.from_json(told), group
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{where}: {error}") from None
        yield line
    if unnamed and count != len(rows):
        raise DataError(
            f"{responses}: {count} responses without example_id or index, for {len(rows)} rows; name the row of each"
        )


def _response(text: str, record: Mapping[str, Any]) -> Response:
    """The response of a line, with the token ids after the prompt: ``completion_ids``, or those of a training sample or
    of one of an evaluation."""
    ids, author = record.get("completion_ids"), record.get("author")
    if ids is None and author is not None and record.get("tokens") is not None:
        context = 0 if isinstance(author, str) else next((i for i, who in enumerate(author) if who >= 0), len(author))
        ids = record["tokens"][context:]
    plain = record.get("plain")
    own = None if ids is None else tuple(map(int, ids))
    return Response(text, text if plain is None else str(plain), str(record.get("opened") or ""), own)
