"""``tandemrl serve``."""

from typing import Annotated, Any, Literal

import typer

OWN_SERVERS = ("vllm",)
"""The engines that bring a server of their own. Every other one is asked through ours."""


def serve(
    senior: Annotated[str, typer.Option(help="HF folder or hub id.")],
    junior: Annotated[str, typer.Option(help="HF folder or hub id. With another vocabulary: --engine torch.")],
    options: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- OPTION...]",
            help="With vLLM, options of `vllm serve`, e.g. -- --max-model-len 4096; else keys of model and rollout, "
            "e.g. -- model.dtype=bfloat16",
        ),
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="vllm or torch, as rollout.engine. Default: vllm where it is installed.")
    ] = None,
    strategy: Annotated[str, typer.Option(help="Who generates: word, sentence, … as selection.strategy.")] = "word",
    prob_senior: Annotated[float, typer.Option(help="Probability that a draw falls to the senior.")] = 0.5,
    max_gap_tokens: Annotated[int, typer.Option(help="Redraw after this many tokens at the latest.")] = 32,
    chunk_size: Annotated[int, typer.Option(help="Tokens per turn with --strategy chunk.")] = 16,
    first: Annotated[str, typer.Option(help="Who starts (sentence, chunk, alternating) or is alone.")] = "senior",
    mode: Annotated[
        str | None, typer.Option(help="With vLLM: lazy, lockstep, …, as rollout.vllm.mode. Default: lazy.")
    ] = None,
    draft_tokens: Annotated[
        str | None,
        typer.Option(help="Tokens that the junior drafts (vLLM: with --mode draft or auto); auto: as many as pay off."),
    ] = None,
    junior_dtype: Annotated[str | None, typer.Option(help="Default: the senior's.")] = None,
    junior_quantization: Annotated[str | None, typer.Option(help="A quantization method of vLLM.")] = None,
    junior_device: Annotated[str | None, typer.Option(help="A CUDA device of its own, e.g. cuda:1.")] = None,
    tool_call_parser: Annotated[
        str | None,
        typer.Option(help="How tool calls are read. Default: hermes or llama3_json, as the chat template writes them."),
    ] = None,
    template_arguments: Annotated[
        str | None,
        typer.Option(
            metavar="MAPPING", help="As data.template_arguments, e.g. '{enable_thinking: true}'; default: the key's."
        ),
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

    from tandemrl.data.templates import arguments_of

    selection = {"strategy": strategy, "prob_senior": prob_senior, "max_gap_tokens": max_gap_tokens}
    selection |= {"chunk_size": chunk_size, "first": first}
    reached: dict[str, Any] = {"host": host, "port": port, "allowed_hosts": allowed_host or (), "api_key": api_key}
    reached |= {"tool_call_parser": tool_call_parser, "template_arguments": arguments_of(template_arguments)}
    own = {"mode": mode, "draft_tokens": draft_tokens, "junior_quantization": junior_quantization}
    partner = {"junior_dtype": junior_dtype, "junior_device": junior_device}
    engine = engine or ("vllm" if importlib.util.find_spec("vllm") is not None else "torch")
    if engine in OWN_SERVERS:
        _serve_by_vllm(senior, junior, selection, options or (), own | partner, reached)
    else:
        _serve_by_engine(engine, senior, junior, selection, options or (), own, reached | partner)


def _serve_by_vllm(senior: str, junior: str, selection: Any, options: Any, own: Any, reached: Any) -> None:
    from dataclasses import asdict

    from tandemrl.config import ConfigError, SelectionConfig
    from tandemrl.rollout.vllm import cannot_import, require_vllm

    require_vllm("tandemrl serve --engine vllm")
    try:
        from tandemrl.apps.serve import vllm_server
        from tandemrl.apps.serve.requests import selection_of
        from tandemrl.rollout.vllm.modes import DRAFTING, check_mode
        from tandemrl.rollout.vllm.settings import TandemOptions
    except ImportError as error:
        raise cannot_import("tandemrl serve", error) from None
    mode, tokens = check_mode(own.pop("mode") or "lazy"), own.pop("draft_tokens")
    if tokens is not None and mode not in DRAFTING:
        able = " or ".join(f"--mode {name}" for name in DRAFTING)
        raise ConfigError(
            f"--draft-tokens requires {able}: with --mode {mode} the junior drafts nothing; or leave it out"
        )
    tandem = TandemOptions(
        junior=junior,
        mode=mode,
        draft=_draft_of(tokens or "auto") if mode in DRAFTING else 0,
        selection=asdict(selection_of(selection, SelectionConfig())),
        **own,
    )
    vllm_server.serve(senior, tandem, vllm_args=options, **reached)


def _serve_by_engine(
    engine: str, senior: str, junior: str, selection: Any, options: Any, own: Any, reached: Any
) -> None:
    from dataclasses import replace

    from tandemrl.config import ConfigError, SelectionConfig, load
    from tandemrl.files import pip_install

    for name in ("mode", "junior_quantization"):
        if own[name] is not None:
            raise ConfigError(f"--{name.replace('_', '-')} requires --engine vllm; leave it out with --engine {engine}")
    for option in options:
        if not option.startswith(("model.", "rollout.")):
            raise ConfigError(f"{option!r}: --engine {engine} takes keys of model and rollout, e.g. model.device=cuda")
    try:
        from tandemrl.apps.serve import engine_server
        from tandemrl.apps.serve.requests import selection_of
    except ImportError as error:
        raise ConfigError(f"tandemrl serve: {error.name} is missing; {pip_install('serve')}") from None
    tokens = own["draft_tokens"]
    given = [] if tokens is None else [f"rollout.draft_tokens={_draft_of(tokens)}"]
    models = [f"model.senior={senior}", f"model.junior={junior}", f"rollout.engine={engine}"]
    config = load(overrides=[*models, *given, *options])
    config = replace(config, selection=selection_of(selection, SelectionConfig()))
    engine_server.serve(config, **reached)


def _draft_of(tokens: str) -> int | Literal["auto"]:
    from tandemrl.config import ConfigError

    if tokens != "auto" and not (tokens.isascii() and tokens.isdecimal() and int(tokens) > 0):
        raise ConfigError(f"--draft-tokens: {tokens!r} is neither auto nor a positive number")
    return "auto" if tokens == "auto" else int(tokens)
