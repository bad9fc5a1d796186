"""On which card an engine computes."""

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from pairs import VLLM

import tandemrl
from helpers import VOCABULARY, tokenizer
from runs import UNDECIDED
from tandemrl.config import load, packaged_configs
from tandemrl.models.loading import resolve_device
from tandemrl.training.build import build_engine

pytestmark = VLLM


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The device of the first worker of every engine that is started."""
    from tandemrl.rollout.vllm import engine as vllm_engine

    devices: list[int] = []

    def start(args: Any) -> Any:
        devices.append(args.additional_config["tandem"]["device"])
        return MagicMock()

    sizes = SimpleNamespace(vocab_size=VOCABULARY, max_position_embeddings=64)
    for place, name, fake in (
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "device_count", lambda: 4),
        (vllm_engine, "platform_device", lambda: "cuda"),
        (vllm_engine.LLMEngine, "from_engine_args", start),
        (vllm_engine.AutoConfig, "from_pretrained", lambda *_, **__: sizes),
        (vllm_engine, "stored_eos_token_ids", lambda *_: ()),
    ):
        monkeypatch.setattr(place, name, fake)
    return devices


ON_VLLM = [name for name, file in packaged_configs().items() if "engine: vllm" in file.read_text()]


@pytest.mark.parametrize("name", [name for name in ON_VLLM if name != "quickstart_vllm"])  # which is for a CPU
def test_every_process_has_its_engine_on_the_card_of_its_trainer(name, chosen, monkeypatch):
    config = load(name, UNDECIDED.get(name, []))
    trainers = []
    for rank in range(4):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        trainers.append(resolve_device(config.model.device).index)
        build_engine(config, None, tokenizer())
    assert chosen == trainers == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        (["model.device=auto"], 0),
        (["model.device=cuda:2", "rollout.vllm.multiprocess=true"], 2),
        # Of a process that sees this card alone, and counts from 0.
        (["model.device=cuda:3", "rollout.vllm.multiprocess=true", "rollout.vllm.devices='2'"], 0),
    ],
)
def test_an_engine_of_one_process_is_where_the_config_says(keys, wanted, chosen, monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    build_engine(load(None, ["rollout.engine=vllm", *keys]), None, tokenizer())
    assert chosen == [wanted]


def test_a_gpu_never_imports_the_cpu_worker() -> None:
    """Its import replaces torch.cuda's streams and events, so it stands below a question about the platform."""
    module = ast.parse((Path(tandemrl.__file__).parent / "rollout" / "vllm" / "worker.py").read_text())
    unasked = [node.module for node in module.body if isinstance(node, ast.ImportFrom)]
    assert "vllm.v1.worker.gpu_worker" in unasked
    assert "vllm.v1.worker.cpu_worker" not in unasked
