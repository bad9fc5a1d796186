"""What goes with what: the one place that refuses values of a config, by the config alone or by what else is known.

The range of one key stands at its field (``Allowed``), what contradicts within a section in the section's ``faults``,
everything else here. Files and the machine are looked at in ``training.preflight``; what it finds is in `Facts`.
"""

import difflib
import math
from collections.abc import Callable, Iterator
from functools import reduce
from itertools import chain
from operator import attrgetter
from types import NoneType
from typing import NamedTuple, get_args

from tandemrl.config.components import ENGINES
from tandemrl.config.fields import ConfigError, Fault
from tandemrl.config.losses import LossConfig
from tandemrl.config.plain import flatten, plain, to_dict
from tandemrl.config.reference import Leaf, leaves
from tandemrl.config.rollout import RolloutConfig
from tandemrl.config.schema import Config, TrainConfig
from tandemrl.config.strategies import KINDS


class RecipeFacts(NamedTuple):
    """What a recipe needs.

    name: for messages. critic: whether it needs one. grouped: whether an advantage comes from the other rollouts of a
    group. ratio: whether its surrogate corrects for updates since the rollouts. reduction, importance: its own, or what
    ``loss`` sets instead.
    """

    name: str
    critic: bool
    grouped: bool
    ratio: bool
    reduction: str
    importance: str


class Facts(NamedTuple):
    """What a config does not say. None and False: not known, or not so.

    processes: how many there are; with ``parallel.dp_shard: null`` the launcher says so. recipe: the one that trains,
    which may have been passed to ``train``. drops: whether the strategy drops what an author proposes. one_turn:
    whether there is no environment, not even one that was passed. acted_in: whether one was passed. apart: whether the
    junior has a vocabulary of its own. asked: whether the junior may be asked to write, though ``selection`` lets the
    senior write alone. windowed: the key of a model that the engine runs, of which a layer attends to a window only,
    and the tokens of the window.
    """

    processes: int | None = None
    recipe: RecipeFacts | None = None
    drops: bool = False
    one_turn: bool = False
    acted_in: bool = False
    apart: bool = False
    asked: bool = False
    windowed: tuple[str, int] | None = None


def check(config: Config, facts: Facts | None = None) -> None:
    """Refuse values that are out of range or contradict each other, or what the facts decide if there are any.

    Raises:
        ConfigError: the message names the key and what is allowed.
    """
    if facts is not None:
        return _refuse(config, _by_facts(config, facts))
    values = flatten(to_dict(config))
    for key, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{key}={value}: must be a finite number")
    for leaf in leaves(config):
        _check_range(leaf, values.get(leaf.key))
    sections = (config.rollout, config.retrieval, config.selection, config.loss, config.reward, config.judge)
    _refuse(config, chain(*(section.faults() for section in sections), *(rule(config) for rule in _RULES)))
    p = config.parallel
    if (declared := p.dp_replicate * (p.dp_shard or 1) * p.sp * p.tp) > 1:
        check(config, Facts(processes=declared))
    r = config.rollout
    if (r.top_p < 1 or r.top_k > 0 or r.min_p > 0) and not r.allow_truncated:
        raise ConfigError(
            "rollout.top_p/top_k/min_p truncate the sampling distribution, which biases the trainer's ratios; set "
            "rollout.allow_truncated=true (the trainer then renormalises over the kept tokens) or switch them off"
        )


