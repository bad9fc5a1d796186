"""Configs: errors that name the key, round trips, and the packaged files against the published values."""

import dataclasses
from importlib.resources import files
from pathlib import Path

import pytest

from tandemrl.config import Config, ConfigError, batch_plan, difference, find_config, load, to_dict, to_yaml

PACKAGED = sorted(file.name for file in files("tandemrl.configs").iterdir() if file.name.endswith(".yaml"))
DEEPSCALER = ("deepscaler_tandem", "deepscaler_grpo", "deepscaler_kl", "deepscaler_grpo_g16")


def packaged(name: str) -> Config:
    return load(name, ["loss.kl_coef=0.001"] if name.startswith("deepscaler_kl") else [])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.stepz=3", r"unknown key 'train\.stepz'\. Did you mean train\.steps\?"),
        ("optimizer.lr=1", r"unknown key 'optimizer'.*Allowed here: data, eval, loss"),
        ("train.steps=1.5", r"train\.steps: .*could not be converted to Integer"),
        ("rollout.engine=sglang", r"rollout\.engine: .*expected one of \['torch', 'vllm'\]"),
        ("train=3", r"train is a section"),
        ("train.lr", r"expected key=value"),
        ("train.lr=[1", r"train\.lr=\[1: not readable as YAML"),
        ("selection.prob_senior=1.5", r"selection\.prob_senior=1\.5: must be in \(0, 1\]"),
        ("train.mini_batch_prompts=5", r"a divisor of train\.prompts_per_step \(16\)"),
        ("eval.k=[1,16]", r"eval\.k=\[1, 16\]: must be non-empty, each between 1 and eval\.samples \(8\)"),
        ("rollout.top_p=0.9", r"rollout\.allow_truncated"),
        ("loss.recipe=ppo", r"loss\.recipe=ppo"),
        ("loss.kl_coef=???", r"leaves a value to you .* loss\.kl_coef=…"),
    ],
)
def test_a_bad_override_names_the_key_and_what_is_allowed(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(overrides=[override])


def test_an_unreadable_or_unknown_file_is_named(tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("train: [")
    with pytest.raises(ConfigError, match=r"bad\.yaml: not readable as YAML"):
        load(bad)
    bad.write_text("- 1\n")
    with pytest.raises(ConfigError, match=r"bad\.yaml: expected a mapping"):
        load(bad)
    with pytest.raises(ConfigError, match=r"'nope\.yaml' not found; packaged configs: .*quickstart\.yaml"):
        load("nope.yaml")


def test_later_sources_win_and_one_data_source_needs_no_brackets(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("train: {lr: 1.0e-4, steps: 7}\ndata: {train: a.jsonl}\n")
    config = load(file, ["train.lr=2e-4", "train.lr=3e-4", "data.eval=b.jsonl"])
    assert (config.train.lr, config.train.steps) == (3e-4, 7)
    assert (config.data.train, config.data.eval) == (("a.jsonl",), ("b.jsonl",))


def test_a_config_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        load().train.lr = 1.0  # type: ignore[misc]


def test_a_mandatory_value_is_asked_for_until_it_is_given() -> None:
    with pytest.raises(ConfigError, match=r"deepscaler_kl\.yaml leaves a value to you .*give loss\.kl_coef=…"):
        load("deepscaler_kl")
    with pytest.raises(ConfigError, match=r"loss\.kl_coef"):
        load("deepscaler_kl", ["train.lr=1e-6"])
    assert load("deepscaler_kl", ["loss.kl_coef=0.003"]).loss.kl_coef == 0.003


@pytest.mark.parametrize("name", PACKAGED)
def test_every_packaged_config_loads_and_survives_a_round_trip(name: str, tmp_path: Path) -> None:
    config = packaged(name)
    stored = tmp_path / "config.yaml"
    stored.write_text(to_yaml(config))
    assert load(stored) == config
    assert difference(load(stored), config) == {}


def test_a_packaged_config_is_found_by_name_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = ("quickstart", "quickstart.yaml", "configs/quickstart.yaml", Path("configs/quickstart.yaml"))
    assert {find_config(name) for name in names} == {find_config("quickstart")}
    (tmp_path / "quickstart.yaml").write_text("train: {steps: 3}\n")  # one's own file comes first
    assert load("quickstart.yaml").train.steps == 3


@pytest.mark.parametrize("name", PACKAGED)
def test_packaged_configs_are_short(name: str) -> None:
    assert len(find_config(name).read_text().splitlines()) <= 45


@pytest.mark.parametrize("name", DEEPSCALER)
def test_deepscaler_has_the_published_values(name: str) -> None:
    c = packaged(name)
    assert c.model.senior == "Qwen/Qwen3-4B-Instruct-2507"
    assert c.model.junior is None  # self-paired
    assert (c.model.dtype, c.model.gradient_checkpointing) == ("bfloat16", True)
    assert (c.data.max_prompt_tokens, c.rollout.max_tokens) == (1024, 3000)
    assert (c.rollout.temperature, c.rollout.top_p, c.rollout.top_k, c.rollout.min_p) == (0.6, 1.0, 0, 0.0)
    assert (c.train.prompts_per_step, c.train.mini_batch_prompts) == (16, 8)
    assert (c.train.lr, c.train.schedule, c.train.warmup_steps) == (1e-6, "constant", 0)
    assert (c.loss.recipe, c.loss.clip_low, c.loss.clip_high) == ("grpo", 0.2, 0.2)
    assert (c.loss.entropy_coef, c.loss.junior_kl_coef, c.loss.kl_in_reward) == (0.0, 0.0, False)
    assert c.train.tokens_per_micro_batch == 10_000
    assert (c.train.save_every, c.train.eval_every, c.train.keep_checkpoints) == (20, 20, 1)
    assert c.train.steps == 2 * (39_309 // 16)  # two epochs
    assert c.data.eval == ("data/deepscaler/heldout.parquet",)
    assert (c.eval.profile, c.eval.train_samples, c.eval.train_problems, c.eval.select_by) == ("paper", 4, 1000, None)
    assert r"\boxed{42}" in c.data.prompt_suffix
    assert r"\boxed{\frac{1}{2}}" in c.data.prompt_suffix
    plan = batch_plan(c)
    assert (plan.prompts, plan.updates) == (16, 2)


def test_deepscaler_tandem_and_its_controls_differ_where_they_should() -> None:
    tandem, grpo, kl, g16 = (packaged(name) for name in DEEPSCALER)
    assert (tandem.selection.strategy, tandem.selection.prob_senior, tandem.selection.max_gap_tokens) == (
        "word",
        0.5,
        32,
    )
    assert (tandem.loss.junior_weight, tandem.loss.kl_coef, tandem.rollout.group_size) == (0.0, 0.0, 8)
    assert (grpo.selection.strategy, grpo.selection.first, grpo.loss.kl_coef) == ("solo", "senior", 0.0)
    assert set(difference(tandem, grpo)) == {"selection.strategy", "loss.normalise_by", "output_dir"}
    assert set(difference(grpo, kl)) == {"loss.kl_coef", "output_dir"}
    assert kl.loss.kl_kind == "k3"
    assert difference(grpo, g16)["rollout.group_size"] == (8, 16)
    assert set(difference(grpo, g16)) == {"rollout.group_size", "output_dir"}


def test_gsm8k_tandem_has_the_published_values() -> None:
    c = load("gsm8k_tandem")
    assert c.model.senior == "Qwen/Qwen3-0.6B"
    assert (c.reward.gsm8k, c.reward.format_score) == ("tandem", 0.1)
    assert (c.selection.strategy, c.selection.prob_senior, c.selection.max_gap_tokens) == ("word", 0.5, 32)
    assert (c.rollout.group_size, c.rollout.temperature, c.train.lr) == (8, 0.6, 1e-6)
    assert (c.train.prompts_per_step, c.train.mini_batch_prompts, c.loss.junior_weight) == (16, 8, 0.0)
    assert c.train.steps == 2 * 6_973 // 16


def test_the_quickstart_is_what_the_tiny_pair_was_measured_with() -> None:
    c = load("quickstart")
    assert (c.model.senior, c.model.junior) == ("runs/tiny/senior", "runs/tiny/junior")
    assert (c.train.prompts_per_step, c.rollout.group_size, c.train.mini_batch_prompts) == (16, 8, None)
    assert (c.train.lr, c.train.betas, c.rollout.temperature) == (3e-4, (0.9, 0.95), 1.0)
    assert (c.rollout.max_tokens, c.eval.profile, c.model.device) == (64, "tiny", "cpu")


def test_the_batch_plan_counts_by_hand() -> None:
    overrides = ["train.mini_batch_prompts=4", "rollout.max_tokens=76", "data.max_prompt_tokens=24"]
    plan = batch_plan(load(overrides=[*overrides, "train.tokens_per_micro_batch=1000"]))
    # 16 x 8 rollouts; 4 updates of 4 x 8 sequences of at most 24 + 76 tokens, 10 of which fit into 1,000 tokens
    assert dataclasses.astuple(plan) == (16, 128, 4, 32, 100, 4)
    assert "16 prompts -> 128 rollouts -> 4 update(s) of 32 sequences" in str(plan)


def test_to_dict_is_plain() -> None:
    tree = to_dict(load())
    assert tree["train"]["betas"] == [0.9, 0.999]
    assert tree["data"]["train"] == ["synthetic:plain:train"]
