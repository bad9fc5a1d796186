"""Finds and reads what runs and evaluations have written, and sorts it into settings, arms and seeds.

Any folder with ``metrics.jsonl`` is a run; any ``PHASE.json`` is an evaluation. Paths that differ only in a ``seed-N``
component belong to the same arm with different seeds. Of the other components, the last one names the arm, and those
before it name the setting (a pair, an experiment). ``eval`` components do not count, so that a run and its evaluations
belong together.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tandemrl.config.hints import hint
from tandemrl.config.written import free, read
from tandemrl.evals import PHASES, read_result
from tandemrl.evals.stats import Interval
from tandemrl.training.tracking import STOPPED

SEED = re.compile(r"seed-(\w+)")
NO_ENTRY = {"hf", "checkpoints", "wandb", "eval_texts"}
"""Folders of weights, back-ends and texts, which hold no results."""
BASE = "base"
"""The name of the model before training."""
FIRST_ARMS = (BASE, "grpo", "kl", "tandem")
"""The order of the arms that every experiment has; others follow by name."""
JUNIOR = "junior"
"""The name of the junior alone, beside the arms."""
Verdict = Literal["holds", "fails", "undecided", "not asked of one seed"]
"""The verdict on a claim. It is undecided if the interval contains the bar, and not asked if the claim is about several
seeds and there is only one."""


class ReportError(ValueError):
    """A file cannot be reported on. The message names it."""


class RunRecord(NamedTuple):
    """A training run. ``seed`` is that of its path, or "".

    ``stopped`` is the reason why it ended early, or "" if it did not, or was killed, or goes on.
    """

    folder: Path
    seed: str
    steps: list[dict[str, Any]]
    config: dict[str, Any]
    stopped: str = ""

    @property
    def unfinished(self) -> str:
        """How far a run has come that has not reached its last step, as "step 3 of 20"; "" if it has."""
        steps = (self.config.get("train") or {}).get("steps")
        done = self.steps[-1].get("step", 0) if self.steps else 0
        return f"step {done} of {steps}" if isinstance(steps, int) and done < steps else ""


class EvaluationRecord(NamedTuple):
    """A finished phase; ``result`` is the content of ``file``."""

    file: Path
    seed: str
    phase: str
    result: dict[str, Any]


@dataclass(slots=True)
class ArmRecord:
    """One way to train (or a model as it is), over its seeds. ``extra``: measures of ``results.json``, by seed."""

    name: str
    title: str
    runs: list[RunRecord] = field(default_factory=list)
    evaluations: list[EvaluationRecord] = field(default_factory=list)
    extra: dict[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def seeds(self) -> list[str]:
        """The seeds in numeric order, or [""] if paths name no seed."""
        return sorted({run.seed for run in self.runs} | {e.seed for e in self.evaluations}, key=natural)

    def phase(self, phase: str) -> dict[str, dict[str, Any]]:
        """The results of a phase, by seed."""
        results = sorted((e for e in self.evaluations if e.phase == phase), key=lambda e: natural(e.seed))
        return {each.seed: each.result for each in results}


class ContrastRecord(NamedTuple):
    """A paired difference between two arms, ``a`` - ``b``."""

    phase: str
    metric: str
    a: str
    b: str
    difference: Interval


class Claim(NamedTuple):
    """A statement with its bar, the values that are compared with it, and the verdict.

    values: one for each seed if the claim is about every seed; a single one if it is about the mean or the end of an
    interval; none if it is not asked.
    """

    claim: str
    bar: str
    values: tuple[float, ...]
    verdict: Verdict


@dataclass(slots=True)
class Setting:
    """Arms that are compared with each other; ``contrasts`` and ``claims`` are those of ``results.json``."""

    name: str
    arms: list[ArmRecord] = field(default_factory=list)
    contrasts: list[ContrastRecord] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)

    def arm(self, name: str) -> ArmRecord:
        """The arm of this name, which is added if there is none."""
        if all(arm.name != name for arm in self.arms):
            self.arms.append(ArmRecord(name, name))
        return next(arm for arm in self.arms if arm.name == name)


class Records(NamedTuple):
    """Everything found below a folder. ``experiment`` is the content of its ``experiment.json``, or {}."""

    folder: Path
    settings: list[Setting]
    experiment: dict[str, Any]


class _Settings(dict[tuple[str, ...], Setting]):
    """The settings by the path of their folders without seeds, each of which is there once it is asked for."""

    def __missing__(self, key: tuple[str, ...]) -> Setting:
        return self.setdefault(key, Setting("/".join(key)))

    def add_results(self, file: Path, key: tuple[str, ...]) -> dict[str, str]:
        """Add the content of a ``results.json``, and return the titles of its arms. ``key`` is its folder's."""
        content = _read_json(file)

        def setting(entry: Mapping[str, Any]) -> Setting:
            return self[(*key, str(entry["pair"])) if "pair" in entry else key]

        try:
            for entry in content.get("rows", []):
                measures = {k: v for k, v in entry.items() if k not in ("pair", "arm", "seed")}
                setting(entry).arm(str(entry["arm"])).extra[str(entry["seed"])] = measures
            for entry in content.get("contrasts", []):  # as of ``compare.to_json``, with the arms' names as A and B
                phase, metric, a, b = (str(entry[name]) for name in ("phase", "metric", "A", "B"))
                each = ContrastRecord(phase, metric, a, b, Interval(**entry["difference"]))
                setting(entry).contrasts.append(each)
            for entry in content.get("claims", []):
                claim = Claim(entry["claim"], entry["bar"], tuple(entry["values"]), entry["verdict"])
                setting(entry).claims.append(claim)
        except (KeyError, TypeError) as error:
            raise ReportError(f"{file}: not the results of an experiment: {error!r} in {entry!r:.200}") from None
        return _titles(content.get("experiment") or {})

    def ordered(self, titles: Mapping[str, str]) -> list[Setting]:
        """The settings that have arms, with arms and runs in order, and all titles."""
        for setting in self.values():
            setting.arms.sort(key=lambda arm: _rank(arm.name))
            for arm in setting.arms:
                arm.title = titles.get(arm.name, arm.name)
                arm.runs.sort(key=lambda run: natural(run.seed))
        return sorted((each for each in self.values() if each.arms), key=lambda each: natural(each.name))


