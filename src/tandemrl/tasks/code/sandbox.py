"""Runs programs that a model wrote. Linux only; the module does not import torch.

Each test gets a fresh tree of processes (`runner`) in a fresh directory, so that a program can leave nothing for its
next test, not even how many tests there were. Six layers enclose the processes. A layer holds if one of its mechanisms
does, and the sandbox tries each mechanism before it reports the layer:

============== ================================================ =======================================================
layer          what it stops                                    mechanisms
============== ================================================ =======================================================
limits         eating CPU, memory, disk, descriptors            rlimits; wall clock and output are watched
user           being root, fork bombs (RLIMIT_NPROC)            as root, a user id of its own; else a user namespace
files          reading or writing outside the working directory mount namespace (the directory is in memory); Landlock
network        connections, also to this machine                network namespace; seccomp
processes      killing, tracing or outliving others             process namespace; as root, the user id
system calls   much of the kernel; uncounted memory             seccomp
============== ================================================ =======================================================

The environment is empty. Programs read the Python libraries of this interpreter and nothing else. The whole tree is
killed after every test, and when this process dies. Without a process namespace a program
can kill the sandbox's own processes: its test is then run once more, and is a crash if that happens again.

**A program cannot award itself a pass.** What a test should give stays in this process; a `Check` runs beside the
program in a process that it can neither see nor trace.

**Not covered**: bugs of the kernel that the remaining system calls reach, and side channels (timing, caches). Memory is
limited per process: a test can use ``sandbox.processes`` times ``sandbox.memory_mb``, and on a machine without as much
the kernel kills the test before the training. Without a mount namespace, many files can fill the disk. Programs see
their tests' inputs, so they can know a test again that they have seen before.
"""

import atexit
import contextlib
import functools
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tandemrl.config import SandboxConfig
from tandemrl.tasks.code.runner import to_wire
from tandemrl.tasks.code.tests import Call, Stdin, Test

START = (
    f"import sys; sys.path.append({str(Path(__file__).parents[3])!r}); "
    "from tandemrl.tasks.code.runner import main; sys.path.pop(); main()"
)
COMMAND = (sys.executable, "-S", "-P", "-s", "-c", START)
START_LIMIT_S = 60.0
GRACE_S = 20.0
"""How many seconds the runner may take beyond a test's own limit, on a busy machine."""


class SandboxError(RuntimeError):
    """Programs cannot be run safely here. The message says which layers are missing and what to do."""


class Outcome(NamedTuple):
    """The outcome of a test.

    ``output`` is what a script wrote. ``value`` is what a function returned, as JSON has it, or True for a check that
    passed.
    """

    status: Literal["ok", "error", "crash", "timeout", "output", "syntax"]
    output: str = ""
    value: Any = None
    message: str = ""


class Layer(NamedTuple):
    holds: bool
    how: str
    """The mechanisms that hold the layer, or why there is none."""


