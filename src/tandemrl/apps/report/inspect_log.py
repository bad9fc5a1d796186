"""Writes the samples of runs and evaluations as log files of Inspect, so that ``inspect view`` opens them.

A step of a run becomes a log, and so does an arm of an evaluation (of a reader, each condition). A sample has the
messages, the calls of tools and
the scores; each message of the assistant says in its metadata who wrote which part (``spans``).
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from tandemrl.apps.report.records import ReportError, discover
from tandemrl.apps.report.samples import SampleReader
from tandemrl.config.hints import pip_install
from tandemrl.data.messages import sound
from tandemrl.evals import authors_of, read_samples
from tandemrl.evals.measures import author_runs
from tandemrl.training.authored import authored_spans
from tandemrl.types import Author

SHOWN = {
    *("text", "plain", "transcript", "question", "score", "parts", "reward", "reward_parts", "correct", "answer"),
    *("tokens", "behaviour_logprobs", "handover_logprobs"),
}
"""Fields of a line that a log shows elsewhere, and those that are too long for one."""
STOPS: Mapping[str, Any] = {"eos": "stop", "stop": "stop", "length": "max_tokens"}
"""Inspect's words for why a text ended."""
Decode = Callable[[list[int]], str] | None


def export_inspect(
    folder: Path, out: Path | None = None, *, tokenizer: Any = None, say: Callable[[str], None] = print
) -> list[Path]:
    """Write the logs of all runs and evaluations below a folder, and return their paths.

    Args:
        out: the folder of the logs. None means ``inspect`` in the folder.
        tokenizer: the tokenizer of all models. None looks for each model's.
        say: called with a sentence about anything that could not be shown, and why.

    Raises:
        ReportError: inspect-ai is missing, there is nothing to export, or a file is damaged.
    """
    try:
        from inspect_ai.log import write_eval_log
    except ImportError:
        raise ReportError(f"inspect-ai is not installed: {pip_install('inspect')}") from None
    read, written, out = SampleReader(folder, say, tokenizer), [], out or folder / "inspect"
    out.mkdir(parents=True, exist_ok=True)
    for name, model, decode, lines in _logs(folder, read):
        path = out / f"{name}.eval"
        write_eval_log(_log(name, model, [_sample(line, decode) for line in lines]), path)
        written.append(path)
    if not written:
        raise ReportError(f"{folder}: its runs and evaluations have no samples")
    return written


def _logs(folder: Path, read: SampleReader) -> Iterator[tuple[str, str, Decode, list[dict[str, Any]]]]:
    """Yield (name, model, decoder, lines) of each log."""

    def name_of(place: Path, *more: str) -> str:
        return "-".join((*place.relative_to(folder).parts, *more))

    for arm in (arm for setting in discover(folder).settings for arm in setting.arms):
        for run in arm.runs:
            file, model = run.folder / "samples.jsonl", str((run.config.get("model") or {}).get("senior", ""))
            decode = read.decoder(model, run.folder)
            try:
                with open(file if file.is_file() else os.devnull, encoding="utf-8") as found:
                    whole = (json.loads(line) for line in found if line.endswith("\n"))  # a run may go on
                    for step, some in groupby(whole, lambda line: line["step"]):
                        yield name_of(run.folder, f"step_{step:06}"), model, decode, [*map(_of_run(decode), some)]
            except (ValueError, KeyError, TypeError) as error:
                raise ReportError(f"{file}: a line is no rollout: {error!r}") from None
        for each in arm.evaluations:
            file, config = each.file.with_name(str(each.result["samples"])), each.result["config"]
            if not file.is_file():
                continue
            model, questions = str(config.get("model", "")), read.questions(tuple(config.get("data") or ()))
            decode, samples = read.decoder(model, file.parent), read_samples(file)
            for role, given in dict.fromkeys((sample.arm, sample.given) for sample in samples):
                own = [sample for sample in samples if (sample.arm, sample.given) == (role, given)]
                lines = [sample._asdict() | {"question": questions.get(sample.example_id, "")} for sample in own]
                more = (role, *([] if given is None else [given.replace("/", "-")]))
                yield name_of(file.parent, each.phase, *more), model, decode, lines