def _by_facts(c: Config, facts: Facts) -> Iterator[Fault]:
    if facts.processes is not None:
        yield from _among_processes(c) if facts.processes > 1 else _alone(c)
    if (recipe := facts.recipe) is not None:
        yield from _with_recipe(c, recipe.name, critic=recipe.critic, grouped=recipe.grouped, ratio=recipe.ratio)
        yield from _unused_by_recipe(c, recipe.name, recipe.reduction, recipe.importance)
        if facts.drops and recipe.critic:
            yield from _word_ends_of_a_critic(c, f"a strategy such as before_word and recipe {recipe.name}")
    if facts.one_turn:
        yield from _without_turns(c)
    if facts.acted_in and c.rollout.environment_kind.turns:
        yield Fault("rollout.environment", "single, as another environment was passed to train; or leave that one out")
    if facts.windowed is not None and not c.rollout.kind.windows:
        key, tokens = facts.windowed
        why = f"some of its layers attend to {tokens} tokens only, and rollout.engine={c.rollout.engine} needs full "
        fix = "attention; use rollout.engine=torch, which works as long as sequences are no longer than that"
        yield Fault(key, f"another model: {why}{fix}")
    if facts.apart:
        solo = c.selection.kind.solo and not facts.asked
        yield from _with_two_vocabularies(c, solo=solo, asked=facts.asked)


def _check_range(leaf: Leaf, shown: object) -> None:
    allowed, value = leaf.allowed, leaf.value
    if allowed is None or value is None or allowed.holds(value):
        return
    null = ("null, " if " or " in allowed.words else "null or ") if NoneType in get_args(leaf.type) else ""
    close = difflib.get_close_matches(str(value), [name for name, _ in allowed.names], n=1)
    raise ConfigError(
        f"{leaf.key}={shown}: must be {null}{allowed.words}{f'; did you mean {close[0]}?' if close else ''}"
    )


def _refuse(config: Config, faults: Iterator[Fault]) -> None:
    for fault in faults:
        value = plain(reduce(getattr, fault.key.split("."), config))
        raise ConfigError(f"{fault.key}={value}: must be {fault.must_be}")


# ---------------------------------------------------------------------------------------------- rules between sections


def _groups(c: Config) -> Iterator[Fault]:
    r, t = c.rollout, c.train
    if t.max_resamples > 0 and r.group_size < 2:
        yield Fault("train.max_resamples", "0 with rollout.group_size=1: the rewards of one rollout are always equal")
    if t.max_resamples > 0 and t.async_steps > 0:
        where = f"train.async_steps={t.async_steps}"
        yield Fault("train.max_resamples", f"0 with {where}: the engine is busy with the next step")
    if t.async_steps > 1 and r.workers == 0:
        why = "this process decodes with one version of the weights at a time"
        yield Fault("train.async_steps", f"0 or 1 with rollout.workers=0: {why}")


_OF_A_CRITIC = {
    **{f"loss.{name}": getattr(LossConfig, name) for name in ("gamma", "lam", "value_clip")},
    "train.critic_lr": TrainConfig.critic_lr,
}
"""The keys that only a critic reads, with their defaults."""


def _recipe(c: Config) -> Iterator[Fault]:
    """What contradicts ``loss.recipe``, if that is known and no other takes its place."""
    kind = c.loss.kind
    if kind.critic is not None and c.functions.recipe is None:
        yield from _with_recipe(c, kind.name, critic=kind.critic, grouped=not kind.critic, ratio=bool(kind.clips))


def _with_recipe(c: Config, name: str, *, critic: bool, grouped: bool, ratio: bool) -> Iterator[Fault]:
    t, group = c.train, c.rollout.group_size
    if grouped and group < 2:
        why = "a group of one has no advantage (with a critic, as in ppo, at least 1)"
        yield Fault("rollout.group_size", f"at least 2: {why}")
    if not ratio and t.mini_batch_prompts not in (None, t.prompts_per_step):
        yield Fault("train.mini_batch_prompts", f"null with {name}, which has no correction for a second update")
    if c.model.critic is not None and not critic:
        also = "set that beside a variant of it that is passed to train, too"
        yield Fault("model.critic", f"null unless the recipe has a critic, as loss.recipe=ppo; {also}")
    if t.critic_warmup_steps > 0 and not critic:
        yield Fault("train.critic_warmup_steps", "0 unless the recipe has a critic, as loss.recipe=ppo")
    if critic:
        return
    for key, default in _OF_A_CRITIC.items():
        if attrgetter(key)(c) != default:
            yield Fault(key, f"{default:g} (the default) with {name}, which has no critic")


