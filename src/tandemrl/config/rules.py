"""Checks the values of keys: the range beside each field, and the rules between keys."""

# ruff: noqa: E501 - the rules are a table, one per line

import math
from collections.abc import Mapping
from types import NoneType
from typing import get_args

from tandemrl.config.plain import flatten, to_dict
from tandemrl.config.schema import Config, ConfigError, leaves


def check(config: Config) -> None:
    """Refuse values that are out of range or contradict each other.

    Raises:
        ConfigError: the message names the key and what is allowed.
    """
    values = flatten(to_dict(config))
    for key, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{key}={value}: must be a finite number")
    for leaf in leaves(config):
        if leaf.allowed and leaf.value is not None and not leaf.allowed.holds(leaf.value):
            words = leaf.allowed.words
            null = ("null, " if " or " in words else "null or ") if NoneType in get_args(leaf.type) else ""
            raise ConfigError(f"{leaf.key}={values[leaf.key]}: must be {null}{words}")
    _hold(_rules(config), values)
    r, p = config.rollout, config.parallel
    if (declared := p.dp_replicate * (p.dp_shard or 1) * p.sp * p.tp) > 1:
        check_processes(config, declared)
    if (r.top_p < 1 or r.top_k > 0 or r.min_p > 0) and not r.allow_truncated:
        raise ConfigError(
            "rollout.top_p/top_k/min_p truncate the sampling distribution, which biases the trainer's ratios; set "
            "rollout.allow_truncated=true (the trainer then renormalises over the kept tokens) or switch them off"
        )


def check_processes(config: Config, processes: int) -> None:
    """Refuse values that do not work in a run of so many processes.

    ``check`` cannot know their number: with ``parallel.dp_shard: null`` it is what the launcher says.

    Raises:
        ConfigError: the message names the key and what is allowed.
    """
    _hold(_rules_of_processes(config, several=processes > 1), flatten(to_dict(config)))


def _hold(rules: list[tuple[bool, str, str]], values: Mapping[str, object]) -> None:
    for ok, key, allowed in rules:
        if not ok:
            raise ConfigError(f"{key}={values[key]}: must be {allowed}")


def _rules_of_processes(config: Config, *, several: bool) -> list[tuple[bool, str, str]]:
    """The rules of a run with several processes, or with one, as ``_rules``."""
    m, r, v, p = config.model, config.rollout, config.rollout.vllm, config.parallel
    engines = several and r.engine == "vllm"
    return [
        (not engines or v.multiprocess, "rollout.vllm.multiprocess", "true with several processes: vLLM would take the trainer's process group for its own"),
        (not engines or r.tensor_parallel == 1, "rollout.tensor_parallel", "1 with several processes, which do not support it"),
        (not engines or v.devices is None, "rollout.vllm.devices", "null with several processes, which do not support it: each engine is on its trainer's card"),
        (not engines or v.junior_device is None, "rollout.vllm.junior_device", "null with several processes, which do not support it: each junior is beside its senior"),
        (not several or not m.device.startswith("cuda:"), "model.device", "cuda with several processes: each then takes the card of its own local rank"),
        (several or not p.offload_parameters, "parallel.offload_parameters", "false with one process: only the weights of sharded models can; start several processes, or use parallel.offload_optimizer=true"),
        (not (several and config.has_episodes) or r.tool_timeout_s < p.timeout_s, "rollout.tool_timeout_s", f"below parallel.timeout_s ({p.timeout_s:g}) among several processes: one that waits for a tool would be taken for one that hangs"),
    ]  # fmt: skip