def _of_run(decode: Decode) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Makes a line of a run like one of an evaluation, without the prompt among its tokens."""

    def line_of(line: dict[str, Any]) -> dict[str, Any]:
        author = np.asarray(line["author"], dtype=np.int8)
        first = int(np.argmax(author >= 0)) if (author >= 0).any() else len(author)
        own = {"tokens": line["tokens"][first:], "author": author_runs(author[first:]), "sample": line["index"]}
        own["question"] = decode(line["tokens"][:first]) if decode is not None and first else ""
        scored = not line["reward_parts"].get("unscored")
        return line | own | {"score": line["reward"] if scored else None, "parts": line["reward_parts"]}

    return line_of


def _sample(line: Mapping[str, Any], decode: Decode) -> Any:
    """A sample of a log. Its number among those of its problem is the epoch."""
    from inspect_ai.log import EvalSample
    from inspect_ai.model import ModelOutput
    from inspect_ai.scorer import Score

    line, told = sound(dict(line)), sound(line.get("transcript") or {})
    values = {"score": line["score"], "correct": line.get("correct"), **(line.get("parts") or {})}
    given = {} if line["score"] is None else {name: value for name, value in values.items() if value is not None}
    place = f"{line['group']}/{line['example_id']}" if "step" in line else line["example_id"]
    more = {name: value for name, value in line.items() if name not in SHOWN and value is not None}
    return EvalSample(
        id=place,
        epoch=line["sample"] + 1,
        input=line["question"],
        target="",
        messages=_chat(line, told.get("messages") or [{"role": "assistant", "content": line["text"]}], decode),
        output=ModelOutput.from_content("", line["text"], STOPS.get(line["stop_reason"], "unknown")),
        scores={name: Score(value=float(value), answer=line.get("answer")) for name, value in given.items()},
        metadata=more | {name: told[name] for name in ("state", "counts") if told.get(name)},
    )


def _chat(line: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], decode: Decode) -> list[Any]:
    """The messages of a sample, those of the assistant with their spans by author."""
    from inspect_ai import model
    from inspect_ai.tool import ToolCall

    kinds = {name: getattr(model, f"ChatMessage{name.title()}") for name in ("user", "assistant", "system", "tool")}
    turns = iter(_spans(line, decode, sum(each["role"] == "assistant" for each in messages)))
    chat, open_calls, count = [kinds["user"](content=line["question"], source="input")], list[str](), 0
    for each in messages:
        role, fields = each["role"], dict[str, Any](content=str(each.get("content") or ""))
        if role == "assistant":
            called = []
            for call in each.get("tool_calls") or ():
                count, function = count + 1, call.get("function", call)
                given = function.get("arguments")
                arguments = given if isinstance(given, dict) else {"arguments": given}
                called.append(ToolCall(id=f"call_{count}", function=str(function.get("name")), arguments=arguments))
            open_calls = [call.id for call in called]
            rest = {name: value for name, value in each.items() if name not in ("role", "content", "tool_calls")}
            fields |= {"tool_calls": called or None, "source": "generate", "metadata": rest | {"spans": next(turns)}}
        elif role == "tool":
            fields |= {"function": each.get("name"), "tool_call_id": open_calls.pop(0) if open_calls else None}
        chat.append(kinds.get(role, kinds["user"])(**fields))
    return chat


def _spans(line: Mapping[str, Any], decode: Decode, turns: int) -> list[list[list[str]]]:
    """Who wrote what in each turn, as pairs (author, text); nothing where that is not known."""
    spans, start = list[list[list[str]]](), 0
    if decode is None or line["author"] is None:
        return [[] for _ in range(turns)]
    author = authors_of(line["author"])
    for own, run in groupby(author >= 0):
        here = slice(start, start := start + len([*run]))
        if own:
            found = authored_spans(line["tokens"][here], author[here].tolist(), decode)
            spans.append([[Author(who).name.lower(), text] for who, text in found])
    return spans if len(spans) == turns else [[] for _ in range(turns)]


def _log(name: str, model: str, samples: Sequence[Any]) -> Any:
    """A log with the mean of each score."""
    from inspect_ai.log import EvalConfig, EvalDataset, EvalLog, EvalMetric, EvalResults, EvalScore, EvalSpec

    means = []
    for score in dict.fromkeys(score for sample in samples for score in sample.scores):
        values = [sample.scores[score].value for sample in samples if score in sample.scores]
        mean = EvalMetric(name="mean", value=sum(values) / len(values))
        counts = {"scored_samples": len(values), "unscored_samples": len(samples) - len(values)}
        means.append(EvalScore(name=score, scorer=score, metrics={"mean": mean}, **counts))
    ids = [*dict.fromkeys(sample.id for sample in samples)]
    spec = EvalSpec(
        created=datetime.now(UTC).isoformat(),
        task=name,
        model=model or "unknown",
        dataset=EvalDataset(samples=len(ids), sample_ids=ids),
        config=EvalConfig(epochs=max(sample.epoch for sample in samples)),
    )
    results = EvalResults(total_samples=len(samples), completed_samples=len(samples), scores=means)
    return EvalLog(status="success", eval=spec, results=results, samples=[*samples])
