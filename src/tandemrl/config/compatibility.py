"""What goes with what: the one place that refuses values of a config, by the config alone or by what else is known.

The range of one key stands at its field (``Allowed``), everything else here. Files and the machine are looked at in
``training.preflight``; what it finds is in `Facts`. Requests have no config, so what two writers cannot do is also
refused request by request (``rollout.relay.check_partnered``). An evaluation refuses what two readers cannot read.
"""

import difflib
import math
from collections.abc import Iterator
from operator import attrgetter
from types import NoneType
from typing import NamedTuple, get_args

from tandemrl.config.fields import ConfigError, is_own
from tandemrl.config.plain import flatten, plain, to_dict
from tandemrl.config.recipes import CLIPS, Recipe
from tandemrl.config.reference import Leaf, leaves
from tandemrl.config.schema import Config, LossConfig, RolloutConfig, TrainConfig
from tandemrl.config.strategies import KINDS

Rules = Iterator[tuple[bool, str, str]]
"""Whether a rule is broken; the key that breaks it; what its value must be."""


class Facts(NamedTuple):
    """What a config does not say. None and False: not known, or not so.

    processes: how many there are; with ``parallel.dp_shard: null`` the launcher says so. recipe: the one
    that trains, with what ``loss`` sets instead of its own choices. drops: whether the strategy drops what an author
    proposes. one_turn: whether there is no environment, not even one that was passed. acted_in: whether one was passed.
    apart: whether the junior has a vocabulary of its own. asked: whether the junior may be asked to write, though
    ``selection`` lets the senior write alone. windowed: the key of a model that the engine runs, of which a layer
    attends to a window only, and the tokens of the window.
    """

    processes: int | None = None
    recipe: Recipe | None = None
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
    for rules in (_parameters, _rollout, _retrieval, _selection, _loss, _train, _services, _model):
        _refuse(config, rules(config))
    p = config.parallel
    if (declared := p.dp_replicate * (p.dp_shard or 1) * p.sp * p.tp) > 1:
        check(config, Facts(processes=declared))


def _check_range(leaf: Leaf, shown: object) -> None:
    allowed, value = leaf.allowed, leaf.value
    if allowed is None or value is None or allowed.holds(value):
        return
    null = ("null, " if " or " in allowed.words else "null or ") if NoneType in get_args(leaf.type) else ""
    close = difflib.get_close_matches(str(value), [name for name, _ in allowed.names], n=1)
    raise ConfigError(
        f"{leaf.key}={shown}: must be {null}{allowed.words}{f'; did you mean {close[0]}?' if close else ''}"
    )


def _refuse(config: Config, rules: Rules) -> None:
    for broken, key, must_be in rules:
        if broken:
            raise ConfigError(f"{key}={plain(attrgetter(key)(config))}: must be {must_be}")


# ------------------------------------------------------------------------------------------- rules by the config alone


def _parameters(c: Config) -> Rules:
    """Only a component of the user's own has parameters of its own; the library's read keys."""
    for key, name, parameters in (
        ("rollout.engine_parameters", c.rollout.engine, c.rollout.engine_parameters),
        ("rollout.environment_parameters", c.rollout.environment, c.rollout.environment_parameters),
        ("retrieval.parameters", c.retrieval.retriever, c.retrieval.parameters),
        ("selection.parameters", c.selection.strategy, c.selection.parameters),
        ("loss.parameters", c.loss.recipe, c.loss.parameters),
    ):
        must_be = f"{{}} with {name}, whose parameters are keys; only a module:name has others"
        yield bool(parameters) and not is_own(name), key, must_be


