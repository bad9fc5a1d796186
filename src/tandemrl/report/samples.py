"""A few completions as they were written, with their authors: always the first problems, so that nothing is picked."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from tandemrl.data.loading import load_rows
from tandemrl.data.rows import DataError
from tandemrl.files import LineError, read_json_lines
from tandemrl.models.attention import ModelError
from tandemrl.models.loading import load_tokenizer
from tandemrl.report.records import ArmRecord, EvaluationRecord, Records, ReportError, RunRecord, Setting, natural
from tandemrl.training.tracking import authored_spans
from tandemrl.types import Author

PROBLEMS = 2
"""Problems shown per kind of evaluation; the first sample of each."""
CHARACTERS = 3000
"""Of a text; the rest is left out, and counted."""
TAIL = 4 << 20
"""Bytes read from the end of a ``samples.jsonl``, for the last step of a run."""
KINDS = {
    ("handoff", "senior_first"): "Handoff, senior first",
    ("handoff", "junior_first"): "Handoff, junior first",
    ("tandem", "word"): "Tandem",
    ("pass-at-k", "solo"): "Solo",
}
TRAINING = "Training, last step"


class Shown(NamedTuple):
    """One completion. ``spans``: (author, text), one without an author where the tokenizer could not be loaded.

    correct is None where nothing was graded, reward None but for training samples. ``left_out``: characters.
    """

    spans: list[tuple[Author | None, str]]
    correct: bool | None
    reward: float | None
    tokens: int
    senior_share: float
    stop_reason: str
    left_out: int


class Problem(NamedTuple):
    """A problem, and what each arm wrote for it. ``question`` is "" where it could not be found."""

    example_id: str
    question: str
    shown: list[tuple[ArmRecord, Shown]]


class Gallery(NamedTuple):
    """Samples of one kind, problem by problem."""

    kind: str
    problems: list[Problem]


Say = Callable[[str], None]


def galleries(
    records: Records, setting: Setting, say: Say, tokenizer: PreTrainedTokenizerBase | None = None
) -> list[Gallery]:
    """The first samples of every arm's first seed; training samples of arms that were not evaluated.

    Args:
        say: told what could not be shown as it should, and why.
        tokenizer: of all models; None = each is looked for below the records' folder, and nowhere else.

    Raises:
        ReportError: a file of samples is damaged.
    """
    read = _Reader(records.folder, say, tokenizer)
    by_kind: dict[str, dict[str, list[tuple[ArmRecord, str, Shown]]]] = {}
    for arm in setting.arms:
        for kind, example, question, shown in read.arm(arm):
            by_kind.setdefault(kind, {}).setdefault(example, []).append((arm, question, shown))
    return [
        Gallery(
            kind,
            [
                Problem(example, next((q for _, q, _ in entries if q), ""), [(arm, shown) for arm, _, shown in entries])
                for example, entries in by_kind[kind].items()
            ],
        )
        for kind in [*KINDS.values(), TRAINING]
        if kind in by_kind
    ]


def expand(runs: str) -> list[int]:
    """Authors from run lengths: the inverse of ``evals.author_runs``.

    Raises:
        ValueError: not run lengths.

    Example:
        >>> expand("S2J1")
        [1, 1, 0]
    """
    if not re.fullmatch(r"([SJ]\d+)*", runs):
        raise ValueError(f"author {runs!r}: expected run lengths such as 'S12J5'")
    return list(chain.from_iterable([int(who == "S")] * int(n) for who, n in re.findall(r"([SJ])(\d+)", runs)))


class _Reader:
    """Reads samples; remembers tokenizers and questions, and says each trouble once."""

    def __init__(self, folder: Path, say: Say, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._folder = folder
        self._tokenizer = tokenizer
        self._say = cache(say)
        self._decoder = cache(self._load_decoder)
        self._questions = cache(self._load_questions)

    def arm(self, arm: ArmRecord) -> Iterator[tuple[str, str, str, Shown]]:
        """(kind, example id, question, completion) of an arm's first seed."""
        seeds = sorted({e.seed for e in arm.evaluations if any(e.phase == p for p, _ in KINDS)}, key=natural)
        if seeds:
            for each in arm.evaluations:
                if each.seed == seeds[0] and any(each.phase == phase for phase, _ in KINDS):
                    yield from self._evaluation(each)
        elif arm.runs:
            yield from self._run(arm.runs[0])

    def _evaluation(self, evaluation: EvaluationRecord) -> Iterator[tuple[str, str, str, Shown]]:
        file = evaluation.file.with_name(str(evaluation.result["samples"]))
        if not file.is_file():
            self._say(f"{file} is missing, so its samples are not shown.")
            return
        config = evaluation.result["config"]
        decode = self._decoder(str(config.get("model", "")), file.parent)
        for number, line in _lines(file):
            try:
                kind = KINDS.get((evaluation.phase, line["arm"]))
                if kind is None or line["problem"] >= PROBLEMS or line["sample"] != 0:
                    continue
                author = expand(line["author"])
                if len(author) != len(line["tokens"]):
                    raise ValueError(f"{len(line['tokens'])} tokens have {len(author)} authors")
                shown = _show(
                    line["tokens"], author, line["text"], decode, line["stop_reason"], correct=line["correct"]
                )
                if decode is not None and not shown.left_out and "".join(t for _, t in shown.spans) != line["text"]:
                    self._say(
                        f"The tokenizer of {config['model']} does not give the texts of {file}: authors not shown."
                    )
                    shown = _show(
                        line["tokens"], author, line["text"], None, line["stop_reason"], correct=line["correct"]
                    )
                question = self._questions(tuple(config.get("data") or ())).get(line["example_id"], "")
                yield kind, line["example_id"], question, shown
            except (KeyError, TypeError, ValueError) as error:
                raise ReportError(f"{file}: line {number} is not an evaluation sample: {error}") from None

    def _run(self, run: RunRecord) -> Iterator[tuple[str, str, str, Shown]]:
        file = run.folder / "samples.jsonl"
        if not file.is_file():
            return
        decode = self._decoder(str((run.config.get("model") or {}).get("senior", "")), run.folder)
        try:
            lines = [line for line in _tail(file) if line["index"] == 0]
            last = max((line["step"] for line in lines), default=0)
            for line in [line for line in lines if line["step"] == last][:PROBLEMS]:
                pairs = [(t, a) for t, a in zip(line["tokens"], line["author"], strict=True) if a >= 0]
                tokens, author = [t for t, _ in pairs], [a for _, a in pairs]
                first = len(line["author"]) - len(pairs) if line["turns"] == 1 else 0
                question = decode(line["tokens"][:first]) if decode is not None and first else ""
                shown = _show(tokens, author, line["text"], decode, line["stop_reason"], reward=line["reward"])
                yield TRAINING, line["example_id"], question, shown
        except (KeyError, TypeError, ValueError) as error:
            raise ReportError(f"{file}: not a line of training samples: {error}") from None

    def _load_decoder(self, model: str, home: Path) -> Callable[[list[int]], str] | None:
        """Tokens to text, by the tokenizer that was asked for, or else by the first one that the folder has."""
        places = [] if self._tokenizer is not None else self._places(model, home)
        tokenizer = self._tokenizer
        for place in places:
            try:
                tokenizer = load_tokenizer(place)
                break
            except ModelError:
                continue
        if tokenizer is not None:
            return lambda tokens: str(tokenizer.decode(tokens, skip_special_tokens=True))
        self._say(
            f"The tokenizer of {model or 'a model'} is not below {self._folder}, so its samples do not show who wrote "
            "what; name it: tandemrl report --tokenizer FOLDER."
        )
        return None

    def _places(self, model: str, home: Path) -> list[Path]:
        """Where a model's tokenizer may be: at the end of the model's path, and in the ``hf/`` of the run that ``home``
        is in. The path comes out of a file that may be anybody's, so only folders inside of the report's count."""
        parts, top = Path(model).parts, self._folder.resolve()
        ends = [self._folder.joinpath(*parts[i:]) for i in range(len(parts))]
        runs = [folder for folder in (home, *home.parents) if folder.resolve().is_relative_to(top)]
        exports = [export for run in runs for export in (run / "hf" / "best", *sorted((run / "hf").glob("step_*")))]
        return [each for each in (*ends, *exports) if each.is_dir() and each.resolve().is_relative_to(top)]

    def _load_questions(self, data: Sequence[str]) -> Mapping[str, str]:
        """Example id -> the last message of the user, for sources that are at hand."""
        if not all(str(source).startswith("synthetic:") or Path(source).is_file() for source in data) or not data:
            return {}
        try:
            rows = load_rows(list(data))
        except (DataError, OSError) as error:
            self._say(f"The problems' texts are not shown: {error}")
            return {}
        return {row.example_id: str(row.messages[-1]["content"]) for row in rows if row.messages}


