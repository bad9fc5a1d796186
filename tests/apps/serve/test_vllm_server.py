"""What of ``tandemrl serve`` is vLLM's alone: its options, its KV cache, its guard."""

import inspect
import shutil
import socket
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from clients import DEFAULT, written
from pairs import CONTEXT, VLLM
from served import SERVED, save_pair
from typer.testing import CliRunner

from tandemrl.config import SelectionConfig
from tandemrl.rollout.engine import EngineError

pytest.importorskip("tandemrl.apps.serve.vllm_server", reason="vllm brings fastapi")

from tandemrl.apps.serve import vllm_server
from tandemrl.apps.serve.address import check_port
from tandemrl.apps.serve.tool_calls import tool_call_parser_of
from tandemrl.rollout.vllm.settings import TandemOptions

pytestmark = VLLM


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pair(tmp_path_factory.mktemp("served"))


def test_the_command_hands_on_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    from tandemrl.cli.main import app

    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(vllm_server, "serve", lambda *arguments, **keywords: calls.append((*arguments, keywords)))
    options = ["serve", "--engine", "vllm", "--senior", "S", "--junior", "J", "--port", "1"]
    options += ["--strategy", "chunk", "--chunk-size", "3"]
    options += ["--allowed-host", "pair"]
    options += ["--mode", "lockstep", "--template-arguments", "{enable_thinking: true, n: 1}"]
    result = CliRunner().invoke(app, [*options, "--", "--max-model-len", "64"])
    assert result.exit_code == 0, result.output
    [(senior, tandem, keywords)] = calls
    selection = vars(SelectionConfig(strategy="chunk", chunk_size=3))
    assert (senior, tandem) == ("S", TandemOptions(junior="J", mode="lockstep", selection=selection))
    assert keywords["vllm_args"] == ["--max-model-len", "64"]
    assert (keywords["tool_call_parser"], keywords["allowed_hosts"]) == (None, ["pair"])
    assert keywords["template_arguments"] == {"enable_thinking": True, "n": 1}
    assert keywords["port"] == 1
    assert (keywords["host"], keywords["api_key"]) == ("127.0.0.1", None)


def test_a_server_is_open_to_this_machine_alone_unless_told_otherwise() -> None:
    options = TandemOptions(junior="J", selection=vars(DEFAULT))
    defaults = inspect.signature(vllm_server.serve).parameters
    assert defaults["host"].default == "127.0.0.1"
    args = vllm_server.server_arguments("S", options, host="0.0.0.0", port=1, api_key="s3cret", vllm_args=())
    assert (args.allowed_origins, args.allowed_hosts) == ([], [])  # no web page but ours, of which there is none
    assert (args.host, args.api_key) == ("0.0.0.0", ["s3cret"])
    args = vllm_server.server_arguments("S", options, host="127.0.0.1", port=1, vllm_args=["--api-key", "a", "b"])
    assert (args.host, args.api_key) == ("127.0.0.1", ["a", "b"])
    with pytest.raises(EngineError, match="--api-key is set by tandemrl serve"):
        vllm_server.server_arguments("S", options, host="x", port=1, api_key="a", vllm_args=["--api-key", "b"])


@pytest.mark.parametrize(
    ("template", "option", "flags", "parser"),
    [
        ("{{ tools | length }}", None, [], "hermes"),
        ("{{ messages }} {{ stools }}", None, [], None),
        ("{{ tools | length }}", "mistral", [], "mistral"),
        ("{{ tools }} {{- '\"parameters\": ' }}", None, [], "llama3_json"),
        ("{{ tools }} {{ '\"parameters\": ' }}<tool_call>", None, [], "hermes"),
        ("", "mistral", [], "mistral"),
        ("{{ tools }}", None, ["--enable-auto-tool-choice", "--tool-call-parser", "llama3_json"], "llama3_json"),
    ],
)
def test_tool_calls_are_read_where_a_template_knows_tools(template, option, flags, parser) -> None:
    options = TandemOptions(junior="J", selection=vars(DEFAULT))
    chosen = tool_call_parser_of(option, template, flags)
    args = vllm_server.server_arguments("S", options, host="x", port=1, tool_call_parser=chosen, vllm_args=flags)
    assert (args.tool_call_parser, args.enable_auto_tool_choice) == (parser, parser is not None)