def _rules(config: Config) -> list[tuple[bool, str, str]]:
    """The rules that involve several keys, each as (whether it holds, the key at fault, what the key must be)."""
    m, r, s, lo = config.model, config.rollout, config.selection, config.loss
    t, e, p = config.train, config.eval, config.parallel
    v, reward, judge, ret = r.vllm, config.reward, config.judge, config.retrieval
    cuda = m.device.startswith("cuda")
    two_threads = t.async_steps == 1 and r.engine == "torch"
    per_update = t.mini_batch_prompts or t.prompts_per_step
    longest = config.longest_sequence
    parts = "data.max_prompt_tokens + rollout.max_tokens" + (" + rollout.world_tokens" if config.has_episodes else "")
    patience = (1 + ret.retries) * ret.timeout_s + ret.backoff_s * (2**ret.retries - 1)
    selectors = [f"pass@{k}" for k in e.k if k <= e.train_samples]
    return [
        (r.group_size >= (1 if lo.recipe == "ppo" else 2), "rollout.group_size", "at least 2: a group of one has no advantage (with ppo, at least 1)"),
        (r.tensor_parallel == 1 or r.engine == "vllm", "rollout.tensor_parallel", "1 with the torch engine"),
        (r.draft_tokens == 0 or m.junior is not None or s.strategy != "solo", "rollout.draft_tokens", "0 without model.junior: drafting requires model.junior"),
        (not r.tools or r.environment != "single", "rollout.tools", "empty with rollout.environment=single, which calls no tools"),
        (r.environment != "tools" or len(r.tools) > 0, "rollout.tools", "at least one module:function with rollout.environment=tools"),
        (r.turn_tokens is None or r.turn_tokens <= r.max_tokens, "rollout.turn_tokens", f"null, or at most rollout.max_tokens ({r.max_tokens}), which is of all turns"),
        (s.anneal_steps == 0 or s.strategy in ("word", "word_aligned", "bernoulli", "turn"), "selection.anneal_steps", f"0 with {s.strategy}, which draws nothing"),
        (s.strategy != "solo" or s.first == "senior", "selection.first", "senior with solo: a junior alone trains nothing"),
        ((s.prob_senior_final is None) == (s.anneal_steps == 0), "selection.anneal_steps", "set together with selection.prob_senior_final"),
        (not lo.kl_in_reward or lo.kl_coef > 0, "loss.kl_in_reward", "false unless loss.kl_coef > 0"),
        (lo.recipe != "rloo" or lo.clip_low is None, "loss.clip_low", "null with rloo, which does not clip"),
        (lo.recipe != "rloo" or lo.clip_high is None, "loss.clip_high", "null with rloo, which does not clip"),
        (lo.recipe not in ("rloo", "cispo") or lo.dual_clip is None, "loss.dual_clip", f"null with {lo.recipe}"),
        (lo.recipe != "rloo" or per_update == t.prompts_per_step, "train.mini_batch_prompts", "null with rloo, which has no correction for a second update"),
        (lo.overlong_buffer is None or 0 <= lo.overlong_buffer < r.max_tokens, "loss.overlong_buffer", "null, 0 (off) or below rollout.max_tokens"),
        (m.critic is None or lo.recipe == "ppo", "model.critic", "null unless loss.recipe=ppo"),
        (per_update >= 1 and t.prompts_per_step % per_update == 0, "train.mini_batch_prompts", f"a divisor of train.prompts_per_step ({t.prompts_per_step})"),
        (t.tokens_per_micro_batch >= longest, "train.tokens_per_micro_batch", f"at least {longest}: {parts}, the longest sequence there can be"),
        (t.eval_every > 0 or not config.data.monitor, "data.monitor", "empty with train.eval_every=0, which evaluates nothing"),
        (t.eval_every == 0 or len(config.data.eval) > 0, "data.eval", "at least one source, or train.eval_every=0"),
        (any(k <= e.train_samples for k in e.k), "eval.train_samples", f"at least the smallest of eval.k ({min(e.k, default=1)})"),
        (e.select_by is None or e.select_by in selectors, "eval.select_by", "null or one of " + ", ".join(selectors)),
        (not m.liger or p.tp == 1, "model.liger", "false with parallel.tp > 1: its kernels cannot be split"),
        (not m.compile or p.tp == 1, "model.compile", "false with parallel.tp > 1"),
        (not r.compile or r.engine == "torch", "rollout.compile", "false with rollout.engine=vllm, which has its own way"),
        *((not (on and two_threads), key, "false with train.async_steps=1 and rollout.engine=torch: two threads cannot compile") for key, on in (("model.compile", m.compile), ("rollout.compile", r.compile))),
        (not m.lora.export or m.lora.rank > 0, "model.lora.export", "false with model.lora.rank=0: there are no adapters"),
        (m.lora.dropout == 0 or m.lora.rank > 0, "model.lora.dropout", "0 with model.lora.rank=0: there are no adapters"),
        (lo.kl_target is None or (lo.kl_target > 0 and lo.kl_in_reward), "loss.kl_target", "null, or positive with loss.kl_in_reward"),
        (t.max_resamples == 0 or r.group_size >= 2, "train.max_resamples", "0 with rollout.group_size=1: the rewards of one rollout are always equal"),
        (0 <= t.critic_warmup_steps < t.steps, "train.critic_warmup_steps", f"0 or positive, and below train.steps ({t.steps})"),
        (t.critic_warmup_steps == 0 or lo.recipe == "ppo", "train.critic_warmup_steps", "0 unless loss.recipe=ppo"),
        (e.context is None or e.profile == "custom", "eval.context", f"null with eval.profile={e.profile}, which has its own"),
        (t.max_resamples == 0 or t.async_steps == 0, "train.max_resamples", "0 with train.async_steps=1: the engine is busy with the next step"),
        (v.max_batched_tokens is None or v.max_batched_tokens >= r.max_rows, "rollout.vllm.max_batched_tokens", f"null or at least rollout.max_rows ({r.max_rows})"),
        (v.mode != "draft" or r.engine != "vllm" or r.draft_tokens != 0, "rollout.draft_tokens", "auto, or positive (e.g. 8), with rollout.vllm.mode=draft"),
        (r.draft_tokens == 0 or r.engine != "vllm" or v.mode in ("draft", "auto"), "rollout.draft_tokens", f"0 with rollout.vllm.mode={v.mode}: the vllm engine drafts with rollout.vllm.mode=draft or auto"),
        (v.devices is None or v.multiprocess, "rollout.vllm.devices", "null unless rollout.vllm.multiprocess=true: a process has one set of devices"),
        (not v.sleep or cuda, "rollout.vllm.sleep", "false unless model.device is a CUDA device"),
        (v.junior_device is None or cuda, "rollout.vllm.junior_device", "null unless model.device is a CUDA device"),
        (len(e.k) > 0 and all(1 <= k <= e.samples for k in e.k), "eval.k", f"non-empty, each between 1 and eval.samples ({e.samples})"),
        (reward.compat not in ("cohlem", "tinyzero") or reward.countdown == reward.compat, "reward.countdown", f"{reward.compat} with reward.compat={reward.compat}"),
        (ret.model is not None or ret.url is not None or ret.retriever not in ("semantic", "hybrid"), "retrieval.model", f"a model's folder with {ret.retriever}, unless retrieval.url is set"),
        (ret.index is None or ret.retriever in ("bm25", "lexical"), "retrieval.index", f"null with {ret.retriever}: a corpus is searched by words"),
        (ret.api_key_env is None or ret.url is not None, "retrieval.api_key_env", "null without retrieval.url"),
        (ret.url is None or patience < r.tool_timeout_s, "rollout.tool_timeout_s", f"above {patience:g}: what retrieval.timeout_s, retries and backoff_s allow a service, which would otherwise be a tool that is late"),
        (judge.command is None or judge.url is not None, "judge.command", "null without judge.url, the address that it serves"),
        (judge.command is None or judge.wait_s > 0, "judge.wait_s", "positive with judge.command: a server needs minutes to load a model, e.g. 1800"),
        (judge.wait_s == 0 or judge.url is not None, "judge.wait_s", "0 without judge.url: waiting requires judge.url"),
        (judge.api_key_env is None or judge.url is not None, "judge.api_key_env", "null without judge.url"),
    ]  # fmt: skip
