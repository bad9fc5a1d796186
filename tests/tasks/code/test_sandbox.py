"""The sandbox against programs that attack it, and against machines that lack its layers."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tandemrl.config import SandboxConfig
from tandemrl.tasks.code import sandbox
from tandemrl.tasks.code.layers import LAYERS
from tandemrl.tasks.code.sandbox import COMMAND, Sandbox, SandboxError, Template
from tandemrl.tasks.code.tests import Call, Check, Stdin

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox runs on Linux only")

LIMITS = SandboxConfig(timeout_s=20.0, memory_mb=512, output_mb=1, file_mb=4, processes=6)
QUICK = SandboxConfig(timeout_s=1.0, memory_mb=512, output_mb=1, file_mb=4, processes=6)
ADD = "print(sum(map(int, input().split())))"


class Marked(Template):
    """A template whose processes, and all that descend from them, can be found by their command line."""

    def __init__(self, command: tuple[str, ...] = COMMAND) -> None:
        self.marker = f"marker-{uuid.uuid4()}"
        super().__init__((*command, self.marker))

    def descendants(self) -> list[int]:
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and self.marker in (entry / "cmdline").read_text():
                    found.append(int(entry.name))
            except OSError:
                continue  # ended meanwhile
        own = None if self._process is None else self._process.pid
        return [pid for pid in found if pid != own]


@pytest.fixture(scope="module")
def shared_template() -> Iterator[Marked]:
    template = Marked()
    yield template
    template.close()


@pytest.fixture
def template(shared_template: Marked) -> Iterator[Marked]:
    """A template that has to work and to have no processes left after the test."""
    yield shared_template
    box = Sandbox(LIMITS, template=shared_template)
    assert box.run(ADD, Stdin("1 2")).output == "3\n"
    wait_until(lambda: shared_template.descendants() == [])


def wait_until(true, seconds: float = 15.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def attack(template: Template, program: str):
    """Run a program, then an honest one in the same sandbox, which has to work."""
    box = Sandbox(LIMITS, template=template)
    outcome = box.run(program, Stdin("1 2"))
    assert box.run(ADD, Stdin("1 2")).output == "3\n"
    return outcome


# What works -------------------------------------------------------------------------------------------------------


def test_a_script_reads_and_prints():
    box = Sandbox(LIMITS)
    assert box.run(ADD, Stdin("20 22")) == ("ok", "42\n", None, "")
    assert box.run("import sys\nfor line in sys.stdin: print(line, end='')", Stdin("a\nb\n")).output == "a\nb\n"
    assert box.run("print(open(0).read())", Stdin("ä" * 100_000)).output == "ä" * 100_000 + "\n"
    assert box.run("if __name__ == '__main__': print('main')", Stdin("")).output == "main\n"


def test_the_end_of_a_script_is_its_own():
    box = Sandbox(LIMITS)
    assert box.run("print(1); exit()", Stdin("")) == ("ok", "1\n", None, "")
    assert box.run("import sys; print(1); sys.exit(0)", Stdin("")).status == "ok"
    assert box.run("import sys; sys.exit(3)", Stdin("")).status == "error"
    assert box.run("print(1 / 0)", Stdin(""))[::3] == ("error", "ZeroDivisionError: division by zero")
    assert box.run("def f(:", Stdin("")).status == "syntax"
    assert box.run("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", Stdin("")).status == "crash"
    late = "import threading, time\nthreading.Thread(target=lambda: (time.sleep(.2), print('late'))).start()"
    assert box.run(late, Stdin("")).output == "late\n"
    deep = "import sys\nf = lambda n: n and 1 + f(n - 1)\nprint(f(50_000))"
    assert box.run(deep, Stdin("")).output == "50000\n"


def test_tools_and_buffers_are_those_of_python():
    swapped = "import io, sys\nsys.stdout = io.StringIO()\nprint(3)\nsys.__stdout__.write(sys.stdout.getvalue())"
    programs = {
        swapped: "3\n",
        "import sys\nprint(3)\nsys.stdout.close()": "3\n",
        "import sys\nout = sys.stdout\nsys.stdout = sys.stderr\nprint(1)\nout.write('3')": "3",
        "import sys\nout = sys.stdout\nsys.stdout = None\nout.write('3')": "3",
        "out = open(1, 'w')\nout.write('3')": "3",
        "import atexit, io, os, sys\nsys.stdout = io.StringIO()\n"
        "atexit.register(lambda: os.write(1, sys.stdout.getvalue().encode()))\nprint(3)": "3\n",
        "import asyncio\nasyncio.run(asyncio.sleep(0)); print('x')": "x\n",
        "import tempfile\nwith tempfile.TemporaryFile() as f: f.write(b'x')\nprint('x')": "x\n",
        "open('a', 'w').write('x'); print(open('a').read())": "x\n",
        "import numpy; print(int(numpy.arange(3).sum()))": "3\n",
        "import subprocess; open('/dev/null', 'w').write('x'); print('x')": "x\n",
        "import os\nif os.fork() == 0: os._exit(0)\nos.wait(); print('x')": "x\n",
        "import resource\nresource.setrlimit(resource.RLIMIT_STACK, (2**20, 2**20)); print('x')": "x\n",
    }
    box = Sandbox(LIMITS)
    for program, output in programs.items():
        outcome = box.run(program, Stdin(""))
        assert (outcome.status, outcome.output) == ("ok", output), (program, outcome)


def test_a_function_is_called_with_values_that_survive():
    box = Sandbox(LIMITS)
    value = [1, -2.5, "ä\n", None, True, [1, [2]], {"k": {"3": 4}}, [[]], 10**100]
    assert box.run("def f(*a): return a", Call("f", tuple(value))).value == value
    kinds = "(1, 2), {3: {4}}, {'k': frozenset({5})}, b'\\0\\xff', 2j, 'ä\\n', None, True, 10**100, {(1, 2): 3}, 1e999"
    same = f"def check(c): assert c({kinds}) == ({kinds}) and repr(c(-1e999 + 1e999)) == '(nan,)'"
    assert box.run("def f(*a): return a", Check("f", "", same)).value is True
    assert box.run("def f(x): return min(x)", Call("f", ([2, float("-inf")],))).value == float("-inf")
    kind = "import enum\nclass Kind(str, enum.Enum): A = 'a'\ndef f(x): return Kind.A"
    assert box.run(kind, Call("f", (1,))).value == "a"
    assert box.run("class Solution:\n def f(self, x): return x + 1", Call("f", (1,))).value == 2
    assert box.run("import numpy\ndef f(): return numpy.arange(3)", Call("f", ())).value == [0, 1, 2]
    assert box.run("def f(xs: List[int]): return Counter(xs)", Call("f", ([1, 1],))).value == {"1": 2}
    assert box.run("print('noise')\ndef f(): print('more'); return 1", Call("f", ())).value == 1
    assert box.run("def f(x): return x[5]", Call("f", ([],))).message == "IndexError: list index out of range"
    assert box.run("def f(): return object()", Call("f", ())).status == "error"
    assert box.run("pass", Call("gcd", (4, 6))).status == "error"  # a name of the preamble is not the program's
    assert box.run("from math import gcd", Call("gcd", (4, 6))).value == 2
    assert box.run("class Solution:\n def count(self, x): return x", Call("count", (3,))).value == 3


def test_a_test_may_have_much_and_deep_input():
    """Half a million numbers take the interpreter's own parser 500 MB, and 200 brackets are too many for it."""
    box = Sandbox(LIMITS)
    assert box.run("def f(x): return sum(x)", Call("f", ([1] * 500_000,))).value == 500_000
    same = "def check(c):\n x = []\n for _ in range(399): x = [x]\n assert c(x) == x"
    assert box.run("def f(x): return x", Check("f", "", same)).value is True