def _rollout(c: Config) -> Rules:
    r, v, kind = c.rollout, c.rollout.vllm, c.rollout.kind
    name = f"rollout.engine={r.engine}"
    yield r.tensor_parallel > 1 and not kind.reserves, "rollout.tensor_parallel", f"1 with the {r.engine} engine"
    yield r.host_every != "auto" and not kind.steps, "rollout.host_every", f"auto with {name}, which has its own way"
    drafts = r.draft_tokens != 0
    yield drafts and not kind.drafts, "rollout.draft_tokens", f"0 with {name}, which does not draft"
    few = v.max_batched_tokens is not None and v.max_batched_tokens < r.max_rows
    yield few, "rollout.vllm.max_batched_tokens", f"null or at least rollout.max_rows ({r.max_rows})"
    must_be = "null unless rollout.vllm.multiprocess=true: a process has one set of devices"
    yield v.devices is not None and not v.multiprocess, "rollout.vllm.devices", must_be
    why = "Ray gives each of them as many GPUs as rollout.tensor_parallel says"
    for key in ("devices", "junior_device"):
        placed = r.workers > 0 and getattr(v, key) is not None
        yield placed, f"rollout.vllm.{key}", f"null with rollout.workers={r.workers}: {why}"
    where = f"with rollout.environment={r.environment}"
    turns = r.environment_kind.turns
    yield bool(r.tools) and not turns, "rollout.tools", f"empty {where}, which calls no tools"
    asks = r.environment_kind.asks
    yield asks and bool(r.tools), "rollout.tools", f"empty {where}, which has its own"
    must_be = "a command or [module:function] with rollout.environment=agent, and else empty"
    yield asks is not bool(r.agent.run), "rollout.agent.run", must_be
    yield asks and r.workers > 0, "rollout.workers", f"0 {where}, which asks an engine of this process"
    must_be = f"at least one module:function {where}"
    yield r.environment_kind.only_tools and not r.tools, "rollout.tools", must_be
    must_be = f"null, or at most rollout.max_tokens ({r.max_tokens}), which is of all turns"
    yield r.turn_tokens is not None and r.turn_tokens > r.max_tokens, "rollout.turn_tokens", must_be
    must_be = "0 without model.junior: drafting requires model.junior"
    yield drafts and c.model.junior is None and c.selection.kind.solo, "rollout.draft_tokens", must_be
    truncated = (r.top_p < 1 or r.top_k > 0 or r.min_p > 0) and not r.allow_truncated
    why = "they bias the trainer's ratios, unless it renormalises over the kept tokens, too"
    yield truncated, "rollout.allow_truncated", f"true with rollout.top_p, top_k or min_p: {why}"


def _retrieval(c: Config) -> Rules:
    r, t = c.retrieval, c.rollout
    must_be = f"a model's folder with {r.retriever}, unless retrieval.url is set"
    yield r.kind.model and r.model is None and r.url is None, "retrieval.model", must_be
    must_be = f"null with {r.retriever}: a corpus is searched by words"
    yield r.index is not None and not r.kind.corpus, "retrieval.index", must_be
    must_be = f"the address of a service with POST /search, with {r.retriever}"
    yield r.kind.hosted and r.url is None, "retrieval.url", must_be
    why = "the time that retrieval.timeout_s, retries and backoff_s allow a service; else its tool times out first"
    short = r.url is not None and t.tool_timeout_s <= r.patience_s
    yield short, "rollout.tool_timeout_s", f"above {r.patience_s:g}: {why}"
    waits = t.max_turns * t.tool_timeout_s
    why = "rollout.max_turns times rollout.tool_timeout_s; else a worker that waits for tools is taken for lost"
    short = t.workers > 0 and c.has_episodes and t.worker_timeout_s <= waits
    yield short, "rollout.worker_timeout_s", f"above {waits:g}: {why}"


def _selection(c: Config) -> Rules:
    s, kind = c.selection, c.selection.kind
    still = f"with {s.strategy}, which draws nothing"
    yield s.draws == "per_group" and not kind.draws, "selection.draws", f"per_rollout {still}"
    yield s.anneal_steps > 0 and not kind.draws, "selection.anneal_steps", f"0 {still}"
    must_be = f"senior with {s.strategy}: a junior alone trains nothing"
    yield kind.solo and s.first != "senior", "selection.first", must_be
    together = (s.prob_senior_final is None) == (s.anneal_steps == 0)
    yield not together, "selection.anneal_steps", "set together with selection.prob_senior_final"
    for key in ("loss.junior_weight", "loss.junior_kl_coef"):
        unwritten = kind.solo and c.functions.strategy is None and attrgetter(key)(c) > 0
        yield unwritten, key, f"0 with selection.strategy={s.strategy}: there are no tokens of the junior's"
    if not kind.drops:
        return
    name = f"selection.strategy={s.strategy}"
    yield _keeps_words(c, name)
    why = "a draft would have to guess which tokens are dropped; selection.strategy=word can be drafted"
    yield c.rollout.draft_tokens != 0, "rollout.draft_tokens", f"0 with {name}: {why}"
    if c.loss.kind.critic and c.functions.recipe is None:
        yield _word_ends_of_a_critic(c, f"{name} and loss.recipe={c.loss.recipe}")


