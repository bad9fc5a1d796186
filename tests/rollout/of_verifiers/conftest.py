"""The tasksets of this folder are modules, also in the processes of their tools."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
sys.path += [str(HERE.parents[1] / "apps" / "serve"), str(HERE.parent / "vllm")]  # what serves a pair


@pytest.fixture(scope="module", autouse=True)
def plugins() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join((str(HERE), *filter(None, [os.environ.get("PYTHONPATH")]))))
        patch.syspath_prepend(HERE)
        yield
