"""``tandemrl serve``."""

from typing import Annotated, Literal

import typer


def serve(
    senior: Annotated[str, typer.Option(help="HF folder or hub id.")],
    junior: Annotated[str, typer.Option(help="HF folder or hub id of a model with the same vocabulary.")],
    vllm_args: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- VLLM_OPTION...]", help="Options of `vllm serve`, e.g. -- --max-model-len 4096"),
    ] = None,
    strategy: Annotated[str, typer.Option(help="Who writes: word, sentence, chunk, … as selection.strategy.")] = "word",
    prob_senior: Annotated[float, typer.Option(help="Probability that a draw falls to the senior.")] = 0.5,
    max_gap_tokens: Annotated[int, typer.Option(help="Redraw after so many tokens at the latest.")] = 32,
    chunk_size: Annotated[int, typer.Option(help="Tokens per turn with --strategy chunk.")] = 16,
    first: Annotated[str, typer.Option(help="Who starts (sentence, chunk, alternating) or writes alone.")] = "senior",
    mode: Annotated[str, typer.Option(help="lazy, lockstep, draft or auto, as rollout.vllm.mode.")] = "lazy",
    draft_tokens: Annotated[
        str, typer.Option(help="Tokens that the junior writes ahead with --mode draft or auto; auto: as many as pay.")
    ] = "auto",
    junior_dtype: Annotated[str | None, typer.Option(help="Default: the senior's.")] = None,
    junior_quantization: Annotated[str | None, typer.Option(help="A quantization method of vLLM.")] = None,
    junior_device: Annotated[str | None, typer.Option(help="A CUDA device of its own, e.g. cuda:1.")] = None,
    tool_call_parser: Annotated[
        str | None,
        typer.Option(
            help="How vLLM reads tool calls. Default: hermes or llama3_json, as the chat template writes them."
        ),
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
        str | None, typer.Option(help="Key that clients have to send; better in VLLM_API_KEY, which nobody can list.")
    ] = None,
) -> None:
    """vLLM's OpenAI-compatible server, written by both models. Responses name the author of each token."""
    from dataclasses import asdict

    from tandemrl.config import SelectionConfig
    from tandemrl.data.templates import arguments_of
    from tandemrl.rollout.vllm import cannot_import, require_vllm

    require_vllm("tandemrl serve")
    try:
        from tandemrl.rollout.vllm import server
        from tandemrl.rollout.vllm.authorship import selection_of
        from tandemrl.rollout.vllm.modes import DRAFTING, check_mode
        from tandemrl.rollout.vllm.settings import TandemOptions
    except ImportError as error:
        raise cannot_import("tandemrl serve", error) from None

    selection = {"strategy": strategy, "prob_senior": prob_senior, "max_gap_tokens": max_gap_tokens}
    selected = selection_of(selection | {"chunk_size": chunk_size, "first": first}, SelectionConfig())
    options = TandemOptions(
        junior=junior,
        mode=check_mode(mode),
        draft=_draft_of(draft_tokens) if mode in DRAFTING else 0,
        junior_dtype=junior_dtype,
        junior_quantization=junior_quantization,
        junior_device=junior_device,
        selection=asdict(selected),
    )
    server.serve(
        senior,
        options,
        host=host,
        port=port,
        allowed_hosts=allowed_host or (),
        api_key=api_key,
        tool_call_parser=tool_call_parser,
        template_arguments=arguments_of(template_arguments),
        vllm_args=vllm_args or (),
    )


def _draft_of(tokens: str) -> int | Literal["auto"]:
    from tandemrl.config import ConfigError

    if tokens != "auto" and not (tokens.isascii() and tokens.isdecimal() and int(tokens) > 0):
        raise ConfigError(f"--draft-tokens: {tokens!r} is neither auto nor a positive number")
    return "auto" if tokens == "auto" else int(tokens)