def _unused_by_recipe(c: Config, name: str, reduction: str, importance: str) -> Iterator[Fault]:
    if c.loss.normalise_by != "weight" and reduction in ("sequence_mean_token_sum", "token_sum_constant"):
        why = "which does not divide by tokens; loss.reduction can be another"
        yield Fault("loss.normalise_by", f"weight with {name} and its reduction {reduction}, {why}")
    if c.loss.importance_cap is not None and importance == "none":
        yield Fault("loss.importance_cap", f"null with {name} and without importance sampling: see loss.importance")


def _junior_tokens(c: Config) -> Iterator[Fault]:
    if not c.selection.kind.solo or c.functions.strategy is not None:
        return
    for key in ("loss.junior_weight", "loss.junior_kl_coef"):
        if attrgetter(key)(c) > 0:
            where = f"selection.strategy={c.selection.strategy}"
            yield Fault(key, f"0 with {where}: there are no tokens of the junior's")


def _without_turns(c: Config) -> Iterator[Fault]:
    one = f"with rollout.environment={c.rollout.environment}, where there is one turn; or name an environment"
    if c.selection.kind.by_turns:
        yield Fault("selection.strategy", f"another, such as solo, {one}")
    if c.rollout.max_turns != RolloutConfig.max_turns:
        yield Fault("rollout.max_turns", f"{RolloutConfig.max_turns} (the default) {one}")
    if c.rollout.turn_tokens is not None:
        yield Fault("rollout.turn_tokens", f"null {one}")


def _drafts(c: Config) -> Iterator[Fault]:
    if c.rollout.draft_tokens != 0 and c.model.junior is None and c.selection.kind.solo:
        yield Fault("rollout.draft_tokens", "0 without model.junior: drafting requires model.junior")


def _dropped_proposals(c: Config) -> Iterator[Fault]:
    if not c.selection.kind.drops:
        return
    name = f"selection.strategy={c.selection.strategy}"
    if not c.rollout.kind.drops:
        why = "which cannot drop what an author proposes; or use rollout.engine=torch"
        yield Fault("selection.strategy", f"another, such as word, with rollout.engine={c.rollout.engine}, {why}")
    if c.rollout.kind.spans:
        yield from _in_two_engines(c, name)
    if c.rollout.draft_tokens != 0:
        why = "a draft would have to guess which tokens are dropped; selection.strategy=word can be drafted"
        yield Fault("rollout.draft_tokens", f"0 with {name}: {why}")
    if c.loss.kind.critic and c.functions.recipe is None:
        yield from _word_ends_of_a_critic(c, f"{name} and loss.recipe={c.loss.recipe}")


def _word_ends_of_a_critic(c: Config, who: str) -> Iterator[Fault]:
    if c.loss.word_ends:
        why = "a critic has no value for the end of a word; group recipes such as grpo need none"
        yield Fault("loss.word_ends", f"false with {who}: {why}")


def _in_two_engines(c: Config, why: str) -> Iterator[Fault]:
    """What needs both models in one engine, where each has its own."""
    more = f"with rollout.engine={c.rollout.engine} and {why}: each model has an engine of its own; or use torch"
    if c.rollout.tensor_parallel > 1:
        yield Fault("rollout.tensor_parallel", f"1 {more}")
    if c.rollout.vllm.junior_device is not None:
        yield Fault("rollout.vllm.junior_device", f"null {more}")


def _batches(c: Config) -> Iterator[Fault]:
    t, longest = c.train, c.longest_sequence
    per_update = t.mini_batch_prompts or t.prompts_per_step
    if t.prompts_per_step % per_update:
        yield Fault("train.mini_batch_prompts", f"a divisor of train.prompts_per_step ({t.prompts_per_step})")
    if t.tokens_per_micro_batch < longest:
        parts = "data.max_prompt_tokens + rollout.max_tokens" + (
            " + rollout.observation_tokens" if c.has_episodes else ""
        )
        yield Fault("train.tokens_per_micro_batch", f"at least {longest}: {parts}, the longest sequence there can be")
    if c.loss.overlong_buffer is not None and not 0 <= c.loss.overlong_buffer < c.rollout.max_tokens:
        yield Fault("loss.overlong_buffer", "null, 0 (off) or below rollout.max_tokens")


