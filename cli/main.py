"""``tandemrl``: the entry point, its commands, and the one place where errors become a line and an exit code."""

from tandemrl.cli.errors import interruptible, is_users, one_line

with interruptible():
    import importlib.metadata
    import os
    from typing import Annotated, Any

    import typer
    from typer.core import TyperGroup

    from tandemrl.cli import (
        check,
        compare,
        config,
        data,
        evaluate,
        experiment,
        legibility,
        model,
        play,
        regrade,
        report,
        score,
        serve,
    )
    from tandemrl.cli.examples import add_examples
    from tandemrl.cli.train import plan, train


class ErrorBoundary(TyperGroup):
    """Turns bad input into one line on standard error and exit code 2, and Ctrl-C into a line and exit code 130. Only a
    bug shows a traceback."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Write the home folder where a shell leaves a ~: in quotes and after ``--option=``."""
        return super().parse_args(ctx, [_at_home(argument) for argument in args])

    def invoke(self, ctx: Any) -> Any:
        try:
            with interruptible():
                return super().invoke(ctx)
        except Exception as error:
            option = str(getattr(error, "option_name", ""))  # of click's NoSuchOption, which typer may have a copy of
            if option and (keys := _config_keys(option)) and _takes_keys(getattr(error, "ctx", None)):
                problem = f"config keys are given without dashes: {' or '.join(f'{key}=VALUE' for key in keys)}"
                raise typer.BadParameter(problem, param_hint=option) from None
            if ctx.params.get("debug") or not is_users(error):
                raise
            typer.echo(f"error: {one_line(error)}", err=True)
            raise typer.Exit(2) from None


def _at_home(argument: str) -> str:
    option, sign, value = argument.partition("=") if argument.startswith("--") else ("", "", argument)
    return f"{option}{sign}{os.path.expanduser(value)}"


def _takes_keys(ctx: Any) -> bool:
    return ctx is None or any(each.name == "overrides" for each in ctx.command.params)


def _config_keys(option: str) -> list[str]:
    """The config keys that an unknown option was probably meant to be."""
    from tandemrl.config import Config, leaves

    name = option.lstrip("-").replace("-", "_")
    if "." in name:
        return [name]
    return [leaf.key for leaf in leaves(Config()) if f".{leaf.key}".endswith(f".{name}")]


app = typer.Typer(
    cls=ErrorBoundary,
    help="Tandem RL: train a senior on rollouts that it writes together with a frozen junior.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for _command in (
    *(train, plan, compare.compare, serve.serve, play.play, score.score, legibility.legibility),
    *(regrade.regrade, report.report, config.config, check.check),
):
    app.command()(_command)
_groups = {"eval": evaluate, "experiment": experiment, "data": data, "model": model, "export": report}
for _name, _group in _groups.items():
    app.add_typer(_group.app, name=_name)
add_examples(app)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"tandemrl {importlib.metadata.version('tandemrl')}")
        raise typer.Exit


@app.callback()
def root(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of every command."""


def main() -> None:
    """The console script."""
    with interruptible():
        app()
