"""``tandemrl``: the entry point, its commands, and the one place where errors become a line and an exit code."""

from tandemrl.cli.errors import interruptible, is_users, one_line

with interruptible():
    import importlib.metadata
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
        model,
        play,
        report,
        score,
        serve,
        train,
    )


class ErrorBoundary(TyperGroup):
    """Turns bad input into one line on standard error and exit code 2, and Ctrl-C into a line and exit code 130. Only a
    bug shows a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            with interruptible():
                return super().invoke(ctx)
        except Exception as error:
            option = str(getattr(error, "option_name", ""))  # of click's NoSuchOption, which typer may have a copy of
            if "." in option:
                problem = f"config keys are given without dashes: {option.lstrip('-')}=VALUE"
                raise typer.BadParameter(problem, param_hint=option) from None
            if ctx.params.get("debug") or not is_users(error):
                raise
            typer.echo(f"error: {one_line(error)}", err=True)
            raise typer.Exit(2) from None


app = typer.Typer(
    cls=ErrorBoundary,
    help="Tandem RL: train a senior on rollouts that it writes together with a frozen junior.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("train")(train.train)
app.add_typer(evaluate.app, name="eval")
app.command("compare")(compare.compare)
app.command("experiment")(experiment.experiment)
app.add_typer(data.app, name="data")
app.add_typer(model.app, name="model")
app.command("serve")(serve.serve)
app.command("play")(play.play)
app.command("score")(score.score)
app.command("report")(report.report)
app.command("config")(config.config)
app.command("check")(check.check)


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
