"""The scheduling modes: which model computes which tokens. This module does not import vllm.

- ``lazy``: a decoding request is computed only by the author of its next token, from where that model stopped. The
  other model catches up in one chunk when its turn comes. Prompts are computed by both models, or by the only one that
  writes.
- ``lockstep``: both models compute every token.
- ``draft``: as lazy, but rows that decode are left to a ``drafting.Round``, in which the junior drafts.
- ``auto``: lazy or draft, whichever ``rollout.drafting`` expects to be cheaper, from step to step.
"""

from typing import Literal, cast, get_args

from tandemrl.rollout.engine import EngineError

SchedulingMode = Literal["lazy", "lockstep", "draft", "auto"]
DRAFTING: tuple[SchedulingMode, ...] = ("draft", "auto")
"""The modes in which the junior may draft."""


def check_mode(mode: str) -> SchedulingMode:
    """Check that ``mode`` is a scheduling mode, and return it.

    Raises:
        EngineError: there is no such mode.
    """
    if mode not in get_args(SchedulingMode):
        raise EngineError(f"mode={mode}: must be one of {', '.join(get_args(SchedulingMode))}")
    return cast(SchedulingMode, mode)
