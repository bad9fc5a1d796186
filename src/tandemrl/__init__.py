"""Tandem RL: GRPO on rollouts that a trainable senior and a frozen junior write together.

Names are imported on first use, so ``import tandemrl`` is cheap and loads neither torch nor transformers.
``tandemrl.train`` is the module; the function is ``tandemrl.train.train``.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tandemrl import batching as batching
    from tandemrl import checkpoint as checkpoint
    from tandemrl import compare as compare
    from tandemrl import config as config
    from tandemrl import data as data
    from tandemrl import evals as evals
    from tandemrl import experiment as experiment
    from tandemrl import losses as losses
    from tandemrl import model as model
    from tandemrl import report as report
    from tandemrl import rollout as rollout
    from tandemrl import run as run
    from tandemrl import schedule as schedule
    from tandemrl import score as score
    from tandemrl import selection as selection
    from tandemrl import stats as stats
    from tandemrl import tiny as tiny
    from tandemrl import tracking as tracking
    from tandemrl import train as train
    from tandemrl import types as types
    from tandemrl import update as update
    from tandemrl.config import Config as Config
    from tandemrl.config import ConfigError as ConfigError
    from tandemrl.config import load as _load
    from tandemrl.data.rows import Row as Row
    from tandemrl.data.rows import load_rows as load_rows
    from tandemrl.losses import RECIPES as RECIPES
    from tandemrl.losses import Recipe as Recipe
    from tandemrl.rollout.engine import Completion as Completion
    from tandemrl.rollout.engine import Engine as Engine
    from tandemrl.rollout.engine import EngineError as EngineError
    from tandemrl.rollout.engine import Request as Request
    from tandemrl.rollout.engine import Sampling as Sampling
    from tandemrl.rollout.envs.protocol import Score as Score
    from tandemrl.rollout.torch_engine import TorchEngine as TorchEngine
    from tandemrl.selection import Strategy as Strategy
    from tandemrl.selection import replay as replay
    from tandemrl.tracking import Tracker as Tracker
    from tandemrl.types import Author as Author
    from tandemrl.types import Batch as Batch
    from tandemrl.types import Group as Group
    from tandemrl.types import Rollout as Rollout
    from tandemrl.types import Totals as Totals

    load_config = _load
    __version__: str

_MODULES = (
    "batching",
    "checkpoint",
    "compare",
    "config",
    "data",
    "evals",
    "experiment",
    "losses",
    "model",
    "report",
    "rollout",
    "run",
    "schedule",
    "score",
    "selection",
    "stats",
    "tiny",
    "tracking",
    "train",
    "types",
    "update",
)
_NAMES = {
    "Config": "config.Config",
    "ConfigError": "config.ConfigError",
    "load_config": "config.load",
    "Row": "data.rows.Row",
    "load_rows": "data.rows.load_rows",
    "RECIPES": "losses.RECIPES",
    "Recipe": "losses.Recipe",
    "Completion": "rollout.engine.Completion",
    "Engine": "rollout.engine.Engine",
    "EngineError": "rollout.engine.EngineError",
    "Request": "rollout.engine.Request",
    "Sampling": "rollout.engine.Sampling",
    "Score": "rollout.envs.protocol.Score",
    "TorchEngine": "rollout.torch_engine.TorchEngine",
    "Strategy": "selection.Strategy",
    "replay": "selection.replay",
    "Tracker": "tracking.Tracker",
    "Author": "types.Author",
    "Batch": "types.Batch",
    "Group": "types.Group",
    "Rollout": "types.Rollout",
    "Totals": "types.Totals",
}
__all__ = ["__version__", *_NAMES, *_MODULES]


if not TYPE_CHECKING:  # else a type checker would take every name for one of ours

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            from importlib.metadata import version

            value: Any = version("tandemrl")
        elif name in _MODULES:
            value = import_module(f"tandemrl.{name}")
        elif name in _NAMES:
            module, _, attribute = _NAMES[name].rpartition(".")
            value = getattr(import_module(f"tandemrl.{module}"), attribute)
        else:
            raise AttributeError(f"module 'tandemrl' has no attribute {name!r}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
