"""``tandemrl experiment``: pairs × seeds × arms, trained, evaluated, compared and reported on."""

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from tandemrl.apps.experiments.arms import EXPERIMENTS, Experiment
from tandemrl.cli.keys import keys

app = typer.Typer(help="Train, evaluate and compare the arms of an experiment.", no_args_is_help=True)

Overrides = Annotated[
    list[str] | None,
    keys(
        "For every run, e.g. train.steps=40; those of the task (data.prompt_suffix, reward.*, …) also for evaluations."
    ),
]
Out = Annotated[Path | None, typer.Option(help="Folder; default runs/NAME. Rerun to resume.")]
Seeds = Annotated[str | None, typer.Option(help="E.g. 0,1,2. To add some later, name all.")]
Problems = Annotated[int | None, typer.Option(min=2, help="Held-out problems of every evaluation.")]
Samples = Annotated[int | None, typer.Option(min=1, help="Samples per problem.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda, for everything.")]


def _add(experiment: Experiment) -> None:
    """Add the command of an experiment. Its options are those that apply to it."""
    name, known = experiment.name, ", ".join(arm.name for arm in experiment.arms)

    def run(
        overrides: Overrides = None,
        out: Out = None,
        pair: Annotated[list[str] | None, typer.Option(help=f"In place of {experiment.pairs[0]}; repeatable.")] = None,
        seeds: Seeds = None,
        arms: Annotated[str | None, typer.Option(help=f"Train only some of {known}; commas between them.")] = None,
        problems: Problems = None,
        samples: Samples = None,
        device: Device = None,
        workers: Annotated[int | None, typer.Option(min=1, help="Processes at once; default: one per core.")] = None,
    ) -> None:
        from tandemrl.apps.experiments.experiment import run_experiment
        from tandemrl.cli.heartbeat import heartbeat, last_written
        from tandemrl.cli.lines import echo

        chosen = experiment if arms is None else experiment.only([part.strip() for part in arms.split(",")])
        given = _given(pairs=pair, seeds=seeds, problems=problems, samples=samples, device=device)
        chosen = replace(chosen, **given, overrides=(*chosen.overrides, *(overrides or ())))
        folder = out or Path("runs") / name
        command = shlex.join(["tandemrl", *sys.argv[1:]])
        with heartbeat(typer.echo, lambda: last_written(folder)):
            results = run_experiment(chosen, folder, workers=workers, command=command, say=echo)
        for claim in results["claims"]:
            values = ", ".join(f"{value:.3f}" for value in claim["values"])
            verdict = claim["verdict"].replace("fails", "DOES NOT HOLD")
            echo(f"{claim['pair']}: {claim['claim']} {claim['bar']}: {verdict}" + (f" ({values})" if values else ""))
        for each in results["tests"]:
            what = f"{each['pair']}: {each['a']} - {each['b']}, {each['measure']}: {each['mean']:+.3f}"
            echo(f"{what} over {each['seeds']} seeds, p {each['p']:.2g}, Holm's {each['holm']:.2g}")
        typer.echo(f"report: {folder}/report.html")

    app.command(name, help=experiment.summary)(run)


for each in EXPERIMENTS.values():
    _add(each)


@app.command()
def retrievers(
    models: Annotated[list[str], typer.Option("--model", help="A folder or hub id; repeatable.")],
    data: Annotated[list[str], typer.Option(help="Questions: a file or source; repeatable.")],
    overrides: Overrides = None,
    out: Out = None,
    retrievers: Annotated[
        list[str] | None,
        typer.Option(
            "--retriever",
            help="bm25, golden, semantic, hybrid or hops; repeatable, each is compared with the first.",
        ),
    ] = None,
    junior: Annotated[str | None, typer.Option(help="The junior of every --model.")] = None,
    config: Annotated[str | None, typer.Option(help="The config of every evaluation.")] = None,
    problems: Problems = None,
    samples: Samples = None,
) -> None:
    """The same questions to every model, with each retriever. Nothing is trained."""
    given = _given(**{name: value for name, value in locals().items() if name != "out"})
    from tandemrl.apps.experiments.retrievers import Benchmark, run_retrievers
    from tandemrl.cli.heartbeat import heartbeat, last_written
    from tandemrl.cli.lines import echo

    folder = out or Path("runs/retrievers")
    with heartbeat(typer.echo, lambda: last_written(folder)):
        run_retrievers(Benchmark(**given), folder, say=echo)
    typer.echo(f"report: {folder}/report.html")


def _given(*, seeds: str | None = None, **options: Any) -> dict[str, Any]:
    """The options that were given, as an experiment takes them.

    Raises:
        ConfigError: the seeds are no numbers.
    """
    from tandemrl.config import ConfigError

    if seeds is not None and not all(part.strip().isdigit() for part in seeds.split(",")):
        raise ConfigError(f"--seeds {seeds}: expected whole numbers with commas between them, e.g. 0,1,2")
    options["seeds"] = [int(part) for part in seeds.split(",")] if seeds else None
    return {name: tuple(value) if isinstance(value, list) else value for name, value in options.items() if value}
