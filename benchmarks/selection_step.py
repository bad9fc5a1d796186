"""Cost of one decoding step's author choice, per strategy and batch size, and of one replay. Prints one JSON line.

OMP_NUM_THREADS=1 python benchmarks/selection_step.py [--device cuda]
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable

import torch

from tandemrl.selection import alternating, bernoulli, chunk, replay, sentence, solo, word, word_aligned
from tandemrl.selection.boundaries import StepTables, WordTables

VOCABULARY = 151_936  # Qwen3's logits
ROWS = (1, 256, 4096)
REPLAY_ROWS, REPLAY_TOKENS = 128, 3000


def median_ms(run: Callable[[], object], repeats: int, device: torch.device) -> float:
    def timed() -> float:
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return 1e3 * (time.perf_counter() - start)

    for _ in range(20):
        timed()
    return round(statistics.median(timed() for _ in range(repeats)), 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--repeats", type=int, default=500)
    options = parser.parse_args()
    device, generator = options.device, torch.Generator().manual_seed(0)

    def table(share: float) -> torch.Tensor:
        return torch.rand(VOCABULARY, generator=generator) < share

    def ids(*shape: int) -> torch.Tensor:
        return torch.randint(0, VOCABULARY, shape, generator=generator).to(device)

    strategies = {
        "word": word(0.5, 32, table(0.35)),
        "word_aligned": word_aligned(0.5, 32, WordTables(table(0.02), table(0.1))),
        "bernoulli": bernoulli(0.5),
        "sentence": sentence("senior", StepTables(table(0.01), table(0.02), table(0.02))),
        "chunk": chunk(16),
        "alternating": alternating(),
        "solo": solo(),
    }
    step_ms: dict[str, dict[str, float]] = {}
    for name, strategy in strategies.items():
        step_ms[name] = {}
        for rows in ROWS:
            last_token, (_, state) = ids(rows), strategy.init(torch.arange(rows, device=device))
            run = lambda step=strategy.step, state=state, last=last_token: step(state, last)  # noqa: E731
            step_ms[name][str(rows)] = median_ms(run, options.repeats, device)

    keys, tokens = torch.arange(REPLAY_ROWS, device=device), ids(REPLAY_ROWS, REPLAY_TOKENS)
    lengths = torch.full((REPLAY_ROWS,), REPLAY_TOKENS, device=device)
    start = time.perf_counter()
    replay(strategies["word"], keys, tokens, lengths).draws.tolist()
    replay_s = time.perf_counter() - start

    result = {
        "benchmark": "selection_step",
        "step_ms": step_ms,
        "replay_s": {"strategy": "word", "rows": REPLAY_ROWS, "tokens": REPLAY_TOKENS, "value": round(replay_s, 3)},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
