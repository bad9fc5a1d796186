"""Rows of a taskset of verifiers (0.4), as ``verifiers:TASKSET:COUNT[:SKIP]``. Without torch."""

import json
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from tandemrl.config.hints import pip_install
from tandemrl.data.rows import DataError, Row, messages_of


def rows(source: str, parts: list[str]) -> Iterator[Row]:
    """The rows of a source, given in parts: COUNT tasks, after the first SKIP of them.

    Raises:
        DataError: it is not of this form, the package or the taskset is missing, or it has fewer tasks.
    """
    name, *numbers = parts or [""]
    if not name or not 1 <= len(numbers) <= 2 or not all(map(str.isdigit, numbers)) or int(numbers[0]) < 1:
        raise DataError(f"{source}: expected verifiers:TASKSET:COUNT or verifiers:TASKSET:COUNT:SKIP")
    count, skip = int(numbers[0]), int([*numbers, "0"][1])
    try:
        from verifiers.v1.utils.loaders import load_taskset, taskset_config_type
    except ImportError as error:
        raise DataError(f"{source}: {error.name} is missing; {pip_install('verifiers')}") from None
    try:
        taskset = load_taskset(taskset_config_type(name).model_validate({"id": name}))
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise DataError(f"{source}: no taskset {name!r}: {error}") from None
    found = [_row(source, name, task.data.model_dump(mode="json")) for task in islice(taskset, skip, skip + count)]
    if len(found) < count:
        raise DataError(f"{source}: the taskset has {skip + len(found)} tasks; ask for fewer")
    return iter(found)


def _row(source: str, name: str, data: Mapping[str, Any]) -> Row:
    place, prompt, system = f"verifiers/{name}/{data['idx']}", data["prompt"], data["system_prompt"]
    said = [] if system is None else [{"role": "system", "content": system}]
    said += [{"role": "user", "content": prompt or "…"}] if isinstance(prompt, str | None) else prompt
    return Row(
        example_id=place,
        messages=messages_of(said, f"{source}, task {data['idx']}", "prompt"),
        data_source=f"verifiers/{name}",
        ground_truth=str(data.get("answer", "")),
        extra_info={"task": json.loads(json.dumps(data)), "index": data["idx"]},
    )
