"""Makes calls that may hang, crash or raise, in child processes (many at a time in each) or in threads of this process.

The caller passes with each call the function that receives its outcome, and then polls. The module has no thread of its
own; between polls, nothing runs but the calls.
"""

import contextlib
import itertools
import json
import os
import pickle
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tandemrl.processes.child import CALLS_AT_ONCE, HERE, READY

START_LIMIT_S = 600.0
"""How long a process may take to start, in which that of a tool may load an index or a model. A scoring process has as
long: it may import from a slow disk, beside many others. The limit ends starts that hang; one that fails is seen at
once."""
ORPHAN_GRACE_S = 30.0
"""If a call holds the interpreter for this long beyond the limit, its process has no parent left that would kill it."""
GRACE_S = 2.0
"""How long a process with a late call may take to answer that it is still alive."""


class ProcessError(RuntimeError):
    """A child process cannot be started. The message has the end of its output."""


class Outcome(NamedTuple):
    """The outcome of a call.

    ``value`` is the result (JSON), for an ``error`` what was raised, and for a ``death`` the end of the process's
    output.
    """

    how: Literal["result", "error", "timeout", "death"]
    value: Any = None


Deliver = Callable[[Outcome], None]
"""A function that receives the outcome of a call. It is called during a poll."""


class ChildCalls:
    """Makes calls in child processes (see `child.serve_calls`), which are started when they are first needed.

    A late call is given up, and its process gets no further calls; it is killed when its other calls are done. If a
    process dies, or does not answer because a call holds the interpreter, it is unknown which of several calls caused
    it. Each of them is then made again, alone in a process.

    Args:
        command: the command that starts a child.
        setup: the first message to a child. All later messages are calls.
        limit_s: after how many seconds a call is late.
        queue: None makes several calls at a time in each process, and all calls of a key in the same one. A number
            makes one at a time, in the main thread of whichever process is free, and starts another process where there
            are more calls than that for each. One that died is replaced as long as a call waits.
    """

    def __init__(
        self, command: Sequence[str], setup: Any, *, processes: int, limit_s: float, queue: int | None = None
    ) -> None:
        self._command = tuple(command)
        self._setup = pickle.dumps((setup, limit_s + ORPHAN_GRACE_S if queue is None else None))
        self._limit_s, self._queue = limit_s, queue
        self._at_once = CALLS_AT_ONCE if queue is None else 1
        self._lanes = [_Lane() for _ in range(processes)]
        self._processes: list[_Process] = []
        self.close()

    def call(self, argument: Any, deliver: Deliver, *, key: str = "", limit_s: float | None = None) -> None:
        """Begin a call, and return at once.

        Calls with the same ``key`` are made in the same process, which can use what it has cached.

        Args:
            argument: of the function; it is pickled.
            limit_s: of this call.
        """
        lane = self._lanes[zlib.crc32(key.encode()) % len(self._lanes)]
        lane.waiting.append(_Call(pickle.dumps(argument), deliver, limit_s or self._limit_s))
        self._feed(lane)

    def poll(self, *, wait: bool) -> None:
        """Deliver the outcomes that are ready.

        Args:
            wait: wait for at least one outcome, if any call is running.

        Raises:
            ProcessError: no process can be started.
        """
        over = list[tuple[_Call, Outcome]]()
        for lane in self._lanes:
            self._feed(lane)
        while nearest := min((due for each in self._processes if (due := each.due)), default=None):
            over += self._listen(max(0.0, nearest - time.monotonic()) if wait else 0.0)
            for process in tuple(self._processes):
                over += self._check(process)
            for lane in self._lanes:
                self._feed(lane)
            if over or not wait:
                break
        for call, outcome in over:
            call.deliver(outcome)

    def close(self) -> None:
        """Kill the running calls. No further outcomes are delivered."""
        for process in tuple(self._processes):
            self._remove(process)
        shared = deque[_Call]()
        self._lanes = [_Lane() if self._queue is None else _Lane(waiting=shared) for _ in self._lanes]

    # ---------------------------------------------------------------------------------------------------------------

    def _feed(self, lane: "_Lane") -> None:
        """Begin as many calls of a lane as its process takes at once."""
        process = lane.process
        if process is not None and process.ready and not process.begun and not process.running():
            self._remove(process)  # it died when nobody needed it
        calls = len(lane.waiting) + sum(len(each.begun) for each in self._processes)
        enough = calls <= len(self._processes) * (self._queue or 0)
        if lane.process is None and (lane.alone or (lane.waiting and not enough)):
            self._start(lane)
        process = lane.process
        while process is not None and process.ready and (lane.alone or lane.waiting):
            if not process.begun:
                process.alone = bool(lane.alone)
            elif process.alone or len(process.begun) >= self._at_once:
                break
            process.begin((lane.alone or lane.waiting).popleft())

    def _start(self, lane: "_Lane") -> None:
        lane.process = _Process(self._command, self._setup, lane)
        self._processes.append(lane.process)

    def _listen(self, timeout: float) -> list[tuple["_Call", Outcome]]:
        """Read what processes have written, and continue to send what they have not read yet."""
        with selectors.DefaultSelector() as selector:
            for process in self._processes:
                selector.register(process.stdout, selectors.EVENT_READ, process)
                if not process.flush():
                    selector.register(process.stdin, selectors.EVENT_WRITE)
            chosen = [key.data for key, _ in selector.select(timeout) if key.data is not None]
            return [reply for process in chosen for reply in process.read_replies()]

    def _check(self, process: "_Process") -> list[tuple["_Call", Outcome]]:
        """Give up late calls, and a process that died, does not answer, or is no longer needed."""
        now, over = time.monotonic(), list[tuple[_Call, Outcome]]()
        if process.here:  # so it is the late calls' own fault
            process.here, process.asked = False, None
            late = [number for number, call in process.begun.items() if now >= call.due]
            over = [(process.begun.pop(number), Outcome("timeout")) for number in late]
            if late and process.lane.process is process:
                process.lane.process = None
        if process.alive and (process.due is None or now < process.due):
            if process.lane.process is not process and not process.begun:
                self._remove(process)
        elif process.alive and process.ready and process.asked is None and self._queue is None:
            process.ask(now)
        else:
            over += self._reap(process)
        return over

    def _reap(self, process: "_Process") -> list[tuple["_Call", Outcome]]:
        """Handle the calls of a process that died or does not answer."""
        stderr_tail = self._remove(process)
        if not process.ready:
            self.close()
            raise ProcessError(f"`{' '.join(self._command)}` did not start: {stderr_tail}")
        if process.lane.process is None and process.lane.waiting:
            self._start(process.lane)
        calls = [*process.begun.values()]
        if len(calls) == 1:
            return [(calls[0], Outcome("timeout") if process.alive else Outcome("death", stderr_tail))]
        process.lane.alone.extend(calls)
        return []

    def _remove(self, process: "_Process") -> str:
        self._processes.remove(process)
        if process.lane.process is process:
            process.lane.process = None
        return process.kill()