def _loss(c: Config) -> Rules:
    loss = c.loss
    for key in CLIPS["ppo_clip"]:
        unused = getattr(loss, key) is not None and key not in loss.kind.clips
        yield unused, f"loss.{key}", f"null with {loss.recipe}, which does not use it"
    why = "the gradient of k1 has expectation 0; in the reward (loss.kl_in_reward) the KL is always k1"
    yield loss.loss_kl_coef > 0 and loss.kl_kind == "k1", "loss.kl_kind", f"k2 or k3 for a KL in the loss: {why}"
    yield loss.kl_in_reward and loss.kl_coef == 0, "loss.kl_in_reward", "false unless loss.kl_coef > 0"
    yield loss.kl_to == "junior" and loss.kl_coef == 0, "loss.kl_to", "initial unless loss.kl_coef > 0"
    wrong = loss.kl_target is not None and not (loss.kl_target > 0 and loss.kl_in_reward)
    yield wrong, "loss.kl_target", "null, or positive with loss.kl_in_reward"
    wrong = loss.overlong_buffer is not None and not 0 <= loss.overlong_buffer < c.rollout.max_tokens
    yield wrong, "loss.overlong_buffer", "null, 0 (off) or below rollout.max_tokens"
    if not is_own(loss.recipe) and c.functions.recipe is None:
        yield from _with_recipe(c, loss.kind)


def _train(c: Config) -> Rules:
    t, r, longest = c.train, c.rollout, c.longest_sequence
    must_be = "0 with rollout.group_size=1: the rewards of one rollout are always equal"
    yield t.max_resamples > 0 and r.group_size < 2, "train.max_resamples", must_be
    must_be = f"0 with train.async_steps={t.async_steps}: the engine is busy with the next step"
    yield t.max_resamples > 0 and t.async_steps > 0, "train.max_resamples", must_be
    must_be = "0 or 1 with rollout.workers=0: this process decodes with one version of the weights at a time"
    yield t.async_steps > 1 and r.workers == 0, "train.async_steps", must_be
    must_be = f"a divisor of train.prompts_per_step ({t.prompts_per_step})"
    wrong = t.prompts_per_step % (t.mini_batch_prompts or t.prompts_per_step) > 0
    yield wrong, "train.mini_batch_prompts", must_be
    parts = "data.max_prompt_tokens + rollout.max_tokens" + " + rollout.observation_tokens" * c.has_episodes
    must_be = f"at least {longest}: {parts}, the longest sequence there can be"
    yield t.tokens_per_micro_batch < longest, "train.tokens_per_micro_batch", must_be
    long = t.critic_warmup_steps < 0 or (t.epochs is None and t.critic_warmup_steps >= t.steps)
    yield long, "train.critic_warmup_steps", f"0 or positive, and below train.steps ({t.steps})"
    e, never = c.eval, t.eval_every == 0
    must_be = "empty with train.eval_every=0, which evaluates nothing"
    yield never and bool(c.data.monitor), "data.monitor", must_be
    yield not never and not c.data.eval, "data.eval", "at least one source, or train.eval_every=0"
    wrong = not e.k or not all(1 <= k <= e.samples for k in e.k)
    yield wrong, "eval.k", f"non-empty, each between 1 and eval.samples ({e.samples})"
    must_be = f"at least the smallest of eval.k ({min(e.k)})"
    yield not never and min(e.k) > e.train_samples, "eval.train_samples", must_be
    must_be = f"custom with {', '.join(e.unread)}, which others do not read; or leave it out"
    yield bool(e.unread), "eval.profile", must_be


