"""The side of a child process that makes calls and can be killed. It reads pickles and writes JSON lines.

The parent is trusted; a child that works on hostile input is not. The child is a plain process, not one of
`multiprocessing`, so it imports neither torch nor the user's main script. It leads a process group of its own, so that
the processes that it starts end with it.
"""

import json
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

READY = '"ready"'
"""The first line that a child writes, when everything is imported."""
HERE = '"here"'
"""What a child answers to None in place of a call, which asks whether it is still alive."""
CALLS_AT_ONCE = 32
"""How many calls run at once in a process that makes several. Most of them wait, for a service or for each other."""


def cores() -> int:
    """How many CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Parent:
    """The child's side of the connection to its parent.

    Programs that calls start and prints of libraries cannot disturb it: for them, standard input is empty, and standard
    output is stderr. Signals to the whole job are left to the parent, which finishes its step first.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._told = os.fdopen(os.dup(sys.stdin.fileno()), "rb")
        self._descriptor = os.dup(sys.stdout.fileno())
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), sys.stdin.fileno())
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, lambda number, frame: None)  # SIG_IGN would hold in programs that calls start, too

    def receive(self) -> Any:
        """Read the next message. If the parent is gone, also amid a message, the child ends, together with what it
        started."""
        try:
            return pickle.load(self._told)
        except EOFError:
            end()
        except BaseException:  # half a message, or what is no message: nothing after it can be read
            traceback.print_exc()
            end()

    def send(self, line: str) -> None:
        """Write one JSON line. Any thread may call this."""
        left = memoryview(line.encode() + b"\n")
        with self._lock:
            try:
                while left:
                    left = left[os.write(self._descriptor, left) :]
            except OSError:  # nobody listens any more
                end()


def serve_calls(prepare: Callable[[Any], Callable[[Any], str]]) -> None:
    """The child's side of `calls.ChildCalls`: make calls until the parent is gone, in threads, or one at a time here.

    Args:
        prepare: receives the parent's setup, and returns the function to call, which returns a JSON text.
    """
    parent = Parent()
    setup, patience_s = parent.receive()
    function = prepare(setup)

    def work(number: int, argument: bytes, _: float) -> None:
        try:
            said = f'"result": {function(pickle.loads(argument))}'
        except BaseException as error:  # SystemExit and asyncio.CancelledError, too: it is answered in any case
            said = f'"error": {json.dumps(f"{type(error).__name__}: {error}")}'
        parent.send(f'{{"number": {number}, {said}}}')

    def beat() -> None:
        """Postpone, again and again, an alarm with which the kernel ends this process.

        It goes off if a call holds the interpreter for too long and no parent is left to notice.
        """
        while True:
            signal.setitimer(signal.ITIMER_REAL, patience_s)
            time.sleep(min(1.0, patience_s / 2))

    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    if patience_s is None:  # calls may use signals themselves
        parent.send(READY)
        while True:
            asked = parent.receive()
            signal.setitimer(signal.ITIMER_REAL, asked[-1])
            work(*asked)
            signal.setitimer(signal.ITIMER_REAL, 0)
    threading.Thread(target=beat, daemon=True).start()
    threads = ThreadPoolExecutor(CALLS_AT_ONCE)
    parent.send(READY)
    while True:
        asked = parent.receive()
        if asked is None:
            parent.send(HERE)
            continue
        try:
            threads.submit(work, *asked)
        except BaseException:  # it is no call; the end of this thread alone would wait for those that hang
            traceback.print_exc()
            end()


def end() -> NoReturn:
    """End this process, with the processes of its group."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)  # whatever still hangs