def test_a_check_calls_the_program():
    prompt = "import math\ndef half(x): return x / 2\n\ndef f(x):\n    '''Twice.'''\n"
    test = "def check(candidate):\n    assert candidate(half(4)) == 4\n    assert f(1) == 2, 'second'\n"
    box = Sandbox(LIMITS)
    assert box.run("def f(x): return 2 * x", Check("f", prompt, test)).value is True
    assert box.run("def f(x): return 4", Check("f", prompt, test))[::3] == ("error", "AssertionError: second")
    assert box.run("pass", Check("f", prompt, test)).status == "error"
    stateful = "calls = []\ndef f(): calls.append(1); return len(calls)"
    assert box.run(stateful, Check("f", "", "def check(c): assert [c(), c()] == [1, 2]")).value is True
    raising = "def check(c):\n  try: c()\n  except KeyError: return\n  assert False"
    assert box.run("def f(): raise KeyError(1)", Check("f", "", raising)).value is True


# What does not ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "import time; time.sleep(1000)",
        "import signal\nfor s in range(1, 65):\n  try: signal.signal(s, signal.SIG_IGN)\n  except Exception: pass\n"
        "while True: pass",
        "import threading\nthreading.Thread(target=lambda: [None for _ in iter(int, 1)]).start()",
        "while True:\n  try: raise SystemExit\n  except BaseException: pass",
    ],
    ids=["loop", "sleep", "signals ignored", "thread", "exit caught"],
)  # fmt: skip
def test_a_program_that_does_not_end_is_ended(template, program):
    start = time.monotonic()
    box = Sandbox(QUICK, template=template)
    assert box.run(program, Stdin("")).status == "timeout"
    assert time.monotonic() - start < 30