def _services(c: Config) -> Rules:
    j, e = c.judge, c.model.junior_endpoint
    must_be = "null without judge.url; `tandemrl serve --senior MODEL` serves a model"
    yield j.url is None and j.model is not None, "judge.model", must_be
    yield j.url is None and j.wait_s > 0, "judge.wait_s", "0 without judge.url: waiting requires judge.url"
    compat = c.reward.compat
    wrong = compat in ("cohlem", "tinyzero") and c.reward.countdown != compat
    yield wrong, "reward.countdown", f"{compat} with reward.compat={compat}"
    must_be = "the folder or hub id of the tokenizer with model.junior_endpoint.url"
    yield e.url is not None and c.model.junior is None, "model.junior", must_be
    for name, service in (("judge", j), ("model.junior_endpoint", e), ("retrieval", c.retrieval)):
        unused = service.api_key_env is not None and service.url is None
        yield unused, f"{name}.api_key_env", f"null without {name}.url"


def _model(c: Config) -> Rules:
    m = c.model
    yield m.liger and c.parallel.tp > 1, "model.liger", "false with parallel.tp > 1: its kernels cannot be split"
    idle = m.lora.dropout > 0 and m.lora.rank == 0
    yield idle, "model.lora.dropout", "0 with model.lora.rank=0: there are no adapters"
    on_cpu = c.rollout.kind.package == "vllm" and not m.device.startswith("cuda")
    for key, off in (("sleep", "false"), ("junior_device", "null")):
        must_be = f"{off} unless model.device is a CUDA device"
        yield on_cpu and bool(getattr(c.rollout.vllm, key)), f"rollout.vllm.{key}", must_be


# ------------------------------------------------------------------------------------------------------ rules by facts


def _by_facts(c: Config, facts: Facts) -> Rules:
    if facts.processes is not None:
        yield from _among_processes(c) if facts.processes > 1 else _alone(c)
    if (recipe := facts.recipe) is not None:
        name = recipe.name
        yield from _with_recipe(c, recipe)
        by_length = recipe.reduction not in ("sequence_mean_token_sum", "token_sum_constant")
        why = "which does not divide by tokens; loss.reduction can be another"
        must_be = f"weight with {name} and its reduction {recipe.reduction}, {why}"
        yield c.loss.normalise_by != "weight" and not by_length, "loss.normalise_by", must_be
        must_be = f"null with {name} and without importance sampling: see loss.importance"
        yield c.loss.importance_cap is not None and recipe.importance == "none", "loss.importance_cap", must_be
        if facts.drops and recipe.critic:
            yield _word_ends_of_a_critic(c, f"a strategy such as before_word and recipe {name}")
    if facts.drops:
        yield _keeps_words(c, "a strategy such as before_word")
    if facts.one_turn:
        one = f"with rollout.environment={c.rollout.environment}, where there is one turn; or name an environment"
        usual = RolloutConfig.max_turns
        yield c.selection.kind.by_turns, "selection.strategy", f"another, such as solo, {one}"
        yield c.rollout.max_turns != usual, "rollout.max_turns", f"{usual} (the default) {one}"
        yield c.rollout.turn_tokens is not None, "rollout.turn_tokens", f"null {one}"
    must_be = "single, as another environment was passed to train; or leave that one out"
    yield facts.acted_in and c.rollout.environment_kind.turns, "rollout.environment", must_be
    if facts.windowed is not None:
        key, tokens = facts.windowed
        why = f"some of its layers attend to {tokens} tokens only, and rollout.engine={c.rollout.engine} needs full "
        fix = "attention; use rollout.engine=torch, which works as long as sequences are no longer than that"
        yield not c.rollout.kind.steps, key, f"another model: {why}{fix}"
    if facts.apart:
        solo = c.selection.kind.solo and not facts.asked
        yield from _with_two_vocabularies(c, solo=solo)


_OF_A_CRITIC = {
    **{f"loss.{name}": getattr(LossConfig, name) for name in ("gamma", "lam", "value_clip")},
    "train.critic_lr": TrainConfig.critic_lr,
}
"""The keys that only a critic reads, with their defaults."""


