"""A scoring process: pairs of answers in, verdicts out, one JSON line each. Started and killed by `scoring.Scorer`.

It is a plain child process, not a `multiprocessing` one, so it imports neither torch nor the user's main script.
"""

import contextlib
import json
import os
import resource
import signal
import sys
from collections.abc import Callable

from tandemrl.rollout.envs.math import equivalent

MAX_MEMORY_BYTES = 4 * 2**30
"""Address space of a scoring process: a tower of powers ends in MemoryError, not in a machine that swaps."""


def serve(grade: Callable[[str, str], bool] = equivalent) -> None:
    """Answer lines ``[gold, answer, limit_s]`` with ``true`` or ``false``, or with a string: what went wrong.

    ``"ready"`` is written first, when everything is imported. The parent kills a process that takes too long; the
    alarm, whose default action ends the process from the kernel, is for a process whose parent is gone.
    """
    with contextlib.suppress(ValueError, OSError):  # macOS maps more than this at start and refuses
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    replies = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a library that prints must not garble the replies
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    grade("1", "2 - 1")
    _reply(replies, "ready")
    for line in sys.stdin:
        gold, answer, limit_s = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        try:
            verdict: bool | str = grade(gold, answer)
        except Exception as error:
            verdict = f"{type(error).__name__}: {error}"[:500]
        signal.setitimer(signal.ITIMER_REAL, 0)
        _reply(replies, verdict)


def _reply(descriptor: int, value: bool | str) -> None:
    os.write(descriptor, json.dumps(value).encode() + b"\n")


if __name__ == "__main__":
    serve()
