"""A scoring process, which calls functions by name and returns their results. `scoring.Scorer` starts and kills it.

`processes.child` describes how the two communicate.
"""

import contextlib
import json
import resource
import signal
from collections.abc import Callable
from typing import Any

from tandemrl.processes.child import READY, Parent
from tandemrl.rewards.calls import MAX_ERROR_CHARS
from tandemrl.rewards.functions import call as call_by_name
from tandemrl.rewards.protocol import GraderError, number
from tandemrl.rewards.routing import EQUALITY

MAX_MEMORY_BYTES = 4 * 2**30
"""The address space of a scoring process, so that a tower of powers ends in a MemoryError and not in swapping."""


def serve(call: Callable[..., Any] | None = None) -> None:
    """Answer tasks ``((path, *arguments), limit_s)`` with ``{"result": …}`` or ``{"error": …}``.

    ``"ready"`` is written first, when everything is imported. The parent kills a process that takes too long; the
    alarm, whose default action ends the process from the kernel, is for a process whose parent is gone.

    Args:
        call: computes a task from its path and arguments. None calls the function that the path names.
    """
    call = call or call_by_name
    with contextlib.suppress(ValueError, OSError):  # macOS maps more than this at start and refuses
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    parent = Parent()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    call_by_name(f"{EQUALITY}:equal", "1", "2 - 1")
    parent.send(READY)
    while True:
        (path, *arguments), limit_s = parent.receive()
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        try:
            reply = json.dumps({"result": call(path, *arguments)}, default=number)
        except (Exception, SystemExit) as error:
            of_user = isinstance(error, GraderError)  # which says itself what was raised, and where
            said = str(error) if of_user else f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS]
            reply = json.dumps({"error": said})
        signal.setitimer(signal.ITIMER_REAL, 0)
        parent.send(reply)


if __name__ == "__main__":
    serve()
