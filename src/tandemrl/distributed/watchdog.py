"""Ends a process whose work stands still. One that waits for a peer that hangs is deep inside a collective, from where
no exception brings it back, and the time-outs of a communication library do not cover all of its waits.

``stamp`` is called where work is done: tokens decoded, a micro-batch, a response scored, a tensor gathered, a
collective that returned, a model loaded. Only the thread that called ``begin`` counts, and, where it waits for its own
threads (``shared``), these. A thread that beats by itself would go on beating over work that hangs.

The state is the process's, as its process group is. Without ``begin`` a stamp is an addition.
"""

import faulthandler
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

EXIT_CODE = 124
"""Of a process that was ended here; that of timeout(1)."""
GRACE_S = 5.0
"""Seconds beyond the limit: the time-out of a collective, an error with a better message, comes first."""
LOOK_S = 1.0
"""Seconds between two looks at the stamps."""


class Watchdog:
    """See the module.

    place: where the work is, such as ``step 3, update/logprobs``.
    """

    def __init__(self) -> None:
        self.place = ""
        self._stamps = 0
        self._worker = 0
        self._shared = False
        self._end = threading.Event()

    def begin(self, limit_s: float, who: str) -> None:
        """Watch the calling thread from now on.

        Args:
            limit_s: ``parallel.timeout_s``; who: this process, for the message.
        """
        self.end()
        self._worker, self._end = threading.get_ident(), threading.Event()
        watch = threading.Thread(target=self._watch, args=(limit_s, who, self._end), name="watchdog", daemon=True)
        watch.start()

    def end(self) -> None:
        """Watch no longer."""
        self._worker = 0
        self._end.set()

    def stamp(self, place: str | None = None) -> None:
        """Some work is done. ``place``: what comes next."""
        if threading.get_ident() == self._worker or self._shared:
            self._stamps += 1
            self.place = self.place if place is None else place

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Inside, the work of other threads counts as well: this one waits for it."""
        before, self._shared = self._shared, True
        try:
            yield
        finally:
            self._shared = before

    def _watch(self, limit_s: float, who: str, end: threading.Event) -> None:
        stillness, now = Stillness(self._stamps), time.monotonic()
        while not end.wait(LOOK_S):
            before, now = now, time.monotonic()
            if stillness.look(self._stamps, now - before) > limit_s + GRACE_S:
                self._kill(limit_s, who, stillness.seconds)

    def _kill(self, limit_s: float, who: str, seconds: float) -> None:
        message = (
            f"error: {self.place or 'at the start'}: {who} has done nothing for {seconds:.0f} s "
            f"(parallel.timeout_s={limit_s:g}): another process hangs, is stopped or gone, or this one hangs. It ends "
            f"with exit code {EXIT_CODE}, after the stacks of its threads. Start the run again to resume from the last "
            "checkpoint; torchrun --max-restarts does so by itself.\n"
        )
        os.write(2, message.encode())  # print() may wait for a lock of the thread that hangs
        faulthandler.dump_traceback(2)
        for child in multiprocessing.active_children():  # such as an engine, which would keep its memory
            child.kill()
        os._exit(EXIT_CODE)


class Stillness:
    """For how many seconds a counter has not changed.

    Time in which nobody could look does not count, beyond ``GRACE_S`` at once: this process itself was stopped, and may
    go on with the others.

    Examples:
        >>> stillness = Stillness(7)
        >>> [stillness.look(stamps, 1.0) for stamps in (7, 7, 8, 8)]
        [1.0, 2.0, 0.0, 1.0]
    """

    def __init__(self, stamps: int) -> None:
        self.seconds = 0.0
        self._stamps = stamps

    def look(self, stamps: int, elapsed: float) -> float:
        """Args:
        elapsed: seconds since the last look.
        """
        self.seconds = self.seconds + min(elapsed, GRACE_S) if stamps == self._stamps else 0.0
        self._stamps = stamps
        return self.seconds


WATCHDOG = Watchdog()
"""That of this process."""
stamp = WATCHDOG.stamp