def _critic(c: Config) -> Iterator[Fault]:
    warmup = c.train.critic_warmup_steps
    if warmup < 0 or (c.train.epochs is None and warmup >= c.train.steps):
        yield Fault("train.critic_warmup_steps", f"0 or positive, and below train.steps ({c.train.steps})")


def _evaluation(c: Config) -> Iterator[Fault]:
    e, every = c.eval, c.train.eval_every
    if every == 0 and c.data.monitor:
        yield Fault("data.monitor", "empty with train.eval_every=0, which evaluates nothing")
    if every > 0 and not c.data.eval:
        yield Fault("data.eval", "at least one source, or train.eval_every=0")
    if not e.k or not all(1 <= k <= e.samples for k in e.k):
        yield Fault("eval.k", f"non-empty, each between 1 and eval.samples ({e.samples})")
    if every > 0 and not any(k <= e.train_samples for k in e.k):
        yield Fault("eval.train_samples", f"at least the smallest of eval.k ({min(e.k)})")
    if e.unread:
        yield Fault("eval.profile", f"custom with {', '.join(e.unread)}, which others do not read; or leave it out")


def _model(c: Config) -> Iterator[Fault]:
    m = c.model
    if m.junior_endpoint.url is not None and m.junior is None:
        yield Fault("model.junior", "the folder or hub id of the tokenizer with model.junior_endpoint.url")
    if m.junior_endpoint.url is None and m.junior_endpoint.api_key_env is not None:
        yield Fault("model.junior_endpoint.api_key_env", "null without model.junior_endpoint.url")
    if m.liger and c.parallel.tp > 1:
        yield Fault("model.liger", "false with parallel.tp > 1: its kernels cannot be split")
    if m.compile and c.parallel.tp > 1:
        yield Fault("model.compile", "false with parallel.tp > 1")
    if c.train.async_steps and c.rollout.kind.in_trainer:
        with_both = f"train.async_steps=1 and rollout.engine={c.rollout.engine}"
        for key, on in (("model.compile", m.compile), ("rollout.compile", c.rollout.compile)):
            if on:
                yield Fault(key, f"false with {with_both}: two threads cannot compile at once")
    if m.lora.dropout > 0 and m.lora.rank == 0:
        yield Fault("model.lora.dropout", "0 with model.lora.rank=0: there are no adapters")
    if c.rollout.kind.section != "vllm" or m.device.startswith("cuda"):
        return
    if c.rollout.vllm.sleep:
        yield Fault("rollout.vllm.sleep", "false unless model.device is a CUDA device")
    if c.rollout.vllm.junior_device is not None:
        yield Fault("rollout.vllm.junior_device", "null unless model.device is a CUDA device")


def _models(c: Config) -> Iterator[Fault]:
    """What `_model` finds, all in one, for who takes a config to another machine."""
    faults = [*_model(c)]
    if faults:
        more = (f"{fault.key}={plain(attrgetter(fault.key)(c))}: must be {fault.must_be}" for fault in faults[1:])
        yield Fault(faults[0].key, "; ".join((faults[0].must_be, *more)))


def _services(c: Config) -> Iterator[Fault]:
    if c.retrieval.url is not None and c.rollout.tool_timeout_s <= c.retrieval.patience_s:
        why = "the time that retrieval.timeout_s, retries and backoff_s allow a service; else its tool times out first"
        yield Fault("rollout.tool_timeout_s", f"above {c.retrieval.patience_s:g}: {why}")
    waits = c.rollout.max_turns * c.rollout.tool_timeout_s
    if c.rollout.workers and c.has_episodes and c.rollout.worker_timeout_s <= waits:
        why = "rollout.max_turns times rollout.tool_timeout_s; else a worker that waits for tools is taken for lost"
        yield Fault("rollout.worker_timeout_s", f"above {waits:g}: {why}")