class ThreadCalls:
    """As `ChildCalls`, in threads of this process. A late call is given up, but its thread runs on, since nothing can
    kill it.

    Args:
        function: the function that is called; it returns a JSON text.
        limit_s: after how many seconds a call is late.
    """

    def __init__(self, function: Callable[[Any], str], *, limit_s: float) -> None:
        self._function, self._limit_s = function, limit_s
        self._waiting: deque[_Call] = deque()
        self._begun: dict[Future[Outcome], _Call] = {}

    def call(self, argument: Any, deliver: Deliver, *, key: str) -> None:
        self._waiting.append(_Call(pickle.dumps(argument), deliver, self._limit_s))  # a copy: calls share nothing
        self._feed()

    def poll(self, *, wait: bool) -> None:
        over = dict[Future[Outcome], Outcome]()
        while self._begun and not over:
            due = min(begun.due for begun in self._begun.values())
            done = futures.wait(self._begun, max(0.0, due - time.monotonic()) * wait, futures.FIRST_COMPLETED).done
            now = time.monotonic()
            over = {each: Outcome("timeout") for each, begun in self._begun.items() if now >= begun.due}
            over |= {each: each.result() for each in done}
            for each, outcome in over.items():
                self._begun.pop(each).deliver(outcome)
            self._feed()
            if not wait:
                break

    def close(self) -> None:
        self._waiting.clear()
        self._begun.clear()

    def _feed(self) -> None:
        while self._waiting and len(self._begun) < CALLS_AT_ONCE:
            call, future = self._waiting.popleft(), Future[Outcome]()
            self._begun[future], call.due = call, time.monotonic() + call.limit_s
            # not those of an executor, whose end waits for them
            threading.Thread(target=self._work, args=(future, call.argument), daemon=True).start()

    def _work(self, future: Future[Outcome], argument: bytes) -> None:
        try:
            outcome = Outcome("result", json.loads(self._function(pickle.loads(argument))))
        except BaseException as error:  # SystemExit and asyncio.CancelledError, too: it is answered in any case
            outcome = Outcome("error", f"{type(error).__name__}: {error}")
        future.set_result(outcome)


