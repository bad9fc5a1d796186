"""A server beside this process, such as a model that judges: it ends when this process does, however that ends."""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tandemrl.processes import keeper

OF_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_")
"""Beginnings of variables that tell a process of its place among others; a server has none there."""
LAST_WORDS = 2000
"""Characters of its output in an error."""


@contextmanager
def serving(command: str, log: Path, *, key: str, error: type[Exception]) -> Iterator[Callable[[], None]]:
    """Run ``command`` in the background, without a shell; what it writes goes to the end of ``log``.

    It leads no terminal and gets no signals of this job. At the end, also after an error, its process group is told to
    end and then killed. Where this process is killed (SIGKILL), a keeper does the same.

    Args:
        key: of the config that names the command, for messages.

    Yields:
        a function that raises ``error``, with the end of the log, if the server has ended.

    Raises:
        error: the command cannot be read.
    """
    try:
        words = shlex.split(command)
    except ValueError as problem:
        raise error(f"{key}={command}: not readable as a command: {problem}") from None
    if not words:
        raise error(f"{key}: an empty command; leave it out")
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(OF_TORCHRUN)}
    with open(log, "ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", keeper.__file__, str(os.getpid()), *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )

    def check() -> None:
        if process.poll() is not None:
            said = log.read_text(errors="replace")[-LAST_WORDS:].strip()
            raise error(f"{key}={command}: the server has ended; {log} ends with: {said or '(nothing)'}")

    try:
        yield check
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nothing is left of the group
            os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(keeper.GRACE_S + 5.0)
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