def test_the_chat_template_gets_the_arguments_of_training() -> None:
    make = partial(
        vllm_server.server_arguments, "S", TandemOptions(junior="J", selection=vars(DEFAULT)), host="x", port=1
    )
    assert make(vllm_args=()).default_chat_template_kwargs is None
    quiet = {"enable_thinking": False}
    assert make(template_arguments=quiet, vllm_args=()).default_chat_template_kwargs == quiet
    theirs = ["--default-chat-template-kwargs", '{"enable_thinking": true}']
    with pytest.raises(EngineError, match="leave it out after `--`; give --template-arguments before it"):
        make(template_arguments=quiet, vllm_args=theirs)


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(EngineError, match=f"port {port} of 127.0.0.1 is in use; choose another one with --port"):
            check_port("127.0.0.1", port)
    check_port("127.0.0.1", port)
    with pytest.raises(EngineError, match=r"--host 192\.0\.2\.1 --port"):  # an address of documentation, nobody's
        check_port("192.0.2.1", port)


GIB = 2**30


def config_of(layers: int, heads: int, size: int, dtype: torch.dtype, length: int) -> Any:
    """The part of a ``VllmConfig`` that its KV cache depends on."""
    model = SimpleNamespace(
        max_model_len=length,
        dtype=dtype,
        get_num_layers=lambda parallel: layers,
        get_num_kv_heads=lambda parallel: heads,
        get_head_size=lambda: size,
    )
    return SimpleNamespace(model_config=model, parallel_config=None, cache_config=SimpleNamespace(block_size=128))


def test_the_kv_cache_is_for_the_models_and_not_for_the_machine() -> None:
    """Qwen3-4B and 0.6B: 36 and 28 layers of 8 heads of 128, a key and a value of 2 bytes each."""
    pair = [config_of(36, 8, 128, torch.bfloat16, 4096), config_of(28, 8, 128, torch.bfloat16, 4096)]
    sequence = (147_456 + 114_688) * (4096 + 256)
    assert vllm_server.kv_cache_bytes(pair, free=1000 * GIB) == 8 * sequence
    assert vllm_server.kv_cache_bytes(pair, free=8 * GIB) == 4 * GIB
    assert vllm_server.kv_cache_bytes(pair, free=sequence) == sequence
    with pytest.raises(EngineError, match=r"4096 tokens takes 1\.06 GiB of KV cache, and 1\.00 GiB of memory are free"):
        vllm_server.kv_cache_bytes(pair, free=GIB)


@pytest.mark.parametrize(
    ("flags", "is_open"),
    [([], True), (["--gpu-memory-utilization", "0.3"], False), (["--kv-cache-memory-bytes", "1G"], False)],
)
def test_a_kv_cache_that_was_asked_for_stays(flags: list[str], is_open: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.platforms

    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    monkeypatch.setattr(vllm.platforms.current_platform, "device_type", "cpu", raising=False)
    options = TandemOptions(junior="J", selection=vars(DEFAULT))
    args = vllm_server.server_arguments("S", options, host="127.0.0.1", port=1, vllm_args=flags)
    assert vllm_server.kv_cache_is_open(args) == is_open
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "2")
    assert not vllm_server.kv_cache_is_open(args)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--strategy", "words"], "'words' is none of word"),
        (["--mode", "eager"], "mode=eager: must be one of lazy, lockstep, draft, auto"),
        (["--mode", "auto", "--draft-tokens", "none"], "'none' is neither auto nor a positive number"),
        (["--draft-tokens", "4"], "--draft-tokens requires --mode draft or --mode auto"),
        (["--mode", "lockstep", "--draft-tokens", "x"], "with --mode lockstep the junior drafts nothing"),
        (["--prob-senior", "2"], "prob_senior must be in [0, 1]"),
        (["--junior", "./nowhere"], "nowhere"),
        (["--", "--worker-cls", "x"], "--worker-cls is set by tandemrl serve"),
        (["--", "--async-scheduling"], "--async-scheduling is set by tandemrl serve"),
        (["--", "--headless"], "--headless"),
        (["--tool-call-parser", "a", "--", "--tool-call-parser", "b"], "--tool-call-parser is set by tandemrl serve"),
        (["--tool-call-parser", "words"], "--tool-call-parser: 'words' is none of"),
        (["--", "--logits-processors", "a:B"], "--logits-processors would act on the senior's tokens only"),
        (["--", "other-model"], "the model is set by tandemrl serve"),
        (["--", "--pipeline-parallel-size", "2"], "pipeline_parallel_size"),
        (["--", "--enable-lora"], "enable_lora"),
    ],
)
def test_a_server_that_cannot_work_does_not_start(
    pair: Path, options: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}.items():
        monkeypatch.setenv(name, value)  # `serve` sets them for good: put them back
    from tandemrl.cli.main import app

    result = CliRunner().invoke(
        app, ["serve", "--engine", "vllm", "--senior", str(pair / "senior"), "--junior", str(pair / "junior"), *options]
    )
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert len([line for line in result.stderr.splitlines() if line.startswith("error:")]) == 1


