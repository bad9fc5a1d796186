"""``tandemrl data``: look at rows, and build data sets as files."""

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

import typer

app = typer.Typer(help="Look at data, build data sets.", no_args_is_help=True)


class Template(StrEnum):
    """The form in which the model gets a problem."""

    base = "base"
    instruct = "instruct"
    chat = "chat"


class Builder(NamedTuple):
    """A row of the registry. function: ``module:name`` in `tasks/`, whose parameters are the options of the command.
    fixed: other arguments of it. needs: options without a default. sets: evaluation sets, each in its own folder."""

    about: str
    function: str
    fixed: Mapping[str, Any] = MappingProxyType({})
    needs: tuple[str, ...] = ()
    sets: tuple[str, ...] = ()


CALCULATIONS = "countdown.rows:generate_calculations"
INSTRUCT = {"template": "instruct"}
BUILDERS = {
    "gsm8k": Builder("GSM8K: 6,973 training, 500 held-out and 1,319 test problems", "gsm8k.rows:build_gsm8k"),
    "synthetic": Builder("generated word problems for a tiny pair", "generated.rows:build_synthetic"),
    "deepscaler": Builder("DeepScaleR: 39,309 training and 1,000 held-out problems", "math.rows:build_deepscaler"),
    "countdown": Builder(
        "Countdown with 3 or 4 numbers: TinyZero's, or --generate", "countdown.rows:build_countdown", INSTRUCT
    ),
    "multiply": Builder("generated products, as in TinyZero", CALCULATIONS, INSTRUCT | {"data_source": "multiply"}),
    "arithmetic": Builder(
        "generated sums, differences and products", CALCULATIONS, INSTRUCT | {"data_source": "arithmetic"}
    ),
    "eurus": Builder("Eurus-2-RL-Data: maths, and code with tests, as far as gradable", "code.rows:build_eurus"),
    "polaris": Builder("problems with criteria, for the rrm configs", "rubric.rows:build_polaris", needs=("source",)),
    "rrm": Builder("responses and scores, for rrm_train", "rubric.rows:build_rubric", needs=("source",)),
    "musique": Builder("MuSiQue: 19,938 training, 2,417 validation questions", "qa.rows:build_musique"),
    "aime": Builder(
        "AIME 2024, 2025 and 2026, 30 each", "math.rows:build_benchmark", sets=("aime24", "aime25", "aime26")
    ),
    "amc": Builder("AMC 2023 to 2025: amc23_25, 121 problems", "math.rows:build_benchmark", sets=("amc23_25",)),
    "math500": Builder("MATH-500: 500 problems", "math.rows:build_benchmark", sets=("math500",)),
    "minerva": Builder("Minerva: 272 problems", "math.rows:build_benchmark", sets=("minerva",)),
    "olympiad": Builder("Olympiad: 581 problems, from a file", "math.rows:build_benchmark", sets=("olympiad",)),
    "eval-all": Builder("the sets of the five above", "math.rows:build_benchmark"),
}
"""What ``tandemrl data build NAME`` can build."""


@app.command()
def show(
    sources: Annotated[
        list[str], typer.Argument(help="JSONL or Parquet file, synthetic:PAIR:SPLIT, hf:REPO:CONFIG:SPLIT")
    ],
    limit: Annotated[int, typer.Option(min=1, help="Rows to print.")] = 3,
) -> None:
    """Print rows as the library reads them."""
    from tandemrl.data.loading import load_rows

    rows = load_rows(sources)
    for row in rows[:limit]:
        typer.echo(f"{row.example_id}  [{row.data_source}]  ground truth: {row.ground_truth}")
        for message in row.messages:
            typer.echo(f"  {message['role']}: {message['content']}")
    typer.echo(f"{min(limit, len(rows))} of {len(rows)} rows")


@app.command()
def index(
    corpus: Annotated[Path, typer.Argument(help="JSON Lines of documents: id, and text or title and body.")],
    out: Annotated[Path, typer.Option(help="Folder for the index, as retrieval.index takes it.")],
) -> None:
    """Index documents for keyword search."""
    from tandemrl.rollout.envs.bm25 import write_corpus

    typer.echo(f"{write_corpus(corpus, out)} documents in {out}")


@app.command()
def serve(
    index: Annotated[Path, typer.Argument(help="Folder that `tandemrl data index` wrote.")],
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0: every one of this machine.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any that is free.")] = 8100,
) -> None:
    """Serve an index for retrieval.url. POST /search with query and top_n, as rlvr's service for Wikipedia."""
    from tandemrl.config import ConfigError
    from tandemrl.files import pip_install

    try:
        from tandemrl.apps.serve import corpus
    except ImportError as error:
        raise ConfigError(f"tandemrl data serve: {error.name} is missing; {pip_install('serve')}") from None
    corpus.serve(index, host=host, port=port)


