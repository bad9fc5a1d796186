"""A scoring process, which calls functions by name. `scoring.Scorer` starts and kills it."""

import contextlib
import json
import resource
from collections.abc import Callable
from typing import Any

from tandemrl.processes.child import serve_calls
from tandemrl.rewards.functions import call as call_by_name
from tandemrl.rewards.protocol import number
from tandemrl.rewards.routing import EQUALITY

MAX_MEMORY_BYTES = 4 * 2**30
"""The address space of a scoring process, so that a tower of powers ends in a MemoryError and not in swapping."""


def serve(call: Callable[..., Any] = call_by_name) -> None:
    """Make calls ``(path, *arguments)``, of which ``call`` returns the results."""

    def prepare(_: Any) -> Callable[[Any], str]:
        with contextlib.suppress(ValueError, OSError):  # macOS maps more than this at start and refuses
            resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
        call_by_name(f"{EQUALITY}:equal", "1", "2 - 1")
        return lambda payload: json.dumps(call(*payload), default=number)

    serve_calls(prepare)


if __name__ == "__main__":
    serve()