_RULES: tuple[Callable[[Config], Iterator[Fault]], ...] = (
    _groups,
    _recipe,
    _junior_tokens,
    _drafts,
    _dropped_proposals,
    _batches,
    _critic,
    _evaluation,
    _models,
    _services,
)


def _with_two_vocabularies(c: Config, *, solo: bool, asked: bool) -> Iterator[Fault]:
    two = "since senior and junior have two vocabularies"
    same = "or use a junior of the senior's tokenizer family"
    if c.model.junior_endpoint.url is not None:
        two, same = "since the junior is behind an endpoint", "or load the junior: model.junior_endpoint.url=null"
    if c.selection.kind.by_text is None:
        suit = [kind for kind in KINDS.values() if kind.by_text is not None and not kind.solo]
        able = ", ".join(kind.name for kind in suit if c.has_episodes or not kind.by_turns)
        yield Fault("selection.strategy", f"{able}, {two}: others look at tokens of both; {same}")
    apart = attrgetter("apart" if c.model.junior_endpoint.url is None else "asks")
    if not solo and not apart(c.rollout.kind):
        able = ", ".join(kind.name for kind in ENGINES.values() if apart(kind))
        yield Fault("rollout.engine", f"{able}, {two}; {same}")
    if not solo and c.rollout.kind.spans:
        if asked:
            yield Fault("rollout.engine", f"torch, {two}, of which {c.rollout.engine} writes whole spans; {same}")
        yield from _in_two_engines(c, "two vocabularies")
    if not solo and c.rollout.draft_tokens != 0:
        yield Fault("rollout.draft_tokens", f"0, {two}: a junior drafts tokens of the senior's; {same}")
    if not solo and c.rollout.compile:
        yield Fault("rollout.compile", f"false, {two}: runs of words are read at once, of any length; {same}")
    if c.loss.junior_kl_coef > 0:
        yield Fault("loss.junior_kl_coef", f"0, {two}: the junior has no log-probs of the senior's tokens; {same}")
    if c.loss.junior_weight > 0:
        yield Fault("loss.junior_weight", f"0, {two}: the junior's words have no log-prob in the senior's; {same}")


def _alone(c: Config) -> Iterator[Fault]:
    if c.parallel.offload_parameters:
        why = "only the weights of sharded models can be offloaded"
        fix = "start several processes, or use parallel.offload_optimizer=true"
        yield Fault("parallel.offload_parameters", f"false with one process: {why}; {fix}")


def _among_processes(c: Config) -> Iterator[Fault]:
    r, v, timeout = c.rollout, c.rollout.vllm, c.parallel.timeout_s
    unsupported = "with several processes, which do not support it"
    if r.kind.section == "vllm" and not r.workers:
        if not v.multiprocess:
            why = "vLLM would take the trainer's process group for its own"
            yield Fault("rollout.vllm.multiprocess", f"true with several processes: {why}")
        if r.tensor_parallel > 1:
            yield Fault("rollout.tensor_parallel", f"1 {unsupported}")
        if v.devices is not None:
            yield Fault("rollout.vllm.devices", f"null {unsupported}: each engine is on its trainer's GPU")
        if v.junior_device is not None:
            yield Fault("rollout.vllm.junior_device", f"null {unsupported}: each junior is beside its senior")
    if c.model.device.startswith("cuda:"):
        yield Fault("model.device", "cuda with several processes: each then takes the GPU of its local rank")
    if c.has_episodes and r.tool_timeout_s >= timeout:
        why = "a process that waits for a tool would be taken for one that hangs"
        yield Fault("rollout.tool_timeout_s", f"below parallel.timeout_s ({timeout:g}) among several processes: {why}")