@app.command(epilog="\b\nNAME:\n" + "\n".join(f"  {name:11} {each.about}" for name, each in BUILDERS.items()))
def build(
    name: Annotated[str, typer.Argument(metavar="NAME", help="One of those below.")],
    out: Annotated[Path, typer.Option(help="Folder to write to; an evaluation set gets a folder in it.")],
    source: Annotated[
        Path | None,
        typer.Option(
            help="A local copy, a file or a folder; of several sets, a folder of copies named like their "
            "repositories; default: the hub. polaris and rrm need the published files."
        ),
    ] = None,
    expect_rows: Annotated[int | None, typer.Option(min=0, max=0, help="0 accepts any number of rows.")] = None,
    train: Annotated[int | None, typer.Option(min=1, help="Training rows, of generated sets and countdown.")] = None,
    test: Annotated[int | None, typer.Option(min=1, help="Test rows, likewise.")] = None,
    heldout: Annotated[int | None, typer.Option(min=1, help="synthetic: held-out rows.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of what is generated; musique: of the paragraphs kept.")] = None,
    pair: Annotated[str | None, typer.Option(help="synthetic: the tiny pair the problems are for.")] = None,
    template: Annotated[
        Template | None,
        typer.Option(
            help="TinyZero's prompts: base, plain text for base models; instruct (default), rendered for Qwen's chat "
            "models. chat: messages for the model's own chat template."
        ),
    ] = None,
    digits: Annotated[int | None, typer.Option(min=1, max=18, help="multiply, arithmetic: of each number.")] = None,
    generate: Annotated[bool, typer.Option("--generate", help="countdown: make problems with a solution.")] = False,
    tokenizer: Annotated[str | None, typer.Option(help="eurus: folder or hub id; measures prompts.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=0, help="eurus: longest prompt; 0 keeps all.")] = None,
    system_prompt: Annotated[
        bool, typer.Option("--system-prompt", help="eurus: keep the system message with its actions.")
    ] = False,
    full_marks: Annotated[
        float | None, typer.Option(min=1e-9, help="rrm: maximum score, outside of verl's schema.")
    ] = None,
    noise_rate: Annotated[
        float | None, typer.Option(min=0, max=1, help="musique: probability of keeping a paragraph without support.")
    ] = None,
    skip: Annotated[list[str] | None, typer.Option(help="eval-all: a set to leave out; repeatable.")] = None,
) -> None:
    """Write a data set as Parquet files in verl's row schema."""
    given = {key: value for key, value in locals().items() if key not in ("name", "out")}
    given = {key: value for key, value in given.items() if value is not None and value is not False}
    if skip and name == "eval-all":
        del given["skip"]
    if generate and name == "countdown":
        del given["generate"]
    _build(name, out, given, generate=generate, skip=skip or [])


def _build(name: str, out: Path, given: dict[str, Any], *, generate: bool, skip: list[str]) -> None:
    """Call the builder of a set with the options that were given, and say what it wrote."""
    from importlib import import_module
    from inspect import signature

    from tandemrl.data.rows import DataError

    if name not in BUILDERS:
        raise DataError(f"data build {name}: no such set; known: {', '.join(BUILDERS)}")
    builder = BUILDERS[name]
    module, function = builder.function.split(":")
    if generate and "source" in given:
        raise DataError("--generate makes its own problems: give it or --source, not both")
    if name == "countdown" and not generate and "seed" in given:
        raise DataError("--seed is of --generate: the published problems are taken in their order; leave it out")
    call = getattr(import_module(f"tandemrl.tasks.{module}"), "generate_countdown" if generate else function)
    parameters = signature(call).parameters
    default = parameters["counts"].default if "counts" in parameters else {}
    options = [*parameters, *default]
    if unknown := [f"--{key.replace('_', '-')}" for key in given if key not in options]:
        raise DataError(f"data build {name} has no {', '.join(unknown)}; tandemrl data build --help says who has which")
    if missing := [key for key in builder.needs if key not in given]:
        raise DataError(f"data build {name} needs --{', --'.join(missing)}")
    counts = {split: given.pop(split, rows) for split, rows in default.items()}
    arguments: dict[str, Any] = {"source": None} if "source" in parameters else {}
    arguments |= {**builder.fixed, **given} | ({"counts": counts} if counts else {})
    if name == "rrm":
        from tandemrl.config import JudgeConfig
        from tandemrl.tasks.rubric.judge import template_of

        arguments["template"] = template_of(JudgeConfig(prompt="rrm")).text
    sets = builder.sets
    if name == "eval-all":
        known = [each for row in BUILDERS.values() for each in row.sets]
        if unknown := sorted(set(skip) - set(known)):
            raise DataError(f"--skip {', '.join(unknown)}: known sets are {', '.join(known)}")
        if "source" not in given and "olympiad" not in skip:
            raise DataError("olympiad is not on the hub: leave it out with --skip olympiad, or give copies of all sets")
        sets = tuple(each for each in known if each not in skip)
    if not sets:
        return _report(out, call(out=out, **arguments))
    for each in sets:
        alone = name != "eval-all" and len(sets) == 1
        _report(out / each, call(name=each, out=out, **arguments, alone=alone))


def _report(out: Path, manifest: dict[str, Any]) -> None:
    for split, entry in manifest["splits"].items():
        typer.echo(f"{split}: {entry['rows']} rows in {out / entry['file']}")
    for reason, count in manifest.get("dropped", {}).items():
        if count:
            typer.echo(f"left out: {count} ({reason})")
    for splits, count in manifest["shared_prompts"].items():
        typer.echo(f"warning: {count} prompts are in both splits, {splits}")