def most_of_a_fork_bomb(template: Marked) -> int:
    """How many processes it had at once."""
    bomb = "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass"
    most, box = 0, Sandbox(QUICK, template=template)
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(box.run, bomb, Stdin(""))
        while not running.done():
            most = max(most, len(template.descendants()))
        assert running.result().status == "timeout"
    return most


def test_a_fork_bomb_stays_small(template):
    # The supervisor, the runner, and the program's: as many as a busy machine had time for.
    assert 3 <= most_of_a_fork_bomb(template) <= 2 + QUICK.processes


@pytest.mark.parametrize(
    "program",
    [
        "x = bytearray(10 * 2**30)",
        "f = lambda n: f(n + 1)\nf(0)",
        "import mmap; x = mmap.mmap(-1, 10 * 2**30)",
        "x = 'x'\nwhile True: x += x",
    ],
)
def test_memory_is_limited(template, program):
    outcome = attack(template, program)
    assert outcome.status in ("error", "crash"), outcome


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_output_is_limited(template, stream):
    program = f"import sys\nfor _ in range(1024): sys.{stream}.write('x' * 2**20)\nprint('done')"
    outcome = attack(template, program)
    assert outcome.status == "output"
    assert len(outcome.output) < 2**21
    assert "done" not in outcome.output


def test_files_are_limited(template):
    full = "for n in range(100):\n  with open(str(n), 'wb') as file: file.write(bytes(10**6))"
    assert attack(template, full).status == "error"
    assert attack(template, "open('x', 'wb').truncate(10**12)").status == "error"
    many = "for n in range(10**5): open(str(n), 'w').close()"
    assert attack(template, many).status == "error"


def test_leaving_early_earns_nothing(template):
    leave = "import os\nos._exit(0)"
    test = "def check(candidate): assert candidate(1) == 2"
    box = Sandbox(LIMITS, template=template)
    assert box.run(leave, Stdin("")) == ("ok", "", None, "")
    assert box.run(leave, Call("f", (1,))).status == "error"
    assert box.run(f"def f(x): {leave.replace(chr(10), '; ')}", Call("f", (1,))).status == "error"
    assert box.run(leave, Check("f", "", test)).status == "error"
    assert box.run("import os\ndef f(x): os._exit(0)", Check("f", "", test)).status == "error"
    assert box.run("def f(x): raise SystemExit(0)", Check("f", "", test)).status == "error"


