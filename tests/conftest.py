"""Shared fixtures."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny pair after a short warm start: it writes the format and is right now and then."""
    from tandemrl.experiments.tiny import build_tiny_pair

    out = tmp_path_factory.mktemp("pair") / "tiny"
    build_tiny_pair(out, steps=250)
    return out


@pytest.fixture(scope="session")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random models that call tools now and then, and rows for them."""
    from agents import make_agents

    return make_agents(tmp_path_factory.mktemp("agents"))
