"""The inside of `sandbox`: it confines itself, then runs one test. It uses nothing but the standard library.

The *template* is started once and forks a *supervisor* for each sandbox, which makes the namespaces, starts the
*runner* and waits for it. The runner gives up its user, files and system calls, verifies it, and says which layers
hold. For its test it forks a fresh process, which executes the program, and kills whatever is left of it. The expected
result of a test never comes in here, except for `check`.

Requests are JSON in the frames of `multiprocessing.connection`, replies are lines of JSON, both over one socket. The
runner ends after its test, or when no requests can come any more.
"""

import atexit
import builtins
import contextlib
import fcntl
import gc
import importlib
import io
import json
import math
import os
import resource
import select
import signal
import site
import socket
import sys
import threading
import time
import types
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, NoReturn

from tandemrl.tasks.code.layers import (
    Layers,
    adopt_orphans,
    confine,
    die_with_parent,
    end_user,
    own_ids,
    prove,
    separate,
)

MB = 2**20
MAX_OPEN_FILES = 128
MAX_STACK_BYTES = 64 * MB
DOES_NOT_COMPILE = 120
"""The exit status of a test whose program is not valid Python."""
ERROR_CHARS = 2000
KINDS: tuple[type[Any], ...] = (tuple, set, frozenset, bytes, bytearray)
"""Containers that tests exchange, beside lists and dictionaries."""
PREAMBLE_MODULES = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics"),
    *("itertools", "functools", "operator", "io", "sys", "json", "typing"),
)
"""What PRIME's verifier imports, both as modules and with a star, for a program that defines a function."""


# The program's side -------------------------------------------------------------------------------------------------


def as_script(program: str) -> None:
    """Run the program as ``__main__``, with standard input and output."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    _execute(program, module)
    threading._shutdown()  # type: ignore[attr-defined]  # the other threads may still have to print
    atexit._run_exitfuncs()


def as_function(program: str, name: str, prompt: str = "", *, encode: Callable[[Any], Any]) -> None:
    """Run the program as a module, and call its function ``name``.

    HumanEval's ``prompt`` runs before it, for imports and helpers; the body of the function that it begins is joined
    to it.

    Each line of descriptor 3 is the list of arguments (`to_wire`). What ``encode`` makes of the result is a line of
    JSON on descriptor 4.
    """
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    preamble: dict[str, Any] = {}
    exec("".join(f"from {other} import *; import {other}\n" for other in PREAMBLE_MODULES), preamble)
    module.__dict__["__builtins__"] = preamble | vars(builtins)  # found, but not taken for the program's own
    try:
        compile(program, "<program>", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        program, prompt = f"{prompt}\n{program}", ""
    _execute(prompt, module)
    _execute(program, module)
    solution: Any = getattr(module, "Solution", None)
    function = getattr(solution() if hasattr(solution, name) else module, name)
    with open(3, "rb") as requests, open(4, "wb", buffering=0) as replies:
        for line in requests:
            try:
                reply = json.dumps({"value": encode(function(*map(from_wire, json.loads(line))))})
            except Exception as error:
                reply = json.dumps({"error": type(error).__name__, "message": str(error)[:ERROR_CHARS]})
            replies.write(reply.encode() + b"\n")
        sys.stdout.flush()
        os._exit(0)


def check(prompt: str, test: str, function: str) -> None:
    """Run HumanEval's ``check(candidate)``. The verdict goes to descriptor 5, where only this process can write.

    The candidate is a stand-in that asks the process of `as_function` through descriptors 3 and 4, so the program
    cannot touch the test: it neither sees it nor can it return an object that is equal to everything.
    """
    requests, replies = open(3, "wb", buffering=0), open(4, "rb")  # noqa: SIM115 - for life

    def candidate(*arguments: Any) -> Any:
        requests.write(json.dumps(to_wire([*arguments])).encode() + b"\n")
        reply = json.loads(replies.readline() or '{"error": "RuntimeError", "message": "the program ended"}')
        if "error" in reply:
            kind = getattr(builtins, str(reply["error"]), None)
            if not isinstance(kind, type) or not issubclass(kind, Exception) or issubclass(kind, StopIteration):
                kind = RuntimeError  # a StopIteration would quietly end a test's map(candidate, inputs)
            raise kind(reply.get("message"))
        return from_wire(reply["value"])

    module = types.ModuleType("test")
    exec(compile(prompt, "<prompt>", "exec"), module.__dict__)
    setattr(module, function, candidate)  # some tests call it by its name
    exec(compile(test, "<test>", "exec"), module.__dict__)
    try:
        module.check(candidate)
        verdict: dict[str, Any] = {"value": True}
    except Exception as error:
        verdict = {"error": type(error).__name__, "message": str(error)[:ERROR_CHARS]}
    os.write(5, json.dumps(verdict).encode())


def _execute(program: str, module: types.ModuleType) -> None:
    try:
        code = compile(program, "<program>", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        _leave(DOES_NOT_COMPILE)
    exec(code, module.__dict__)


def to_wire(value: Any) -> Any:
    """A value that tests exchange, as JSON. Lists stay lists; ``{kind: items}`` stands for the other containers.

    Raises:
        TypeError: the value is of a kind that cannot be exchanged.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [*map(to_wire, value)]
    if isinstance(value, dict):
        return {"dict": [[to_wire(key), to_wire(item)] for key, item in value.items()]}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    for kind in KINDS:
        if isinstance(value, kind):
            return {kind.__name__: [*map(to_wire, value)]}
    if hasattr(value, "tolist"):  # numpy's
        return to_wire(value.tolist())
    raise TypeError(f"a test cannot receive a {type(value).__name__}")


