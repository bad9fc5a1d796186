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
    model, data, selection = config.model, config.data, config.selection
    tags = [
        "reinforcement-learning",
        *([] if config.functions.recipe or is_own(config.loss.recipe) else [config.loss.recipe]),
        *([] if selection.kind.solo else ["tandem-rl"]),
    ]
    front = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": tags}
    if not Path(model.senior).exists():  # a name on the hub
        front["base_model"] = model.senior
    header = "".join(f"{name}: {json.dumps(value)}\n" for name, value in front.items())
    shown = replace(config, judge=replace(config.judge, command=None))  # a command line may hold keys
    own = config.functions.recipe
    recipe = ", ".join([config.loss.recipe, *_set(config.loss.parameters)]) if own is None else own.name
    facts = {
        "senior before training": model.senior,
        "junior": "none" if selection.kind.solo else model.junior or "the senior before training",
        "steps": f"{step} of {config.train.steps}",
        "recipe": f"{recipe}, learning rate {config.train.lr:g}",
        "training data": ", ".join(data.train),
        "held-out data": ", ".join(data.eval) or "none",
        "hf/best so far": best,
        **({"code changed in the run": ", ".join(accepted)} if accepted else {}),
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
    kind, selection, weight, own = (
        kind_in_use(config.selection),
        config.selection,
        config.loss.junior_weight,
        config.functions.strategy,
    )
    if own is None and kind.solo:
        return f"The *{selection.first}* wrote all texts that this model learnt from."
    until = "" if selection.prob_senior_final is None else f" to {selection.prob_senior_final:g}"
    drawn = [f"p = {selection.prob_senior:g}{until}"] if kind.draws else []
    who = ", ".join([f"`{selection.strategy}`", *drawn, *_set(selection.parameters)])
    learnt = "only" if weight == 0 else f"with weight 1, on those of the junior with weight {weight:g}"
    chosen = who if own is None else f"the strategy `{own.name}`"
    return (
        f"This model, the *senior*, wrote its training texts together with a frozen *junior* ({chosen}). "
        f"It was trained on its own tokens {learnt}. It is meant to be used alone."
    )


def _set(parameters: Mapping[str, Any]) -> list[str]:
    return [f"{name} = {value}" for name, value in parameters.items()]
