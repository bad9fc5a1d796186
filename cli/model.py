"""``tandemrl model``."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from tandemrl.apps.experiments.warm_start import Progress

app = typer.Typer(help="Build models.", no_args_is_help=True)


@app.command()
def tiny(
    pair: Annotated[
        str,
        typer.Argument(help="plain, jargon, jargon_two_tokenizers, repair, shorthand, hops, hops_jargon, calculator."),
    ] = "plain",
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for senior/, junior/ and manifest.json; default runs/tiny, of agents runs/tiny-PAIR."
        ),
    ] = None,
    train: Annotated[
        bool, typer.Option("--train", help="Train it here: one to four minutes on a CPU. A finished one is kept.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of data, weights and order.")] = 0,
    readers: Annotated[
        int, typer.Option(min=0, help="Also train as many readers, of other sizes, seeds and tokenizers: OUT-readers/.")
    ] = 0,
) -> None:
    """Unpack a tiny senior/junior pair, or train it. Those of seed 0 come with the library."""
    from tandemrl.apps.experiments.tiny import build_tiny_pair, build_tiny_readers
    from tandemrl.tasks.generated.rows import AGENTS

    out = out or Path(f"runs/tiny-{pair}" if pair in AGENTS else "runs/tiny")
    _build(partial(build_tiny_pair, seed=seed, train=train), pair, out)
    if readers:
        beside = out.with_name(f"{out.name}-readers")
        with _shown(f"warm start of {readers} readers", beside) as progress:
            build_tiny_readers(beside, pair=pair, seed=seed, count=readers, progress=progress)
        typer.echo(f"{beside}: {readers} readers, for tandemrl legibility --reader {beside}/reader-1 …")


@app.command()
def smollm2(
    out: Annotated[Path, typer.Option(help="Folder for senior/, junior/ and manifest.json.")] = Path(
        "runs/smollm2-pair"
    ),
    pair: Annotated[str, typer.Option(help="Which pair: word_problems or word_problems_terse.")] = "word_problems",
    seed: Annotated[int, typer.Option(help="Seed of data and order.")] = 0,
    model: Annotated[str | None, typer.Option(help="A folder with the model, instead of the hub (270 MB).")] = None,
) -> None:
    """Build a pair of SmolLM2-135M-Instruct for word problems.

    The junior learns from solutions; the senior learns for twice as long, or goes on with solutions in shorthand. Ten
    minutes on a CPU core; a finished pair is kept.
    """
    from tandemrl.apps.experiments.pretrained import MODEL, build_pretrained_pair

    _build(partial(build_pretrained_pair, seed=seed, model=model or MODEL), pair, out)


@app.command("warm-start")
def warm_start(
    model: Annotated[str, typer.Option(help="The model that learns: a folder or hub id.")],
    data: Annotated[
        list[str], typer.Option(help="Rows with a solution in extra_info.answer: a file or source; repeatable.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for the trained model. It must not exist.")],
    steps: Annotated[int, typer.Option(min=1, help="Steps of AdamW.")] = 40,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows per step.")] = 8,
    lr: Annotated[float, typer.Option(min=0, help="Learning rate, constant.")] = 1e-4,
    seed: Annotated[int, typer.Option(help="Seed of the order of the rows.")] = 0,
    max_prompt_tokens: Annotated[int, typer.Option(min=1, help="Longer prompts are left out.")] = 1024,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """Train a model on worked solutions.

    It then knows the format, and solves some of the problems, before reinforcement learning. The loss is that of
    responses and their EOS only.
    """
    from dataclasses import replace

    from tandemrl.apps.experiments.pretrained import RECIPE
    from tandemrl.apps.experiments.warm_start import train_on_solutions

    recipe = replace(RECIPE, steps=steps, batch_size=batch_size, lr=lr)
    with _shown(f"warm start of {model}", out) as progress:
        rows, left_out, loss = train_on_solutions(
            model,
            data,
            out,
            recipe,
            seed=seed,
            max_prompt_tokens=max_prompt_tokens,
            device=device,
            progress=progress,
        )
    typer.echo(f"{out}: {steps} steps on {rows:,} solutions ({left_out:,} left out), loss {loss:.3f}")


def _build(build: Callable[..., dict[str, Any]], pair: str, out: Path) -> None:
    with _shown(f"warm start of the {pair} pair", out) as progress:
        manifest = build(out, pair=pair, progress=progress)
    source = f", source {manifest['source']}" if "source" in manifest else ""
    base = ", ".join(f"{name} {value:.3g}" for name, value in manifest["base"].items())
    typer.echo(f"{out}: {manifest['parameters']:,} parameters, {manifest['vocab_size']:,} tokens{source}, {base}")


@contextmanager
def _shown(what: str, out: Path) -> "Iterator[Progress]":
    """A context with a function that shows how far a warm start is.

    Raises:
        ConfigError: no folder can be written at ``out``.
    """
    from tandemrl.cli.heartbeat import progress_bars
    from tandemrl.config import ConfigError
    from tandemrl.config.hints import no_folder

    if reason := no_folder(out):
        raise ConfigError(f"--out {out}: {reason}")
    with progress_bars(what) as progress:
        yield lambda step, steps, loss: progress(what, step, steps, f", loss {loss:.3f}")
