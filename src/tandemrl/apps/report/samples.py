"""Shows a few completions with their authors, always of the first problems, so that none is selected by hand."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from tandemrl.apps.report.records import ArmRecord, EvaluationRecord, RunRecord, Setting, natural, read_steps
from tandemrl.data.loading import load_rows
from tandemrl.data.messages import sound
from tandemrl.data.rows import DataError
from tandemrl.evals import authors_of, read_samples
from tandemrl.models.attention import ModelError
from tandemrl.models.loading import load_tokenizer
from tandemrl.training.authored import authored_spans
from tandemrl.types import Author

PROBLEMS = 2
"""How many problems are shown for each kind of evaluation, with the first sample of each."""
CHARACTERS = 3000
"""How many characters of a text are shown. The rest is left out and counted."""
TAIL = 4 << 20
"""How many bytes are read from the end of a ``samples.jsonl``, for the last step of a run."""
KINDS = {
    ("handoff", "senior_first"): "Handoff, senior first",
    ("handoff", "junior_first"): "Handoff, junior first",
    ("handoff", "senior_first_turns"): "Handoff by turns, senior first",
    ("handoff", "junior_first_turns"): "Handoff by turns, junior first",
    ("handoff", "senior_then_junior"): "The senior’s first turn, then the junior",
    ("tandem", "word"): "Tandem",
    ("tandem", "turn"): "Tandem by turns",
    ("pass-at-k", "solo"): "Solo",
    ("handover-effect", "solo"): "Handovers",
}
TRAINING = "Training, last step"


class Heat(NamedTuple):
    """A unit of a text, and how hard it is to follow it. place: where the next unit begins (``Sample.places``)."""

    text: str
    place: Mapping[str, Any] | None


class Shown(NamedTuple):
    """One completion as it is shown: a stored sample, and its text by author.

    ``spans`` are pairs (author, text). The author is None if it is unknown or the tokenizer could not be loaded, and
    CONTEXT for what the environment said between turns. ``tokens`` and ``senior_share`` (None if unknown) count the
    authors' own tokens, ``left_out`` the characters that are not shown. ``heat``: the units of a text in which the
    effects of handovers are known.
    """

    line: Mapping[str, Any]
    spans: list[tuple[Author | None, str]]
    tokens: int
    senior_share: float | None
    left_out: int
    heat: Sequence[Heat] = ()


class Problem(NamedTuple):
    """A problem, and what each arm wrote for it. ``question`` is "" if it could not be found."""

    example_id: str
    question: str
    shown: list[tuple[ArmRecord, Shown]]


class Gallery(NamedTuple):
    """Samples of one kind, problem by problem."""

    kind: str
    problems: list[Problem]


Say = Callable[[str], None]


def galleries(
    folder: Path, setting: Setting, say: Say, tokenizer: PreTrainedTokenizerBase | None = None
) -> list[Gallery]:
    """The first samples of every arm's first seed. For arms that were not evaluated they are training samples.

    Args:
        say: called with a sentence about anything that could not be shown properly, and why.
        tokenizer: the tokenizer of all models. None looks for each model's.

    Raises:
        EvalError, ReportError: a file of samples is damaged.
    """
    read = SampleReader(folder, say, tokenizer)
    by_kind: dict[str, dict[str, Problem]] = {}
    for arm in setting.arms:
        for kind, example, question, shown in read.arm(arm):
            problem = by_kind.setdefault(kind, {}).setdefault(example, Problem(example, question, []))
            problem.shown.append((arm, shown))
    return [Gallery(kind, [*by_kind[kind].values()]) for kind in [*KINDS.values(), TRAINING] if kind in by_kind]


class SampleReader:
    """Reads samples. It caches tokenizers and questions, and reports each problem once."""

    def __init__(self, folder: Path, say: Say, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._folder, self._tokenizer = folder, tokenizer
        self._say, self.decoder, self.questions = cache(say), cache(self._load_decoder), cache(self._load_questions)

    def arm(self, arm: ArmRecord) -> Iterator[tuple[str, str, str, Shown]]:
        """Yield (kind, example id, question, completion) for an arm's first seed."""
        shown = [each for each in arm.evaluations if any(each.phase == phase for phase, _ in KINDS)]
        first = min((each.seed for each in shown), key=natural, default=None)
        for each in shown:
            if each.seed == first:
                yield from self._evaluation(each)
        if not shown and arm.runs:
            yield from self._run(arm.runs[0])

    def _evaluation(self, evaluation: EvaluationRecord) -> Iterator[tuple[str, str, str, Shown]]:
        file, config = evaluation.file.with_name(str(evaluation.result["samples"])), evaluation.result["config"]
        if not file.is_file():
            self._say(f"{file} is missing, so its samples are not shown.")
            return
        model = str(config.get("model", ""))
        decode, questions = self.decoder(model, file.parent), self.questions(tuple(config.get("data") or ()))
        for sample in read_samples(file):
            kind = KINDS.get((evaluation.phase, sample.arm))
            if kind is None or sample.problem >= PROBLEMS or sample.sample != 0:
                continue
            author = None if sample.author is None else authors_of(sample.author)
            shown, text = _show(sample._asdict(), author, decode)
            if author is not None and decode is not None and text != sample.text:
                self._say(f"The tokenizer of {model} does not give the texts of {file}: authors not shown.")
                shown, _ = _show(sample._asdict(), author, None)
            elif decode is not None and sample.places:
                begins = [place["at"] for place in sample.places]
                parts = zip(begins, [*begins[1:], None], strict=True)
                units = zip([decode(sample.tokens[a:b]) for a, b in parts], [*sample.places[1:], None], strict=True)
                shown = shown._replace(heat=[Heat(*unit) for unit in units])
            yield kind, sample.example_id, questions.get(sample.example_id, ""), shown

    def _run(self, run: RunRecord) -> Iterator[tuple[str, str, str, Shown]]:
        file = run.folder / "samples.jsonl"
        if not file.is_file():
            return
        decode = self.decoder(str((run.config.get("model") or {}).get("senior", "")), run.folder)
        lines = [line for line in read_steps(file, TAIL) if line["index"] == 0]
        for line in [line for line in lines if line["step"] == lines[-1]["step"]][:PROBLEMS]:
            author = np.asarray(line["author"])
            first = int(np.argmax(author >= 0)) if (author >= 0).any() else len(author)
            question = decode(line["tokens"][:first]) if decode is not None and first else ""
            shown, _ = _show(line | {"tokens": line["tokens"][first:]}, author[first:], decode)
            yield TRAINING, line["example_id"], question, shown

    def _load_decoder(self, model: str, home: Path) -> Callable[[list[int]], str] | None:
        """The decoding function of the tokenizer that was asked for, or else of the first that is found: in the model's
        folder, in one of its name below the report's, or in ``hf/`` of the run that contains ``home``."""
        parts, found = Path(model).parts, self._tokenizer
        places = [Path(model), *(self._folder.joinpath(*parts[i:]) for i in range(1, len(parts)))]
        places += [export for run in (home, *home.parents) for export in sorted((run / "hf").glob("*"))]
        for place in places if model else ():
            if found is None and place.is_dir():
                with suppress(ModelError):
                    found = load_tokenizer(place)
        if found is not None:
            return lambda tokens: str(found.decode(tokens, skip_special_tokens=True))
        self._say(
            f"The tokenizer of {model or 'a model'} was not found, so its samples do not show who wrote what; name it: "
            "tandemrl report --tokenizer FOLDER."
        )
        return None

    def _load_questions(self, data: Sequence[str]) -> Mapping[str, str]:
        """The last user message of each example, by its id, for the sources that are available."""
        if not all(str(source).startswith("synthetic:") or Path(source).is_file() for source in data) or not data:
            return {}
        try:
            rows = load_rows(list(data), graded=False)
        except (DataError, OSError) as error:
            self._say(f"The problems' texts are not shown: {error}")
            return {}
        return {row.example_id: str(row.messages[-1]["content"]) for row in rows if row.messages}


