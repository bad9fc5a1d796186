"""Calls in processes and threads: what hangs is killed, what is innocent is not blamed, and order does not matter."""

import contextlib
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tandemrl.processes import calls
from tandemrl.processes.calls import Caller, ChildCalls, Outcome, ProcessError, ThreadCalls

CHILD = """
import asyncio, json, multiprocessing, os, subprocess, sys, time
from tandemrl.processes.child import serve_calls

def work(argument):
    what, *values = argument
    if what == "sleep":
        time.sleep(values[0])
    if what == "spin":
        while True:
            pass
    if what == "block":  # one bytecode: no other thread runs
        pow(7, 10**8)
    if what == "die":
        time.sleep(0.2)
        print("last words", file=sys.stderr)
        os._exit(3)
    if what == "print":
        print("noise")
    if what == "babble":
        for descriptor in range(3, 9):
            try:
                os.write(descriptor, b'{"number": "x"}\\n')
            except OSError:
                pass
        time.sleep(5)
    if what in ("fork", "start"):  # and wait for it
        other = multiprocessing.get_context("fork").Process(target=time.sleep, args=(50,)) if what == "fork" else None
        pid = other.start() or other.pid if other else subprocess.Popen(["sleep", "50"]).pid
        with open(values[0], "w") as file:
            file.write(str(pid))
        time.sleep(50)
    if what == "read":
        return json.dumps(len(subprocess.run(["cat"], capture_output=True, check=True).stdout))
    if what == "raise":
        raise ValueError("no")
    if what == "cancel":
        raise asyncio.CancelledError
    if what == "terminate":
        other = subprocess.Popen(["sleep", "50"])
        other.terminate()
        return json.dumps(other.wait(20))
    if what == "exit":
        sys.exit("bye")
    if what == "large":
        return json.dumps("x" * values[0])
    return json.dumps([what, *values, os.getpid()])

def prepare(setup):
    if setup == "broken":
        raise OSError("the index is missing")
    return work

serve_calls(prepare)
"""


@pytest.fixture
def child(tmp_path: Path) -> tuple[str, str]:
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    return sys.executable, str(script)


def outcomes(caller: Caller, arguments: Sequence[tuple[Any, ...]], *, key: str = "k") -> list[Outcome]:
    """Of one call each, in their order."""
    got: dict[int, Outcome] = {}
    for number, argument in enumerate(arguments):
        caller.call(argument, lambda outcome, number=number: got.__setitem__(number, outcome), key=key)
    while len(got) < len(arguments):
        before = len(got)
        caller.poll(wait=True)
        assert len(got) > before
    return [got[number] for number in range(len(arguments))]


def test_results_errors_and_noise(child: tuple[str, str]) -> None:
    caller = ChildCalls(child, None, processes=1, limit_s=60)
    asked = [("a", 1), ("raise",), ("print",), ("exit",), ("large", 10_000_000), ("b", "é\ud800")]
    *got, terminated, cancelled = outcomes(caller, [*asked, ("terminate",), ("cancel",)])
    assert [outcome.how for outcome in got] == ["result", "error", "result", "error", "result", "result"]
    assert (terminated, cancelled) == (Outcome("result", -signal.SIGTERM), Outcome("error", "CancelledError: "))
    assert (got[0].value[:2], got[5].value[:2]) == (["a", 1], ["b", "é\ud800"])
    assert (got[1].value, got[3].value) == ("ValueError: no", "SystemExit: bye")
    assert len(got[4].value) == 10_000_000
    caller.close()


def test_calls_of_a_key_are_made_in_one_process(child: tuple[str, str]) -> None:
    caller = ChildCalls(child, None, processes=2, limit_s=60)
    seen = {key: {outcome.value[1] for outcome in outcomes(caller, [("x",)] * 3, key=key)} for key in "abcdefgh"}
    assert all(len(processes) == 1 for processes in seen.values())
    assert len(set.union(*seen.values())) == 2
    caller.close()


def test_a_call_that_hangs_is_given_up_and_its_neighbours_are_not(child: tuple[str, str]) -> None:
    caller = ChildCalls(child, None, processes=1, limit_s=3.0)
    got = outcomes(caller, [("sleep", 60), ("sleep", 0.8, "neighbour"), ("spin",), ("a",)])
    assert [outcome.how for outcome in got] == ["timeout", "result", "timeout", "result"]
    processes = list(caller._processes)
    [again] = outcomes(caller, [("b",)])
    assert again.how == "result"
    assert again.value[1] != got[1].value[3]  # another process
    caller.close()
    assert caller._processes == []
    assert not any(process.running() for process in processes)


@pytest.mark.parametrize("how", ["fork", "start"])
def test_what_a_late_call_has_started_ends_with_it(how: str, child: tuple[str, str], tmp_path: Path) -> None:
    """A process that was forked holds the child's output, and must keep nobody waiting for its end."""
    caller = ChildCalls(child, None, processes=1, limit_s=1.0)
    begun = time.monotonic()
    assert [outcome.how for outcome in outcomes(caller, [(how, str(tmp_path / "pid")), ("a",)])] == [
        "timeout",
        "result",
    ]
    caller.close()
    assert time.monotonic() - begun < 40
    started, late = int((tmp_path / "pid").read_text()), time.monotonic() + 20
    while lives(started) and time.monotonic() < late:  # a busy machine takes its time to end what was killed
        time.sleep(0.05)
    assert not lives(started)


