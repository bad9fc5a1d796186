"""Runs a server beside this process, such as a judge's. It ends when this process does, however this process ends.

The server is started by a *keeper*, which is this file run as a script, ``server.py PARENT COMMAND…``, with nothing but
the standard library. It leads a process group of its own. A parent that is killed cannot say so, so the keeper checks
whether it is still the parent's child, and else ends the server with all that it has started.
"""

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

OF_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_")
"""The beginnings of environment variables with which torchrun gives a process its place. A server does not get them."""
GRACE_S = 10.0
"""Seconds between SIGTERM and SIGKILL."""
POLL_S = 0.2
LOG_TAIL = 2000
"""How many characters of the end of its output an error shows."""


@contextmanager
def serving(command: str, log: Path, *, key: str, error: type[Exception]) -> Iterator[Callable[[], None]]:
    """A context in which ``command`` runs in the background, without a shell. Its output is appended to ``log``.

    It has no terminal and gets no signals of this job. At the end of the context, also after an error, its process
    group gets SIGTERM and then SIGKILL. If this process is killed (SIGKILL), a keeper does the same.

    Args:
        key: the key of the config that names the command, for messages.
        error: the class of the errors to raise.

    Yields:
        a function that raises ``error``, with the end of the log, if the server has ended.

    Raises:
        error: the command cannot be read, or there is no such program.
    """
    try:
        words = shlex.split(command)
    except ValueError as problem:
        raise error(f"{key}={command}: not readable as a command: {problem}") from None
    if not words or shutil.which(words[0]) is None:
        raise error(f"{key}={command}: no such program; install it, give its path, or leave out {key}")
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(OF_TORCHRUN)}
    with open(log, "ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", __file__, str(os.getpid()), *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )

    def check() -> None:
        if process.poll() is not None:
            said = log.read_text(errors="replace")[-LOG_TAIL:].strip()
            raise error(f"{key}={command}: the server has ended; {log} ends with: {said or '(nothing)'}")

    try:
        yield check
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nothing is left of the group
            os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S + 5.0)
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def keep(parent: int, command: list[str]) -> None:
    """Run the server until the parent is gone. It does not return, since it ends by killing its own process group."""
    told = []

    def end(*_: Any) -> None:
        told.append(time.monotonic())

    signal.signal(signal.SIGTERM, end)  # a function: what is ignored would be ignored by the server, too
    try:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    except OSError as error:
        print(f"tandemrl: {command[0]}: {error}", flush=True)
        return
    while server.poll() is None and not (told and time.monotonic() > told[0] + GRACE_S):
        if os.getppid() != parent and not told:
            os.killpg(0, signal.SIGTERM)
        time.sleep(POLL_S)
    print(f"tandemrl: the server ended ({server.returncode})", flush=True)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    keep(int(sys.argv[1]), sys.argv[2:])
