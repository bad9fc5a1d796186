"""Evaluation results on disk: ``PHASE.json`` and ``PHASE.samples.jsonl``. If the result file exists, the phase is
finished."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from tandemrl.config.plain import flatten
from tandemrl.evals.measures import EvalError, Sample
from tandemrl.files import LineError, read_json_lines, versions, write_text

SCHEMA = 1
EVAL_TEXTS = "eval_texts"
"""The folder of a run with the samples of each evaluation during training. Lines of
``step_N.jsonl`` begin with the field ``source``, which is ``eval`` or ``monitor``."""


@dataclass(frozen=True, slots=True)
class EvalResult:
    """The metrics and samples of a phase.

    ``metrics`` are those of the result file: ``{"macro": {name: value}, "by_set": {set: {name: value}}}``.
    """

    metrics: dict[str, Any]
    samples: list[Sample]


def result_file(phase: str, out: Path) -> Path:
    """``out`` if it names a ``.json`` file, else ``out/PHASE.json``."""
    return Path(out) if Path(out).suffix == ".json" else Path(out) / f"{phase}.json"


def finished_result(file: Path, phase: str, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The result in ``file``, which must be of this phase with this configuration; None if there is no file.

    Raises:
        EvalError: the file holds something else; the message names the first differences.
    """
    if not file.exists():
        return None
    stored = read_result(file)
    if stored["phase"] != phase:
        raise EvalError(f"{file} holds the phase {stored['phase']}, not {phase}; choose another --out")
    if changed := differences(stored["config"], config):
        told = [each for each in changed if not each[0].startswith("digests.")] or changed  # which follow the others
        listed = "; ".join(f"{key}: {before!r} there, {now!r} now" for key, before, now in told[:3])
        raise EvalError(
            f"{file} holds this phase with another configuration ({listed}); delete it or choose another --out"
        )
    return stored


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """The differences of two nested mappings, as (dotted key, value in a, value in b). None stands for a missing key.

    Examples:
        >>> differences({"eval": {"seed": 1, "k": [1]}}, {"eval": {"seed": 2, "k": [1]}})
        [('eval.seed', 1, 2)]
    """
    flat_a, flat_b = flatten(a), flatten(b)
    keys = dict.fromkeys([*flat_a, *flat_b])
    return [(key, flat_a.get(key), flat_b.get(key)) for key in keys if flat_a.get(key) != flat_b.get(key)]


def read_result(file: Path) -> dict[str, Any]:
    """Read a stored result.

    Raises:
        EvalError: the file is not an evaluation result of this schema.
    """
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EvalError(f"{file}: not readable as an evaluation result ({error}); delete it and run again") from None
    needed = {"phase", "config", "metrics", "samples"}
    if not isinstance(stored, dict) or stored.get("schema") != SCHEMA or not needed <= stored.keys():
        raise EvalError(f"{file}: not an evaluation result of schema {SCHEMA}; choose another --out")
    return dict(stored)


def write_result(
    file: Path,
    phase: str,
    config: Mapping[str, Any],
    result: EvalResult,
    *,
    seeds: Mapping[str, int],
    about: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Write the samples, then the result that names their file, each atomically.

    Args:
        about: what the result file says beside.

    Raises:
        EvalError: a number is not finite. Nothing is written then.
    """
    samples = file.with_suffix(".samples.jsonl")
    stored = {
        "schema": SCHEMA,
        "phase": phase,
        "config": config,
        "versions": versions() | {"numpy": np.__version__, "math-verify": metadata.version("math-verify")},
        "seeds": seeds,
        "metrics": result.metrics,
        "samples": samples.name,
        **(about or {}),
    }
    try:
        text = json.dumps(stored, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        lines = [json.dumps(sample.to_json(), ensure_ascii=False, allow_nan=False) + "\n" for sample in result.samples]
        lines = [line.encode(errors="replace").decode() for line in lines]  # a reward function's answer may be anything
    except ValueError as error:
        raise EvalError(f"{file}: a result is not finite ({error}); nothing was written") from None
    write_text(samples, "".join(lines))
    write_text(file, text)
    return json.loads(text)


def read_samples(file: Path, source: str | None = None) -> list[Sample]:
    """The samples of a ``PHASE.samples.jsonl`` file, in order.

    Args:
        source: of a file in ``EVAL_TEXTS``, read the samples of this source.

    Raises:
        EvalError: the file is missing, or a line is not a sample; the message names the line.
    """

    def parse(line: str) -> Sample | None:
        fields = json.loads(line)
        return None if source is not None and fields.pop("source", None) != source else Sample(**fields)

    try:
        return [sample for _, sample in read_json_lines(file, parse=parse) if sample is not None]
    except LineError as error:
        raise EvalError(f"{file}, line {error.line}: not a sample of an evaluation ({error})") from None
    except OSError as error:
        raise EvalError(f"{file}: not readable ({error.strerror}); run the phase again") from None


def digests(sources: Sequence[str]) -> dict[str, str]:
    """A hash of each local model folder or data file, so that changed weights or data are another configuration."""
    hashes = {}
    for source in map(Path, sources):
        files = sorted(source.iterdir()) if source.is_dir() else [source]
        if files := [file for file in files if file.is_file()]:
            digest = hashlib.blake2b(digest_size=16)
            for file in files:
                with open(file, "rb") as content:
                    digest.update(hashlib.file_digest(content, "blake2b").digest())
            hashes[str(source)] = digest.hexdigest()
    return hashes
