"""A junior for the tiny pair with a vocabulary of its own: it has hardly any merges, and writes nearly by letters."""

from pathlib import Path

from tandemrl.apps.experiments.tiny import _lessons, new_model, train_tokenizer
from tandemrl.apps.experiments.warm_start import WarmStart, warm_start


def build_other_junior(folder: Path, *, steps: int = 150, seed: int = 1) -> None:
    recipe = WarmStart(steps=steps, batch_size=6)
    tokenizer = train_tokenizer("plain", seed, vocab_size=290)
    model = new_model(tokenizer, seed)
    warm_start(model, _lessons(tokenizer, "plain", seed, "base"), recipe)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