def from_wire(value: Any) -> Any:
    """The inverse of `to_wire`.

    Raises:
        ValueError, TypeError, LookupError: ``value`` is not what `to_wire` makes.
    """
    if isinstance(value, list):
        return [*map(from_wire, value)]
    if not isinstance(value, dict):
        return value
    ((kind, items),) = value.items()
    if kind == "complex":
        return complex(*items)
    kinds: tuple[type[Any], ...] = (*KINDS, dict)
    return {make.__name__: make for make in kinds}[kind](map(from_wire, items))


def plain(value: Any) -> Any:
    """A value made of Python's own kinds alone."""
    return from_wire(to_wire(value))


# The runner ---------------------------------------------------------------------------------------------------------


def main() -> None:
    """The template: a process with everything imported that forks a sandbox for each message on the socket at 0.

    A message is one byte and two sockets: one for requests and replies, and one to write errors to.
    """
    os.chdir("/")
    os.environ.pop("LD_LIBRARY_PATH", None)
    sys.setrecursionlimit(600_000)
    for name in PREAMBLE_MODULES:
        importlib.import_module(name)
    site.setquit()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # process 1 of a namespace receives only the signals that it handles
    orders = socket.socket(fileno=0)
    while True:
        order, descriptors, _, _ = socket.recv_fds(orders, 1, 2)
        if not order:
            return
        if not os.fork():
            try:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                line, errors = descriptors
                os.dup2(errors, 2)
                os.close(errors)
                _supervise(socket.socket(fileno=line))
            except BaseException as error:
                print(error if isinstance(error, SystemExit) else repr(error), file=sys.stderr, flush=True)
            finally:
                os._exit(0)
        for descriptor in descriptors:
            os.close(descriptor)