def with_junior(arms: Sequence[ArmRecord]) -> list[ArmRecord]:
    """The arms, and each junior alone as a further one, from the first arm that was evaluated with it."""
    juniors: dict[str, ArmRecord] = {}
    for arm in arms:
        if own := [each for each in arm.evaluations if each.phase == "junior"]:
            parts = [each._replace(phase=phase) for each in own for phase in ("pass-at-k", "legibility")]
            known = str([each.result["config"].get("digests") or each.result["config"]["model"] for each in own])
            juniors.setdefault(known, ArmRecord(JUNIOR, f"junior alone ({arm.title})", evaluations=parts))
    if len(juniors) == 1:
        next(iter(juniors.values())).title = "junior alone"
    return [*arms, *juniors.values()]


def natural(text: str) -> str:
    """A sort key under which ``seed 10`` follows ``seed 9``."""
    return re.sub(r"\d+", lambda number: number[0].zfill(9), text)


def discover(folder: str | Path) -> Records:
    """Find and read every run and evaluation below a folder.

    Raises:
        EvalError, ReportError: there is none, a file cannot be read, or two files are of the same arm and seed.
    """
    root = Path(folder)
    if not root.is_dir():
        raise ReportError(f"{root}: no such folder{hint(root) or '; name one with runs or evaluations'}")
    settings, titles, places = _Settings(), dict[str, str](), dict[tuple[object, ...], Path]()
    for path in _files(root):
        parts = path.parent.relative_to(root).parts
        if path.name == "results.json":
            titles |= settings.add_results(path, parts)
            continue
        key, seed = _place(parts, root)
        key = key if path.name == "metrics.jsonl" or path.stem in PHASES else (*key, path.stem)
        arm = settings[key[:-1]].arm(key[-1])
        if path.name == "metrics.jsonl":
            what = "run"
            arm.runs.append(_read_run(path, seed))
        else:
            result = read_result(path)
            what = str(result["phase"])
            arm.evaluations.append(EvaluationRecord(path, seed, what, result))
        if (first := places.setdefault((key, seed, what), path)) is not path:
            raise ReportError(f"{first} and {path} are the same arm and seed; move one of them elsewhere")
    if not places:
        raise ReportError(f"{root}: no run (metrics.jsonl) and no evaluation (PHASE.json) below it")
    experiment = _read_json(root / "experiment.json") if (root / "experiment.json").is_file() else {}
    for setting in settings.values():
        setting.arms = [arm for arm in setting.arms if arm.runs or arm.evaluations]
    return Records(root, settings.ordered(titles | _titles(experiment)), experiment)


