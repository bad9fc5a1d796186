"""The layers of `sandbox`, for a process that confines itself. Linux only; uses nothing but the standard library.

Each layer has one or two mechanisms, and holds if one of them does. Root needs no user namespace: it makes the other
namespaces, then takes a user id that nobody else has. Root of an ordinary container may not make namespaces; its
mechanisms are the user id, Landlock and seccomp. Any other user makes the namespaces inside a user namespace.
"""

import _socket
import contextlib
import ctypes
import errno
import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

LAYERS = ("limits", "user", "files", "network", "processes", "system calls")
WORKPLACE = "/sandbox"
"""The working directory inside a mount namespace."""

_libc = ctypes.CDLL(None, use_errno=True)

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 36, 38
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE, MNT_DETACH = 2, 4, 4096, 16384, 1 << 18, 2
SYS_MOUNT_SETATTR, SYS_LANDLOCK = 442, 444
MAX_PIDS = 2**22
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")

MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""seccomp's numbers of the processors for which the tables below give system call numbers, in the same order."""
SYS_PIVOT_ROOT = (155, 41)
SYS_CLONE3 = (435, 435)
_REFUSED = """
    socket 41 198, io_uring_setup 425 425, unshare 272 97, setns 308 268, ptrace 101 117, process_vm_readv 310 270,
    process_vm_writev 311 271, pidfd_getfd 438 438, bpf 321 280, perf_event_open 298 241, userfaultfd 323 282,
    keyctl 250 219, add_key 248 217, request_key 249 218, memfd_create 319 279, memfd_secret 447 447, shmget 29 194,
    msgget 68 186, semget 64 190, mq_open 240 180
"""
REFUSED = {name: (int(x86), int(arm)) for name, x86, arm in map(str.split, _REFUSED.split(","))}
"""System calls that reach the network, other processes or much of the kernel, or take memory that no limit counts."""
REFUSED_WITH = {
    "prlimit64": ((302, 261), 0, 0xFFFFFFFF),  # limits of another process: it would be the runner
    "socketpair": ((53, 199), 1, 2),  # SOCK_DGRAM, SOCK_RAW: they can send to any socket that has a path
    "clone": ((56, 220), 0, CLONE_NEWUSER),
}
"""System calls that are refused if an argument, counted from 0, has any of these bits."""


class Layers:
    """Which mechanisms hold each layer up, and why others do not."""

    def __init__(self) -> None:
        self.held: dict[str, list[str]] = {layer: [] for layer in LAYERS}
        self.troubles: list[str] = []

    def add(self, mechanism: str, layers: Sequence[str], action: Callable[[], None]) -> bool:
        try:
            action()
        except OSError as error:
            self.troubles.append(f"{mechanism}: {error.strerror or error}")
            return False
        for layer in layers:
            self.held[layer].append(mechanism)
        return True


def own_ids() -> tuple[int, int]:
    """The user id and the group id to run programs as. For root they are ids that nobody has, for others their own.

    For root they differ between all processes that are alive. They begin at 0x70000000, where the ranges that systemd
    gives out end; a container with fewer ids uses the upper half of its ids.
    """

    def spare(kind: str) -> int:
        with open(f"/proc/self/{kind}_map") as ranges:
            end = max(int(first) + int(count) for first, _, count in map(str.split, ranges))
        if end > 0x70000000 + MAX_PIDS:
            return 0x70000000 + os.getpid()
        return end // 2 + os.getpid() % (end // 2 - 100) if end > 1000 else 0  # below "nobody"

    return (os.geteuid(), os.getegid()) if os.geteuid() else (spare("uid"), spare("gid"))


def separate(layers: Layers, user: tuple[int, int], *, home: str, libraries: Sequence[str], bytes_on_disk: int) -> None:
    """Make the namespaces and go to an empty working directory; the next fork is process 1.

    Args:
        user: see `own_ids`.
        home: an empty directory, which is the working directory if there is no mount namespace.
        libraries: the folders that can be read. There is nothing else in a mount namespace.
        bytes_on_disk: the size of the working directory in a mount namespace, where it is in memory.
    """
    root = os.geteuid() == 0
    if root:
        inside = layers.add("unsharing mounts", (), lambda: _unshare(CLONE_NEWNS))
    else:
        counts_alone = tuple(map(int, os.uname().release.split(".")[:2])) >= (5, 14)
        counted = ("user",) if counts_alone else ()
        inside = layers.add("user namespace", counted, lambda: _user_namespace(user))
    new_root = partial(_new_root, home, user, libraries, bytes_on_disk)
    if not inside or not layers.add("mount namespace", ("files",), new_root):
        os.chdir(home)
        if root:
            os.chown(home, *user)
    layers.add("network namespace", ("network",), lambda: _unshare(CLONE_NEWNET))
    layers.add("process namespace", ("processes",), lambda: _unshare(CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWUTS))


