"""``tandemrl train`` and ``tandemrl plan``."""

import shlex
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tandemrl.cli.keys import keys

if TYPE_CHECKING:
    from tandemrl.config import Config

ConfigName = Annotated[
    str | None, typer.Option("--config", "-c", help="A YAML file, the name of a packaged config, or a run's folder.")
]
Overrides = Annotated[list[str] | None, keys("e.g. train.lr=1e-5")]


def train(
    context: typer.Context,
    config: ConfigName = None,
    overrides: Overrides = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print the changed keys, check what the run needs, and stop; no downloads."),
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="With --dry-run: print all keys.")] = False,
    resume: Annotated[
        str,
        typer.Option(help="auto (from the newest checkpoint, if any), never (output_dir must be fresh), or a folder."),
    ] = "auto",
    accept_changed: Annotated[
        list[str] | None,
        typer.Option(metavar="CODE", help="Resume with repaired code: reward, recipe, strategy, engine, environment …"),
    ] = None,
) -> None:
    """Train a senior as a config says. KEY=VALUE arguments override the file."""
    from tandemrl.config import batch_plan, stated_keys, to_yaml

    resolved, accepted = _loaded(config, overrides), tuple(accept_changed or ())
    stated = stated_keys(overrides or ())
    if dry_run:
        typer.echo(f"{to_yaml(resolved) if verbose else _changed(resolved)}\n{batch_plan(resolved)}\n")
        _check(resolved, resume, accepted, stated)
        return
    from tandemrl.processes.world import destroy_world, launched, rank
    from tandemrl.training import loop as training
    from tandemrl.training.faults import Stopped

    # After an error, once it is printed; not as the interpreter ends.
    context.find_root().call_on_close(lambda: destroy_world(resolved.parallel.timeout_s))
    output = resolved.output_dir
    try:
        training.train(resolved, resume=training.checkpoint.Resume(resume, accepted), stated=stated)
    except (Stopped, KeyboardInterrupt):
        if rank() == 0 and training.checkpoint.latest(output):
            same = "the same torchrun command" if launched() > 1 else _command("train", "--config", output)
            typer.echo(f"to go on from the last checkpoint: {same}", err=True)
        raise
    if rank() == 0:
        typer.echo("\n".join(("next:", *(f"  {command}" for command in _next(resolved)))))


def plan(
    config: ConfigName = None,
    overrides: Overrides = None,
    ranks: Annotated[int, typer.Option(min=1, help="How many processes, one per device, which need not be here.")] = 1,
    device: Annotated[
        str | None, typer.Option(help="The device, e.g. h100; default: h100, or cpu with model.device=cpu.")
    ] = None,
    times_of: Annotated[
        str | None, typer.Option(help="The folder of a run; its measured steps say how many hours this one takes.")
    ] = None,
) -> None:
    """Plan a run on other machines: the memory of a process, and its hours. This machine is not checked."""
    from tandemrl.apps.planning.plan import hours_of
    from tandemrl.apps.planning.plan import plan as planned
    from tandemrl.cli.lines import echo
    from tandemrl.config import batch_plan

    resolved = _loaded(config, overrides)
    typer.echo(f"{batch_plan(resolved)}\n")
    found = planned(resolved, ranks, device or ("cpu" if resolved.model.device == "cpu" else "h100"))
    echo(str(found), indent=8)
    if times_of is not None:
        echo(hours_of(resolved, times_of), indent=8)
    found.require_fit()


def _loaded(config: str | None, overrides: list[str] | None) -> "Config":
    from tandemrl.config import ConfigError, load, packaged_configs

    if config is None:
        names = ", ".join(packaged_configs())
        raise ConfigError(f"give --config: a YAML file or one of the packaged configs, which are {names}")
    return load(config, overrides or ())


def _changed(config: "Config") -> str:
    """The keys that differ from the defaults, as they are typed."""
    import json

    from tandemrl.config import Config, difference

    changed = difference(Config(), config)
    lines = [f"{len(changed)} keys differ from the defaults (all: --verbose):"]
    shown = {key: value if isinstance(value, str) else json.dumps(value) for key, (_, value) in changed.items()}
    return "\n".join([*lines, *(f"  {key}={value}" for key, value in shown.items()), ""])


def _next(config: "Config") -> list[str]:
    """The commands that follow a finished run."""
    from tandemrl.models.loading import junior_tokenizer_of
    from tandemrl.training.checkpoint import latest

    output, last = Path(config.output_dir), latest(config.output_dir)
    model, junior = output / "hf" / "best", config.model.junior or config.model.senior
    if not model.is_dir() and last is not None:
        model = output / "hf" / last.name
    commands = [_command("report", output)]
    if model.is_dir() and config.data.eval:
        commands.append(_command("eval", "all", "--model", model, "--junior", junior, "--out", output / "eval"))
    served = config.model.junior_endpoint.url is not None
    if model.is_dir() and not config.has_episodes and junior_tokenizer_of(str(model), junior, endpoint=served) is None:
        commands.append(_command("play", "--senior", model, "--junior", junior))
    return commands


def _command(*words: object) -> str:
    return shlex.join(["tandemrl", *map(str, words)])


def _check(config: "Config", resume: str, accepted: tuple[str, ...], stated: Collection[str]) -> None:
    """Print what the run needs and whether it is there; exit code 2 if something is wrong.

    Args:
        stated: the keys that the user typed; see ``Preflight``.
    """
    from dataclasses import fields
    from functools import partial

    from tandemrl.cli.errors import is_users, one_line
    from tandemrl.cli.lines import echo
    from tandemrl.processes.world import launched
    from tandemrl.training import checkpoint
    from tandemrl.training.arguments import with_records
    from tandemrl.training.preflight import Doubt, NotHereError, Preflight

    def functions() -> str:
        none: dict[str, Any] = {field.name: None for field in fields(config.functions)}
        with_records(config, **none)
        return "none has to be passed in Python"

    size = launched()
    problems: dict[str, str] = {}  # what is wrong -> the first subject that it was found in
    checks: dict[str, Callable[[], str]] = {
        "--resume": partial(checkpoint.check_folder, config, resume, accepted),
        "functions": functions,
        **Preflight(config, downloads=False, processes=size if size > 1 else None, stated=stated).checks,
    }
    for subject, check in checks.items():
        try:
            found = check()
            echo(f"{'look here' if isinstance(found, Doubt) else 'ok':11}  {subject}: {found}", indent=13)
        except NotHereError as error:
            echo(f"not checked  {subject}: {error}", indent=13)
        except Exception as error:
            if not is_users(error):
                raise
            reason = one_line(error)
            same = problems.setdefault(reason, subject)
            echo(f"PROBLEM      {subject}: {reason if same == subject else f'see {same}'}", indent=13)
    if problems:
        typer.echo(f"error: {len(problems)} of the checks failed: {', '.join(problems.values())}", err=True)
        raise typer.Exit(2)