Caller = ChildCalls | ThreadCalls
"""Makes calls of a function with one argument."""

# --------------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Call:
    """argument: the pickled one. due: when it is late, once it has begun."""

    argument: bytes
    deliver: Deliver
    limit_s: float
    due: float = 0.0


@dataclass(eq=False)
class _Lane:
    """The calls of some keys, and the process that they are made in. ``alone`` are calls that need a process for
    themselves."""

    process: "_Process | None" = None
    waiting: deque[_Call] = field(default_factory=deque)
    alone: deque[_Call] = field(default_factory=deque)


class _Process:
    """The parent's side of a child process.

    alive: False once the child has closed its output. asked: since when it has not answered whether it is alive. here:
    whether it has answered. alone: whether it must run no other call beside its present one.
    """

    def __init__(self, command: Sequence[str], setup: bytes, lane: _Lane) -> None:
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
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._pipes = self._process.stdin, self._process.stdout
        self.stdin, self.stdout = (pipe.fileno() for pipe in self._pipes)
        os.set_blocking(self.stdin, False)
        self._received, self._unsent = bytearray(), memoryview(b"")
        self.lane = lane
        self.begun: dict[int, _Call] = {}
        self.alive, self.ready, self.here, self.alone = True, False, False, False
        self.asked: float | None = None
        self._started = time.monotonic()
        self._numbers = itertools.count()
        self._send(setup)

    def running(self) -> bool:
        return self._process.poll() is None

    def _send(self, data: bytes) -> None:
        """Write ``data`` to the child, after what could not be written before."""
        self._unsent = memoryview(bytes(self._unsent) + data)
        self.flush()

    def flush(self) -> bool:
        """Write what is left, as far as that is possible without waiting. Returns whether all of it is written.

        What a dead child should have got is dropped; the end of its output tells of the death.
        """
        try:
            while self._unsent:
                self._unsent = self._unsent[os.write(self.stdin, self._unsent) :]
        except BlockingIOError:
            return False
        except BrokenPipeError:
            self._unsent = memoryview(b"")
        return True

    def kill(self) -> str:
        """Kill the process and what it started. Returns the end of its stderr, or its exit status."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nothing is left of the group
            os.killpg(self._process.pid, signal.SIGKILL)
        for pipe in self._pipes:
            pipe.close()  # not read to its end: a process that left the group may hold the other one
        self._process.wait()
        with self._errors as errors:
            errors.seek(max(0, errors.seek(0, os.SEEK_END) - 4096))
            return errors.read().decode(errors="replace").strip()[-500:] or f"exit status {self._process.returncode}"

    def begin(self, call: _Call) -> None:
        number = next(self._numbers)
        self.begun[number], call.due = call, time.monotonic() + call.limit_s
        self._send(pickle.dumps((number, call.argument, call.limit_s + ORPHAN_GRACE_S)))

    def ask(self, now: float) -> None:
        self.asked = now
        self._send(pickle.dumps(None))

    @property
    def due(self) -> float | None:
        """When the process has to be checked next, or None if it has nothing to do."""
        if not self.ready:
            return self._started + START_LIMIT_S
        if self.asked is not None:
            return self.asked + GRACE_S
        return min((begun.due for begun in self.begun.values()), default=None)

    def read_replies(self) -> list[tuple[_Call, Outcome]]:
        """Read what is there, and return which calls are done, with their outcomes."""
        part, done = os.read(self.stdout, 2**16), []
        self.alive = part != b""
        self._received += part
        end = self._received.rfind(b"\n", len(self._received) - len(part)) + 1
        said, self._received = bytes(self._received[:end]), self._received[end:]
        self.asked = time.monotonic() if self.asked is not None else None  # it says something: it is there
        for line in said.splitlines():
            if line == READY.encode():
                self.ready = True
            elif line == HERE.encode():
                self.here = True
            else:
                try:
                    reply = json.loads(line)
                    call = self.begun.pop(reply.pop("number"), None)
                    [(how, value)] = reply.items()
                except (ValueError, KeyError, AttributeError):  # something else than our code spoke
                    self.alive = False
                    break
                if call is not None:  # it was not given up
                    done.append((call, Outcome(how, value)))
        return done