def _with_recipe(c: Config, recipe: Recipe) -> Rules:
    t, name, critic = c.train, recipe.name, recipe.critic
    must_be = "at least 2: a group of one has no advantage (with a critic, as in ppo, at least 1)"
    yield recipe.grouped and c.rollout.group_size < 2, "rollout.group_size", must_be
    again = t.mini_batch_prompts not in (None, t.prompts_per_step)
    must_be = f"null with {name}, which has no correction for a second update"
    yield again and not recipe.clips, "train.mini_batch_prompts", must_be
    needs = "unless the recipe has a critic, as loss.recipe=ppo"
    also = "set that beside a variant of it that is passed to train, too"
    yield c.model.critic is not None and not critic, "model.critic", f"null {needs}; {also}"
    yield t.critic_warmup_steps > 0 and not critic, "train.critic_warmup_steps", f"0 {needs}"
    for key, default in _OF_A_CRITIC.items():
        must_be = f"{default:g} (the default) with {name}, which has no critic"
        yield not critic and attrgetter(key)(c) != default, key, must_be


def _word_ends_of_a_critic(c: Config, who: str) -> tuple[bool, str, str]:
    why = "a critic has no value for the end of a word; group recipes such as grpo need none"
    return c.loss.word_ends, "loss.word_ends", f"false with {who}: {why}"


_SERVED = "a large junior can be served, also by a stock vLLM (model.junior_endpoint.url)"


def _keeps_words(c: Config, who: str) -> tuple[bool, str, str]:
    why = f"{c.rollout.engine} cannot drop what an author proposes; {_SERVED}"
    return not c.rollout.kind.drops, "rollout.engine", f"torch with {who}: {why}"


def _with_two_vocabularies(c: Config, *, solo: bool) -> Rules:
    two, loaded = "since senior and junior have two vocabularies", c.model.junior_endpoint.url is None
    same = "or use a junior of the senior's tokenizer family"
    if not loaded:
        two, same = "since the junior is behind an endpoint", "or load the junior: model.junior_endpoint.url=null"
    suit = [kind for kind in KINDS.values() if kind.by_text is not None and not kind.solo]
    able = ", ".join(kind.name for kind in suit if c.has_episodes or not kind.by_turns)
    must_be = f"{able}, {two}: others look at tokens of both; {same}"
    yield c.selection.kind.by_text is None, "selection.strategy", must_be
    if not solo:
        must_be = f"torch, {two}; {f'{_SERVED}, ' if loaded else ''}{same}"
        yield not c.rollout.kind.steps, "rollout.engine", must_be
        must_be = f"0, {two}: a junior drafts tokens of the senior's; {same}"
        yield c.rollout.draft_tokens != 0, "rollout.draft_tokens", must_be
    must_be = f"0, {two}: the junior has no log-probs of the senior's tokens; {same}"
    yield c.loss.junior_kl_coef > 0, "loss.junior_kl_coef", must_be
    yield c.loss.kl_to == "junior", "loss.kl_to", must_be.replace("0", "initial", 1)
    must_be = f"0, {two}: the junior's words have no log-prob in the senior's; {same}"
    yield c.loss.junior_weight > 0, "loss.junior_weight", must_be


def _alone(c: Config) -> Rules:
    why = "only the weights of sharded models can be offloaded"
    fix = "start several processes, or use parallel.offload_optimizer=true"
    yield c.parallel.offload_parameters, "parallel.offload_parameters", f"false with one process: {why}; {fix}"


def _among_processes(c: Config) -> Rules:
    r, v, timeout = c.rollout, c.rollout.vllm, c.parallel.timeout_s
    if r.kind.package == "vllm" and not r.workers:
        several = "with several processes, which do not support it"
        must_be = "true with several processes: vLLM would take the trainer's process group for its own"
        yield not v.multiprocess, "rollout.vllm.multiprocess", must_be
        yield r.tensor_parallel > 1, "rollout.tensor_parallel", f"1 {several}"
        must_be = f"null {several}: each engine is on its trainer's GPU"
        yield v.devices is not None, "rollout.vllm.devices", must_be
        must_be = f"null {several}: each junior is beside its senior"
        yield v.junior_device is not None, "rollout.vllm.junior_device", must_be
    must_be = "single, tools or multihop with several processes: agents ask an engine of one"
    yield r.environment_kind.asks, "rollout.environment", must_be
    must_be = "cuda with several processes: each then takes the GPU of its local rank"
    yield c.model.device.startswith("cuda:"), "model.device", must_be
    why = "a process that waits for a tool would be taken for one that hangs"
    must_be = f"below parallel.timeout_s ({timeout:g}) among several processes: {why}"
    yield c.has_episodes and r.tool_timeout_s >= timeout, "rollout.tool_timeout_s", must_be
