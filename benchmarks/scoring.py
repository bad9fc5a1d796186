"""Responses scored per second, and memory over many of them. Prints one JSON line per set.

OMP_NUM_THREADS=1 python benchmarks/scoring.py [--responses 20000] [--batch 1000] [--only gsm8k …] [--out FILE]

The responses are generated: chains of thought of some 400 characters with the answer at the end, 8 per problem, half of
them right. `boxed` has a mix of forms like MATH's: mostly numbers, then fractions, formulas, tuples, units and words;
3 % can only be decided by math-verify. `symbolic` is math-verify alone, with another problem in every response.
Everything goes through `tandemrl.apps.score.score_file`, so reading and writing JSON is included.
"""

import argparse
import json
import os
import platform
import random
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tandemrl.apps.score import score_file
from tandemrl.config import RewardConfig
from tandemrl.config import load as load_config

SAMPLES = 8
BARS = {"gsm8k": 2000, "boxed": 150}
"""Responses per second on 2 cores that must be reached."""
WORDS = ("so", "we", "first", "add", "the", "number", "of", "apples", "and", "then", "multiply", "by", "two", "because")


def thoughts(rng: random.Random) -> str:
    """About 400 characters of reasoning."""
    steps = (
        f"{' '.join(rng.choices(WORDS, k=12))}: {rng.randint(2, 99)} + {rng.randint(2, 99)} = x." for _ in range(5)
    )
    return "\n".join(steps)


def gsm8k(rng: random.Random) -> tuple[str, str, str]:
    """A gold answer, and the ends of a right and of a wrong response."""
    n = rng.randint(1, 5000)
    return str(n), f"#### {n}", f"#### {n + rng.randint(1, 9)}"


def boxed(rng: random.Random) -> tuple[str, str, str]:
    a, b, c = (rng.randint(2, 97) for _ in range(3))
    form = rng.random()
    if form < 0.55:
        gold, right, wrong = f"{a}", rng.choice((f"{a}", f"{a}.0", f"x = {a}")), f"{b}"
    elif form < 0.70:
        gold, right, wrong = rf"\frac{{{a}}}{{{b}}}", rf"\dfrac{{{2 * a}}}{{{2 * b}}}", rf"\frac{{{a}}}{{{c}}}"
    elif form < 0.85:
        gold, right, wrong = rf"{a}x^2+{b}x", rf"x({a}x+{b})", rf"x({b}x+{c})"
    elif form < 0.90:
        gold, right, wrong = rf"{a}\sqrt{{{b}}}", rf"\sqrt{{{a * a * b}}}", rf"\sqrt{{{a * b}}}"
    elif form < 0.94:
        gold, right, wrong = rf"({a}, \frac{{{b}}}{{2}})", rf"\left({a},{b / 2}\right)", rf"({a}, {c})"
    elif form < 0.97:
        gold, right, wrong = rf"{a}\text{{ cm}}^2", f"{a} square centimeters", r"\text{none}"
    else:
        return symbolic(rng)
    return gold, rf"\boxed{{{right}}}", rf"\boxed{{{wrong}}}"


def symbolic(rng: random.Random) -> tuple[str, str, str]:
    """Integrals, which only math-verify computes."""
    a, b = (2 * x for x in sorted(rng.sample(range(1, 10**6), 2)))
    return f"{a * a // 2}", rf"\boxed{{\int_0^{{{a}}} t \, dt}}", rf"\boxed{{\int_0^{{{b}}} t \, dt}}"


def write_files(
    folder: Path, source: str, draw: Callable[[random.Random], tuple[str, str, str]], count: int, samples: int
) -> None:
    rng = random.Random(0)

    def lines() -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
        for index in range(count // samples):
            gold, right, wrong = draw(rng)
            row = {
                "prompt": [{"role": "user", "content": thoughts(rng)}],
                "data_source": source,
                "reward_model": {"style": "rule", "ground_truth": gold},
                "extra_info": {"index": index},
            }
            ends = (rng.choice((right, wrong)) for _ in range(samples))
            yield row, [{"index": index, "response": f"{thoughts(rng)}\n{end}"} for end in ends]

    with open(folder / "rows.jsonl", "w") as rows, open(folder / "responses.jsonl", "w") as responses:
        for row, group in lines():
            rows.write(json.dumps(row) + "\n")
            responses.writelines(json.dumps(each) + "\n" for each in group)


class Memory(threading.Thread):
    """Resident memory of this process and of its children, in MiB, sampled while it runs."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.samples: list[tuple[float, float]] = []
        self._done = threading.Event()

    def run(self) -> None:
        while not self._done.wait(0.2):
            self.samples.append((resident_mib(os.getpid()), sum(map(resident_mib, children(os.getpid())))))

    def stop(self) -> None:
        self._done.set()
        self.join()

    def peak(self, of: int, begin: float, end: float) -> float:
        part = self.samples[int(begin * len(self.samples)) : max(1, int(end * len(self.samples)))]
        return round(max((sample[of] for sample in part), default=0.0), 1)


def resident_mib(process: int) -> float:
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    except OSError:
        return 0.0


def children(process: int) -> list[int]:
    return [
        int(child) for task in Path(f"/proc/{process}/task").glob("*/children") for child in task.read_text().split()
    ]


def cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def measure(name: str, count: int, batch: int, workers: int | None) -> dict[str, Any]:
    draw, source, samples = {
        "gsm8k": (gsm8k, "openai/gsm8k", SAMPLES),
        "boxed": (boxed, "math500", SAMPLES),
        "symbolic": (symbolic, "math500", 1),
    }[name]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_files(folder, source, draw, count, samples)
        memory = Memory()
        memory.start()
        begin = cpu_seconds()
        summary = score_file(
            load_config(overrides=[] if workers is None else [f"reward.workers={workers}"]),
            [str(folder / "rows.jsonl")],
            folder / "responses.jsonl",
            out=folder / "scores.jsonl",
            batch=batch,
        )
        used = cpu_seconds() - begin
        memory.stop()
    means = summary.by_set[source]
    return {
        "benchmark": f"scoring/{name}",
        "responses": summary.responses,
        "per_second": round(summary.responses / summary.seconds, 1),
        "per_cpu_second": round(summary.responses / used, 1),
        "bar": BARS.get(name),
        "seconds": round(summary.seconds, 2),
        "mean_score": round(means["score"], 4),
        "timeouts": means.get("timeout", 0.0),
        "failures": means.get("failure", 0.0),
        "peak_mib": {part: memory.peak(0, *span) for part, span in SPANS.items()},
        "peak_mib_children": {part: memory.peak(1, *span) for part, span in SPANS.items()},
        "batch": batch,
        "timeout_s": RewardConfig().timeout_s,
        "cores": len(os.sched_getaffinity(0)),
        "load": [round(x, 1) for x in os.getloadavg()],
        "platform": platform.machine(),
        "python": platform.python_version(),
    }


SPANS = {"second fifth": (0.2, 0.4), "last fifth": (0.8, 1.0)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--responses", type=int, default=20_000, help="of gsm8k and boxed; a twentieth of symbolic")
    parser.add_argument("--batch", type=int, default=1000)
    parser.add_argument("--workers", type=int, help="scoring processes; default: chosen")
    parser.add_argument("--only", nargs="*", default=["gsm8k", "boxed", "symbolic"])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    lines = []
    for name in options.only:
        count = options.responses // (20 if name == "symbolic" else 1)
        lines.append(json.dumps(measure(name, count, options.batch, options.workers)))
        print(lines[-1], flush=True)
    if options.out:
        options.out.write_text("".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    main()
