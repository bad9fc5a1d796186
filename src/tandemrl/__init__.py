"""Tandem RL: GRPO on rollouts that a trainable senior and a frozen junior write together.

Names are imported on first use, so ``import tandemrl`` is cheap and loads neither torch nor transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tandemrl.config import Config as Config
    from tandemrl.config import ConfigError as ConfigError
    from tandemrl.config import load as load
    from tandemrl.data.loading import load_rows as load_rows
    from tandemrl.data.rows import Row as Row
    from tandemrl.evals import evaluate as evaluate
    from tandemrl.evals.compare import compare as compare
    from tandemrl.experiments.experiment import EXPERIMENTS as EXPERIMENTS
    from tandemrl.experiments.experiment import run_experiment as run_experiment
    from tandemrl.experiments.tiny import build_tiny_pair as build_tiny_pair
    from tandemrl.losses import RECIPES as RECIPES
    from tandemrl.losses import Recipe as Recipe
    from tandemrl.models.loading import load_model as load_model
    from tandemrl.models.loading import load_tokenizer as load_tokenizer
    from tandemrl.rewards.protocol import GraderError as GraderError
    from tandemrl.rewards.protocol import Score as Score
    from tandemrl.rewards.score import score_file as score_file
    from tandemrl.rollout.engine import Completion as Completion
    from tandemrl.rollout.engine import Engine as Engine
    from tandemrl.rollout.engine import EngineError as EngineError
    from tandemrl.rollout.engine import Request as Request
    from tandemrl.rollout.engine import Sampling as Sampling
    from tandemrl.rollout.torch_engine import TorchEngine as TorchEngine
    from tandemrl.selection import Strategy as Strategy
    from tandemrl.selection import alternating as alternating
    from tandemrl.selection import annealed as annealed
    from tandemrl.selection import bernoulli as bernoulli
    from tandemrl.selection import chunk as chunk
    from tandemrl.selection import linear as linear
    from tandemrl.selection import replay as replay
    from tandemrl.selection import sentence as sentence
    from tandemrl.selection import solo as solo
    from tandemrl.selection import word as word
    from tandemrl.selection import word_aligned as word_aligned
    from tandemrl.training.loop import train as train
    from tandemrl.training.tracking import Tracker as Tracker
    from tandemrl.types import Author as Author
    from tandemrl.types import Batch as Batch
    from tandemrl.types import Group as Group
    from tandemrl.types import Rollout as Rollout
    from tandemrl.types import Totals as Totals

    __version__: str

_NAMES = {
    "Config": "config.Config",
    "ConfigError": "config.ConfigError",
    "load": "config.load",
    "Row": "data.rows.Row",
    "load_rows": "data.loading.load_rows",
    "evaluate": "evals.evaluate",
    "compare": "evals.compare.compare",
    "EXPERIMENTS": "experiments.experiment.EXPERIMENTS",
    "run_experiment": "experiments.experiment.run_experiment",
    "build_tiny_pair": "experiments.tiny.build_tiny_pair",
    "RECIPES": "losses.RECIPES",
    "Recipe": "losses.Recipe",
    "load_model": "models.loading.load_model",
    "load_tokenizer": "models.loading.load_tokenizer",
    "GraderError": "rewards.protocol.GraderError",
    "Score": "rewards.protocol.Score",
    "score_file": "rewards.score.score_file",
    "Completion": "rollout.engine.Completion",
    "Engine": "rollout.engine.Engine",
    "EngineError": "rollout.engine.EngineError",
    "Request": "rollout.engine.Request",
    "Sampling": "rollout.engine.Sampling",
    "TorchEngine": "rollout.torch_engine.TorchEngine",
    "Strategy": "selection.Strategy",
    "alternating": "selection.alternating",
    "annealed": "selection.annealed",
    "bernoulli": "selection.bernoulli",
    "chunk": "selection.chunk",
    "linear": "selection.linear",
    "replay": "selection.replay",
    "sentence": "selection.sentence",
    "solo": "selection.solo",
    "word": "selection.word",
    "word_aligned": "selection.word_aligned",
    "train": "training.loop.train",
    "Tracker": "training.tracking.Tracker",
    "Author": "types.Author",
    "Batch": "types.Batch",
    "Group": "types.Group",
    "Rollout": "types.Rollout",
    "Totals": "types.Totals",
}
__all__ = ["__version__", *_NAMES]


if not TYPE_CHECKING:  # else a type checker would take every name for one of ours

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            from importlib.metadata import version

            value: Any = version("tandemrl")
        elif name in _NAMES:
            module, _, attribute = _NAMES[name].rpartition(".")
            value = getattr(import_module(f"tandemrl.{module}"), attribute)
        else:
            raise AttributeError(f"module 'tandemrl' has no attribute {name!r}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
