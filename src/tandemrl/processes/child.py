"""A child process that can be killed. It reads pickles and writes JSON lines.

The parent is trusted; a child that works on hostile input is not. The child is a plain process, not one of
`multiprocessing`, so it imports neither torch nor the user's main script. It leads a process group of its own, so that
the processes that it starts end with it.
"""

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
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


class Child:
    """The parent's side of a child process. ``alive`` is False once the child has closed its output."""

    def __init__(self, command: Sequence[str]) -> None:
        path = dict.fromkeys([str(Path(__file__).parents[2]), *filter(None, sys.path)])
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed in kill()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
            bufsize=0,
            start_new_session=True,
        )
        self._received = bytearray()
        self._unsent = memoryview(b"")
        self.alive = True

    def fileno(self) -> int:
        """The descriptor of the child's output."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    @property
    def stdin(self) -> int:
        """The descriptor of the child's input."""
        assert self._process.stdin is not None
        return self._process.stdin.fileno()

    def running(self) -> bool:
        return self._process.poll() is None

    def send(self, data: bytes) -> bool:
        """Write ``data`` to the child, after what could not be written before; see `flush`."""
        self._unsent = memoryview(bytes(self._unsent) + data)
        return self.flush()

    def flush(self) -> bool:
        """Write what is left, and return whether all of it is written.

        After ``os.set_blocking(child.stdin, False)``, only as much is written as is possible without waiting. What a
        dead child should have got is dropped; `lines` notices the death.
        """
        try:
            while self._unsent:
                self._unsent = self._unsent[os.write(self.stdin, self._unsent) :]
        except BlockingIOError:
            return False
        except BrokenPipeError:
            self._unsent = memoryview(b"")
        return True

    def lines(self) -> list[bytes]:
        """Wait for output of the child or for its end, and return the complete lines."""
        part = os.read(self.fileno(), 2**16)
        self.alive = part != b""
        self._received += part
        end = self._received.rfind(b"\n", len(self._received) - len(part)) + 1
        said, self._received = bytes(self._received[:end]), self._received[end:]
        return said.splitlines()

    def kill(self) -> str:
        """Kill the process and what it started. Returns the end of its stderr, or its exit status."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nothing is left of the group
            os.killpg(self._process.pid, signal.SIGKILL)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()  # not read to its end: a process that left the group may hold the other one
        self._process.wait()
        with self._errors as errors:
            errors.seek(max(0, errors.seek(0, os.SEEK_END) - 4096))
            return errors.read().decode(errors="replace").strip()[-500:] or f"exit status {self._process.returncode}"


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
