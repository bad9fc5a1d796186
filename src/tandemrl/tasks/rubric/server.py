"""The judge's server that a run starts for itself (``judge.command``)."""

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from tandemrl.config import Config
from tandemrl.processes.server import GRACE_S, serving
from tandemrl.tasks.rubric.judge import JudgeError

LOG = "judge.log"
"""The file in ``output_dir`` that the server's output goes to."""
PATIENCE_S = GRACE_S + 2
"""How long the server of a killed run may take to end."""


@contextmanager
def judge_server(config: Config, *, start: bool = True) -> Iterator[Callable[[], None]]:
    """A context in which ``judge.command`` runs, if the config has one. The server need not answer yet when it is
    entered. An error of the judge inside gets a note that names the server's log.

    Args:
        start: whether this process starts the server. If not, another process does.

    Yields:
        a function that raises a `JudgeError` if the server has ended.

    Raises:
        JudgeError: something else answers at ``judge.url``, or the command cannot be read.
    """
    command, url, log = config.judge.command, config.judge.url, Path(config.output_dir, LOG)
    try:
        if command is None or url is None or not start:
            yield lambda: None
            return
        start_by = time.monotonic() + PATIENCE_S
        while (taken := _taken(url)) and time.monotonic() < start_by:
            time.sleep(0.2)
        if taken:
            raise JudgeError(
                f"judge.command: something answers at judge.url={url} already; leave judge.command out to use that, or "
                "take another port in both"
            )
        with serving(command, log, key="judge.command", error=JudgeError) as check:
            yield check
    except JudgeError as error:
        if command is None or str(log) in str(error):
            raise
        raise JudgeError(f"{error}. What the server of judge.command writes is in {log}") from error


def _taken(url: str) -> bool:
    """Whether a server already listens at the address."""
    address = urlsplit(url)
    try:
        port = address.port or (443 if address.scheme == "https" else 80)
    except ValueError as error:
        raise JudgeError(f"judge.url={url}: {error}") from None
    try:
        socket.create_connection((address.hostname or "", port), timeout=1.0).close()
    except OSError:
        return False
    return True
