"""What other threads ask of a running call of ``generate``: to end completions, and to let weights be loaded."""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class Aborts:
    """The completions of the running ``generate`` that are to end at their next token. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keys: set[int] | None = set()  # None: all

    def __bool__(self) -> bool:
        return self._keys != set()

    def __contains__(self, key: int) -> bool:
        return (keys := self._keys) is None or key in keys

    def add(self, keys: Iterable[int] | None) -> None:
        """Abort the completions with these request keys, or all of them if ``keys`` is None."""
        with self._lock:
            self._keys = None if keys is None or self._keys is None else self._keys | set(keys)

    def clear(self) -> None:
        with self._lock:
            self._keys = set()


class Turnstile:
    """Lets weights be loaded while no decoding step reads them: outside of ``generate``, or between two of its steps.

    A lock alone would not do: a thread that gives it back and takes it again at once may never let another in.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._owner: int | None = None  # the thread that decodes or loads
        self._loaders = 0

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """A call of ``generate``. Until its end, weights are loaded during ``pause`` only, or by this thread itself."""
        with self._taken(loads=False):
            yield

    @contextmanager
    def loading(self) -> Iterator[None]:
        """A change of the weights. It waits for the next ``pause`` of a call that runs in another thread."""
        with self._taken(loads=True):
            yield

    @property
    def awaited(self) -> bool:
        """Whether a load waits for the next ``pause``."""
        return self._loaders > 0

    def pause(self) -> None:
        """Between two steps: let the loads that wait go first, and return after them."""
        if self._loaders:
            with self._changed:
                self._owner = None
                self._changed.notify_all()
                self._take(loads=False)

    @contextmanager
    def _taken(self, *, loads: bool) -> Iterator[None]:
        if self._owner == threading.get_ident():
            yield
            return
        with self._changed:
            self._loaders += loads
            try:
                self._take(loads=loads)
            finally:  # also if the wait is interrupted
                self._loaders -= loads
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._owner = None
                self._changed.notify_all()

    def _take(self, *, loads: bool) -> None:
        self._changed.wait_for(lambda: self._owner is None and (loads or not self._loaders))
        self._owner = threading.get_ident()
