"""Shared fixtures."""

import fcntl
import os
import sys
from pathlib import Path

import pytest

# Where numba is loaded (bm25s does that), stock vLLM 0.32 starts no engine on a CPU; ours do (`_readable_modules`).
sys.modules.setdefault("numba", None)  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny pair after a short warm start: it writes the format and is right now and then. All workers share it."""
    from tandemrl.apps.experiments.tiny import build_tiny_pair

    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    out = root / "pair" / "tiny"
    out.parent.mkdir(exist_ok=True)
    with open(out.parent / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        build_tiny_pair(out, steps=250)  # the first one does; the others find it
    return out


@pytest.fixture(scope="session")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random models that call tools now and then, and rows for them."""
    from agents import make_agents

    return make_agents(tmp_path_factory.mktemp("agents"))
