"""Ends a process that makes no progress.

A process that waits for a hanging peer is deep inside a collective, which no exception can interrupt, and the time-outs
of a communication library do not cover all of its waits.

``stamp`` is called wherever work is done: when tokens are decoded, a micro-batch is computed, a response is scored, a
tensor is gathered, a collective returns or a model is loaded. Only stamps of the thread that called ``begin`` count,
and those of its threads while it waits for them (``shared``). A thread that stamps by itself would go on stamping while
the work hangs.

There is one state per process, as there is one process group. Without ``begin``, a stamp costs one addition.
"""

import faulthandler
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

EXIT_CODE = 124
"""The exit code of a process that the watchdog ends. It is that of timeout(1)."""
GRACE_S = 5.0
"""Seconds to wait beyond the limit, so that the time-out of a collective comes first, whose message is better."""
POLL_S = 1.0
"""Seconds between two checks of the stamps."""


class Watchdog:
    """The watchdog that the docstring of the module describes.

    place: what the process is working on, such as ``step 3, update/logprobs``.
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
            limit_s: how many seconds may pass between two stamps: ``parallel.timeout_s``.
            who: the name of this process, for the message.
        """
        self.end()
        self._worker, self._end = threading.get_ident(), threading.Event()
        watch = threading.Thread(target=self._watch, args=(limit_s, who, self._end), name="watchdog", daemon=True)
        watch.start()

    def end(self) -> None:
        """Stop watching."""
        self._worker = 0
        self._end.set()

    def stamp(self, place: str | None = None) -> None:
        """Record that some work is done. ``place`` says what comes next."""
        if threading.get_ident() == self._worker or self._shared:
            self._stamps += 1
            self.place = self.place if place is None else place

    @contextmanager
    def shared(self) -> Iterator[None]:
        """A context in which stamps of other threads count as well, since this thread waits for them."""
        before, self._shared = self._shared, True
        try:
            yield
        finally:
            self._shared = before

    def _watch(self, limit_s: float, who: str, end: threading.Event) -> None:
        timer, now = StallTimer(self._stamps), time.monotonic()
        while not end.wait(POLL_S):
            before, now = now, time.monotonic()
            if timer.update(self._stamps, now - before) > limit_s + GRACE_S:
                self._kill(limit_s, who, timer.seconds)

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


class StallTimer:
    """Measures for how many seconds a counter has not changed.

    If this process itself was stopped, it could not look at the counter for a while. Of the time between two looks, at
    most ``GRACE_S`` counts, so that the process may continue together with the others.

    Examples:
        >>> timer = StallTimer(7)
        >>> [timer.update(stamps, 1.0) for stamps in (7, 7, 8, 8)]
        [1.0, 2.0, 0.0, 1.0]
    """

    def __init__(self, stamps: int) -> None:
        self.seconds = 0.0
        self._stamps = stamps

    def update(self, stamps: int, elapsed: float) -> float:
        """Look at the counter, and return for how many seconds it has not changed.

        Args:
            stamps: the value of the counter.
            elapsed: seconds since the last look.
        """
        self.seconds = self.seconds + min(elapsed, GRACE_S) if stamps == self._stamps else 0.0
        self._stamps = stamps
        return self.seconds


WATCHDOG = Watchdog()
"""The watchdog of this process."""
stamp = WATCHDOG.stamp
