"""What is optimised: pure functions of tensors and keyword hyperparameters.

They return one result per token; only ``reduce`` makes a scalar of them. ``__init__.pyi`` lists the names, which are
imported on first use: ``table`` and ``config`` do not import torch.
"""

from tandemrl.lazy import exports as _exports

_MODULES, __getattr__ = _exports(__name__, __file__)
__all__ = [*_MODULES]
