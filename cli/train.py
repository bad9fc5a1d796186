"""``tandemrl train``."""

from collections.abc import Collection
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from tandemrl.config import Config


def train(
    context: typer.Context,
    config: Annotated[
        str | None,
        typer.Option("--config", "-c", help="A YAML file, the name of a packaged config, or a run's folder."),
    ] = None,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="e.g. train.lr=1e-5")] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Print the config and the batch plan, check what the run needs, and stop; no downloads."
        ),
    ] = False,
    ranks: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="With --dry-run: plan a run of this many processes, one per device, which need not exist here: "
            "memory. This machine is not checked.",
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="With --ranks: the device, e.g. h100; default: h100, or cpu with model.device=cpu."),
    ] = None,
    times_of: Annotated[
        str | None,
        typer.Option(help="With --ranks: the folder of a run; its measured steps say how many hours this one takes."),
    ] = None,
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
    from tandemrl.config import ConfigError, batch_plan, load, packaged_configs, stated_keys, to_yaml

    if config is None:
        names = ", ".join(packaged_configs())
        raise ConfigError(f"give --config: a YAML file or one of the packaged configs, which are {names}")
    resolved = load(config, overrides or ())
    if (ranks is not None and not dry_run) or ((device is not None or times_of is not None) and ranks is None):
        raise ConfigError(
            "--ranks needs --dry-run, and --device and --times-of need --ranks: they plan a run and start none"
        )
    if ranks is not None and resume != "auto":
        raise ConfigError("leave out --resume with --ranks, which plans a run and starts none")
    if ranks is not None:
        typer.echo(f"{to_yaml(resolved)}\n{batch_plan(resolved)}\n")
        _plan(resolved, ranks, device, times_of)
        return
    if dry_run:
        typer.echo(f"{to_yaml(resolved)}\n{batch_plan(resolved)}\n")
        _check(resolved, resume, stated_keys(overrides or ()))
        return
    from tandemrl.distributed.world import destroy_world
    from tandemrl.training import loop as training

    context.find_root().call_on_close(destroy_world)  # after an error, once it is printed; not as the interpreter ends
    how = training.checkpoint.Resume(resume, tuple(accept_changed or ()))
    training.train(resolved, resume=how, stated=stated_keys(overrides or ()))


def _plan(config: "Config", ranks: int, device: str | None, times_of: str | None) -> None:
    """Print what each of ``ranks`` processes needs, and raise a PlanError if it does not fit.

    Args:
        times_of: the run whose steps took as long as those of this one will.
    """
    from tandemrl.apps.planning.accelerators import accelerator
    from tandemrl.apps.planning.page import described, described_time, require_fit
    from tandemrl.apps.planning.plan import plan
    from tandemrl.cli.lines import echo

    target = accelerator(device or ("cpu" if config.model.device == "cpu" else "h100"))
    found = plan(config, ranks, target)
    echo(described(found), indent=8)
    if times_of is not None:
        echo(described_time(config, times_of), indent=8)
    require_fit(found, config, target)


def _check(config: "Config", resume: str, stated: Collection[str]) -> None:
    """Print what the run needs and whether it is there; exit code 2 if something is wrong.

    Args:
        stated: the keys that the user typed; see ``Preflight``.
    """
    from dataclasses import fields

    from tandemrl.cli.errors import is_users, one_line
    from tandemrl.cli.lines import echo
    from tandemrl.distributed.world import launched
    from tandemrl.training.checkpoint import check_resume
    from tandemrl.training.function_records import with_records
    from tandemrl.training.preflight import Doubt, NotHereError, Preflight

    def functions() -> str:
        none: dict[str, Any] = {field.name: None for field in fields(config.functions)}
        with_records(config, **none)
        return "none has to be passed in Python"

    size = launched()
    problems: dict[str, str] = {}  # what is wrong -> the first subject that it was found in
    checks = {
        "--resume": lambda: check_resume(resume, config.output_dir),
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
