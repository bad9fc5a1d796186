"""Which errors are the user's to fix, how they are printed, and what Ctrl-C does."""

import errno
import os
import signal
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from tandemrl.config.fields import ConfigError
from tandemrl.config.hints import no_folder, pip_install

INTERRUPTED = 130
"""The exit code after Ctrl-C: 128 and the number of SIGINT, as of a command that a shell ran."""


@contextmanager
def interruptible() -> Iterator[None]:
    """A context in which Ctrl-C prints one line and exits, in place of a traceback.

    The first one raises KeyboardInterrupt, so that what was started is ended. A second one exits at once, and so does
    one during an import, where Python may lose an exception, or keep the lock of the module and hang. Child processes
    end with their parent.
    """
    pressed = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed or _imports(frame):
            os.write(2, b"interrupted\n")
            os._exit(INTERRUPTED)
        pressed = True
        raise KeyboardInterrupt

    mine = threading.current_thread() is threading.main_thread()
    mine = mine and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    try:
        if mine:
            signal.signal(signal.SIGINT, interrupt)
        yield
    except KeyboardInterrupt:
        os.write(2, b"interrupted\n")
        raise SystemExit(INTERRUPTED) from None
    finally:
        if mine:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _imports(frame: FrameType | None) -> bool:
    """Whether an import is being made in a frame or in one of its callers."""
    return any(each.f_code.co_filename.startswith("<frozen importlib") for each, _ in traceback.walk_stack(frame))


@contextmanager
def needs(extra: str, command: str) -> Iterator[None]:
    """A context that imports what an extra installs; if it is missing, the command says how to install it."""
    try:
        yield
    except ImportError as error:
        raise ConfigError(f"tandemrl {command}: {error.name} is missing; {pip_install(extra)}") from None


def is_users(error: Exception) -> bool:
    """Whether the message is meant for the user: an error class of this library, or a file that cannot be used."""
    ours = any(base.__module__.startswith("tandemrl.") for base in type(error).__mro__)
    return ours or (isinstance(error, OSError) and not isinstance(error, BrokenPipeError))


def one_line(error: Exception) -> str:
    """The message without line breaks; an ``OSError`` starts with its file."""
    if isinstance(error, OSError) and error.filename is not None:
        if error.errno in (errno.ENOTDIR, errno.EROFS) and (reason := no_folder(error.filename)):
            return f"{error.filename}: {reason}"
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split())