def test_two_vocabularies_are_refused_and_what_serves_them_is_named(pair: Path, tmp_path: Path) -> None:
    from tandemrl.cli.main import app
    from tandemrl.models.loading import load_tokenizer

    junior, more = shutil.copytree(pair / "junior", tmp_path / "junior"), load_tokenizer(pair / "senior")
    more.add_tokens(["later"])
    more.save_pretrained(junior)
    both = ["--senior", str(pair / "senior"), "--junior", str(junior)]
    result = CliRunner().invoke(app, ["serve", "--engine", "vllm", *both])
    assert result.exit_code == 2, result.output
    said = " ".join(result.stderr.split())
    assert "senior and junior have different vocabularies: 1 entries differ" in said
    assert "`tandemrl serve` and `tandemrl play` with the torch engine" in said


def test_without_vllm_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from tandemrl.cli.main import app

    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: None)
    result = CliRunner().invoke(app, ["serve", "--engine", "vllm", "--senior", "S", "--junior", "J"])
    assert result.exit_code == 2
    assert "pip install -e '.[vllm]'" in result.stderr


def test_the_guard_refuses_what_only_vllm_sees() -> None:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    from tandemrl.apps.serve.vllm_guard import Guard

    Guard.validate_params(SamplingParams(seed=0))
    for params, reason in [
        (SamplingParams(), "without a seed"),
        (SamplingParams(seed=1, prompt_logprobs=0), "prompt_logprobs"),
        (SamplingParams(seed=1, structured_outputs=StructuredOutputsParams(regex="a")), "structured outputs"),
    ]:
        with pytest.raises(ValueError, match=reason):
            Guard.validate_params(params)


def test_allowed_tokens_are_refused_where_vllm_confines_other_requests_by_them(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm

    from tandemrl.apps.serve.vllm_guard import Guard

    confined = vllm.SamplingParams(seed=0, allowed_token_ids=[5])
    monkeypatch.setattr(vllm, "__version_tuple__", (0, 31, 0))
    Guard.validate_params(confined)
    monkeypatch.setattr(vllm, "__version_tuple__", (0, 30, 1))
    Guard.validate_params(vllm.SamplingParams(seed=0))
    with pytest.raises(ValueError, match=r"allowed_token_ids \(vLLM .* confines other requests"):
        Guard.validate_params(confined)


def test_an_engine_with_the_servers_arguments_writes_to_the_end_in_every_mode(pair: Path) -> None:
    """Where a seeded prompt is computed in pieces, vLLM winds back the row's generator, which that of a CPU refuses."""
    from vllm import AsyncEngineArgs, LLMEngine, SamplingParams

    from tandemrl.rollout.vllm.backend import _RUNNING, _shut_down, _startup
    from tandemrl.rollout.vllm.versions import keep_running

    options = TandemOptions(junior=str(pair / "junior"), mode="lazy", draft=4, selection=vars(SERVED))
    flags = ["--max-model-len", str(CONTEXT), "--enforce-eager", "--kv-cache-memory-bytes", str(2**26)]
    flags += ["--dtype", "float32", "--distributed-executor-backend", "uni", "--max-num-batched-tokens", "64"]
    flags += ["--max-num-seqs", "8"]
    with _startup(False, None, unbound=False):
        args = vllm_server.server_arguments(str(pair / "senior"), options, host="127.0.0.1", port=8000, vllm_args=flags)
        engine = LLMEngine.from_vllm_config(AsyncEngineArgs.from_cli_args(args).create_engine_config())
    client: Any = engine.engine_core
    keep_running(client)  # else it takes down what other engines of this process share
    _RUNNING.add(id(client.engine_core))
    try:
        for mode in ("lazy", "lockstep", "draft", "auto"):
            engine.collective_rpc("tandem_mode", args=(mode,))
            for seed in range(6):
                params = SamplingParams(seed=seed, max_tokens=30, ignore_eos=True)
                engine.add_request(str(seed), {"prompt_token_ids": written(30, seed=seed)}, params)
            left = {str(seed) for seed in range(6)}
            for _ in range(40 * 6):
                left -= {output.request_id for output in engine.step() if output.finished} if left else set()
            assert not left, mode
    finally:
        _shut_down(client.engine_core)
