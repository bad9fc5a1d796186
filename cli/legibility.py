"""``tandemrl legibility``: can others follow this model? One page with the verdict."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from tandemrl.cli.evaluate import Data, Limit, Overrides, Profile, Settings, resolved_for


def legibility(
    model: Annotated[str, typer.Argument(help="HF folder or hub id; with --responses any name.")],
    overrides: Overrides = None,
    reader: Annotated[
        list[str] | None,
        typer.Option(help="A model that reads: HF folder or hub id, or MODEL@URL of an endpoint; repeatable."),
    ] = None,
    data: Data = None,
    responses: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Judge these texts: JSONL with response and example_id or index. Rows without --data: its own.",
        ),
    ] = None,
    match: Annotated[
        Literal["truncation"] | None,
        typer.Option(help="Leave out texts that were cut off, or whose reader was, alone."),
    ] = None,
    config: Settings = None,
    samples: Annotated[int, typer.Option(min=1, help="Texts per problem.")] = 1,
    profile: Profile = None,
    limit: Limit = None,
    out: Annotated[Path, typer.Option(help="Folder for the page, the JSON file and the texts.")] = Path("legibility"),
) -> None:
    """Can others follow this model? Readers get parts of its texts and then have to answer; with controls for leaks.

    The readers need not have been in training. Without ground truths, only their surprise is measured.
    """
    from tandemrl.apps.report.legibility import judge_legibility
    from tandemrl.cli.heartbeat import progress_bars
    from tandemrl.cli.lines import echo
    from tandemrl.config import ConfigError
    from tandemrl.evals import Stored

    own = None if responses is not None else model
    rows = [*data] if data else [str(responses)] if responses is not None else None
    resolved, stated = resolved_for(own, config, overrides, rows, k="1", samples=samples, profile=profile)
    readers = tuple(reader or resolved.eval.readers)
    if not readers:
        raise ConfigError("nobody reads: give --reader MODEL")
    resolved = replace(resolved, eval=replace(resolved.eval, readers=readers))
    source = model if responses is None else Stored(responses, model)
    with progress_bars("loading", err=True) as progress:
        judged = judge_legibility(resolved, source, out, match=match, limit=limit, stated=stated, progress=progress)
    for line in (*judged.verdicts, *judged.notes):
        echo(line)
    typer.echo(f"written to {out / 'legibility.html'}, {out / 'legibility.json'}")
