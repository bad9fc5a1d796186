"""A small pretrained model for tests."""

from pathlib import Path

import pytest

from tandemrl.apps.experiments.smollm2 import FetchError, fetch


def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct. The test is skipped if it cannot be had."""
    try:
        return fetch(print).folder
    except FetchError as error:
        pytest.skip(str(error))
