"""``tandemrl play``."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from tandemrl.cli.errors import needs
from tandemrl.cli.keys import config_of, keys


def play(
    overrides: Annotated[
        list[str] | None,
        keys("e.g. selection.strategy=sentence, to begin with; rollout.engine=vllm; model.dtype=bfloat16"),
    ] = None,
    senior: Annotated[str | None, typer.Option(help="HF folder or hub id; default: the library's tiny pair.")] = None,
    junior: Annotated[str | None, typer.Option(help="HF folder or hub id; default: the senior itself.")] = None,
    longest: Annotated[int, typer.Option(min=16, help="Tokens of the longest text, prompt included.")] = 2048,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any that is free.")] = 8765,
) -> None:
    """Write with senior and junior in the browser."""
    with needs("play", "play"):
        from tandemrl.apps.play.app import application
        from tandemrl.rollout.gateway.address import listen, run, url_of
    from tandemrl.apps.play.duo import Duo
    from tandemrl.apps.play.episodes import EpisodeDuo
    from tandemrl.apps.play.problems import EXAMPLE, Problems, known_problems
    from tandemrl.apps.serve.engine_server import open_pair
    from tandemrl.cli.heartbeat import heartbeat
    from tandemrl.config import ConfigError, load
    from tandemrl.data.rows import DataError
    from tandemrl.models.loading import context_of, junior_tokenizer_of
    from tandemrl.rewards.protocol import GraderError
    from tandemrl.rollout.envs.episodes import make_episode_runner

    config = config_of(overrides, READ, ["rollout.vllm.multiprocess=true"])
    if senior is None and junior is not None:
        raise ConfigError("--junior needs --senior: the tiny pair has a junior of its own")
    if senior is not None and junior_tokenizer_of(senior, junior) is not None:
        texts = "serve it (`tandemrl serve --engine torch`), or read the samples of `tandemrl eval tandem`"
        raise ConfigError(f"--junior {junior}: has another vocabulary than the senior; {texts}")
    listening = listen(HOST, port)  # before models are loaded
    if senior is None:
        from tandemrl.apps.experiments.tiny import build_tiny_pair

        folder = Path("runs/jargon")
        with heartbeat(typer.echo, lambda: f"preparing the tiny pair in {folder}, once"):
            build_tiny_pair(folder, pair="jargon")
        senior, junior = str(folder / "senior"), str(folder / "junior")
    try:
        known, rows, environment = known_problems(senior)
        problems = Problems(known, rows, environment)
    except (ConfigError, DataError, GraderError) as error:
        typer.echo(f"the page offers none of the pair's own problems: {error}")
        problems, environment = Problems(load(), [EXAMPLE]), None
    config = replace(config, model=replace(config.model, senior=senior, junior=junior or senior))
    engine, tokenizer, _, ends, load_junior = open_pair(config, longest)
    reader = load_junior()
    how = {
        "longest": min(longest, engine.context, context_of(reader.config)),
        "template_arguments": config.data.template_arguments,
        "ends": ends,
    }
    if environment is not None:
        acting = replace(known, model=config.model)
        runner = make_episode_runner(acting, tokenizer, environment=environment, eos_token_ids=ends)
        assert runner is not None
        duo: Duo = EpisodeDuo(engine, reader, tokenizer, runner=runner, config=acting, rows=problems.rows, **how)
        stated = any(each.startswith("selection.") for each in overrides or ())
        config = config if stated else replace(config, selection=known.selection)
    else:
        duo = Duo(engine, reader, tokenizer, **how)
    about = {"senior": senior, "junior": junior or senior}
    with listening:
        typer.echo(f"open {url_of(HOST, listening)} (Ctrl-C ends it)")
        run(application(duo, problems, about=about, begin_with=config.selection), listening)


HOST = "127.0.0.1"
READ = ("model.device", "model.dtype", "rollout.engine", "rollout.vllm.", "selection.", "data.template_arguments")
"""The keys that the page reads."""
