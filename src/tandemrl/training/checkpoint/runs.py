"""Saves a run and restores it: what of it goes into a checkpoint (``save``), where that goes when it comes back
(``restore``), and what a resumed run must have in common with its past: the config, and its ``identity``.

Beside the plain data that ``save`` lists, a checkpoint has the trained parameters and the optimiser's moments of the
policy and the critic (``storage``), and the config. ``export`` writes the policy as a plain Hugging Face folder with a
model card, and its adapters as peft reads them.
"""

import hashlib
import io
import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tandemrl.config import Config, difference, to_yaml
from tandemrl.config.fields import is_own
from tandemrl.config.hints import hint
from tandemrl.files import recover, versions, write_directory, write_text
from tandemrl.models.loading import no_progress_bars
from tandemrl.models.lora import adapter_parameters, base_parameters, merged_parameters, peft_config
from tandemrl.models.sharding import full_parameters
from tandemrl.processes.names import import_object
from tandemrl.processes.world import World
from tandemrl.rewards.functions import imported
from tandemrl.rewards.routing import reward_names
from tandemrl.rollout.signatures import NO_PART_OF_A_SEARCH, signature
from tandemrl.rollout.sync import fingerprint
from tandemrl.training.checkpoint import storage
from tandemrl.training.checkpoint.storage import CheckpointError, DamagedError, in_every_process
from tandemrl.training.state import Best, Run, move_state

CARD = "README.md"
ADAPTER_FOLDER = "adapter"
"""The folder inside of an export that holds the adapters alone."""


def export_hf(
    model: Any,
    tokenizer: Any,
    path: str | Path,
    dtype: str | None = None,
    *,
    world: World = World(),  # noqa: B008 - frozen
    adapters_of: str | None = None,
    card: str | None = None,
) -> Path:
    """Write a model, with adapters merged, and its tokenizer as one Hugging Face folder.

    Every process must call this with its part of the model. Rank 0 gathers the weights in host memory and writes. The
    folder appears when all of it is written.

    Args:
        dtype: the dtype of the exported weights. None keeps that of the model.
        adapters_of: the name of the model that the adapters belong to. If it is given, the adapters are also written
            by themselves, in the dtype that they are trained in, into the folder ``adapter`` for ``peft.PeftModel``.
        card: the text of the README.md. None means no README.md.

    Raises:
        CheckpointError: on every process, if rank 0 cannot write.
    """
    weights = _full_weights(model, None if dtype is None else getattr(torch, dtype), keep=world.main)
    adapters = {}
    if adapters_of is not None:
        gathered = adapter_parameters(model)
        adapters = {name: value.detach().cpu().contiguous() for name, value in gathered if world.main}
    folder = Path(path)

    def fill(hidden: Path) -> None:
        _save_pretrained(model, tokenizer, weights, hidden)
        if card is not None:
            (hidden / CARD).write_text(card, encoding="utf-8")
        if adapters_of is not None:
            _save_adapters(peft_config(model, adapters_of), adapters, hidden / ADAPTER_FOLDER)

    held = [*weights.values(), *adapters.values()]
    in_every_process(lambda: write_directory(folder, fill) if world.main else None, folder, world, writes=held)
    return folder


def _full_weights(model: Any, dtype: torch.dtype | None, *, keep: bool) -> dict[str, Tensor]:
    """The whole parameters, with adapters merged, and the saved buffers of a model on the CPU, tied ones once.

    All processes must call this together. Those that do not ``keep`` the weights get {}.
    """
    held = model.state_dict(keep_vars=True)  # first: it makes FSDP take its parameters apart again
    buffers = ((name, value) for name, value in held.items() if not isinstance(value, nn.Parameter))
    weights: dict[str, Tensor] = {}
    for name, value in chain(buffers, merged_parameters(model)):
        if keep:
            weights[name] = value.detach().to("cpu", dtype if value.is_floating_point() else None)
    return weights


def _save_pretrained(model: Any, tokenizer: Any, weights: dict[str, Tensor], folder: Path) -> None:
    """Call ``save_pretrained`` with these weights, and let the saved config name their dtype."""
    own = model.config.dtype
    try:
        with no_progress_bars():
            model.save_pretrained(folder, state_dict=dict(weights))
        model.config.dtype = next((value.dtype for value in weights.values() if value.is_floating_point()), own)
        model.config.save_pretrained(folder)  # save_pretrained names the model's own dtype
    finally:
        model.config.dtype = own
    tokenizer.save_pretrained(folder)


def _save_adapters(config: Any, weights: dict[str, Tensor], folder: Path) -> None:
    """Write the two files of a peft folder. Equal adapters give equal bytes."""
    config.target_modules = sorted(config.target_modules)  # peft keeps them as a set
    config.save_pretrained(folder)
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})


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
    agent = replace(config.rollout.agent, run=())  # a command line may hold keys
    shown = replace(config, rollout=replace(config.rollout, agent=agent))
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


