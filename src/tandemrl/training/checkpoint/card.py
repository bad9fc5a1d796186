"""The model card of an export: what was trained, on what, by which recipe, and who wrote the texts it learnt from."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tandemrl.config import Config, to_yaml

CARD = "README.md"


def model_card(config: Config, *, step: int, best: float, versions: Mapping[str, Any]) -> str:
    """The text of a README.md as the Hugging Face hub reads it. The same run and step give the same text.

    Args:
        best: the highest held-out score so far. A value that is not finite means that there is none.
    """
    model, data, selection = config.model, config.data, config.selection
    tags = [
        "reinforcement-learning",
        *([config.loss.recipe] if config.functions.recipe is None else []),
        *(["tandem-rl"] if selection.strategy != "solo" else []),
    ]
    front = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": tags}
    if not Path(model.senior).exists():  # a name on the hub
        front["base_model"] = model.senior
    header = "".join(f"{name}: {json.dumps(value)}\n" for name, value in front.items())
    shown = replace(config, judge=replace(config.judge, command=None))  # a command line may hold keys
    recipe = config.loss.recipe if config.functions.recipe is None else config.functions.recipe.name
    facts = {
        "senior before training": model.senior,
        "junior": model.junior or "the senior before training" if selection.strategy != "solo" else "none",
        "steps": f"{step} of {config.train.steps}",
        "recipe": f"{recipe}, learning rate {config.train.lr:g}",
        "training data": ", ".join(data.train),
        "held-out data": ", ".join(data.eval) or "none",
        "best held-out score so far": f"{best:.4f}" if math.isfinite(best) else "none",
        **{name: str(value) for name, value in versions.items() if value is not None},
    }
    table = "".join(f"| {name} | `{value}` |\n" for name, value in facts.items())
    return f"""---
{header}---

# {Path(config.output_dir).name}, step {step}

Trained by [tandemrl](https://github.com/tandemrl/tandemrl).

{_authorship(config)}

| | |
|---|---|
{table}
<details><summary>Configuration</summary>

```yaml
{to_yaml(shown).strip()}
```

</details>
"""


def _authorship(config: Config) -> str:
    selection, weight, own = config.selection, config.loss.junior_weight, config.functions.strategy
    if own is None and selection.strategy == "solo":
        return f"The *{selection.first}* wrote all texts that this model learnt from."
    drawn = selection.strategy in ("word", "word_aligned", "bernoulli", "turn")
    until = "" if selection.prob_senior_final is None else f" to {selection.prob_senior_final:g}"
    who = f"`{selection.strategy}`{f', p = {selection.prob_senior:g}{until}' if drawn else ''}"
    learnt = "only" if weight == 0 else f"with weight 1, on those of the junior with weight {weight:g}"
    chosen = who if own is None else f"the strategy `{own.name}`"
    return (
        f"This model, the *senior*, wrote its training texts together with a frozen *junior* ({chosen}). "
        f"It was trained on its own tokens {learnt}. It is meant to be used alone."
    )
