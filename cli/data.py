"""``tandemrl data``: look at rows, and build data sets as files."""

import re
from enum import StrEnum
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any

import typer

from tandemrl.cli.errors import needs
from tandemrl.config.catalogue import TASKS, Task

Template = StrEnum("Template", ["base", "instruct", "chat"])
"""The form in which the model gets a problem."""

app = typer.Typer(help="Look at data, build data sets.", no_args_is_help=True)


@app.command()
def show(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE... [KEY=VALUE]...",
            help="JSONL or Parquet file, synthetic:PAIR:SPLIT, gym:NAME:SPLIT:N, hf:REPO:CONFIG:SPLIT; config keys, "
            "e.g. data.columns.prompt=question.",
        ),
    ],
    limit: Annotated[int, typer.Option(min=1, help="Rows to print.")] = 3,
    config: Annotated[str | None, typer.Option(help="Take data.columns and reward from this config.")] = None,
) -> None:
    """Print rows as the library reads them, and what their graders give for the ground truth itself."""
    from tandemrl.apps.score import own_answers
    from tandemrl.config import load
    from tandemrl.data.loading import load_rows

    overrides = [each for each in sources if re.match(r"(data|reward|sandbox)\.[^/=]+=", each)]
    resolved = load(config, overrides)
    rows = load_rows([each for each in sources if each not in overrides], columns=resolved.data.columns)
    for row in rows[:limit]:
        typer.echo(f"{row.example_id}  [{row.data_source}]  ground truth: {row.ground_truth}")
        for message in row.messages:
            typer.echo(f"  {message['role']}: {message['content']}")
    typer.echo(f"{min(limit, len(rows))} of {len(rows)} rows")
    for data_source, said in own_answers(resolved, rows).items():
        typer.echo(f"{data_source}: {said}")


@app.command()
def index(
    corpus: Annotated[Path, typer.Argument(help="JSON Lines of documents: id, and text or title and body.")],
    out: Annotated[Path, typer.Option(help="Folder for the index, as retrieval.index takes it.")],
) -> None:
    """Index documents for keyword search."""
    from tandemrl.rollout.envs.retrieval import write_corpus

    typer.echo(f"{write_corpus(corpus, out)} documents in {out}")


@app.command()
def serve(
    index: Annotated[Path, typer.Argument(help="Folder that `tandemrl data index` wrote.")],
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0: every one of this machine.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any that is free.")] = 8100,
) -> None:
    """Serve an index for retrieval.url. POST /search with query and top_n, as rlvr's service for Wikipedia."""
    with needs("serve", "data serve"):
        from tandemrl.apps.serve.corpus import serve as serve_index
    serve_index(index, host=host, port=port)


OPTIONS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "source": (Path, "A copy: file or folder; of several sets, one named like each repository; default: the hub.", {}),
    "expect_rows": (int, "0 accepts any number of rows.", {"min": 0, "max": 0}),
    "train": (int, "Training rows, of generated sets and countdown.", {"min": 1}),
    "test": (int, "Test rows, likewise.", {"min": 1}),
    "heldout": (int, "synthetic: held-out rows.", {"min": 1}),
    "seed": (int, "Of what is generated; musique: of the paragraphs kept.", {}),
    "pair": (str, "synthetic: the tiny pair the problems are for.", {}),
    "template": (Template, "Base: TinyZero's text; instruct (default): Qwen's chat markup; chat: messages.", {}),
    "digits": (int, "multiply, arithmetic: of each number.", {"min": 1, "max": 18}),
    "generate": (bool, "countdown: make problems with a solution.", {}),
    "tokenizer": (str, "eurus: folder or hub id; measures prompts.", {}),
    "max_tokens": (int, "eurus: longest prompt; 0 keeps all.", {"min": 0}),
    "system_prompt": (bool, "eurus: keep the system message with its actions.", {}),
    "full_marks": (float, "rrm: maximum score, outside of verl's schema.", {"min": 1e-9}),
    "noise_rate": (float, "musique: probability of keeping a paragraph without support.", {"min": 0, "max": 1}),
    "skip": (list[str], "eval-all: a set to leave out; repeatable.", {}),
}
"""What the builders take: type, meaning and range. Each takes those that its function has as parameters."""