def read_results(file: str | Path) -> list[Setting]:
    """The settings of a single ``results.json``: arms with the measures of each seed, contrasts and claims.

    Raises:
        ReportError: the file cannot be read; the message names the entry.
    """
    settings = _Settings()
    return settings.ordered(settings.add_results(Path(file), ()))


def _read_run(file: Path, seed: str) -> RunRecord:
    stopped = file.with_name(STOPPED)
    reason = str(_read_json(stopped).get("reason", "")) if stopped.is_file() else ""
    return RunRecord(file.parent, seed, read_steps(file), read_config(file.parent), reason)


def read_steps(file: Path, last: int | None = None) -> list[dict[str, Any]]:
    """The lines of a ``metrics.jsonl`` or ``samples.jsonl``, without an incomplete last line, as in a run in progress.

    Args:
        last: how many bytes are read from the end. None means the whole file.

    Raises:
        ReportError: a complete line is not JSON.
    """
    with open(file, "rb") as content:
        size = content.seek(0, os.SEEK_END)
        content.seek(max(0, size - (last or size)))
        lines = content.read().split(b"\n")[:-1]
    try:
        return [json.loads(line) for line in lines[last is not None and size > last :] if line.strip()]
    except ValueError as error:
        raise ReportError(f"{file}: not readable as JSON lines: {error}") from None


def read_config(folder: Path) -> dict[str, Any]:
    """The ``config.yaml`` of a run as nested plain values, or {} if there is none.

    Raises:
        ConfigError: the file is not YAML.
    """
    file = folder / "config.yaml"
    content = free(read(file.read_bytes(), str(file))) if file.is_file() else {}
    return {str(key): value for key, value in content.items()} if isinstance(content, dict) else {}


def _files(root: Path) -> Iterator[Path]:
    """Yield the records below a folder in a fixed order, without those in hidden folders and among weights."""
    for here, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in NO_ENTRY and not name.startswith("."))
        for name in sorted(names):
            stem, suffix = os.path.splitext(name)
            evaluation = suffix == ".json" and (stem in PHASES or f"{stem}.samples.jsonl" in names)
            if evaluation or name in ("metrics.jsonl", "results.json"):
                yield Path(here, name)


def _place(parts: Sequence[str], root: Path) -> tuple[tuple[str, ...], str]:
    """The setting and arm as one tuple, and the seed, of a folder whose path is relative to the report's folder."""
    seeds = [match.group(1) for part in parts if (match := SEED.fullmatch(part))]
    key = tuple(part for part in parts if part != "eval" and not SEED.fullmatch(part))
    return key or (root.resolve().name,), "/".join(seeds)


def _rank(name: str) -> tuple[int, str]:
    return (FIRST_ARMS.index(name), "") if name in FIRST_ARMS else (len(FIRST_ARMS), natural(name))


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ReportError(f"{file}: not readable as JSON: {error}") from None
    if not isinstance(content, dict):
        raise ReportError(f"{file}: expected a JSON object")
    return content


def _titles(experiment: Mapping[str, Any]) -> dict[str, str]:
    """The titles of arms by their names, as far as the experiment gives them."""
    arms = experiment.get("arms") or []
    titles = {arm["name"]: arm["title"] for arm in arms if isinstance(arm, dict) and arm.get("title")}
    return {BASE: "before training", JUNIOR: "junior alone"} | titles if titles else {}
