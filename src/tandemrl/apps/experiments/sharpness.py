"""A control for sharpness: a model with the sampling entropy of another one.

Reinforcement learning lowers the entropy of a model, and texts of a low entropy are easier to continue (arXiv
2602.03978). So that two arms can be compared at the same entropy, one gets a temperature of its own, which its last
norm takes in: its logits are divided by it, while juniors and readers keep theirs.
"""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from scipy.optimize import brentq

from tandemrl import evals
from tandemrl.apps.experiments.arms import ExperimentError
from tandemrl.apps.experiments.warm_start import load_trainable, save
from tandemrl.config import Config
from tandemrl.files import write_directory, write_text

TEMPERATURES = (0.25, 4.0)
"""Between these a temperature is sought, to within `EXACT`."""
EXACT = 0.005
PROBLEMS = 256
"""The sampling entropy is that of one text each to so many held-out problems. Their answers have no part in it."""
FITTED = "entropy.json"
"""The file beside the weights: ``temperature``, and ``entropy`` and ``target_entropy`` in nats per token."""


def match_entropy(config: Config, model: Path, target: Path, out: Path) -> Path:
    """Write into ``out``, unless it is there, a model at the temperature at which its texts have the entropy of the
    target's, and return ``out``.

    At each temperature that is tried the model writes its texts anew, with the same random numbers.

    Args:
        config: that of the evaluations, whose problems and sampling are used.

    Raises:
        ExperimentError: no temperature of `TEMPERATURES` gives this entropy, or the model cannot take one in.
    """
    if out.is_dir():
        return out
    config = replace(config, eval=replace(config.eval, samples=1, k=(1,), bootstrap=0))

    def entropy(of: Path) -> float:
        with TemporaryDirectory() as folder:
            found = evals.evaluate(config, model=of, out=folder, phases=["entropy"], limit=PROBLEMS)
        return found["entropy"]["metrics"]["macro"]["entropy"]

    def excess(temperature: float) -> float:
        with TemporaryDirectory() as folder:
            temper(model, temperature, Path(folder))
            return entropy(Path(folder)) - wanted

    wanted, ends = entropy(target), TEMPERATURES
    if excess(ends[0]) > 0 or excess(ends[1]) < 0:
        raise ExperimentError(
            f"{model}: at no temperature between {ends[0]:g} and {ends[1]:g} do its texts have {target}'s entropy of "
            f"{wanted:.3g} nats per token; leave out the arm that is matched to it"
        )
    temperature = float(brentq(excess, *ends, xtol=EXACT))
    fitted = {"temperature": temperature, "entropy": excess(temperature) + wanted, "target_entropy": wanted}

    def fill(folder: Path) -> None:
        temper(model, temperature, folder)
        write_text(folder / FITTED, json.dumps(fitted) + "\n")

    out.parent.mkdir(parents=True, exist_ok=True)
    write_directory(out, fill)
    return out


@torch.no_grad()
def temper(model: Path, temperature: float, folder: Path) -> None:
    """Write a model into a folder whose logits are those of another one, divided by a temperature.

    Raises:
        ExperimentError: its logits are no linear function of its last norm.
    """
    policy, tokenizer = load_trainable(model)
    logits = partial(policy, torch.arange(8)[None], use_cache=False)
    wanted = logits().logits / temperature
    norm = getattr(policy.get_decoder(), "norm", None)
    if norm is not None:
        norm.weight /= temperature
    if not torch.allclose(logits().logits, wanted, rtol=1e-3, atol=1e-3):
        raise ExperimentError(f"{model}: {type(policy).__name__} has no last norm that scales its logits; give another")
    save(policy, tokenizer, folder)
