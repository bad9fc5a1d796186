"""Lines for a terminal of 80 columns."""

import textwrap

import typer

COLUMNS = 80


def echo(text: str, *, indent: int = 4, err: bool = False) -> None:
    """Print text whose lines break between words; what continues a line is indented. A word that is longer, such as a
    path, stays whole.

    Examples:
        >>> echo("ok           data.train: 4096 rows; the longest prompt has 34 tokens, within 512", indent=13)
        ok           data.train: 4096 rows; the longest prompt has 34 tokens, within
                     512
    """
    lines = (
        textwrap.fill(line, COLUMNS, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
        for line in text.splitlines()
    )
    typer.echo("\n".join(lines), err=err)