def _supervise(line: socket.socket) -> None:
    """Run as the supervisor, and after its fork as the runner."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    limits = _receive(line)
    sys.path += limits["packages"]
    interpreter, supervisor = os.path.realpath("/proc/self/exe"), os.getpid()
    with open("/proc/self/oom_score_adj", "w") as score:  # a machine that is out of memory ends this, not the training
        score.write("1000")
    adopt_orphans()
    layers, user, children = Layers(), own_ids(), _children()
    separate(layers, user, home=limits["home"], libraries=limits["libraries"], bytes_on_disk=limits["file_mb"] * MB)
    if runner := os.fork():
        os.waitpid(runner, os.WUNTRACED)  # a program that has the runner's user id may stop it
        end_user(user)
        sweep_children(children)
        return
    if not layers.held["processes"]:
        children = _children()
    store = os.memfd_create("input")
    confine(layers, user, libraries=limits["libraries"])
    prove(layers, interpreter, supervisor)
    limits["others"] = [{"own user id": 1, "user namespace": 2}[how] for how in layers.held["user"]]
    sweep = sweep_all if layers.held["processes"] else lambda: sweep_children(children)
    hello = {"layers": layers.held, "troubles": layers.troubles, "supervisor": supervisor}
    Runner(line, store, limits, sweep).serve(hello)


def sweep_all() -> None:
    """Kill every process but this one: for process 1 of a namespace, or a user id of its own."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


def sweep_children(listing: int) -> None:
    """Kill the descendants generation by generation: orphans become this process's children."""
    while pids := [int(pid) for pid in os.pread(listing, 2**16, 0).split()]:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _children() -> int:
    return os.open(f"/proc/self/task/{os.getpid()}/children", os.O_RDONLY)


def _receive(line: socket.socket) -> Any:
    """The next message. No more is read: a program must not find its test in the memory that it gets from here.

    Raises:
        EOFError: there is none.
    """
    return json.loads(Connection(os.dup(line.fileno()), writable=False).recv_bytes())