def build(
    name: Annotated[str, typer.Argument(metavar="NAME", help="One of those below, or module:function of your own.")],
    out: Annotated[Path, typer.Option(help="Folder to write to; an evaluation set gets a folder in it.")],
    **options: Any,
) -> None:
    """Write a data set as Parquet files in verl's row schema."""
    from tandemrl.data.rows import DataError
    from tandemrl.processes.names import function_named

    given = {key: value for key, value in options.items() if value not in (None, []) and value is not False}
    task = TASKS.get(name) or (Task(name, name) if ":" in name else None)
    if task is None or task.build is None:
        known = ", ".join(each for each, task in TASKS.items() if task.build)
        raise DataError(f"data build {name}: no such set; known: {known}, or your own module:function")
    path, sets, fixed = task.build, task.sets, {**task.fixed}
    if name == "countdown" and given.pop("generate", False):
        if "source" in given:
            raise DataError("--generate makes its own problems: give it or --source, not both")
        path = "tandemrl.tasks.countdown.rows:generate_countdown"
    elif name == "countdown" and "seed" in given:
        raise DataError("--seed is of --generate: the published problems are taken in their order; leave it out")
    elif name == "rrm":
        from tandemrl.config import JudgeConfig
        from tandemrl.tasks.rubric.judge import template_of

        fixed["template"] = template_of(JudgeConfig(prompt="rrm")).text
    elif name == "eval-all":
        skip, every = given.pop("skip", ()), [each for task in TASKS.values() for each in task.sets]
        if unknown := sorted({*skip} - {*every}):
            raise DataError(f"--skip {', '.join(unknown)}: known sets are {', '.join(every)}")
        if "source" not in given and "olympiad" not in skip:
            raise DataError("olympiad is not on the hub: leave it out with --skip olympiad, or give copies of all sets")
        sets = tuple(each for each in every if each not in skip)
    call = function_named(path, f"data build {name}", DataError)
    parameters = signature(call).parameters
    default = parameters["counts"].default if "counts" in parameters else {}
    if foreign := [f"--{key.replace('_', '-')}" for key in given if key not in (*parameters, *default)]:
        raise DataError(f"data build {name} has no {', '.join(foreign)}; tandemrl data build --help says who has which")
    if missing := [key for key in task.needs if key not in given]:
        raise DataError(f"data build {name} needs --{', --'.join(missing)}")
    counts = {split: given.pop(split, rows) for split, rows in default.items()}
    arguments: dict[str, Any] = {"source": None} if "source" in parameters else {}
    arguments |= {**fixed, **given} | ({"counts": counts} if counts else {})
    if not sets:
        return _report(out, call(out=out, **arguments))
    for each in sets:
        alone = name != "eval-all" and len(sets) == 1
        _report(out / each, call(name=each, out=out, **arguments, alone=alone))


def _parameter(name: str, kind: Any, about: str, limits: dict[str, Any]) -> Parameter:
    """An option of `build`, as typer reads it."""
    option = typer.Option(f"--{name.replace('_', '-')}", help=about, **limits)
    default = False if kind is bool else None
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


_OWN = [*signature(build).parameters.values()][:2]
build.__signature__ = Signature([*_OWN, *(_parameter(key, *each) for key, each in OPTIONS.items())])  # type: ignore[attr-defined]  # typer reads it
_SETS = (f"  {name:15} {each.about}" for name, each in TASKS.items() if each.build)
app.command(epilog="\b\nNAME:\n" + "\n".join(_SETS))(build)


def _report(out: Path, manifest: dict[str, Any]) -> None:
    for split, entry in manifest["splits"].items():
        typer.echo(f"{split}: {entry['rows']} rows in {out / entry['file']}")
    for reason, count in manifest.get("dropped", {}).items():
        if count:
            typer.echo(f"left out: {count} ({reason})")
    for splits, count in manifest["shared_prompts"].items():
        typer.echo(f"warning: {count} prompts are in both splits, {splits}")