def confine(layers: Layers, user: tuple[int, int], *, libraries: Sequence[str]) -> None:
    """Give up rights for good, for this process and for all processes that it starts later."""
    os.setsid()
    if os.geteuid() == 0:
        layers.add("own user id", ("user", "processes"), lambda: _become(user))
    _prctl(PR_SET_NO_NEW_PRIVS, 1)
    _prctl(PR_SET_DUMPABLE, 0)  # a program may not trace this process
    die_with_parent()
    adopt_orphans()
    _drop_capabilities()
    layers.held["limits"].append("rlimits")
    layers.add("Landlock", ("files",), lambda: _landlock(libraries))
    layers.add("seccomp", ("system calls", "network"), _seccomp)


def end_user(user: tuple[int, int]) -> None:
    """For root: kill all processes of a user id of `own_ids` at once, even if they fork faster than one can list them.

    A process with that user's id kills them. They may not signal it, since its other ids are different.
    """
    if os.geteuid() or 0 in user:
        return
    if helper := os.fork():
        os.waitpid(helper, 0)
        return
    try:
        nobody = own_ids()[0]
        os.setresuid(nobody, user[0], nobody)
        _drop_capabilities()  # without them only that user's processes can be killed
        os.kill(-1, signal.SIGKILL)
    finally:
        os._exit(0)


def die_with_parent() -> None:
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def prove(layers: Layers, interpreter: str, supervisor: int) -> None:
    """Try to break each layer that is reported to hold."""
    try:
        os.listdir(os.path.dirname(os.__file__))
    except OSError as error:
        raise SystemExit(
            f"user id {os.geteuid()} cannot read the standard library: {error}; use a Python that all users can read "
            f"({'; '.join(layers.troubles)})"
        ) from None
    forbidden: dict[str, Callable[[], Any]] = {
        "user": lambda: os.setuid(0),
        "files": lambda: os.open(interpreter, os.O_RDONLY),
        "network": lambda: _socket.socket(_socket.AF_INET, _socket.SOCK_DGRAM).connect(("127.0.0.1", 9)),
        "processes": lambda: os.kill(supervisor, 0),
        "system calls": lambda: _unshare(CLONE_NEWUSER),
    }
    for layer, action in forbidden.items():
        if layers.held[layer]:
            with contextlib.suppress(OSError):
                action()
                raise SystemExit(f"the layer {layer!r} ({', '.join(layers.held[layer])}) does not hold")


def _become(user: tuple[int, int]) -> None:
    uid, gid = user
    if 0 in user:
        raise OSError(errno.EPERM, "this container has no ids to spare")
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)


def _drop_capabilities() -> None:
    header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    _called("capset", _libc.capset(header, none))


def _user_namespace(user: tuple[int, int]) -> None:
    _unshare(CLONE_NEWUSER | CLONE_NEWNS)
    for kind, text in (("setgroups", "deny"), ("uid_map", "{0} {0} 1"), ("gid_map", "{1} {1} 1")):
        with open(f"/proc/self/{kind}", "w") as file:
            file.write(text.format(*user))


def _new_root(root: str, user: tuple[int, int], libraries: Sequence[str], bytes_on_disk: int) -> None:
    """Enter a new root directory with the libraries (read-only), some devices, and an empty directory in memory."""
    _mount(None, "/", None, MS_REC | MS_PRIVATE)
    _mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=1m")
    for path in filter(os.path.exists, libraries):
        os.makedirs(root + os.path.dirname(path), exist_ok=True)
        if os.path.islink(path):
            os.symlink(os.readlink(path), root + path)
        else:
            _stand_in(path, root + path)
            _mount(path, root + path, None, MS_BIND | MS_REC)
    os.makedirs(root + "/dev", exist_ok=True)
    for path in DEVICES:
        _stand_in(path, root + path)
    os.makedirs(root + WORKPLACE)
    read_only = (ctypes.c_uint64 * 4)(1 | MS_NOSUID | MS_NODEV, 0, 0, 0)
    recursive = 0x8000
    _syscall("mount_setattr", SYS_MOUNT_SETATTR, -1, root.encode(), recursive, read_only, 32)
    for path in DEVICES:
        _mount(path, root + path, None, MS_BIND)
    options = "mode=700,nr_inodes=4096,size={},uid={},gid={}".format(bytes_on_disk, *user)
    _mount("tmpfs", root + WORKPLACE, "tmpfs", MS_NOSUID | MS_NODEV, options)
    os.chdir(root)
    _syscall("pivot_root", SYS_PIVOT_ROOT[_machine()], b".", b".")
    _called("umount", _libc.umount2(b".", MNT_DETACH))
    os.chdir(WORKPLACE)


