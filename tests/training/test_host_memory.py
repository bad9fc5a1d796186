"""Memory that a step frees is there for the next one, without the kernel."""

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
import torch
from tandemrl.training.host_memory import keep_freed_memory

if sys.argv[1] == "kept" and not keep_freed_memory():
    sys.exit(77)

def step():
    for _ in range(4):
        torch.ones(2**24), torch.ones(2**22)  # 64 and 16 MiB

step()
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    """How many fresh pages a third, equal step of a new process takes."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, timeout=120)
    if done.returncode == 77:
        pytest.skip("this C library has no mallopt, or refuses to keep freed memory")
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_a_later_step_takes_hardly_any_fresh_pages() -> None:
    assert 10 * faults("kept") < faults("returned")
