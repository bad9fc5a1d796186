"""The model card of an export: what was trained, on what, by which recipe, and who wrote the texts it learnt from."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tandemrl.config import Config, to_yaml
from tandemrl.config.fields import is_own
from tandemrl.rollout.schedule import kind_in_use

CARD = "README.md"


def model_card(
    config: Config, *, step: int, best: str, versions: Mapping[str, Any], accepted: Sequence[str] = ()
) -> str:
    """The text of a README.md as the Hugging Face hub reads it. The same run and step give the same text.

    Args:
        best: the step of `hf/best` so far and what chose it, or "none".
    """
    model, data, own = config.model, config.data, config.functions.recipe
    solo = config.selection.kind.solo
    recipe = _with(config.loss.recipe, config.loss.parameters) if own is None else own.name
    front = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": [
            "reinforcement-learning",
            *([] if own or is_own(config.loss.recipe) else [config.loss.recipe]),
            *([] if solo else ["tandem-rl"]),
        ],
        **({} if Path(model.senior).exists() else {"base_model": model.senior}),  # a name on the hub
    }
    header = "".join(f"{name}: {json.dumps(value)}\n" for name, value in front.items())
    shown = replace(config, judge=replace(config.judge, command=None))  # a command line may hold keys
    facts = {
        "senior before training": model.senior,
        "junior": "none" if solo else model.junior or "the senior before training",
        "steps": f"{step} of {config.train.steps}",
        "recipe": f"{recipe}, learning rate {config.train.lr:g}",
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
    kind, selection, weight, own = (
        kind_in_use(config.selection),
        config.selection,
        config.loss.junior_weight,
        config.functions.strategy,
    )
    if own is None and kind.solo:
        return f"The *{selection.first}* wrote all texts that this model learnt from."
    until = "" if selection.prob_senior_final is None else f" to {selection.prob_senior_final:g}"
    drawn = f", p = {selection.prob_senior:g}{until}" if kind.draws else ""
    who = _with(f"`{selection.strategy}`{drawn}", selection.parameters) if own is None else f"the strategy `{own.name}`"
    learnt = "only" if weight == 0 else f"with weight 1, on those of the junior with weight {weight:g}"
    return (
        f"This model, the *senior*, wrote its training texts together with a frozen *junior* ({who}). "
        f"It was trained on its own tokens {learnt}. It is meant to be used alone."
    )


def _with(name: str, parameters: Mapping[str, Any]) -> str:
    return ", ".join([name, *(f"{key} = {value}" for key, value in parameters.items())])
