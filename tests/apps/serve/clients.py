"""What a client of a server computes, and what it reads of a stream."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import uvicorn
from starlette.testclient import TestClient

from helpers import VOCABULARY, tokenizer
from tandemrl.apps.serve import engine_server
from tandemrl.config import Config, SelectionConfig
from tandemrl.rollout.schedule import schedule_of
from tandemrl.rollout.torch_engine import TorchEngine
from tandemrl.selection import Strategy, replay
from tandemrl.selection.draws import mix64

DEFAULT = SelectionConfig(strategy="word", prob_senior=0.5, max_gap_tokens=4)


def strategy_of(selection: SelectionConfig) -> Strategy:
    return schedule_of(selection, tokenizer(), VOCABULARY).strategy(1)


def authors(seed: int, tokens: Sequence[int], selection: SelectionConfig = DEFAULT) -> list[int]:
    """What a client computes for one choice."""
    keys, row = torch.tensor([mix64(seed)]), torch.tensor([tokens], dtype=torch.int64)
    return replay(strategy_of(selection), keys, row, torch.tensor([len(tokens)])).author[0].tolist()


def session_key(name: str) -> int:
    """That of any server: a name has the same texts everywhere."""
    digest = hashlib.sha256(np.array([*name.encode()], dtype=np.int64).tobytes()).digest()
    return mix64(int.from_bytes(digest[:8], "big"))


def written(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCABULARY, count).tolist()


@contextmanager
def served_here(config: Config, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    """A client of ``tandemrl serve`` in this process, in place of its web server; the engine is not closed."""
    apps: list[Any] = []
    monkeypatch.setattr(TorchEngine, "close", lambda self: None)
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets: apps.append(self.config.app))
    engine_server.serve(config, port=0)
    with TestClient(apps[0], base_url="http://127.0.0.1") as client:
        yield client


def events(data: bytes) -> list[Any]:
    """The chunks of a stream; comments and [DONE] as they are."""
    assert data.endswith(b"\n\n")
    lines = data[:-2].decode().split("\n\n")
    return [json.loads(line[6:]) if line.startswith("data: {") else line for line in lines]
