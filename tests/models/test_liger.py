"""Liger's kernels, which `test_cuda` runs."""

import pytest

from helpers import prepared, qwen3
from tandemrl.models.attention import ModelError
from tandemrl.models.trainable import use_liger


def test_liger_kernels_are_refused_on_other_devices():
    with pytest.raises(ModelError, match=r"need a CUDA device, the model is on cpu; set model\.liger=false"):
        use_liger(prepared(qwen3()))