class Runner(NamedTuple):
    """Runs one test in fresh processes.

    line: for requests and replies. store: an empty file for what a test reads. limits: those of a test, see `sandbox`.
    sweep: kills all of a test's processes.
    """

    line: socket.socket
    store: int
    limits: dict[str, Any]
    sweep: Callable[[], None]

    def serve(self, hello: dict[str, Any]) -> NoReturn:
        self._send(hello)
        with contextlib.suppress(EOFError):  # nobody asks for a test
            self._send(self._test(_receive(self.line)))
        os._exit(0)

    def _send(self, message: Any) -> None:
        self.line.sendall(json.dumps(message).encode() + b"\n")

    def _test(self, job: dict[str, Any]) -> dict[str, Any]:
        deadline = time.monotonic() + job["timeout_s"]
        (out, out_end), (err, err_end), (result, result_end) = pipes = [os.pipe() for _ in range(3)]
        std = (0, out_end, err_end)
        with open(self.store, "wb", closefd=False) as file:
            file.write(job["input"].encode(errors="surrogatepass"))
        os.lseek(self.store, 0, os.SEEK_SET)
        if job["kind"] == "script":
            main = self._spawn(lambda: as_script(job["program"]), (self.store, out_end, err_end))
        elif job["kind"] == "call":
            call = partial(as_function, job["program"], job["function"], encode=plain)
            main = self._spawn(call, (*std, self.store, result_end))
        else:
            (calls, call_end), (returns, return_end) = more = [os.pipe(), os.pipe()]
            call = partial(as_function, job["program"], job["function"], job["prompt"], encode=to_wire)
            self._spawn(call, (*std, calls, return_end))
            test = _receive(self.line)  # only now: the program must not find it in its memory
            main = self._spawn(lambda: check(**test), (*std, call_end, returns, result_end))
            for end in (end for pair in more for end in pair):
                os.close(end)
        for _, end in pipes:
            os.close(end)
        status, texts = self._watch(main, (out, err, result), deadline)
        output, errors, reply = (text.decode(errors="replace") for text in texts)
        return {"status": status, "output": output, "errors": errors.strip()[-ERROR_CHARS:], "reply": reply}

    def _watch(self, main: int, sources: Sequence[int], deadline: float) -> tuple[str, list[bytes]]:
        """Wait for the main process, then kill everything that is left of the test.

        Returns:
            how the process ended, and what came out of the pipes.
        """
        left = self.limits["output_mb"] * MB
        texts: dict[int, list[bytes]] = {source: [] for source in sources}
        ended = os.pidfd_open(main)
        poll = select.poll()
        for source in (*sources, ended, self.line.fileno()):
            poll.register(source, select.POLLIN)
        status = ""
        while not status:
            for descriptor, _ in poll.poll(max(0.0, deadline - time.monotonic()) * 1000 + 1):
                if descriptor == self.line.fileno():  # nobody waits for the outcome any more
                    self.sweep()
                    os._exit(0)
                if descriptor == ended:
                    code = os.waitstatus_to_exitcode(os.waitpid(main, 0)[1])
                    known = {0: "ok", DOES_NOT_COMPILE: "syntax", -signal.SIGXCPU: "timeout"}
                    status = known.get(code, "crash" if code < 0 else "error")
                elif data := os.read(descriptor, 2**16):
                    texts[descriptor].append(data)
                    left -= len(data)
                else:
                    poll.unregister(descriptor)
            if left < 0:
                status = "output"
            elif time.monotonic() >= deadline:
                status = status or "timeout"
        self.sweep()
        for source in sources:
            while left >= 0 and (data := os.read(source, 2**16)):
                texts[source].append(data)
                left -= len(data)
            os.close(source)
        os.close(ended)
        return "output" if left < 0 else status, [b"".join(texts[source]) for source in sources]

    def _spawn(self, body: Callable[[], None], descriptors: Sequence[int]) -> int:
        """Fork a process whose only open descriptors are the given ones, as 0, 1, 2, …"""
        pid = os.fork()
        if pid:
            return pid
        try:
            high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 64) for descriptor in descriptors]
            for number, descriptor in enumerate(high):
                os.dup2(descriptor, number)
            os.closerange(len(descriptors), 1024)
            os.setsid()
            die_with_parent()
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._limit()
            sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", closefd=False)  # type: ignore[misc]  # noqa: SIM115
            sys.stdout = sys.__stdout__ = open(1, "w", encoding="utf-8", closefd=False)  # type: ignore[misc]  # noqa: SIM115
            sys.stderr = sys.__stderr__ = open(2, "w", encoding="utf-8", closefd=False)  # type: ignore[misc]  # noqa: SIM115
            body()
            _leave(0)
        except SystemExit as error:
            if isinstance(error.code, str):
                print(error.code, file=sys.stderr)
            _leave(error.code & 255 if isinstance(error.code, int) else int(error.code is not None))
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            _leave(1)
        finally:
            os._exit(1)

    def _limit(self) -> None:
        limits = self.limits
        values = {
            resource.RLIMIT_AS: limits["memory_mb"] * MB,
            resource.RLIMIT_FSIZE: limits["file_mb"] * MB,
            resource.RLIMIT_NOFILE: MAX_OPEN_FILES,
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_CPU: math.ceil(limits["timeout_s"]) + 1,
            resource.RLIMIT_STACK: MAX_STACK_BYTES,
        }
        for others in limits["others"]:  # the runner and, in a user namespace, its supervisor count too
            values[resource.RLIMIT_NPROC] = limits["processes"] + others
        for which, value in values.items():
            hard = resource.getrlimit(which)[1]
            soft = value if hard == resource.RLIM_INFINITY else min(value, hard)
            kept = {resource.RLIMIT_CPU: soft + 1, resource.RLIMIT_STACK: hard}  # a program may ask for more stack
            resource.setrlimit(which, (soft, kept.get(which, soft)))


def _leave(status: int) -> NoReturn:
    """End a test's process without the runner's clean-up, but write what its files still hold, as Python does."""
    own = [each for each in vars(sys.modules["__main__"]).values() if isinstance(each, io.IOBase)]
    for stream in (sys.stdout, sys.__stdout__, sys.stderr, sys.__stderr__, *own):
        try:
            if stream is not None and not getattr(stream, "closed", False):
                stream.flush()
        except (AttributeError, OSError, ValueError):
            status = status or 1
    os._exit(status)
