"""A server beside a process ends with it, however that ends, and takes along what it has started."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tandemrl.processes.server import serving

SERVER = """
import os, signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
if sys.argv[2:] == ["stubborn"]:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("RANK" in os.environ, os.getpgrp() == int(sys.argv[1]), flush=True)
print("started", os.getpid(), child.pid, flush=True)
time.sleep(600)
"""
HOST = """
import sys, time
from pathlib import Path
from tandemrl.processes.server import serving
with serving(sys.argv[1], Path(sys.argv[2]), key="k", error=RuntimeError):
    time.sleep(600)
"""


def eventually(holds: Callable[[], bool], seconds: float = 60.0) -> bool:
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.05)
    return holds()


def runs(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def started(log: Path) -> list[int]:
    """The server and its child, once both run."""
    assert eventually(lambda: log.is_file() and "started" in log.read_text())
    pids = [int(word) for word in log.read_text().split("started")[1].split()]
    assert all(map(runs, pids))
    return pids


@pytest.fixture
def command(tmp_path: Path) -> str:
    (tmp_path / "server.py").write_text(SERVER)
    return f"{sys.executable} '{tmp_path / 'server.py'}' {os.getpgrp()}"


def test_it_ends_with_the_block_also_after_an_error(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    log = tmp_path / "run" / "server.log"
    pids: list[int] = []

    def fails() -> None:
        with serving(command, log, key="k", error=RuntimeError) as check:
            pids.extend(started(log))
            check()
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert len(pids) == 2
    assert eventually(lambda: not any(map(runs, pids)))
    assert log.read_text().startswith("False False\n")  # nothing of torchrun's, and a process group of its own


def test_one_that_does_not_want_to_is_killed(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandemrl.processes.server.GRACE_S", -4.0)  # here: the keeper, a script, has its own
    log = tmp_path / "server.log"
    with serving(f"{command} stubborn", log, key="k", error=RuntimeError):
        pids = started(log)
    assert eventually(lambda: not any(map(runs, pids)))


def test_it_ends_when_the_process_is_killed(command: str, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    host = subprocess.Popen([sys.executable, "-c", HOST, command, str(log)])
    try:
        pids = started(log)
        os.kill(host.pid, signal.SIGKILL)
    finally:
        host.kill()
        host.wait()
    assert eventually(lambda: not any(map(runs, pids)))


def test_the_error_of_one_that_has_ended_shows_its_log(tmp_path: Path) -> None:
    def ended(check: Callable[[], None]) -> bool:
        try:
            check()
        except RuntimeError:
            return True
        return False

    log, asked = tmp_path / "server.log", f"{sys.executable} -c 'print(40 + 2)'"
    with serving(asked, log, key="judge.command", error=RuntimeError) as check:
        assert eventually(lambda: ended(check))
        with pytest.raises(RuntimeError, match=r"(?s)judge\.command=.*has ended; .*server\.log ends with: .*42"):
            check()


@pytest.mark.parametrize("wrong", ["", "vllm 'serve", "no-such-program --port 1"])
def test_what_is_no_command_is_refused(wrong: str, tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match=r"judge\.command"),
        serving(wrong, tmp_path / "log", key="judge.command", error=RuntimeError),
    ):
        raise AssertionError("not reached")
