"""What ``module:name`` means."""

import importlib
import os
import sys
from typing import Any


def named(path: str) -> Any:
    """What ``module:name`` names; modules in the working directory are found, too.

    Raises:
        Exception: whatever importing it raises.
    """
    module, _, name = path.partition(":")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    return getattr(importlib.import_module(module), name)