def lives(pid: int) -> bool:
    """Whether a process runs; one that nobody has buried yet does not."""
    status = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout
    return bool(status.strip()) and not status.startswith("Z")


def test_programs_of_a_call_do_not_read_what_the_process_is_told(child: tuple[str, str]) -> None:
    caller = ChildCalls(child, None, processes=1, limit_s=20)
    got = outcomes(caller, [("a",), ("sleep", 0.2), ("read",), ("b",), ("read",), ("c",)])
    assert [got[i].value for i in (2, 4)] == [0, 0]
    assert [outcome.how for outcome in got] == ["result"] * 6
    caller.close()


@pytest.mark.parametrize(("harm", "how"), [("die", "death"), ("block", "timeout"), ("babble", "death")])
def test_only_who_is_to_blame_is_blamed(harm, how, child, monkeypatch):
    """The process is lost to everybody in it; the innocent are called again."""
    monkeypatch.setattr(calls, "GRACE_S", 0.5)
    caller = ChildCalls(child, None, processes=1, limit_s=3.0)
    got = outcomes(caller, [("sleep", 0.5, 0), (harm,), ("sleep", 0.5, 1), ("c",)])
    assert [outcome.how for outcome in got] == ["result", how, "result", "result"]
    assert harm != "die" or got[1].value == "last words"
    caller.close()


def test_a_process_that_died_while_idle_is_replaced(child: tuple[str, str]) -> None:
    caller = ChildCalls(child, None, processes=1, limit_s=60)
    [_first] = outcomes(caller, [("a",)])
    idle = caller._processes[0]._process
    idle.kill()
    idle.wait()
    [second] = outcomes(caller, [("b",)])
    assert second.value[0] == "b"
    caller.close()


def test_a_process_that_cannot_start_says_why(child: tuple[str, str]) -> None:
    caller = ChildCalls(child, "broken", processes=2, limit_s=60)
    caller.call(("a",), lambda outcome: pytest.fail("it has no outcome"), key="k")
    with pytest.raises(ProcessError, match="the index is missing"):
        caller.poll(wait=True)
    assert caller._processes == []


@pytest.mark.parametrize(("harm", "status"), [(("sleep", 60), 0), (("block",), -signal.SIGALRM)])
def test_children_end_with_their_parent(harm: tuple[Any, ...], status: int, child: tuple[str, str]) -> None:
    with subprocess.Popen(child, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(pickle.dumps((None, 0.5)) + pickle.dumps((0, pickle.dumps(harm), 0.5)))
        process.stdin.flush()
        assert process.stdout.readline() == b'"ready"\n'
        time.sleep(0.1)  # the call has begun
        process.stdin.close()
        assert process.wait(timeout=20) == status


@pytest.mark.parametrize(
    "last",
    [b"", pickle.dumps((1, b"x" * 10**6))[: 5 * 10**5], b"\x80\x05\x95", pickle.dumps(7)],
    ids=["end", "amid", "amid a header", "no call"],
)
def test_a_child_whose_parent_is_gone_amid_a_message_ends(last: bytes, child: tuple[str, str], tmp_path: Path) -> None:
    started = tmp_path / "pid"
    with subprocess.Popen(
        child, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(pickle.dumps((None, 300.0)) + pickle.dumps((0, pickle.dumps(("start", str(started))), 0.0)))
        process.stdin.flush()
        assert process.stdout.readline() == b'"ready"\n'
        while not (started.exists() and started.read_text()):
            time.sleep(0.01)
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(last)
            process.stdin.close()
        assert process.wait(timeout=20) == -signal.SIGKILL
    other = Path("/proc", started.read_text(), "stat")
    while other.exists() and other.read_text().rpartition(")")[2].split()[0] not in "ZX":
        time.sleep(0.01)


def test_threads_share_nothing_and_are_given_up() -> None:
    shared, seen = {"notes": []}, []

    def work(argument: tuple[str, Any]) -> str:
        what, value = argument
        if what == "sleep":
            time.sleep(value)
        if what == "raise":
            raise ValueError("no")
        if what == "note":
            value["notes"].append(1)
            seen.append(threading.current_thread() is threading.main_thread())
            return str(len(value["notes"]))
        return "7"

    caller = ThreadCalls(work, limit_s=1.0)
    arguments = [("sleep", 30), ("sleep", 0.3), ("raise", None), ("note", shared), ("note", shared)]
    got = outcomes(caller, arguments)
    assert [outcome.how for outcome in got] == ["timeout", "result", "error", "result", "result"]
    assert [got[3].value, got[4].value] == [1, 1]
    assert shared == {"notes": []}
    assert seen == [False, False]
    caller.poll(wait=True)  # nothing is under way
