"""Eurus-2-RL-Data (PRIME-RL): maths and code with tests, filtered as rawsh/TinyZero filters it. No torch."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tandemrl.data.parquet import write_splits
from tandemrl.data.rows import DataError, Row, messages_of, record_of
from tandemrl.data.sources import ExpectRows, Origin, expect, provenance, read
from tandemrl.tasks.code.tests import parse_tests

EURUS = "PRIME-RL/Eurus-2-RL-Data"
EURUS_ROWS: Mapping[str, int] = {"train/math": 455_261, "train/code": 26_758, "test/math": 1024, "test/code": 1024}
"""How many rows there are before any is dropped. ``test`` is the published ``validation``."""
EURUS_TOKENIZER = "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"
EURUS_MAX_TOKENS = 1000
EURUS_UNITS = ("mm/s", "cm/s", "m/s", "km/s", "km/h", "mph")
"""Speeds, which the graders of the time could not compare."""


def build_eurus(
    source: Path | None,
    out: Path,
    *,
    tokenizer: str = EURUS_TOKENIZER,
    max_tokens: int = EURUS_MAX_TOKENS,
    system_prompt: bool = False,
    expect_rows: ExpectRows = EURUS_ROWS,
) -> dict[str, Any]:
    r"""Write Eurus-2-RL-Data, filtered, as ``train`` and ``test`` (its validation split) into ``out``, and return the
    manifest.

    These rows are dropped and counted: code whose ground truth is not JSON with inputs and outputs; maths whose ground
    truth is missing, or has a unit of speed (`EURUS_UNITS`) or a ``\boxed``; rows of other abilities; and prompts with
    more than ``max_tokens`` tokens. As in the published code, the tokens counted are those of the Python text of the
    list of messages. One filter is not published: tests that `program_tests.parse_tests` refuses, such as those with
    more inputs than outputs.

    Args:
        source: a folder with ``train`` and ``validation`` Parquet files in verl's schema. None means the hub.
        tokenizer: folder or hub id of the tokenizer. It is not read with ``max_tokens=0``, which keeps prompts of any
            length.
        system_prompt: keep the system message ([ASSESS] [ADVANCE] …), which the published training run left out.
        expect_rows: how many rows each split and ability must have before any is dropped; 0 accepts any number.

    Raises:
        DataError: the data or the tokenizer is missing or malformed, or a split has another number of rows.
    """
    dropped: Counter[str] = Counter()
    origins = {"train": Origin(EURUS, "train"), "test": Origin(EURUS, "validation")}
    where = provenance([*origins.values()], source, dropped)  # refuses one file for both, before a tokenizer is fetched
    fits = _at_most(max_tokens, tokenizer) if max_tokens else lambda text: True

    def rows(split: str) -> Iterator[dict[str, Any]]:
        seen: Counter[str] = Counter()
        for number, record in enumerate(read(origins[split], source)):
            messages = messages_of(record.fields.get("prompt"), record.where)
            ability, reward = str(record.fields.get("ability")), record.fields.get("reward_model")
            truth = reward.get("ground_truth") if isinstance(reward, Mapping) else 0
            if not isinstance(truth, str | None):
                raise DataError(
                    f"{record.where}, field 'reward_model': expected an object with a string as ground_truth"
                )
            seen[f"{split}/{ability}"] += 1
            prompt = [
                {"content": message["content"], "role": message["role"]}  # in the order that their length is taken in
                for message in messages
                if system_prompt or message["role"] != "system"
            ]
            if reason := _fault(ability, truth or "") or (None if fits(str(prompt)) else "too long"):
                dropped[f"{split}: {reason}"] += 1
                continue
            extra = record.fields.get("extra_info") or {}
            index = number if extra.get("index") is None else int(extra["index"])
            yield record_of(record.text("data_source"), prompt, ability, truth, {"split": split, "index": index})
        for key in (f"{split}/math", f"{split}/code"):
            expect(f"{EURUS} {key}", seen[key], expect_rows, key)

    where |= {"tokenizer": tokenizer if max_tokens else None, "max_tokens": max_tokens, "system_prompt": system_prompt}
    return write_splits(out, "eurus", {split: rows(split) for split in origins}, where)


# --------------------------------------------------------------------------------------------------------------------


def _fault(ability: str, truth: str) -> str | None:
    """Why a row is dropped, or None if it is kept."""
    if ability == "code":
        try:
            tests = json.loads(truth)
            if not (isinstance(tests, Mapping) and tests.get("inputs") and tests.get("outputs")):
                return "code without tests"
            parse_tests(Row("", (), "", truth, {}))
        except DataError:
            return "code with unusable tests"
        except (ValueError, RecursionError):
            return "code without valid JSON"
        return None
    if ability != "math":
        return "other ability"
    if not truth:
        return "maths without an answer"
    if any(unit in truth for unit in EURUS_UNITS):
        return "maths with a unit of speed"
    return "maths with a boxed ground truth" if r"\boxed" in truth else None


def _at_most(max_tokens: int, name: str) -> Callable[[str], bool]:
    """A function that says whether a text has at most ``max_tokens`` tokens, including special ones."""
    from tokenizers import Tokenizer

    file = Path(name) / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(file)) if Path(name).is_dir() else Tokenizer.from_pretrained(name)
    except Exception as error:
        raise DataError(
            f"tokenizer {name!r} could not be loaded ({error}); give a folder with tokenizer.json, or keep prompts of "
            "any length with --max-tokens 0"
        ) from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return lambda text: len(tokenizer.encode(text).ids) <= max_tokens
