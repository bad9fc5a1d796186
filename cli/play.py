"""``tandemrl play``."""

import os
import socket
from pathlib import Path
from typing import Annotated

import typer

from tandemrl.cli.keys import config_of, keys


def play(
    overrides: Annotated[
        list[str] | None,
        keys("e.g. selection.strategy=sentence, to begin with; rollout.engine=vllm; model.dtype=bfloat16"),
    ] = None,
    senior: Annotated[
        str | None, typer.Option(help="HF folder or hub id; default: the tiny pair of the library.")
    ] = None,
    junior: Annotated[str | None, typer.Option(help="HF folder or hub id; default: the senior itself.")] = None,
    longest: Annotated[int, typer.Option(min=16, help="Tokens of the longest text, prompt included.")] = 2048,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any that is free.")] = 8765,
) -> None:
    """Write with senior and junior in the browser."""
    from tandemrl.config import ConfigError
    from tandemrl.config.hints import pip_install

    try:
        import uvicorn

        from tandemrl.apps.play.app import application
    except ImportError as error:
        raise ConfigError(f"tandemrl play: {error.name} is missing; {pip_install('play')}") from None
    from transformers import AutoConfig

    from tandemrl.apps.play.duo import Duo
    from tandemrl.apps.play.problems import EXAMPLE, Problems, known_problems
    from tandemrl.cli.heartbeat import heartbeat
    from tandemrl.config import load
    from tandemrl.config.compatibility import Facts, check
    from tandemrl.data.rows import DataError
    from tandemrl.data.templates import template_variables
    from tandemrl.models.loading import context_of, junior_tokenizer_of, load_model, load_tokenizer, resolve_device
    from tandemrl.rewards.protocol import GraderError
    from tandemrl.rollout.factory import ModelSource, ends_of, make_engine
    from tandemrl.rollout.schedule import schedule_of

    config = config_of(overrides, READ, ["rollout.vllm.multiprocess=true"])
    selection, rollout, arguments = config.selection, config.rollout, config.data.template_arguments
    if senior is None and junior is not None:
        raise ConfigError("--junior needs --senior: the tiny pair has a junior of its own")
    listening = listen(port)
    if senior is None:
        from tandemrl.apps.experiments.tiny import build_tiny_pair

        folder = Path("runs/jargon")
        with heartbeat(typer.echo, lambda: f"preparing the tiny pair in {folder}, once"):
            build_tiny_pair(folder, pair="jargon")
        senior, junior = str(folder / "senior"), str(folder / "junior")
    try:
        problems = Problems(*known_problems(senior))
    except (ConfigError, DataError, GraderError) as error:
        typer.echo(f"the page offers none of the pair's own problems: {error}")
        problems = Problems(load(), [EXAMPLE])
    partner = junior or senior
    on, dtype = str(resolve_device(config.model.device)), config.model.dtype
    tokenizer = load_tokenizer(senior)
    other = junior_tokenizer_of(senior, partner)
    if other is not None:
        check(config, Facts(apart=True, asked=True))
    template_variables(tokenizer, arguments)  # refuses what the chat template does not read
    models = [AutoConfig.from_pretrained(path, trust_remote_code=False) for path in (senior, partner)]
    longest = min(longest, *map(context_of, models))
    reader = load_model(partner, dtype=dtype, device=on)
    own = ModelSource(senior, lambda: load_model(senior, dtype=dtype, device=on))
    its = ModelSource(partner, lambda: reader, None, None, other)
    ends = ends_of(own, its, tokenizer)
    engine = make_engine(rollout, own, its, tokenizer, dtype=dtype, device=on, longest=longest, ends=ends)
    duo = Duo(
        engine, reader, tokenizer, longest=longest, template_arguments=arguments, junior_tokenizer=other, ends=ends
    )
    # One of the user's own that cannot be made is refused now.
    schedule_of(selection, tokenizer, engine.vocabulary, by_text=other is not None)
    app = application(duo, problems, about={"senior": senior, "junior": partner}, begin_with=selection)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False))
    with listening:
        typer.echo(f"open http://127.0.0.1:{listening.getsockname()[1]} (Ctrl-C ends it)")
        server.run(sockets=[listening])


READ = ("model.device", "model.dtype", "rollout.engine", "rollout.vllm.", "selection.", "data.template_arguments")
"""The keys that the page reads."""


def listen(port: int) -> socket.socket:
    """A socket that listens on this machine. It is opened before models are loaded."""
    from tandemrl.config import ConfigError

    try:
        return socket.create_server(("127.0.0.1", port))
    except OSError as error:
        reason = os.strerror(error.errno or 0)  # without the address, which Python appends
        raise ConfigError(f"--port {port}: {reason}; take another one, or 0 for any that is free") from None