@pytest.mark.parametrize(
    "program",
    [
        "os.kill(os.getppid(), signal.SIGKILL)",
        "os.kill(1, signal.SIGKILL)",
        "os.kill(os.getppid(), signal.SIGINT)",
        "os.kill(-1, signal.SIGKILL)",
        "os.kill({parent}, signal.SIGKILL)",
        "os.kill({template}, signal.SIGKILL)",
        "os.killpg(os.getpgid(0), signal.SIGKILL)",
        "os.killpg(os.getpgid(os.getppid()), signal.SIGSTOP)",
        "[os.kill(pid, signal.SIGKILL) for pid in range(2, 4000) if pid != os.getpid()]",
    ],
)
def test_other_processes_cannot_be_killed(template, program):
    box = Sandbox(LIMITS, template=template)
    box.run(ADD, Stdin("1 2"))
    filled = program.format(parent=os.getpid(), template=template._process.pid)
    outcome = box.run(f"import os, signal\n{filled}", Stdin(""))
    assert outcome.status in ("ok", "error", "crash"), outcome
    assert box.run(ADD, Stdin("1 2")).output == "3\n"


def test_nobody_else_can_be_traced_or_seen(template):
    trace = "import ctypes, os\nprint(ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0))"  # PTRACE_ATTACH
    assert attack(template, trace).output == "-1\n"
    assert attack(template, "import os; print(os.listdir('/proc'))").status == "error"
    assert attack(template, "import os; print(os.getpid() < 10)").output == "True\n"


def test_nothing_is_written_elsewhere(template):
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        for target in (f"{folder}/x", "/x", "/tmp/x", "../x", "/etc/x", "/dev/x", f"{os.path.dirname(os.__file__)}/x"):
            assert attack(template, f"open({target!r}, 'w').write('x')").status == "error", target
        assert attack(template, f"import os; os.symlink({folder!r}, 'a'); open('a/x', 'w')").status == "error"
        assert os.listdir(folder) == []
    assert attack(template, "import os; os.mknod('device', 0o600 | 0o20000, 259)").status == "error"


def test_nothing_is_read_elsewhere(template):
    with tempfile.NamedTemporaryFile("w") as file:
        file.write("secret")
        file.flush()
        os.chmod(file.name, 0o644)
        for target in (file.name, "/etc/passwd", __file__, sandbox.__file__, "/proc/self/environ", "/proc/1/cmdline"):
            assert attack(template, f"print(open({target!r}).read())").status == "error", target
    assert attack(template, "import os; print(os.listdir('/'))").status == "error"


def test_there_is_no_network(template):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.5)
        port = server.getsockname()[1]
        connect = f"import socket; socket.create_connection(('127.0.0.1', {port})).send(b'x')"
        assert attack(template, connect).status == "error"
        with pytest.raises(TimeoutError):
            server.accept()
    for family in ("AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK"):
        assert attack(template, f"import socket; socket.socket(socket.{family}, socket.SOCK_DGRAM)").status == "error"


@pytest.mark.parametrize(
    "call",
    [
        "unshare(0x10000000)",  # CLONE_NEWUSER
        "syscall(56, 0x10000000 | 17, 0, 0, 0, 0)",  # clone, on x86-64
        "syscall(435, 0, 0)",  # clone3
        "syscall(425, 1, 0)",  # io_uring_setup
        "memfd_create(b'x', 0)",
        "shmget(0, 4096, 0o1600)",
        "prlimit(1, 7, None, (ctypes.c_long * 2)())",  # the runner's
        "socketpair(1, 2, 0, (ctypes.c_int * 2)())",  # of datagrams
        "setuid(0)",
        "chroot(b'.')",
        "mount(b'none', b'.', b'tmpfs', 0, 0)",
    ],
)
def test_system_calls_that_widen_the_cage_are_refused(template, call):
    assert attack(template, f"import ctypes\nprint(ctypes.CDLL(None).{call})").output == "-1\n"


