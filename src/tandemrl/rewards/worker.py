"""A scoring process, which calls functions by name. `scoring.Scorer` starts and kills it."""

import contextlib
import json
import resource
from collections.abc import Callable, Sequence
from typing import Any

from tandemrl.processes.child import serve_calls
from tandemrl.rewards.functions import call as call_by_name
from tandemrl.rewards.protocol import number
from tandemrl.rewards.routing import EQUALITY

MAX_MEMORY_BYTES = 4 * 2**30
"""The address space of a scoring process, so that a tower of powers ends in a MemoryError and not in swapping."""


FIRST_CALLS = (f"{EQUALITY}:equal", "1", "2 - 1"), ("tandemrl.tasks.math.prime:equal", r"\sqrt{2}", "2^{1/2}")
"""They import math-verify and sympy's parsers, for which no call's time limit has to pay."""


def serve(first: Sequence[Sequence[str]] = FIRST_CALLS) -> None:
    """Make calls ``(path, *arguments)``, after the ``first`` ones, whose results are dropped."""

    def prepare(_: Any) -> Callable[[Any], str]:
        with contextlib.suppress(ValueError, OSError):  # macOS maps more than this at start and refuses
            resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
        for each in first:
            call_by_name(*each)
        return lambda payload: json.dumps(call_by_name(*payload), default=number)

    serve_calls(prepare)


if __name__ == "__main__":
    serve()
