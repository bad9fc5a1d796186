"""What a client of a server computes, and what it reads of a stream."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from helpers import VOCABULARY, tokenizer
from tandemrl.config import SelectionConfig
from tandemrl.rollout.schedule import schedule_of
from tandemrl.selection import Strategy, replay
from tandemrl.selection.draws import mix64

DEFAULT = SelectionConfig(strategy="word", prob_senior=0.5, max_gap_tokens=4)


def strategy_of(selection: SelectionConfig) -> Strategy:
    return schedule_of(selection, tokenizer(), VOCABULARY).strategy(1)


def authors(seed: int, tokens: Sequence[int], selection: SelectionConfig = DEFAULT) -> list[int]:
    """What a client computes for one choice."""
    keys, row = torch.tensor([mix64(seed)]), torch.tensor([tokens], dtype=torch.int64)
    return replay(strategy_of(selection), keys, row, torch.tensor([len(tokens)])).author[0].tolist()


def written(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCABULARY, count).tolist()


def events(data: bytes) -> list[Any]:
    """The chunks of a stream; comments and [DONE] as they are."""
    assert data.endswith(b"\n\n")
    lines = data[:-2].decode().split("\n\n")
    return [json.loads(line[6:]) if line.startswith("data: {") else line for line in lines]