# ----------------------------------------------------------------------------------------------------- save and restore

RECORD = ("metrics.jsonl", "samples.jsonl")
"""The files that grow by lines. A resume cuts them to the bytes that they had when the checkpoint was saved."""


def save(run: Run) -> list[Path]:
    """Save the run: first the Hugging Face export, then the checkpoint, so that a checkpoint always has its export.

    Returns:
        earlier exports that were removed (``train.keep_exports``), on rank 0 only.
    """
    setup, models, progress = run
    train, output, world = setup.config.train, setup.config.output_dir, setup.world
    export(run, f"step_{progress.step}", progress.step)
    state = {
        "step": progress.step,
        "sampler": progress.sampler.state_dict(),  # the position in the data
        "best": progress.best and progress.best._asdict(),  # of hf/best: its step, its metrics, what chose it
        "ahead": progress.rollouts_in_flight,  # rollouts that were generated and wait for their step
        "kl_coef": progress.kl_coef,
        "identity": identity(run),  # hashes of data, frozen models and code, names of recipe, judge and environment
        "accepted": progress.accepted,  # whose code has changed within the run
        "written": progress.written,  # bytes of metrics.jsonl and samples.jsonl
    }
    storage.save(output, progress.step, state, setup.config, train.keep_checkpoints, parts=models.trained, world=world)
    keep = train.keep_exports
    if keep is None:
        return []
    return storage.in_every_process(lambda: storage.drop_exports(output, keep) if world.main else [], output, world)


def export(run: Run, name: str, step: int) -> None:
    """Export the policy after a step to ``hf/NAME``, in the compute dtype."""
    config = run.setup.config
    folder, adapters_of = Path(config.output_dir, "hf", name), config.model.senior if config.model.lora.rank else None
    policy, tokenizer, world = run.models.policy, run.setup.tokenizer, run.setup.world
    if world.main:
        recover(folder.parent)  # it is this run's alone
    card = model_card(
        config, step=step, best=str(run.progress.best or "none"), versions=versions(), accepted=run.progress.accepted
    )
    export_hf(policy, tokenizer, folder, config.model.dtype, world=world, adapters_of=adapters_of, card=card)


def check_resume(resume: str, output_dir: str | Path) -> None:
    """Check the value of ``--resume``: auto, never, or the folder of a checkpoint.

    Raises:
        CheckpointError: it is none of these; the message names the newest checkpoint of the run.
    """
    folder = Path(resume)
    if resume in ("auto", "never") or storage.is_checkpoint(folder):
        return
    newest = storage.latest(output_dir)
    near = hint(folder) if newest is None else f"; did you mean {newest}?"
    what = "not a checkpoint" if folder.exists() else "no such folder"
    raise CheckpointError(f"--resume {resume}: {what}; expected auto, never or a folder checkpoints/step_N{near}")


def start_of(output_dir: str | Path, resume: str) -> tuple[Path | None, Path | None]:
    """The checkpoint that a run begins with, if any, and the folder with the config that it has to have."""
    output = Path(output_dir)
    path = storage.latest(output) if resume in ("auto", "never") else Path(resume)
    metrics = output / "metrics.jsonl"
    if path is None and metrics.is_file() and metrics.stat().st_size > 0:  # it died before its first checkpoint
        return None, output
    return path, path


def check_folder(config: Config, resume: str, accepted: Collection[str] = ()) -> str:
    """Refuse early, before anything is loaded, to train where a run of another config is. Returns what will be done.

    Functions that are passed, and the steps that ``train.epochs`` makes, are known later, and compared by ``restore``.

    Args:
        resume, accepted: see ``Resume``.

    Raises:
        CheckpointError: the run there has another config, or ``resume`` is ``never`` and there is a run; or there is
            no such checkpoint, or nothing of an accepted name.
    """
    check_resume(resume, config.output_dir)
    if unknown := sorted(set(accepted) - set(CODE)):
        raise CheckpointError(f"--accept-changed {unknown[0]}: expected one of {', '.join(CODE)}")
    path, before = start_of(config.output_dir, resume)
    if before is None:
        return f"{config.output_dir} holds no run: a new one"
    if resume == "never":
        raise CheckpointError(
            f"{config.output_dir} already holds a run; resume it (--resume auto), or choose another output_dir or "
            "remove it"
        )
    stored = storage.load_config(before)
    known = replace(stored, functions=config.functions)
    if config.train.epochs is not None:
        known = replace(known, train=replace(known.train, steps=config.train.steps))
    check_same_config(known, config, accepted)
    return f"{config.output_dir}: begins anew" if path is None else f"goes on from {path}"


