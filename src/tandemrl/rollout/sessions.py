"""What an engine keeps of sessions, so that a request which goes on with a text computes its new tokens alone."""

from collections.abc import Sequence

from tandemrl.rollout.engine import Request
from tandemrl.rollout.kv_cache import Layers


class Sessions:
    """The last text of each session, with its keys and values.

    Args:
        most: of how many sessions; those that were used last.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: dict[str | None, tuple[list[int], dict[int, Layers]]] = {}  # the least recently used first

    def keep(self, request: Request, text: Sequence[int], layers: dict[int, Layers]) -> None:
        """Keep the ``layers`` of all tokens of a text but the last, by author, for the session of a request."""
        self._kept.pop(request.session, None)
        self._kept[request.session] = [*text], layers
        if len(self._kept) > self._most:
            del self._kept[next(iter(self._kept))]

    def take(self, request: Request) -> dict[int, Layers]:
        """What was kept of the session of a request, if its prompt goes on with that text. It is kept no longer."""
        text, layers = self._kept.pop(request.session, ([], {}))
        goes_on = len(request.prompt) > len(text) and [*request.prompt[: len(text)]] == text
        return layers if goes_on else {}

    def clear(self) -> None:
        """Forget all, since other weights compute other keys and values."""
        self._kept.clear()
