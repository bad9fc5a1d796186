"""What other threads ask of a running call of ``generate``: to end completions."""

import threading
from collections.abc import Iterable


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

    def take(self) -> "Aborts":
        """Those so far, which are forgotten here."""
        taken = Aborts()
        with self._lock:
            taken._keys, self._keys = self._keys, set()
        return taken
