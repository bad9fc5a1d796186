"""Lines for a terminal, broken between words."""

import shutil
import sys
import textwrap

import typer


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