def test_the_environment_is_empty(template, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    outcome = attack(template, "import os\nprint(*os.environ)")
    assert set(outcome.output.split()) <= {"PYTHONHASHSEED", "PYTHONUTF8", "OMP_NUM_THREADS", "LC_CTYPE"}
    search = "import ctypes, os\nenviron = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), 'environ')\n"
    search += "n = 0\nwhile environ[n]:\n  print(environ[n]); n += 1"
    assert "secret" not in attack(template, search).output


def test_a_program_cannot_find_its_test(template):
    """It is nowhere in its memory, and there are no descriptors but the standard ones and the two it is asked by."""
    test = "def check(candidate):\n  assert candidate() == 'SECRET' + 'SAUCE'\n  'the-comment-of-the-test'"
    search = """
import gc, os, sys
def f():
    texts = [str(x) for x in gc.get_objects() if isinstance(x, (dict, list, tuple))]
    frame = sys._getframe()
    while frame:
        texts.append(str(frame.f_locals)); frame = frame.f_back
    wanted = "-".join(["the", "comment", "of", "the", "test"])
    found = any(wanted in text for text in texts)
    open_ = [n for n in range(64) if os.path.exists(f"/proc/self/fd/{n}") or not closed(n)]
    raise ValueError(f"{found} {open_}")
def closed(n):
    try: os.fstat(n)
    except OSError: return True
"""
    box = Sandbox(LIMITS, template=template)
    assert box.run(search, Check("f", "", test)).message == "ValueError: False [0, 1, 2, 3, 4]"


@pytest.mark.parametrize(
    "program",
    [
        "class Any:\n  def __eq__(self, other): return True\ndef f(): return Any()",
        "class Any(int):\n  def __eq__(self, other): return True\n  __hash__ = int.__hash__\ndef f(): return Any(7)",
        "import builtins\nbuiltins.AssertionError = None\ndef f(): return 1",
        "import sys\nsys.modules['test'] = None\ndef f(): sys.settrace(lambda *a: None); return 1",
        "import os\nos.write(5, b'{\"value\": true}')\ndef f(): return 1",
        "import os\nos.write(4, b'{\"value\": true}\\n' * 9)\ndef f(): return 1",
        "def f(): raise AssertionError",
        "def f(): raise StopIteration",
        "def f(): return float('nan')",
    ],
)
def test_a_check_cannot_be_talked_into_a_pass(template, program):
    tests = (
        "assert c() == 42",
        "assert c() != 1 and c() is not None and c() == 42",
        "assert not [x for x in map(lambda _: c(), '1') if x != 42]",
    )
    box = Sandbox(LIMITS, template=template)
    for test in tests:
        outcome = box.run(program, Check("f", "", f"def check(c): {test}"))
        assert outcome.status in ("error", "crash"), outcome
        assert outcome.value is None


@pytest.mark.parametrize(
    "reply",
    ["[1", "7", "[]", '{"error": 1}', "[" * 10**5, '{"value": ' + "[" * 10**5, "1" * 10**5, "\\xff\\xfe"],
    ids=range(8),
)  # fmt: skip
def test_an_answer_that_is_none_is_the_programs_mistake(template, reply):
    program = f"import os\nos.write(4, b'{reply}'); os._exit(0)"
    box = Sandbox(LIMITS, template=template)
    outcome = box.run(program, Call("f", ()))
    assert (outcome.status, outcome.value) == ("error", None), outcome


# The pool --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deaths", [1, 2])
def test_a_killed_sandbox_is_replaced_once(template, deaths):
    """By whatever killed it, its test is run once more; if that kills it too, it was the program."""
    box = Sandbox(LIMITS, template=template)
    with ThreadPoolExecutor(1) as threads:
        # Its three children tell that the program itself is running, and not yet the sandbox's own start.
        program = f"import os, time\nalone = all(os.fork() for _ in range(3))\ntime.sleep({3**deaths})"
        running = threads.submit(box.run, f"{program}\nif alone: print('done')", Stdin(""))
        alive: set[int] = set()
        for _ in range(deaths):
            dead = alive

            def all_new(dead=dead) -> bool:
                nonlocal alive
                alive = {*template.descendants()}
                return len(alive) == 6 and not dead & alive

            wait_until(all_new)
            os.kill(min(alive), signal.SIGKILL)  # the supervisor, which came first
        status, output, _, message = running.result()
        assert (status, output) == (("ok", "done\n") if deaths == 1 else ("crash", ""))
        assert ("did not outlive this test, twice" in message) == (deaths == 2)
        assert box.run(ADD, Stdin("1 2")).output == "3\n"


def test_nothing_outlives_this_process(tmp_path):
    host = """
import sys, uuid
from tandemrl.config import SandboxConfig
from tandemrl.tasks.code.tests import Stdin
from tandemrl.tasks.code.sandbox import COMMAND, Sandbox, Template
box = Sandbox(SandboxConfig(timeout_s=600), template=Template((*COMMAND, sys.argv[1])))
box.run("print(1)", Stdin(""))
print("ready", flush=True)
box.run("import os, time\\nos.fork()\\nos.setsid() if os.fork() == 0 else None\\ntime.sleep(1000)", Stdin(""))
"""
    found = Marked()
    command = [sys.executable, "-c", host, found.marker]
    environment = {**os.environ, "PYTHONPATH": source(), "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout.readline() == b"ready\n"
        wait_until(lambda: len(found.descendants()) >= 6)
        process.kill()
    wait_until(lambda: found.descendants() == [])


def source() -> str:
    return str(Path(sandbox.__file__).parents[3])


@pytest.mark.parametrize(
    ("reply", "request_", "said"),
    [(b'{"a": ', "", "timed out"), (b"1" * 99, "", "too long"), (b"", "x" * 2**24, "timed out")],
    ids=["a reply that stops", "one that goes on and on", "a request that nobody reads"],
)
def test_a_program_that_stops_its_runner_does_not_hang_the_scoring(reply: bytes, request_: str, said: str) -> None:
    (line, theirs), (errors, gone) = socket.socketpair(), socket.socketpair()

    class Scripted(Template):
        def fork(self) -> tuple[socket.socket, socket.socket]:
            return line, errors

    gone.close()
    theirs.sendall(b'{"supervisor": null, "layers": {}, "troubles": []}\n')
    process = sandbox._Process(Scripted(), LIMITS)
    process._reply_bytes = 50
    theirs.sendall(reply)
    with theirs, pytest.raises(OSError, match=said):
        process.ask([request_], 0.2)
    process.end()


def test_an_interrupted_run_leaves_nothing(template):
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a worker of pytest-xdist ignores it
    box = Sandbox(LIMITS, template=template)
    box.run(ADD, Stdin("1 2"))
    main = threading.main_thread().ident
    timer = threading.Timer(0.5, signal.pthread_kill, (main, signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            box.run("import time; time.sleep(1000)", Stdin(""))
    finally:
        signal.signal(signal.SIGINT, handler)
    assert template.descendants() == []


# Machines that lack something ---------------------------------------------------------------------------------------

HANDICAPPED = f"""
import errno, os, sys
sys.path.append({source()!r})
from tandemrl.tasks.code import layers as sandbox_layers, runner as sandbox_runner

def refused(*_):
    raise OSError(errno.EPERM, "not here")

for name in sys.argv[1].split():
    setattr(sandbox_layers, name, refused)
if sys.argv[2] != "0":
    os.setgroups([])
    os.setgid(int(sys.argv[2]))
    os.setuid(int(sys.argv[2]))
    sandbox_layers._prctl(sandbox_layers.PR_SET_DUMPABLE, 1)  # as after the start of a program
sandbox_runner.main()
"""
SYSTEM_PYTHON = "/usr/bin/python3"
root_only = pytest.mark.skipif(
    os.geteuid() != 0 or not os.path.exists(SYSTEM_PYTHON), reason="plays other users, with a Python that they can read"
)


def handicapped(*refused: str, user: int = 0) -> Marked:
    """A template that cannot do some things and runs as a user, with a Python that everybody can read."""
    return Marked((SYSTEM_PYTHON, "-S", "-P", "-s", "-c", HANDICAPPED, " ".join(refused), str(user)))


@pytest.fixture
def open_home(monkeypatch, tmp_path_factory):
    """Let users that this process plays enter the directories that it makes."""
    real = tempfile.mkdtemp

    def make(**keywords):
        folder = real(**keywords)
        os.chmod(folder, 0o777)
        return folder

    monkeypatch.setattr(tempfile, "mkdtemp", make)


def holding(template: Template) -> dict[str, str]:
    return {name: layer.how for name, layer in sandbox.layers(template).items() if layer.holds}


def test_all_layers_hold_here():
    held = sandbox.layers()
    assert tuple(held) == LAYERS
    assert {name for name, layer in held.items() if not layer.holds} == set(), held


@root_only
def test_root_of_an_ordinary_container_has_all_layers():
    template = handicapped("_unshare")
    assert holding(template) == {
        "limits": "rlimits",
        "user": "own user id",
        "files": "Landlock",
        "network": "seccomp",
        "processes": "own user id",
        "system calls": "seccomp",
    }
    box = Sandbox(LIMITS, template=template)
    assert box.run(ADD, Stdin("1 2")).output == "3\n"
    assert box.run("open('/etc/passwd')", Stdin("")).status == "error"
    assert box.run("open('/proc/self/environ')", Stdin("")).status == "error"
    assert box.run("open('/tmp/x', 'w')", Stdin("")).status == "error"
    assert box.run("import socket; socket.socket()", Stdin("")).status == "error"
    assert box.run(f"import os; os.kill({os.getpid()}, 0)", Stdin("")).status == "error"
    queue = f"/{template.marker}".encode()
    box.run(f"import ctypes; ctypes.CDLL(None).mq_open({queue}, 0o102, 0o600, None)", Stdin(""))
    assert ctypes.CDLL(None).mq_unlink(queue) == -1
    escape = "import os, time\nif os.fork() == 0:\n  os.setsid()\n  os.fork()\n  time.sleep(1000)\nprint(1)"
    assert box.run(escape, Stdin("")).output == "1\n"
    assert template.descendants() == []
    box.run("import os; os.fork(); os.setsid(); os.kill(os.getppid(), 9); import time; time.sleep(9)", Stdin(""))
    assert box.run(ADD, Stdin("1 2")).output == "3\n"
    wait_until(lambda: template.descendants() == [])


@root_only
@pytest.mark.parametrize(
    "attack_it", ["os.kill(runner, signal.SIGSTOP)", "os.kill(runner, signal.SIGKILL)", "os.kill(-1, signal.SIGKILL)"]
)
def test_a_program_that_reaches_its_runner_leaves_nothing_and_has_failed(attack_it):
    """Without a process namespace they have the same user id."""
    template = handicapped("_unshare")
    program = f"""
import os, signal, time
end, runner = time.monotonic() + 60, os.getppid()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        {attack_it}
    while time.monotonic() < end:
        try: os.fork()
        except OSError: pass
time.sleep(60)
"""
    limits = SandboxConfig(**{**vars(QUICK), "processes": 24})
    box = Sandbox(limits, template=template)
    start = time.monotonic()
    assert box.run(program, Stdin("")).status in ("crash", "timeout")  # on a busy machine its attack comes too late
    assert time.monotonic() - start < 30
    assert template.descendants() == []
    assert box.run(ADD, Stdin("1 2")).output == "3\n"


@root_only
def test_an_ordinary_user_has_all_layers(open_home):
    template = handicapped(user=54321)
    try:
        held = holding(template)
    except SandboxError as error:
        pytest.skip(f"no user namespaces here: {error}")
    if "user" not in held:
        pytest.skip("no user namespaces here")
    assert held == {
        "limits": "rlimits",
        "user": "user namespace",
        "files": "mount namespace, Landlock",
        "network": "network namespace, seccomp",
        "processes": "process namespace",
        "system calls": "seccomp",
    }
    assert 3 < most_of_a_fork_bomb(template) <= 2 + QUICK.processes
    box = Sandbox(LIMITS, template=template)
    assert box.run(ADD, Stdin("1 2")).output == "3\n"
    assert box.run("open('/etc/passwd')", Stdin("")).status == "error"
    assert box.run("import os; os.kill(os.getppid(), 9)", Stdin("")).status == "ok"
    assert box.run(ADD, Stdin("1 2")).output == "3\n"
    wait_until(lambda: template.descendants() == [])


@root_only
@pytest.mark.parametrize(
    ("refused", "missing"),
    [
        ("_unshare _landlock", "files"),
        ("_unshare _seccomp", "network, system calls"),
        ("_become", "user"),
        ("_seccomp", "system calls"),
    ],
)
def test_a_missing_layer_is_refused(refused, missing):
    message = rf"layers missing: {missing} \(.*not here.*sandbox\.allow_weak=true"
    box = Sandbox(LIMITS, template=handicapped(*refused.split()))
    with pytest.raises(SandboxError, match=message):
        box.run(ADD, Stdin("1 2"))


@root_only
def test_a_missing_layer_can_be_accepted_and_is_said(open_home):
    template = handicapped("_unshare", "_landlock", "_seccomp", user=54321)
    weak = SandboxConfig(**{**vars(LIMITS), "allow_weak": True})
    escape = "import os, time\nif os.fork() == 0:\n  os.setsid()\n  os.fork()\n  time.sleep(1000)\nprint(1)"
    box = Sandbox(weak, template=template)
    with pytest.warns(UserWarning, match="layers missing: user, files, network, processes, system calls"):
        assert box.run(ADD, Stdin("1 2")).output == "3\n"
    assert box.run(escape, Stdin("")).output == "1\n"
    assert template.descendants() == []  # what is left of a program is found without any layer
    assert box.run("x = bytearray(10 * 2**30)", Stdin("")).status == "error"
    homes = set(Path(tempfile.gettempdir()).glob("tandemrl-sandbox-*"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="layers missing"):
            Sandbox(weak, template=template).run(ADD, Stdin("1 2"))
    wait_until(lambda: template.descendants() == [])
    assert set(Path(tempfile.gettempdir()).glob("tandemrl-sandbox-*")) <= homes


# What a test leaves to the next one ---------------------------------------------------------------------------------

MARKS = {
    "times": "print(os.stat('.').st_mtime == 1); os.utime('.', (1, 1))",
    "attributes": "print(os.listxattr('.')); os.setxattr('.', 'user.n', b'1')",
    "mode": "print(oct(os.stat('.').st_mode)); os.chmod('.', 0o711)",
    "files": "print(os.listdir('.')); open('.x', 'w').close()",
    "niceness of a user": "print(os.nice(0)); os.setpriority(os.PRIO_USER, 0, 3)",
    "niceness of the runner": "print(os.nice(0)); os.setpriority(os.PRIO_PROCESS, os.getppid(), 3)",
    "processors": "all = os.sched_getaffinity(0); print(len(all)); os.sched_setaffinity(os.getppid(), {min(all)})",
    "scheduler": "print(os.sched_getscheduler(0)); os.sched_setscheduler(os.getppid(), 5, os.sched_param(0))",
    "disk priority": "s = ctypes.CDLL(None).syscall; print(s(252, 1, 0)); s(251, 1, os.getppid(), 3 << 13)",
    "process ids": "print(os.getpid())",
}
"""Programs that print a state, then change it."""


@pytest.mark.parametrize("namespaces", [True, pytest.param(False, marks=root_only)])
def test_tests_of_a_program_cannot_count_themselves(namespaces):
    marks = dict(MARKS)
    if not namespaces:
        del marks["process ids"]  # those of the whole machine: they tell nothing of this program
    box = Sandbox(LIMITS, template=Marked() if namespaces else handicapped("_unshare"))
    for name, program in marks.items():
        guarded = f"import ctypes, os\ntry:\n  {program}\nexcept OSError: pass"  # some kernels refuse some
        outputs = [box.run(guarded, Stdin("")).output for _ in range(3)]
        assert outputs == [outputs[0]] * 3, name
        assert outputs[0], name