def restore(run: Run, resume: str, accepted: Collection[str] = ()) -> None:
    """Bring the run to the state of a checkpoint. A fresh run stays at step 0.

    Args:
        resume: ``auto`` or ``never`` for the newest checkpoint in output_dir, if there is one (``check_folder`` has
            refused ``never`` then); or the path of a checkpoint.
        accepted: see ``check_same_identity``.

    Raises:
        CheckpointError: the checkpoint was written under another config.
        DamagedError: the checkpoint differs from what was written, or metrics.jsonl or samples.jsonl lacks lines that
            were; the message names an older checkpoint, if there is one.
    """
    config, world, progress = run.setup.config, run.setup.world, run.progress
    output = Path(config.output_dir)
    path, before = start_of(output, resume)
    if path is None and before is not None:
        check_same_config(storage.load_config(before), config, accepted)
    if path is not None:
        try:
            _restore_from(run, path, accepted)
        except DamagedError as error:
            none = f"No older checkpoint is in {path.parent}: start again in another output_dir, or from an export"
            way_out = f"{none} (hf/step_N as model.senior)"
            if (older := storage.before(path)) is not None:
                way_out = f"The steps after an older checkpoint can be trained again: --resume {older}"
            raise DamagedError(f"{error}. {way_out}") from None
    if world.main:
        storage.discard_after(output, progress.step)
        for name in RECORD:
            if (output / name).is_file():
                os.truncate(output / name, progress.written.get(name, 0))
        write_text(output / "config.yaml", to_yaml(config))
    world.barrier()


def _restore_from(run: Run, path: Path, accepted: Collection[str]) -> None:
    """Fill a run from a checkpoint. Every process must call this, and if one fails, all raise."""
    setup, models, progress = run
    output, world = Path(setup.config.output_dir), setup.world
    config = storage.in_every_process(lambda: storage.load_config(path), path, world)
    check_same_config(config, setup.config, accepted)
    state = storage.load(path, world)
    progress.written = storage.in_every_process(
        lambda: written_before(path, state, output) if world.main else {}, path, world
    )
    changed = check_same_identity(run, state["identity"], path, accepted)
    storage.load_parts(path, models.trained, world)
    if setup.config.parallel.offload_optimizer:
        for part in models.trained.values():
            move_state(part.optimizer, to_host=True)
    progress.sampler.load_state_dict(state["sampler"])
    known = state["best"] is not None and (output / "hf" / "best").is_dir()
    progress.best = Best(**state["best"]) if known else None
    progress.rollouts_in_flight = state["ahead"]
    progress.kl_coef = state["kl_coef"]
    progress.step = int(state["step"])
    progress.accepted = [*state["accepted"], *(f"{name} after step {progress.step}" for name in changed)]


def written_before(path: Path, state: Mapping[str, Any], output: Path) -> dict[str, int]:
    """How many bytes of metrics.jsonl and samples.jsonl belong to a checkpoint.

    A run that continues in another folder than its checkpoint's begins new files there, unless they were copied along.

    Raises:
        DamagedError: a file is missing, is shorter, or has no end of a line there.
    """
    moved = path.resolve().parent.parent != output.resolve()
    if moved and not any((output / name).is_file() and (output / name).stat().st_size for name in state["written"]):
        return {}
    for name, size in state["written"].items():
        with open(output / name, "rb") if (output / name).is_file() else io.BytesIO() as file:
            file.seek(max(0, size - 1))
            if size and file.read(1) != b"\n":
                raise DamagedError(
                    f"{output / name}: cut, changed or gone, of the {size} bytes that belong to {path}: put it back "
                    f"from a copy, or go on without them in another folder (output_dir=OTHER --resume {path})"
                )
    return dict(state["written"])


# ------------------------------------------------------------------------------------------------------------- identity

_FREE = {
    "data": "monitor",
    "model.junior_endpoint": "url api_key_env timeout_s retries backoff_s concurrency max_failure_rate leave_out",
    "rollout": "ray worker_timeout_s",
    # `train.steps` is computed from epochs
    "train": "save_every eval_every eval_first keep_checkpoints keep_exports profile log_samples wandb epochs",
    "judge": "url wait_s api_key_env backoff_s timeout_s concurrency max_failure_rate",
    "retrieval": " ".join(NO_PART_OF_A_SEARCH),
}
_FREE_TO_CHANGE = {"output_dir", *(f"{section}.{name}" for section, names in _FREE.items() for name in names.split())}
"""Keys that may differ when a run is resumed."""


