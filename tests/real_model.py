"""A small pretrained model for tests."""

import os
from pathlib import Path

import pytest

from tandemrl.apps.experiments.smollm2 import FetchError, fetch


def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct. The test is skipped if it cannot be had."""
    try:
        return fetch(print).folder
    except FetchError as error:
        pytest.skip(str(error))


def pretrained() -> Path:
    """The folder of the model that TANDEMRL_REAL_MODEL names, else of SmolLM2."""
    return Path(os.environ["TANDEMRL_REAL_MODEL"]) if "TANDEMRL_REAL_MODEL" in os.environ else smollm2()
