"""Shared by the benchmarks: models, prompts, lengths, the load of the machine, and what a result says about itself.

Peer scripts import it in environments of their own, which do not have this library.
"""

import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

TINY_PAIR = Path("runs/tiny")


def tiny_senior() -> Path:
    """The senior of the tiny pair, which is built where the quickstart looks for it if it is not there."""
    from tandemrl.apps.experiments.tiny import build_tiny_pair

    build_tiny_pair(TINY_PAIR)
    return TINY_PAIR / "senior"


def prompt_texts(count: int) -> list[str]:
    """Short plain prompts, the same in every library."""
    return [f"the quick brown fox adds {i} plus {i % 7} equals" for i in range(count)]


def given_lengths(kind: str, count: int, longest: int, *, seed: int, step: int) -> list[int]:
    """Response tokens of the completions of a step, in order: the same in every library.

    ``equal``: all ``longest``. ``lognormal``: median 0.35 of the longest, sigma 0.8 of the logarithm, clipped to
    [4, longest].
    """
    if kind == "equal":
        return [longest] * count
    drawn = np.random.default_rng((seed, step)).lognormal(np.log(0.35 * longest), 0.8, count)
    return np.clip(drawn, 4, longest).astype(int).tolist()


def digit_fraction(text: str) -> float:
    """A reward that costs nothing, is deterministic, and differs within a group."""
    return sum(character.isdigit() for character in text) / max(len(text), 1)


def cpu_seconds() -> tuple[float, float]:
    """CPU seconds of this process so far, and of the whole machine (where that is unknown: of this process)."""
    mine = time.process_time()
    try:
        fields = [int(x) for x in Path("/proc/stat").read_text().split()[1:9]]
    except OSError:
        return mine, mine
    idle, iowait = fields[3], fields[4]
    return mine, (sum(fields) - idle - iowait) / os.sysconf("SC_CLK_TCK")


def cpu_name() -> str:
    """What the kernel calls the CPU; empty where it does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def about(library: str = "tandemrl") -> dict[str, Any]:
    """Versions (of this library its commit, too) and machine of this process; no path and no host name."""
    return {
        **(_commit() if library == "tandemrl" else {}),
        "library": library,
        "version": version(library),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "cpu": cpu_name(),
        "platform": platform.machine(),
    }


def _commit() -> dict[str, Any]:
    from tandemrl.files import versions

    return {name: value for name, value in versions().items() if name.startswith("git_")}


def ratios(seconds: Mapping[str, Sequence[float]], pairs: Sequence[tuple[str, str]]) -> dict[str, dict[str, Any]]:
    """For each pair (a, b), how long a takes relative to b in the same round; see ``over_rounds``."""
    return {f"{a} / {b}": over_rounds([x / y for x, y in zip(seconds[a], seconds[b], strict=True)]) for a, b in pairs}


def over_rounds(values: Sequence[float], level: float = 0.9) -> dict[str, Any]:
    """The median of the rounds, its distribution-free interval, and the rounds themselves.

    The interval goes from the k-th smallest to the k-th largest round, with the largest k for which it holds the true
    median with at least ``level`` (sign test); None where all rounds together are too few.
    """
    count, ordered = len(values), sorted(values)
    k, outside = 0, 2 * 0.5**count
    while outside <= 1 - level:
        k += 1
        outside += 2 * math.comb(count, k) * 0.5**count
    return {
        "median": round(statistics.median(values), 4),
        "interval_90": [round(ordered[k - 1], 4), round(ordered[-k], 4)] if k else None,
        "per_round": [round(value, 4) for value in values],
    }


def wait_for_turn() -> None:
    """Say that a step could begin and wait for a line: `step_time.py` lets one process at a time do a step."""
    print("ready", file=sys.__stdout__, flush=True)
    sys.stdin.readline()


def write_lines(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """One JSON object per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
