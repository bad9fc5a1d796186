"""The model card of an export: what was trained, on what, by which recipe, and who wrote the texts it learnt from."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tandemrl.config import Config, to_yaml
from tandemrl.config.fields import is_own

CARD = "README.md"


def model_card(
    config: Config, *, step: int, best: str, versions: Mapping[str, Any], accepted: Sequence[str] = ()
) -> str:
    """The text of a README.md as the Hugging Face hub reads it. The same run and step give the same text.

    Args:
        best: the step of `hf/best` so far and what chose it, or "none".
    """
    model, data, loss, selection, passed = config.model, config.data, config.loss, config.selection, config.functions
    solo, named = selection.kind.solo and passed.strategy is None, passed.recipe is None
    tags = ["reinforcement-learning"]
    tags += [loss.recipe] if named and not is_own(loss.recipe) else []
    tags += [] if solo else ["tandem-rl"]
    front = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": tags}
    if not Path(model.senior).exists():  # a name on the hub
        front["base_model"] = model.senior
    header = "".join(f"{name}: {json.dumps(value)}\n" for name, value in front.items())
    shown = replace(config, judge=replace(config.judge, command=None))  # a command line may hold keys
    facts = {
        "senior before training": model.senior,
        "junior": "none" if solo else model.junior or "the senior before training",
        "who wrote the training texts": selection.strategy if passed.strategy is None else passed.strategy.name,
        "weight of the junior's tokens in the loss": f"{loss.junior_weight:g}",
        "steps": f"{step} of {config.train.steps}",
        "recipe": loss.recipe if passed.recipe is None else passed.recipe.name,
        "training data": ", ".join(data.train),
        "held-out data": ", ".join(data.eval) or "none",
        "hf/best so far": best,
        "code changed in the run": ", ".join(accepted) or None,
        **versions,
    }
    table = "".join(f"| {name} | `{value}` |\n" for name, value in facts.items() if value is not None)
    return f"""---
{header}---

# {Path(config.output_dir).name}, step {step}

Trained by [tandemrl](https://github.com/tandemrl/tandemrl). This model, the *senior*, is meant to be used alone.

| | |
|---|---|
{table}
<details><summary>Configuration</summary>

```yaml
{to_yaml(shown).strip()}
```

</details>
"""
