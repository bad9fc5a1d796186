"""``tandemrl data``: look at rows, and build data sets as files."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

app = typer.Typer(help="Look at data, build data sets.", no_args_is_help=True)
build = typer.Typer(help="Write a data set as Parquet files in verl's row schema.", no_args_is_help=True)
app.add_typer(build, name="build")


class Template(StrEnum):
    """The form in which the model gets a problem."""

    base = "base"
    instruct = "instruct"
    chat = "chat"


Out = Annotated[Path, typer.Option(help="Folder to write to.")]
OutAbove = Annotated[Path, typer.Option(help="Folder to write to; each set gets a folder with its name in it.")]
Source = Annotated[Path | None, typer.Option(help="A local copy, a file or a folder; default: the hub.")]
Copies = Annotated[
    Path | None,
    typer.Option(help="Folder with local copies, each named like its repository on the hub; default: the hub."),
]
AnyRows = Annotated[int | None, typer.Option(min=0, max=0, help="0 accepts any number of rows.")]
Wording = Annotated[
    Template,
    typer.Option(
        help="TinyZero's prompts: base, plain text for base models; instruct, rendered for Qwen's chat models. "
        "chat: messages for the model's own chat template."
    ),
]
Train = Annotated[int, typer.Option(min=1, help="Training rows.")]
Test = Annotated[int, typer.Option(min=1, help="Test rows.")]
Seed = Annotated[int, typer.Option(help="Seed of the generator.")]


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


@build.command()
def gsm8k(
    out: Out,
    source: Annotated[Path | None, typer.Option(help="Folder with its train and test files; default: the hub.")] = None,
    expect_rows: AnyRows = None,
) -> None:
    """GSM8K: 6,973 training, 500 held-out and 1,319 test problems. The held-out ones are from its training split."""
    from tandemrl.data.builders import GSM8K_ROWS, build_gsm8k

    _report(out, build_gsm8k(source, out, expect_rows=GSM8K_ROWS if expect_rows is None else 0))


@build.command()
def synthetic(
    out: Out,
    pair: Annotated[str, typer.Option(help="The tiny pair the problems are for.")] = "plain",
    train: Train = 2048,
    heldout: Annotated[int, typer.Option(min=1, help="Held-out rows.")] = 512,
    seed: Seed = 0,
) -> None:
    """Generated word problems. Training and held-out problems are disjoint."""
    from tandemrl.data.builders import build_synthetic

    _report(out, build_synthetic(pair, out, {"train": train, "heldout": heldout}, seed))


@build.command()
def deepscaler(out: Out, source: Source = None, expect_rows: AnyRows = None) -> None:
    """DeepScaleR: 39,309 training and 1,000 held-out problems."""
    from tandemrl.data.boxed import DEEPSCALER_ROWS, build_deepscaler

    _report(out, build_deepscaler(source, out, expect_rows=DEEPSCALER_ROWS if expect_rows is None else 0))


@build.command()
def countdown(
    out: Out,
    source: Source = None,
    generate: Annotated[
        bool, typer.Option("--generate", help="Make problems that have a solution, instead of the published ones.")
    ] = False,
    template: Wording = Template.instruct,
    train: Train = 327_680,
    test: Test = 1024,
    seed: Annotated[int | None, typer.Option(help="Seed of --generate; default 0.")] = None,
) -> None:
    """Countdown with 3 or 4 numbers. TinyZero's published problems, or generated ones."""
    from tandemrl.data.builders import build_countdown, generate_countdown
    from tandemrl.data.rows import DataError

    counts = {"train": train, "test": test}
    if generate and source is not None:
        raise DataError("--generate makes its own problems: give it or --source, not both")
    if generate:
        _report(out, generate_countdown(out, template=template.value, counts=counts, seed=seed or 0))
    else:
        if seed is not None:
            raise DataError("--seed is of --generate: the published problems are taken in their order; leave it out")
        _report(out, build_countdown(source, out, template=template.value, counts=counts))


@build.command()
def multiply(
    out: Out,
    template: Wording = Template.instruct,
    digits: Annotated[int, typer.Option(min=1, max=18, help="Digits of each number.")] = 3,
    train: Train = 32_768,
    test: Test = 4096,
    seed: Seed = 0,
) -> None:
    """Generated products of two numbers, as in TinyZero."""
    _calculations("multiply", out, template, digits, train, test, seed)


@build.command(name="arithmetic")
def calculations(
    out: Out,
    template: Wording = Template.instruct,
    digits: Annotated[int, typer.Option(min=1, max=18, help="Digits of each number.")] = 3,
    train: Train = 32_768,
    test: Test = 4096,
    seed: Seed = 0,
) -> None:
    """Generated sums, differences and products, as in TinyZero."""
    _calculations("arithmetic", out, template, digits, train, test, seed)


@build.command()
def eurus(
    out: Out,
    source: Annotated[
        Path | None, typer.Option(help="Folder with train and validation Parquet files; default: the hub.")
    ] = None,
    tokenizer: Annotated[
        str, typer.Option(help="Folder or hub id of the tokenizer that measures prompts.")
    ] = "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
    max_tokens: Annotated[int, typer.Option(min=0, help="Longest prompt; 0 keeps all, and needs no tokenizer.")] = 1000,
    system_prompt: Annotated[
        bool, typer.Option("--system-prompt", help="Keep the system message with its [ASSESS] [ADVANCE] … actions.")
    ] = False,
    expect_rows: AnyRows = None,
) -> None:
    """Eurus-2-RL-Data: maths, and code with tests. Without the rows that cannot be graded."""
    from tandemrl.data.eurus import EURUS_ROWS, build_eurus

    manifest = build_eurus(
        source,
        out,
        tokenizer=tokenizer,
        max_tokens=max_tokens,
        system_prompt=system_prompt,
        expect_rows=EURUS_ROWS if expect_rows is None else 0,
    )
    _report(out, manifest)


