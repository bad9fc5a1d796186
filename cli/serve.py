"""``tandemrl serve``."""

from typing import Annotated

import typer

from tandemrl.cli.errors import needs
from tandemrl.cli.keys import config_of, keys


def serve(
    senior: Annotated[str, typer.Option(help="HF folder or hub id.")],
    junior: Annotated[str, typer.Option(help="HF folder or hub id. With another vocabulary: --engine torch.")],
    overrides: Annotated[
        list[str] | None,
        keys("Keys of model, rollout and selection, e.g. model.dtype=bfloat16 selection.prob_senior=0.25"),
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="vllm or torch, as rollout.engine. Default: vllm where it is installed.")
    ] = None,
    context: Annotated[
        int | None, typer.Option(min=2, help="Tokens of prompt and response; default: the models'.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0: every one of this machine.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Name under which clients know this machine, if it is another; repeatable."),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(help="Key that clients must send; safer in VLLM_API_KEY, which process lists do not show."),
    ] = None,
) -> None:
    """An OpenAI-compatible server. Both models generate the responses, which name the author of each token."""
    import importlib.util

    with needs("serve", "serve"):
        from tandemrl.apps.serve import engine_server
    engine = engine or ("vllm" if importlib.util.find_spec("vllm") is not None else "torch")
    before = [f"model.senior={senior}", f"model.junior={junior}", f"rollout.engine={engine}"]
    config = config_of(overrides, ("model.", "rollout.", "selection.", "data.template_arguments"), before)
    engine_server.serve(
        config, host=host, port=port, allowed_hosts=allowed_host or (), api_key=api_key, context=context
    )
