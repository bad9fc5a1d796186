"""``tandemrl experiment``: pairs × seeds × arms, trained, evaluated, compared and reported on."""

from pathlib import Path
from typing import Annotated, Any

import typer

RETRIEVERS = "retrievers"


def experiment(
    name: Annotated[
        str,
        typer.Argument(
            help="quickstart, paper-claims, two-tokenizers, repair, ablations, hops, smollm2, smollm2-quick or "
            "retrievers."
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="Config keys for every run, e.g. train.steps=40; those of the task (data.prompt_suffix, reward.*, …) "
            "hold for the evaluations, too.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder; default runs/NAME. Rerun to resume.")] = None,
    pair: Annotated[
        list[str] | None,
        typer.Option(
            help="plain, jargon, jargon_two_tokenizers, repair, hops, hops_jargon; of smollm2: word_problems, "
            "word_problems_terse; repeatable."
        ),
    ] = None,
    seeds: Annotated[str | None, typer.Option(help="E.g. 0,1,2. To add some later, name all.")] = None,
    arms: Annotated[str | None, typer.Option(help="Train only these of its arms, e.g. grpo,tandem.")] = None,
    problems: Annotated[int | None, typer.Option(min=2, help="Held-out problems of every evaluation.")] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Samples per problem.")] = None,
    size: Annotated[str | None, typer.Option(help="Size of the models: tiny, 1m, 4m, or 46m (on a GPU).")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda, for everything.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes at once; default: one per core.")] = None,
    retriever: Annotated[
        list[str] | None,
        typer.Option(help="For retrievers: bm25, golden, semantic, hybrid or hops; each is compared with the first."),
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="For retrievers: a folder or hub id, in place of tiny pairs; repeatable.")
    ] = None,
    junior: Annotated[str | None, typer.Option(help="For retrievers: the junior of every --model.")] = None,
    data: Annotated[list[str] | None, typer.Option(help="For retrievers: questions for every --model.")] = None,
    config: Annotated[str | None, typer.Option(help="For retrievers: the config of every evaluation.")] = None,
) -> None:
    """Train and evaluate every arm on every seed of a pair. Report what the intervals support.

    retrievers: nothing is trained; every model answers the same questions with each retriever.
    """
    from dataclasses import replace

    from tandemrl.apps.experiments.experiment import EXPERIMENTS, run_experiment
    from tandemrl.apps.experiments.retrievers import Benchmark, run_retrievers
    from tandemrl.cli.heartbeat import heartbeat, last_written
    from tandemrl.cli.lines import echo
    from tandemrl.config import ConfigError

    if name not in (*EXPERIMENTS, RETRIEVERS):
        raise ConfigError(f"unknown experiment {name!r}; known: {', '.join((*EXPERIMENTS, RETRIEVERS))}")
    if seeds is not None and not all(part.strip().isdigit() for part in seeds.split(",")):
        raise ConfigError(f"--seeds {seeds}: expected whole numbers with commas between them, e.g. 0,1,2")
    of_retrievers = {"retrievers": retriever, "models": model, "junior": junior, "data": data, "config": config}
    of_training = {"--arms": arms, "--size": size, "--workers": workers}
    folder = out or Path("runs") / name
    if name == RETRIEVERS:
        if stray := [option for option, value in of_training.items() if value is not None]:
            raise ConfigError(f"{stray[0]} does not apply to retrievers, which trains nothing; leave it out")
        asked: dict[str, Any] = of_retrievers | {
            "overrides": overrides,
            "pairs": pair,
            "seeds": seeds and [int(part) for part in seeds.split(",")],
            "problems": problems,
            "samples": samples,
            "device": device,
        }
        given: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in asked.items() if v}
        with heartbeat(typer.echo, lambda: last_written(folder)):
            run_retrievers(Benchmark(**given), folder, say=echo)
        typer.echo(f"report: {folder}/report.html")
        return
    if stray := [option for option, value in of_retrievers.items() if value is not None]:
        raise ConfigError(
            f"--{stray[0].removesuffix('s')} applies to the experiment retrievers, not to {name}; leave it out"
        )
    chosen = EXPERIMENTS[name]
    if arms is not None:
        chosen = chosen.only([part.strip() for part in arms.split(",")])
    changes: dict[str, Any] = {
        "overrides": (*chosen.overrides, *(overrides or ())),
        "pairs": pair and tuple(pair),
        "seeds": seeds and tuple(int(part) for part in seeds.split(",")),
        "problems": problems,
        "samples": samples,
        "size": size,
        "device": device,
    }
    chosen = replace(chosen, **{key: value for key, value in changes.items() if value})
    with heartbeat(typer.echo, lambda: last_written(folder)):
        results = run_experiment(chosen, folder, workers=workers, say=echo)
    for claim in results["claims"]:
        values = ", ".join(f"{value:.3f}" for value in claim["values"])
        verdict = claim["verdict"].replace("fails", "DOES NOT HOLD")
        echo(f"{claim['pair']}: {claim['claim']} {claim['bar']}: {verdict}" + (f" ({values})" if values else ""))
    typer.echo(f"report: {folder}/report.html")
