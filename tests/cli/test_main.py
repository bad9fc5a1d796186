"""Every command's help ends with an example that the command takes."""

import shlex
from collections.abc import Iterator
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from tandemrl.cli.main import app


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    inner = getattr(command, "commands", None)
    if inner is None:
        yield path, command
    for name, each in (inner or {}).items():
        yield from commands(each, (*path, name))


@pytest.mark.parametrize(("path", "command"), list(commands(get_command(app))), ids=str)
def test_the_help_of_every_command_ends_with_an_example_that_it_takes(path: tuple[str, ...], command: Any) -> None:
    assert command.epilog, f"{' '.join(path)}: give it an example in cli/main.py: EXAMPLES"
    assert "Example: tandemrl" in CliRunner().invoke(app, [*path, "--help"]).output
    example = shlex.split(command.epilog.splitlines()[0].partition(": ")[2])
    assert example[: len(path) + 1] == ["tandemrl", *path]
    command.make_context(path[-1], example[len(path) + 1 :])  # which refuses what it does not know