def _show(
    line: Mapping[str, Any], author: np.ndarray | None, decode: Callable[[list[int]], str] | None
) -> tuple[Shown, str]:
    """A stored sample as it is shown, and the authors' own text by its tokens, with a line break between turns.

    Args:
        author: the author of each token of ``line["tokens"]``. None if it is unknown.
    """
    transcript = line.get("transcript") or {}
    written, said = _turns(transcript.get("messages") or ())
    turns: list[list[tuple[Author | None, str]]] = []
    if author is None or decode is None:
        turns = [[(None, text)] for text in written or [line["text"]]]
    else:
        start = 0
        for own, run in groupby(author >= 0):
            here = slice(start, start := start + len([*run]))
            tokens = list(line["tokens"][here])
            if own:
                turns.append([*authored_spans(tokens, author[here].tolist(), decode)])
            elif len(said) < len(turns):
                said.append(decode(tokens))
    whole: list[tuple[Author | None, str]] = []
    for turn, answer in zip_longest(turns, said[: len(turns)], fillvalue=""):
        whole += [*turn, *([(Author.CONTEXT, answer)] if answer else [])]
    spans, room = [], CHARACTERS
    for who, part in whole:
        spans += [(who, part[:room])] if part[:room] else []
        room -= len(part[:room])
    left_out = sum(len(part) for _, part in whole) - (CHARACTERS - room)
    own_text = "\n".join("".join(text for _, text in turn) for turn in turns)
    if author is None:
        return Shown(line, spans, line["length"], None, left_out), own_text
    by_senior = author[author >= 0]
    share = float(by_senior.mean()) if len(by_senior) else 0.0
    return Shown(line, spans, len(by_senior), share, left_out), own_text


def _turns(messages: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[str]]:
    """The turns of an episode as text, with their tool calls, and what the environment said after each."""
    written, said = list[str](), list[str]()
    for message in messages:
        text = str(sound(message.get("content") or ""))
        if message["role"] == "assistant":
            calls = [json.dumps(sound(call), ensure_ascii=False) for call in message.get("tool_calls") or ()]
            written.append("\n".join(filter(None, [text, *calls])))
            said.append("")
        elif said:
            said[-1] = "\n\n".join(filter(None, (said[-1], text)))
    return written, said
