"""Shared fixtures."""

import sys
from pathlib import Path

import pytest

# Where numba is loaded (bm25s does that), stock vLLM 0.32 starts no engine on a CPU; ours do (`_readable_modules`).
sys.modules.setdefault("numba", None)  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny pair after a short warm start: it writes the format and is right now and then."""
    from tandemrl.apps.experiments.tiny import build_tiny_pair

    out = tmp_path_factory.mktemp("pair") / "tiny"
    build_tiny_pair(out, steps=250)
    return out


@pytest.fixture(scope="session")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random models that call tools now and then, and rows for them."""
    from agents import make_agents

    return make_agents(tmp_path_factory.mktemp("agents"))