def identity(run: Run) -> Mapping[str, str]:
    """What a resumed run must have in common with its past, beside the config: recipe, data, frozen models, judge,
    scorers and environment.

    It is computed once per run, since none of it changes. All processes must call this together.
    """
    if run.progress.identity is not None:
        return run.progress.identity
    setup, models, _ = run
    config = setup.config
    read = [
        p.tokens
        if setup.episode_runner is None  # else an environment reads more of a row, such as its documents
        else (p.tokens, (p.row.ground_truth, json.dumps(p.row.extra_info, default=repr)))
        for p in setup.prompts
    ]
    frozen = {
        name: "none" if model is None else hex(fingerprint(full_parameters(model)))
        for name, model in (("junior", models.junior), ("reference", models.reference))
    }
    if config.model.lora.rank:  # of what the adapters, and without them the reference, stand on
        frozen["reference"] = hex(fingerprint(base_parameters(models.policy)))
    if models.junior is None and models.engine.has_junior:
        frozen["junior"] = hex(models.engine.fingerprint("junior"))
    named = {"strategy": config.selection.strategy, "engine": config.rollout.engine}
    passed = {name: record.signature for name, record in vars(config.functions).items() if record is not None}
    code = {key: signature(import_object(name)) for key, name in named.items() if is_own(name) and key not in passed}
    code |= {name: signature(imported(name)) for name in reward_names(config.reward) if is_own(name)}
    recipe = {name: signature(value) for name, value in setup.recipe._asdict().items() if name != "says"}
    run.progress.identity = {
        **code,
        **passed,
        "recipe": str(recipe),
        "data.train": hashlib.sha256(repr(read).encode()).hexdigest(),
        **frozen,
        **({} if setup.judge is None else {"judge": setup.judge}),
        **setup.preflight.environment_id,
    }
    return run.progress.identity


CODE = ("reward", "recipe", "strategy", "engine", "environment", "retriever")
"""Components whose code may change within a run, if the user says so (``--accept-changed``), to repair it."""


class Resume(NamedTuple):
    """How a run is resumed.

    where: ``auto``, ``never`` or the folder of a checkpoint. accept_changed: components of `CODE` whose code may differ
    from that of the checkpoint, such as a reward that was repaired; later checkpoints and the model card record it.
    """

    where: str = "auto"
    accept_changed: tuple[str, ...] = ()


def check_same_identity(
    run: Run, before: Mapping[str, str], path: Path, accepted: Collection[str] = ()
) -> tuple[str, ...]:
    """Refuse to continue a run whose recipe, data, models, judge, scorers or environment is another one.

    Args:
        before: the identity that the checkpoint ``path`` stores.
        accepted: the components of `CODE` whose code may have changed. Those that have are returned.

    Raises:
        CheckpointError: they differ; the message names what does.
    """
    changed = [name for name, value in identity(run).items() if before.get(name) != value]
    code = {name: "reward" if ":" in name else name for name in changed if ":" in name or name in CODE}
    if refused := [name for name in changed if code.get(name) not in accepted]:
        options = " ".join(
            f"--accept-changed {each}" for each in dict.fromkeys(code[name] for name in refused if name in code)
        )
        fix = f"; to go on with repaired code: {options}" if all(name in code for name in refused) else ""
        raise CheckpointError(f"{path}: written with another {', '.join(refused)}; a resume would mix runs{fix}")
    return tuple(dict.fromkeys(code[name] for name in changed if name in code))


def check_same_config(stored: Config, current: Config, accepted: Collection[str] = ()) -> None:
    """Refuse to continue a run under another config, since the result would belong to neither.

    ``train.steps`` may grow if the learning rate is constant. ``rollout.workers`` may change if the same groups are
    decoded together. Keys that only decide where and how often files are
    written may change.

    Raises:
        CheckpointError: the configs differ; the message names every key that does, with both values.
    """
    changed = {key: pair for key, pair in difference(stored, current).items() if not _may_change(key, pair[0])}
    if current.train.steps > stored.train.steps and current.train.schedule == "constant":
        changed.pop("train.steps", None)
    if current.rollout.units == stored.rollout.units:  # then the bits do not depend on who decodes
        changed.pop("rollout.workers", None)
        changed.pop("rollout.unit_groups", None)
    for name in accepted:
        changed.pop(f"functions.{name}.signature", None)
    if changed:
        listing = ", ".join(f"{key} (checkpoint {old!r}, now {new!r})" for key, (old, new) in changed.items())
        raise CheckpointError(
            f"output_dir={current.output_dir}: the config differs from the checkpoint's: {listing}. Choose another "
            "output_dir for a new run (from exported weights: model.senior=RUN/hf/step_N), or restore these values: "
            "--config RUN has them all"
        )


def _may_change(key: str, stored: Any) -> bool:
    """Whether a key may differ when a run is resumed. The record of a function may differ in its name, but not in its
    signature."""
    if key.startswith("functions."):
        return stored is None or not key.endswith(".signature")
    return key in _FREE_TO_CHANGE or key.startswith("parallel.")
