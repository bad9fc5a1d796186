"""A scoring process: function names and arguments in, results out. Started and killed by `scoring.Scorer`.

It is a plain child process, not a `multiprocessing` one, so it imports neither torch nor the user's main script. Tasks
arrive as pickles from the parent, which is trusted; replies are JSON lines, since a child that worked on hostile input
is not.
"""

import contextlib
import json
import os
import pickle
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

from tandemrl.rewards.functions import call as call_by_name
from tandemrl.rewards.math.boxed import equivalent
from tandemrl.rewards.protocol import number

MAX_MEMORY_BYTES = 4 * 2**30
"""Address space of a scoring process: a tower of powers ends in MemoryError, not in a machine that swaps."""
MAX_ERROR_CHARS = 500


def serve(call: Callable[..., Any] | None = None) -> None:
    """Answer tasks ``((path, *arguments), limit_s)`` with ``{"result": …}`` or ``{"error": …}``.

    ``"ready"`` is written first, when everything is imported. The parent kills a process that takes too long; the
    alarm, whose default action ends the process from the kernel, is for a process whose parent is gone.

    Args:
        call: computes a task from its path and arguments; None = the function of that name.
    """
    call = call or call_by_name
    with contextlib.suppress(ValueError, OSError):  # macOS maps more than this at start and refuses
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    replies = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a library that prints must not garble the replies
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    for each in (signal.SIGINT, signal.SIGTERM):  # sent to the whole job: the parent finishes its step first
        signal.signal(each, signal.SIG_IGN)
    equivalent("1", "2 - 1")
    _write(replies, '"ready"')
    while True:
        try:
            (path, *arguments), limit_s = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        try:
            reply = json.dumps({"result": call(path, *arguments)}, default=number)
        except (Exception, SystemExit) as error:
            reply = json.dumps({"error": f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS]})
        signal.setitimer(signal.ITIMER_REAL, 0)
        _write(replies, reply)


def _write(descriptor: int, line: str) -> None:
    left = line.encode() + b"\n"
    while left:
        left = left[os.write(descriptor, left) :]


if __name__ == "__main__":
    serve()
