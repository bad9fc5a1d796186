"""What happens to a fleet of rollout workers, and what is to be done: what goes into the dispatcher, and comes out."""

from typing import Any, NamedTuple

INITIAL = -1
"""The version of the weights that workers start with."""


class Unit(NamedTuple):
    """A fixed set of keys that are decoded together: a part of a batch."""

    batch: int
    index: int  # type: ignore[assignment]  # instead of the method of tuples


# -------------------------------------------------------------------------------------------------------------- events


class Published(NamedTuple):
    """The trainer's weights have a new version. ``checksum``: None means that of the first worker that loads them."""

    version: int
    checksum: int | None


class Submitted(NamedTuple):
    """A batch of ``units`` units is asked for, with the weights ``version``, to be trained on in ``step``."""

    batch: int
    units: int
    version: int
    step: int


class Joined(NamedTuple):
    """A worker has started; it has no version of the weights yet. ``described``: what it says of its engine."""

    worker: int
    described: Any = None


class Loaded(NamedTuple):
    """A worker has loaded weights. ``checksum``: of what it decodes with, read back."""

    worker: int
    version: int
    checksum: int


class Answered(NamedTuple):
    """A worker has generated a unit.

    ``version`` and ``checksum``: of the weights that it has.
    """

    worker: int
    unit: Unit
    attempt: int
    version: int
    checksum: int
    answer: Any


class Lost(NamedTuple):
    """A worker has ended, or cannot be reached."""

    worker: int
    why: str


class Tick(NamedTuple):
    """Nothing happened but time."""


Event = Published | Submitted | Joined | Loaded | Answered | Lost | Tick


# ------------------------------------------------------------------------------------------------------------- actions


class Start(NamedTuple):
    """Start a worker under this number, which was never used before."""

    worker: int


class Load(NamedTuple):
    """Let a worker load the weights of this version."""

    worker: int
    version: int


class Assign(NamedTuple):
    """Let a worker generate a unit."""

    worker: int
    unit: Unit
    attempt: int


class Fence(NamedTuple):
    """End a worker, and let nothing that it has begun have an effect."""

    worker: int
    why: str


class Deliver(NamedTuple):
    """Hand over the answer of a unit. Units come in order, each once."""

    unit: Unit
    answer: Any


class Retire(NamedTuple):
    """No batch needs these weights any more."""

    version: int


class Fail(NamedTuple):
    """Give up: workers are lost again and again without an answer in between."""

    why: str


Action = Start | Load | Assign | Fence | Deliver | Retire | Fail
