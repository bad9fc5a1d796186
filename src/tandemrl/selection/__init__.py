"""Who writes the next token: pure strategies over a decoding batch, their random draws, their token tables.

``__init__.pyi`` lists the names, which are imported on first use: ``kinds`` and ``config`` do not import torch.
"""

from tandemrl.lazy import exports as _exports

_MODULES, __getattr__ = _exports(__name__, __file__)
__all__ = [*_MODULES]
