"""``tandemrl config``."""

from typing import Annotated

import typer


def config(
    section: Annotated[
        str | None,
        typer.Argument(
            help="A section or key, such as rollout, rollout.vllm or train.lr, or module:name; default: all."
        ),
    ] = None,
) -> None:
    """Every key of the configuration: type, default, range, meaning."""
    import json
    import textwrap

    from tandemrl.config import Config, ConfigError, expected, explanation, leaves
    from tandemrl.config.fields import is_own

    if section is not None and is_own(section):
        return own_component(section)
    keys = list(leaves(Config()))
    chosen = [key for key in keys if section is None or f"{key.key}.".startswith(f"{section}.")]
    if not chosen:
        sections = dict.fromkeys(key.key.rpartition(".")[0] or key.key for key in keys)
        raise ConfigError(f"no section {section!r}; there are {', '.join(sections)}")
    heading = None
    for key in chosen:
        default = key.value if isinstance(key.value, str) and key.value else json.dumps(key.value)
        allowed = key.allowed.words if key.allowed else ""
        if key.section != heading:
            heading = key.section
            typer.echo(f"\n{textwrap.fill(' '.join(str(heading.__doc__).split()), 80)}\n")
        head = f"{key.key} = {default}   ({'; '.join(filter(None, (expected(key.type), allowed)))})"
        for text, margin, indent in ((head, "", " " * 8), (explanation(key), " " * 4, " " * 4)):
            typer.echo(textwrap.fill(text, 80, initial_indent=margin, subsequent_indent=indent))


def own_component(path: str) -> None:
    """Print what the author of ``module:name`` wrote about it, and its parameters."""
    import inspect

    from tandemrl.config import ConfigError
    from tandemrl.processes.names import function_named

    component = function_named(path, path, ConfigError)
    typer.echo(inspect.cleandoc(component.__doc__ or "no docstring") + "\n")
    for each in inspect.signature(component).parameters.values():
        typer.echo(f"    {each}")