RubricSource = Annotated[
    Path, typer.Option(help="Folder with the published files, or with custom train and test files.")
]


@build.command()
def polaris(out: Out, source: RubricSource) -> None:
    """Polaris problems with marking criteria, for the rrm configs. Files: train_polaris, test_polaris."""
    from tandemrl.data.rubric import build_polaris

    _report(out, build_polaris(source, out))


@build.command()
def rrm(
    out: Out,
    source: RubricSource,
    full_marks: Annotated[
        float, typer.Option(min=1e-9, help="Maximum score, for rows that are not in verl's schema.")
    ] = 1.0,
) -> None:
    """Responses and the scores to give them, for rrm_train. Files: train_rrm, test_rrm."""
    from tandemrl.config import JudgeConfig
    from tandemrl.data.rubric import build_rubric
    from tandemrl.rewards.judge.rubric import template_of

    _report(out, build_rubric(source, out, template=template_of(JudgeConfig(prompt="rrm")).text, full_marks=full_marks))


@build.command()
def musique(
    out: Out,
    source: Annotated[
        Path | None,
        typer.Option(help="Folder with train and validation files, or the official ones; default: the hub."),
    ] = None,
    noise_rate: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Probability of keeping a paragraph that supports no answer.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of which are kept.")] = 0,
    expect_rows: AnyRows = None,
) -> None:
    """MuSiQue: 19,938 training and 2,417 validation questions. With 2 to 4 hops, and their paragraphs."""
    from tandemrl.data.musique import MUSIQUE_ROWS, build_musique

    manifest = build_musique(
        source, out, noise_rate=noise_rate, seed=seed, expect_rows=MUSIQUE_ROWS if expect_rows is None else 0
    )
    _report(out, manifest)


@build.command()
def math500(out: OutAbove, source: Source = None, expect_rows: AnyRows = None) -> None:
    """MATH-500: 500 problems."""
    _benchmarks(["math500"], source, out, expect_rows)


@build.command()
def aime(out: OutAbove, source: Copies = None, expect_rows: AnyRows = None) -> None:
    """AIME 2024, 2025 and 2026, 30 problems each. Copies: aime24, aime25, aime_2026."""
    _benchmarks(["aime24", "aime25", "aime26"], source, out, expect_rows)


@build.command()
def amc(out: OutAbove, source: Copies = None, expect_rows: AnyRows = None) -> None:
    """AMC 2023 to 2025: amc23_25, 121 problems. Copies: amc23, 2024_AMC12, amc12-2025-non-figure."""
    _benchmarks(["amc23_25"], source, out, expect_rows)


@build.command()
def minerva(out: OutAbove, source: Source = None, expect_rows: AnyRows = None) -> None:
    """Minerva: 272 problems."""
    _benchmarks(["minerva"], source, out, expect_rows)


@build.command()
def olympiad(
    out: OutAbove,
    source: Annotated[Path | None, typer.Option(help="The published test.parquet; it is not on the hub.")] = None,
    expect_rows: AnyRows = None,
) -> None:
    """Olympiad: 581 problems, from a file."""
    _benchmarks(["olympiad"], source, out, expect_rows)


@build.command()
def eval_all(
    out: OutAbove,
    source: Copies = None,
    skip: Annotated[
        list[str] | None, typer.Option(help="A set to leave out, e.g. olympiad, which is not on the hub; repeatable.")
    ] = None,
    expect_rows: AnyRows = None,
) -> None:
    """All seven evaluation sets. Copies: as for each of them, and MATH-500, minervamath, olympiad."""
    from tandemrl.data.boxed import BENCHMARK_ROWS
    from tandemrl.data.rows import DataError

    if unknown := set(skip or ()) - set(BENCHMARK_ROWS):
        raise DataError(f"--skip {', '.join(sorted(unknown))}: known sets are {', '.join(BENCHMARK_ROWS)}")
    if source is None and "olympiad" not in (skip or ()):
        raise DataError("olympiad is not on the hub: leave it out with --skip olympiad, or give copies of all sets")
    _benchmarks([name for name in BENCHMARK_ROWS if name not in (skip or ())], source, out, expect_rows, alone=False)


# --------------------------------------------------------------------------------------------------------------------


def _calculations(
    data_source: Literal["multiply", "arithmetic"],
    out: Path,
    template: Template,
    digits: int,
    train: int,
    test: int,
    seed: int,
) -> None:
    from tandemrl.data.builders import generate_calculations

    options: dict[str, Any] = {"template": template.value, "digits": digits, "seed": seed}
    _report(out, generate_calculations(out, data_source=data_source, counts={"train": train, "test": test}, **options))


def _benchmarks(
    names: list[str], source: Path | None, out: Path, expect_rows: int | None, *, alone: bool = True
) -> None:
    from tandemrl.data.boxed import BENCHMARK_ROWS, build_benchmark

    for name in names:
        manifest = build_benchmark(
            name,
            source,
            out,
            expect_rows=BENCHMARK_ROWS if expect_rows is None else 0,
            alone=alone and len(names) == 1,
        )
        _report(out / name, manifest)


def _report(out: Path, manifest: dict[str, Any]) -> None:
    for split, entry in manifest["splits"].items():
        typer.echo(f"{split}: {entry['rows']} rows in {out / entry['file']}")
    for reason, count in manifest.get("dropped", {}).items():
        if count:
            typer.echo(f"left out: {count} ({reason})")
    for splits, count in manifest["shared_prompts"].items():
        typer.echo(f"warning: {count} prompts are in both splits, {splits}")