class Template:
    """A process with everything imported, from which sandboxes are forked. It is started when first needed.

    Args:
        command: the command that starts a process like `runner.main`.
    """

    def __init__(self, command: Sequence[str] = COMMAND) -> None:
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._orders: socket.socket | None = None
        self._owner = 0
        self._lock = threading.Lock()
        atexit.register(self.close)

    def fork(self) -> tuple[socket.socket, socket.socket]:
        """Fork a sandbox. Returns sockets for requests and replies, and to read errors from."""
        (ours, line), (errors, their_errors) = socket.socketpair(), socket.socketpair()
        with line, their_errors, self._lock:
            descriptors = [line.fileno(), their_errors.fileno()]
            try:
                socket.send_fds(self._running(), [b"+"], descriptors)
            except OSError:  # somebody killed it
                self.close()
                socket.send_fds(self._running(), [b"+"], descriptors)
        return ours, errors

    def close(self) -> None:
        if self._process is not None and self._orders is not None and self._owner == os.getpid():
            self._orders.close()
            self._process.wait()
        self._process = self._orders = None

    def _running(self) -> socket.socket:
        if self._orders is None or self._owner != os.getpid():  # a fork of this process needs its own
            environment = {"PYTHONHASHSEED": "0", "PYTHONUTF8": "1", "OMP_NUM_THREADS": "1"}
            if "LD_LIBRARY_PATH" in os.environ:  # this interpreter may need it to start
                environment["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
            self._orders, theirs = socket.socketpair()
            with theirs:
                self._process = subprocess.Popen(
                    self._command, stdin=theirs.fileno(), env=environment, start_new_session=True
                )
            self._owner = os.getpid()
        return self._orders


_TEMPLATE = Template()


class Sandbox:
    """Runs tests one after the other, each in processes of its own, which end with it. It must not be used from several
    threads at once.

    ``seconds`` is the wall-clock time of the tests so far, without the start and the end of their processes.

    Raises:
        SandboxError: on a test, if no sandbox starts, or a layer is missing and ``sandbox.allow_weak`` is false.

    Examples:
        >>> Sandbox(SandboxConfig()).run("print(int(input()) + 1)", Stdin("41")).output
        '42\\n'
    """

    def __init__(self, config: SandboxConfig, *, template: Template | None = None) -> None:
        self._config = config
        self._template = template or _TEMPLATE
        self._warned = False
        self.seconds = 0.0

    def run(self, program: str, test: Test, *, timeout_s: float | None = None) -> Outcome:
        """Run one test, for at most ``timeout_s`` seconds (default and upper bound: ``sandbox.timeout_s``)."""
        limit = min(self._config.timeout_s, self._config.timeout_s if timeout_s is None else timeout_s)
        messages = _messages(program, test, limit)
        for _ in range(2):  # a sandbox may die by accident; twice under the same test, the program did it
            process = self._start()
            start = time.monotonic()
            try:
                return _outcome(process.ask(messages, limit + GRACE_S), test)
            except (OSError, EOFError) as error:
                trouble = str(error) or "it died"
            finally:
                self.seconds += time.monotonic() - start
                stderr_tail = process.end()
        return Outcome("crash", message=f"the sandbox did not outlive this test, twice: {stderr_tail or trouble}")

    def _start(self) -> "_Process":
        process = _Process(self._template, self._config)
        missing = ", ".join(name for name, held in process.layers.items() if not held)
        what = f"sandbox layers missing: {missing} ({'; '.join(process.troubles)})"
        try:
            if missing and not self._config.allow_weak:
                raise SandboxError(
                    f"{what}; `tandemrl check` lists them. Run as root, or where user namespaces are allowed, or "
                    "accept the risk with sandbox.allow_weak=true"
                )
            if missing and not self._warned:
                warnings.warn(f"{what}; programs run all the same: sandbox.allow_weak", stacklevel=3)
        except BaseException:  # a warning may be an error, too
            process.end()
            raise
        self._warned = True
        return process


class _Process:
    """The processes of one sandbox, and the empty directory that they start from.

    Raises:
        SandboxError: they do not start.
    """

    def __init__(self, template: Template, config: SandboxConfig) -> None:
        if sys.platform != "linux":
            raise SandboxError(f"programs can only be run on Linux, this is {sys.platform}")
        libraries, packages = _python()
        self._line, self._errors = template.fork()
        self._reply_bytes = 8 * config.output_mb * 2**20 + 2**20  # JSON writes a byte of output as up to 6
        self._home = tempfile.mkdtemp(prefix="tandemrl-sandbox-")
        self._supervisor: int | None = None
        limits = vars(config) | {"home": self._home, "libraries": libraries, "packages": packages}
        try:
            hello: dict[str, Any] = self.ask([limits], START_LIMIT_S)
        except (OSError, EOFError) as error:
            raise SandboxError(f"the sandbox did not start: {self.end() or repr(error)}") from None
        except BaseException:
            self.end()
            raise
        self._supervisor = hello["supervisor"]
        self.layers: dict[str, list[str]] = hello["layers"]
        self.troubles: list[str] = hello["troubles"]

    def ask(self, messages: Sequence[Any], limit_s: float) -> Any:
        """Send messages, in the frames of `multiprocessing.connection`, and wait for the reply.

        Raises:
            OSError: the process does not read or answer in time, or its reply is too long.
            EOFError: it is gone.
        """
        deadline = time.monotonic() + limit_s
        for data in (json.dumps(message).encode() for message in messages):
            self._line.settimeout(max(0.001, deadline - time.monotonic()))
            self._line.sendall(struct.pack("!i", len(data)) + data)
        reply = bytearray()
        while not reply.endswith(b"\n"):
            self._line.settimeout(max(0.001, deadline - time.monotonic()))
            if not (part := self._line.recv(2**20)):
                raise EOFError
            reply += part
            if len(reply) > self._reply_bytes:
                raise OSError("the sandbox's reply is too long")
        return json.loads(reply)

    def end(self) -> str:
        """Wait until all processes are gone, and return the end of what they wrote as errors."""
        words = bytearray()
        self._errors.settimeout(GRACE_S)
        with self._line, self._errors, contextlib.suppress(ProcessLookupError):
            with contextlib.suppress(OSError):  # nobody is there any more
                self._line.shutdown(socket.SHUT_RDWR)
            try:
                while part := self._errors.recv(2**16):
                    words += part
            except TimeoutError:
                if self._supervisor is not None:
                    os.kill(self._supervisor, signal.SIGKILL)
        try:
            shutil.rmtree(self._home, ignore_errors=True)
        except RecursionError:  # directories in directories, where there is no mount namespace
            subprocess.run(["rm", "-rf", "--", self._home], check=False)
        return words.decode(errors="replace").strip()[-500:]


def layers(template: Template = _TEMPLATE) -> dict[str, Layer]:
    """Which layers hold on this machine, by name. A layer that does not hold raises no error.

    Raises:
        SandboxError: this is not Linux, or no sandbox starts.
    """
    process = _Process(template, SandboxConfig())
    process.end()
    why = "; ".join(process.troubles)
    return {name: Layer(bool(held), ", ".join(held) or why) for name, held in process.layers.items()}


# --------------------------------------------------------------------------------------------------------------------


def _messages(program: str, test: Test, timeout_s: float) -> list[dict[str, Any]]:
    job = {"program": program, "timeout_s": timeout_s}
    if isinstance(test, Stdin):
        return [job | {"kind": "script", "input": test.text}]
    if isinstance(test, Call):
        arguments = json.dumps(to_wire([*test.arguments]))
        return [job | {"kind": "call", "function": test.function, "input": arguments + "\n"}]
    return [job | {"kind": "check", "function": test.function, "input": "", "prompt": test.prompt}, test._asdict()]


def _outcome(reply: dict[str, Any], test: Test) -> Outcome:
    status, message = reply["status"], reply["errors"].rpartition("\n")[2]
    if status != "ok":
        return Outcome(status, reply["output"], message=message)
    if isinstance(test, Stdin):
        return Outcome("ok", reply["output"])
    try:
        result = json.loads(reply["reply"])
        if "error" not in result:
            return Outcome("ok", reply["output"], result["value"])
        return Outcome("error", reply["output"], message=f"{result['error']}: {result['message']}")
    except (ValueError, TypeError, LookupError, RecursionError):
        return Outcome("error", reply["output"], message="the program ended without an answer")


@functools.cache
def _python() -> tuple[list[str], list[str]]:
    """The folders that programs may read, none of which is inside another, and the folders that hold packages."""
    paths = sysconfig.get_paths()
    packages = [path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages")]
    prefixes = (sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix, "/usr", "/")
    libraries = [os.path.join(prefix, name) for prefix in prefixes for name in ("lib", "lib64")]
    libraries += [paths["stdlib"], paths["platstdlib"], *packages, "/etc/ld.so.cache"]
    libraries = [path for path in libraries if os.path.exists(path)]
    known = {*libraries, *map(os.path.realpath, libraries)}
    return sorted(path for path in known if not known & set(map(str, Path(path).parents))), packages
