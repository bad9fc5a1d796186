"""Rows of seeds, as ``openenv:COUNT[:FIRST]``. Without torch."""

from collections.abc import Iterator

from tandemrl.data.rows import DataError, Row, messages_of


def rows(source: str, parts: list[str]) -> Iterator[Row]:
    """A row for each of COUNT seeds from FIRST on, with which an environment is reset.

    Raises:
        DataError: the source is not of this form.
    """
    if not 1 <= len(parts) <= 2 or not all(map(str.isdigit, parts)) or parts[0] == "0":
        raise DataError(f"{source}: expected openenv:COUNT or openenv:COUNT:FIRST, e.g. openenv:64:512")
    count, first = map(int, [*parts, "0"][:2])
    begin = messages_of([{"role": "user", "content": "Begin."}], source, "prompt")
    return (
        Row(
            example_id=f"openenv/{seed}",
            messages=begin,
            data_source="openenv",
            ground_truth="",
            extra_info={"reset": {"seed": seed}, "index": seed},
        )
        for seed in range(first, first + count)
    )
