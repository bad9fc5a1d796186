"""Lines and tables for a terminal."""

import shutil
import sys
import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich.table import Table


def echo(text: str, *, indent: int = 4, err: bool = False) -> None:
    """Print text. On a terminal, lines break between words, and what continues a line is indented. A word that is
    longer than a line, such as a path, stays whole. In a pipe or a file, every line stays as it is."""
    if (sys.stderr if err else sys.stdout).isatty():
        text = wrapped(text, shutil.get_terminal_size().columns, indent)
    typer.echo(text, err=err)


def wrapped(text: str, columns: int, indent: int) -> str:
    """Lines of at most so many columns.

    Examples:
        >>> print(wrapped("ok           data.train: 4096 rows; the longest prompt has 34 tokens, within 512", 80, 13))
        ok           data.train: 4096 rows; the longest prompt has 34 tokens, within
                     512
    """
    lines = (
        textwrap.fill(line, columns, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
        for line in text.splitlines()
    )
    return "\n".join(lines)


def table(
    title: str | None, left: Iterable[str], right: Iterable[str], rows: Iterable[Iterable[str]], *, fold: bool = False
) -> "Table":
    """A table with names on the left and numbers on the right. A row without cells is a line.

    Args:
        fold: break the cells on the left that are too long.
    """
    from rich.table import Table
    from rich.text import Text

    made = Table(title=title, title_justify="left")
    for name in left:
        made.add_column(name, no_wrap=not fold, overflow="fold")
    for name in right:
        made.add_column(Text(name), justify="right", no_wrap=True)
    for row in rows:
        cells = [Text(cell) for cell in row]  # in which brackets are no markup
        made.add_row(*cells) if cells else made.add_section()
    return made
