"""Programs per second through `score_code`, by format of their tests. Prints one JSON line.

python benchmarks/sandbox.py [--threads 2] [--programs 200] [--tests 1]
"""

import argparse
import json
import os
import platform
import time
from concurrent.futures import ThreadPoolExecutor

from tandemrl.config import SandboxConfig
from tandemrl.data.rows import Row
from tandemrl.rewards.code.scorer import score_code

SCRIPT = "```python\nimport sys\nprint(sum(map(int, sys.stdin.read().split())))\n```"
FUNCTION = "```python\ndef add(a, b):\n    return a + b\n```"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--tests", type=int, default=1, help="tests of each program")
    options = parser.parse_args()
    numbers = range(options.tests)
    sums = {"outputs": [str(2 * n + 1) for n in numbers]}
    checks = "".join(f"    assert candidate({n}, {n + 1}) == {2 * n + 1}\n" for n in numbers)
    formats = {
        "script": (SCRIPT, sums | {"inputs": [f"{n} {n + 1}\n" for n in numbers]}),
        "function": (FUNCTION, sums | {"inputs": [f"{n}\n{n + 1}" for n in numbers], "fn_name": "add"}),
        "check": (FUNCTION, {"test": f"def check(candidate):\n{checks}", "entry_point": "add"}),
    }
    limits = SandboxConfig(timeout_s=60.0, program_timeout_s=600.0)
    per_s = {}
    for name, (text, truth) in formats.items():
        row = Row(name, (), "apps", json.dumps(truth), {})
        assert score_code(row, text, sandbox=limits).value == 1.0
        start = time.perf_counter()
        with ThreadPoolExecutor(options.threads) as threads:
            scores = list(threads.map(lambda _: score_code(row, text, sandbox=limits), range(options.programs)))  # noqa: B023
        per_s[name] = round(options.programs / (time.perf_counter() - start), 1)
        assert all(score.value == 1.0 for score in scores)
    result = {
        "benchmark": "sandbox",
        "programs_per_s": per_s,
        "tests_per_program": options.tests,
        "threads": options.threads,
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "device": platform.machine(),
        "versions": {"python": platform.python_version(), "kernel": platform.release()},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
