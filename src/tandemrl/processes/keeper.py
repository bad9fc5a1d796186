"""Starts a server, and ends it with all that it has started once the process that wanted it is gone.

`server.serving` runs this as a script, ``keeper.py PARENT COMMAND…``, which leads a process group of its own. It needs
nothing but the standard library. A parent that is killed cannot say so, so the keeper checks whether it is still the
parent's child.
"""

import os
import signal
import subprocess
import sys
import time
from typing import Any

GRACE_S = 10.0
"""Seconds between SIGTERM and SIGKILL."""
POLL_S = 0.2


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