def _show(
    tokens: Sequence[int],
    author: Sequence[int],
    text: str,
    decode: Callable[[list[int]], str] | None,
    stop_reason: str,
    *,
    correct: bool | None = None,
    reward: float | None = None,
) -> Shown:
    whole: list[tuple[Author | None, str]] = [(None, text)]
    if decode is not None:
        whole = list(authored_spans(tokens, author, decode))
    spans, room = [], CHARACTERS
    for who, part in whole:
        if part[:room]:
            spans.append((who, part[:room]))
        room -= len(part[:room])
    left_out = sum(len(part) for _, part in whole) - (CHARACTERS - room)
    share = sum(author) / len(author) if len(author) else 0.0
    return Shown(spans, correct, reward, len(tokens), share, stop_reason, left_out)


def _lines(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        yield from read_json_lines(file)
    except LineError as error:
        raise ReportError(f"{file}: line {error.line} is not JSON: {error}") from None


def _tail(file: Path) -> Iterator[dict[str, Any]]:
    """The last complete lines of a file; a torn last one is left out."""
    with open(file, "rb") as content:
        size = content.seek(0, 2)
        content.seek(max(0, size - TAIL))
        lines = content.read().split(b"\n")
    for line in lines[1 if size > TAIL else 0 : -1]:
        if line.strip():
            yield json.loads(line)