def _stand_in(path: str, place: str) -> None:
    if os.path.isdir(path):
        os.makedirs(place, exist_ok=True)
    else:
        os.close(os.open(place, os.O_CREAT))


def _landlock(libraries: Sequence[str]) -> None:
    """Apply Landlock: only the libraries can be read, everything is allowed in the working directory, and no signals or
    abstract sockets reach other processes."""
    version = _syscall("landlock_create_ruleset", SYS_LANDLOCK, None, 0, 1)
    write, read, listing, truncate, device_control = (1 << bit for bit in (1, 2, 3, 14, 15))
    handled = (1 << (13 + (version >= 2) + (version >= 3))) - 1 | (device_control if version >= 5 else 0)
    rules = (ctypes.c_uint64 * 3)(handled, 0b11 if version >= 4 else 0, 0b11 if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = _syscall("landlock_create_ruleset", SYS_LANDLOCK, rules, size, 0)
    make_devices = 1 << 6 | 1 << 11
    allowed = dict.fromkeys(filter(os.path.exists, libraries), read | listing)  # not: this user cannot reach it anyway
    allowed |= dict.fromkeys(DEVICES, read | write) | {os.getcwd(): handled & ~make_devices}
    for path, access in allowed.items():
        place = os.open(path, os.O_PATH)
        access &= handled if os.path.isdir(path) else write | read | truncate
        rule = access.to_bytes(8, sys.byteorder) + place.to_bytes(4, sys.byteorder)
        _syscall("landlock_add_rule", SYS_LANDLOCK + 1, ruleset, 1, rule, 0)
        os.close(place)
    _syscall("landlock_restrict_self", SYS_LANDLOCK + 2, ruleset, 0)
    os.close(ruleset)


def _seccomp() -> None:
    """Refuse the system calls of `REFUSED` and `REFUSED_WITH`, and calls by another processor's conventions."""
    machine = _machine()
    load, equal, at_least, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, kill, refuse, unknown = 0x7FFF0000, 0x80000000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS
    steps = [(load, 0, 0, 4), (equal, 1, 0, list(MACHINES.values())[machine]), (give, 0, 0, kill), (load, 0, 0, 0)]
    steps += [(at_least, 0, 1, 0x40000000), (give, 0, 0, refuse)]  # x32
    for numbers in REFUSED.values():
        steps += [(equal, 0, 1, numbers[machine]), (give, 0, 0, refuse)]
    steps += [(equal, 0, 1, SYS_CLONE3[machine]), (give, 0, 0, unknown)]  # the C library then takes clone
    for numbers, argument, bits in REFUSED_WITH.values():
        steps += [(equal, 0, 4, numbers[machine]), (load, 0, 0, 16 + 8 * argument), (any_bit, 0, 1, bits)]
        steps += [(give, 0, 0, refuse), (give, 0, 0, allow)]
    steps += [(give, 0, 0, allow)]
    code = b"".join(
        op.to_bytes(2, sys.byteorder) + bytes((yes, no)) + value.to_bytes(4, sys.byteorder)
        for op, yes, no, value in steps
    )

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_char_p))

    _prctl(PR_SET_SECCOMP, 2, ctypes.byref(Program(len(steps), code)))


def _machine() -> int:
    if os.uname().machine not in MACHINES:
        raise OSError(errno.ENOSYS, f"not known for {os.uname().machine}")
    return list(MACHINES).index(os.uname().machine)


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    arguments = [text and text.encode() for text in (source, target, kind, options)]
    result = _libc.mount(*arguments[:3], ctypes.c_ulong(flags), arguments[3])
    _called(f"mount {target}", result)


def _unshare(flags: int) -> None:
    _called("unshare", _libc.unshare(flags))


def _prctl(option: int, *arguments: Any) -> None:
    padded = [ctypes.c_ulong(value) if isinstance(value, int) else value for value in (*arguments, 0, 0, 0, 0)[:4]]
    _called("prctl", _libc.prctl(option, *padded))


def _syscall(name: str, number: int, *arguments: Any) -> int:
    return _called(name, _libc.syscall(*(ctypes.c_long(a) if isinstance(a, int) else a for a in (number, *arguments))))


def _called(name: str, result: int) -> int:
    """The result of a system call.

    Raises:
        OSError: it is negative.
    """
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result
