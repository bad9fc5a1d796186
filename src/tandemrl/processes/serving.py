"""The child's side of `calls.ChildCalls`."""

import json
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tandemrl.processes.child import CALLS_AT_ONCE, HERE, READY, Parent, end


def serve_calls(prepare: Callable[[Any], Callable[[Any], str]]) -> None:
    """Make calls, in threads, until the parent is gone.

    Args:
        prepare: receives the parent's setup, and returns the function to call, which returns a JSON text.
    """
    parent = Parent()
    setup, patience_s = parent.receive()
    function = prepare(setup)

    def work(number: int, argument: bytes) -> None:
        try:
            said = f'"result": {function(pickle.loads(argument))}'
        except BaseException as error:  # SystemExit and asyncio.CancelledError, too: it is answered in any case
            said = f'"error": {json.dumps(f"{type(error).__name__}: {error}")}'
        parent.send(f'{{"number": {number}, {said}}}')

    def beat() -> None:
        """Postpone, again and again, an alarm with which the kernel ends this process.

        It goes off if a call holds the interpreter for too long and no parent is left to notice.
        """
        while True:
            signal.setitimer(signal.ITIMER_REAL, patience_s)
            time.sleep(min(1.0, patience_s / 2))

    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    threading.Thread(target=beat, daemon=True).start()
    threads = ThreadPoolExecutor(CALLS_AT_ONCE)
    parent.send(READY)
    while True:
        asked = parent.receive()
        if asked is None:
            parent.send(HERE)
            continue
        try:
            threads.submit(work, *asked)
        except BaseException:  # it is no call; the end of this thread alone would wait for those that hang
            traceback.print_exc()
            end()
