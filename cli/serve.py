"""``tandemrl serve``."""

from typing import Annotated

import typer


def serve(
    senior: Annotated[str, typer.Option(help="HF folder or hub id.")],
    junior: Annotated[str, typer.Option(help="HF folder or hub id. With another vocabulary: --engine torch.")],
    options: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- OPTION...]",
            help="Keys of model and rollout, e.g. -- model.dtype=bfloat16 rollout.max_rows=64",
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
    draft_tokens: Annotated[
        str | None,
        typer.Option(help="Tokens that the junior drafts; auto: as many as pay off. Default: none."),
    ] = None,
    junior_dtype: Annotated[str | None, typer.Option(help="Default: the senior's.")] = None,
    junior_quantization: Annotated[str | None, typer.Option(help="A quantization method of vLLM.")] = None,
    junior_device: Annotated[str | None, typer.Option(help="A CUDA device of its own, e.g. cuda:1.")] = None,
    context: Annotated[
        int | None,
        typer.Option(min=2, help="Tokens of prompt and response together. Default: the models'."),
    ] = None,
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
    from dataclasses import replace

    from tandemrl.config import ConfigError, SelectionConfig, load
    from tandemrl.config.hints import pip_install
    from tandemrl.data.templates import arguments_of

    engine = engine or ("vllm" if importlib.util.find_spec("vllm") is not None else "torch")
    if junior_quantization is not None and engine != "vllm":
        raise ConfigError(f"--junior-quantization requires --engine vllm; leave it out with --engine {engine}")
    for option in options or ():
        if not option.startswith(("model.", "rollout.")):
            raise ConfigError(f"{option!r}: expected keys of model and rollout, e.g. model.device=cuda")
    try:
        from tandemrl.apps.serve import engine_server
        from tandemrl.apps.serve.requests import selection_of
    except ImportError as error:
        raise ConfigError(f"tandemrl serve: {error.name} is missing; {pip_install('serve')}") from None
    keys = {"model.senior": senior, "model.junior": junior, "rollout.engine": engine}
    if draft_tokens is not None:
        keys["rollout.draft_tokens"] = draft_tokens
    if engine == "vllm":
        of_vllm = {"junior_dtype": junior_dtype, "junior_device": junior_device}
        of_vllm |= {"junior_quantization": junior_quantization}
        keys |= {f"rollout.vllm.{name}": value for name, value in of_vllm.items() if value is not None}
    config = load(overrides=[*(f"{key}={value}" for key, value in keys.items()), *(options or ())])
    selection = {"strategy": strategy, "prob_senior": prob_senior, "max_gap_tokens": max_gap_tokens}
    selection |= {"chunk_size": chunk_size, "first": first}
    engine_server.serve(
        replace(config, selection=selection_of(selection, SelectionConfig())),
        host=host,
        port=port,
        allowed_hosts=allowed_host or (),
        api_key=api_key,
        tool_call_parser=tool_call_parser,
        template_arguments=arguments_of(template_arguments),
        context=context,
        junior_dtype=junior_dtype,
        junior_device=junior_device,
    )
