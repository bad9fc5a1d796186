"""Configs: errors that name the key, round trips, and the packaged files against the published values."""

import ast
import dataclasses
import re
from collections.abc import Iterator
from functools import partial
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationKeyError

from runs import UNDECIDED, cli
from tandemrl.config import (
    Config,
    ConfigError,
    FunctionRecord,
    difference,
    expected,
    explanation,
    leaves,
    load,
    to_dict,
    to_yaml,
)
from tandemrl.config.compatibility import Facts, check
from tandemrl.config.loading import REMOVED_KEYS, find_config
from tandemrl.config.plain import flatten
from tandemrl.config.reference import Leaf
from tandemrl.config.schema import FunctionsConfig, LossConfig
from tandemrl.config.written import read, typed, written

PACKAGED = sorted(file.name for file in files("tandemrl.configs").iterdir() if file.name.endswith(".yaml"))


def packaged(name: str) -> Config:
    return load(name, UNDECIDED.get(name.removesuffix(".yaml"), []))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.stepz=3", r"unknown key 'train\.stepz'\. Did you mean train\.steps\?"),
        ("optimizer.lr=1", r"unknown key 'optimizer'.*Allowed here: data, eval, functions, judge, loss"),
        ("train.learning_rate=1e-5", r"unknown key 'train\.learning_rate'\. Did you mean train\.lr\? Allowed here: "),
        ("group_size=8", r"unknown key 'group_size'\. Did you mean rollout\.group_size\?"),
        ("train=3", r"train is a section"),
        ("train.lr", r"expected key=value"),
        ("train.mini_batch_prompts=5", r"a divisor of train\.prompts_per_step \(16\)"),
        ("eval.k=[1,16]", r"eval\.k=\[1, 16\]: must be non-empty, each between 1 and eval\.samples \(8\)"),
        ("eval.temperature=0", r"eval\.profile=tiny: must be custom with eval\.temperature=0\.0, which others do not"),
        ("rollout.top_p=0.9", r"rollout\.allow_truncated"),
        ("model.critic=x", r"model\.critic=x: must be null unless the recipe has a critic, as loss\.recipe=ppo"),
        ("loss.recipe=grop", r"loss\.recipe=grop: must be one of grpo, .*ppo, or module:name; did you mean grpo\?$"),
        ("judge.mode=both", r"judge\.mode=both: expected one of addon, mixed, tinyv_only$"),
        ("loss.lam=0.9", r"loss\.lam=0\.9: must be 0\.95 \(the default\) with grpo, which has no critic"),
        ("loss.kl_coef=???", r"leaves a value to you .* loss\.kl_coef=…"),
        (
            "selection.strategy=solo loss.junior_weight=0.5",
            r"^loss\.junior_weight=0\.5: must be 0 with .*=solo: there are no",
        ),
        ("selection.strategy=solo loss.junior_kl_coef=0.5", r"^loss\.junior_kl_coef=0\.5: must be 0 with .*=solo"),
        ("loss.kl_coef=0.1 loss.kl_kind=k1", r"^loss\.kl_kind=k1: must be k2 or k3 for a KL in the loss: the gradient"),
        (
            "selection.strategy=before_word rollout.draft_tokens=4",
            r"draft_tokens=4: must be 0 with .*before_word: .*=word can",
        ),
        (
            "selection.strategy=before_word rollout.engine=vllm",
            r"rollout\.engine=vllm: must be torch with .*before_word: .* stock vLLM \(model\.junior_endpoint\.url\)",
        ),
        (
            "selection.strategy=before_word loss.recipe=ppo",
            r"loss\.word_ends=True: must be false with .*before_word and .*ppo",
        ),
    ],
)
def test_a_bad_override_names_the_key_and_what_is_allowed(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(overrides=override.split(" "))


def test_what_a_passed_strategy_or_the_reward_takes_is_not_refused() -> None:
    settings = load(overrides=["selection.strategy=solo"])
    passed = FunctionsConfig(strategy=FunctionRecord("mine"))  # in place of solo
    check(dataclasses.replace(settings, loss=LossConfig(junior_weight=0.5), functions=passed))
    assert load(overrides=["loss.kl_coef=0.1", "loss.kl_kind=k1", "loss.kl_in_reward=true"]).loss.loss_kl_coef == 0


def test_an_unreadable_or_unknown_file_is_named(tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("train: [")
    with pytest.raises(ConfigError, match=r"bad\.yaml, line 1: not readable as YAML"):
        load(bad)
    bad.write_text("train:\n  steps: 5\n lr: 3\n")
    with pytest.raises(ConfigError, match=r"bad\.yaml, line 3: not readable as YAML: .*; compare its indentation"):
        load(bad)
    bad.write_bytes(b"train:\n  steps: 3  # caf\xe9\n")
    with pytest.raises(
        ConfigError, match=r"bad\.yaml, line 2: not readable as YAML in UTF-8: invalid cont.*; save it as UTF-8"
    ):
        load(bad)
    bad.write_text("# nothing\n")
    with pytest.raises(ConfigError, match=r"bad\.yaml is empty; write what differs"):
        load(bad)
    bad.write_text("- 1\n")
    with pytest.raises(ConfigError, match=r"bad\.yaml: expected a mapping"):
        load(bad)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nope.yaml", r"'nope\.yaml': no such file; packaged configs: .*quickstart, "),
        ("quickstrt", r"'quickstrt': no such file; did you mean quickstart\?; packaged configs: calculator, "),
        ("gsm8k.yaml", r"'gsm8k\.yaml': no such file; did you mean gsm8k_tandem\?; packaged configs: "),
        ("runs/mien/config.yaml", r"'runs/mien/config\.yaml': no such file; did you mean runs/mine/config\.yaml\?; "),
        ("runs/gsm8k", r"'runs/gsm8k': no such file; did you mean runs/gsm8k_mine\?; "),
        ("runs", r"'runs': a folder without a config\.yaml, so not that of a run; packaged configs: "),
    ],
)
def test_a_config_that_is_not_there_comes_with_what_was_meant(name, message, tmp_path, monkeypatch):
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "config.yaml").touch()
    (tmp_path / "runs" / "gsm8k_mine").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        load(name)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("train.steps", "ten", "a whole number"),
        ("train.profile", "maybe", "true or false"),
        ("train.betas", "[a, 1]", r"a list such as \[a, b\], each a number"),
        ("reward.scorers", "3", r"a mapping such as \{a: b\}"),
    ],
)
def test_a_value_of_another_kind_is_named(key: str, value: str, expected: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"^{re.escape(f'{key}={value}')}: expected {expected}$"):
        load(overrides=[f"{key}={value}"])
    section, name = key.split(".")
    file = tmp_path / "own.yaml"
    file.write_text(f"{section}:\n  {name}: {value}\n")
    with pytest.raises(ConfigError, match=rf"^{file}: {re.escape(key)}=.*: expected {expected}$"):
        load(file)


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("data.prompt_suffix=Write #### and: the number.", "data.prompt_suffix", "Write #### and: the number."),
        ("data.prompt_suffix=", "data.prompt_suffix", ""),
        (r'data.prompt_suffix="\nA: #"', "data.prompt_suffix", "\nA: #"),
        ("model.junior=null", "model.junior", None),
        ("model.junior=007", "model.junior", "007"),
        ("data.train=a #b.jsonl", "data.train", ["a #b.jsonl"]),
        ("reward.scorers.mine/v1.5=boxed", "reward.scorers.mine/v1.5", "boxed"),
        ("data.template_arguments.note=x: y #z", "data.template_arguments.note", "x: y #z"),
        (
            "data.prompt_suffix=Pay ${amount}, or ${oc.env:HOME}",
            "data.prompt_suffix",
            "Pay ${amount}, or ${oc.env:HOME}",
        ),
        ("data.prompt_suffix=[Answer], {x", "data.prompt_suffix", "[Answer], {x"),
        ('data.prompt_suffix="Yes" or no', "data.prompt_suffix", '"Yes" or no'),
        ("reward.scorers={0123: boxed, yes: boxed}", "reward.scorers.yes", "boxed"),
        ("rollout.draft_tokens='4'", "rollout.draft_tokens", 4),
        ("train.steps=0x10", "train.steps", 16),
        ("model.lora.targets=[no, 1e3, '~', 12:30]", "model.lora.targets", ["no", "1e3", "~", "12:30"]),
    ],
)
def test_a_text_is_taken_as_it_stands_and_all_else_is_yaml(override: str, key: str, value: Any) -> None:
    """YAML would end a text at " #", fold its lines, and read 007 as 7."""
    assert flatten(to_dict(load(overrides=[override])))[key] == value


@pytest.mark.parametrize(
    ("content", "key", "value"),
    [
        ("output_dir: 0123", "output_dir", "0123"),
        ("model: {senior: 1e5, junior: null}", "model.senior", "1e5"),
        ("data: {prompt_suffix: yes}", "data.prompt_suffix", "yes"),
        ("data: {prompt_suffix: ' # ${x} ???'}", "data.prompt_suffix", " # ${x} ???"),
        ("data: {prompt_suffix: '???'}", "data.prompt_suffix", "???"),
        ("data: {train: [no, 1e3]}", "data.train", ["no", "1e3"]),
        ("data: {template_arguments: {date: 2026-01-02, n: 1e5, t: 12:3o}}", "data.template_arguments.t", "12:3o"),
        (
            "data: {template_arguments: {a: [+1, .5, -2., True, ' 1', ١]}}",
            "data.template_arguments.a",
            [1, 0.5, -2.0, True, " 1", "١"],
        ),
        ("reward: {scorers: {0123: boxed}, weights: {yes: 1e-1}}", "reward.weights.yes", 0.1),
        ("train: &t {steps: '50', lr: 1.}\njudge: {}", "train.steps", 50),
        ("train: {lr: 1_000}", "train.lr", 1000.0),
        ("judge:\n  model:", "judge.model", None),
    ],
)
def test_what_is_text_in_yaml_stays_text(content: str, key: str, value: Any, tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text(content + "\n")
    config = load(file)
    assert flatten(to_dict(config))[key] == value
    file.write_text(to_yaml(config))
    assert load(file) == config


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("train: {steps: 0123}", r"train\.steps=0123: expected a whole number$"),
        ("train: {lr: 012}", r"train\.lr=012: expected a number$"),
        ("output_dir: ~", r"output_dir=~: expected a string; put a text in quotes$"),
        (
            "data:\n  prompt_suffix: End with #### and",
            r"prompt_suffix=End with: expected a string; put a text in quotes$",
        ),
        ("data: {prompt_suffix: {Answer}}", r"prompt_suffix=.*: expected a string; put a text in quotes$"),
        ("data: {prompt_suffix: !Answer x}", r"line 1: not readable as YAML: !Answer is a tag"),
        ("model: {junior: [a]}", r"model\.junior=\['a'\]: expected a string or null; put a text in quotes$"),
        (
            "data: {template_arguments: {a: yes}}",
            r"template_arguments: yes can be read in two ways; put a text in quotes",
        ),
        ("train: {lr: 1}\ntrain: {lr: 2}", r"line 2: not readable as YAML: the key train stands twice"),
    ],
)
def test_what_yaml_reads_otherwise_than_it_looks_is_refused(content: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "lr=1" / "own.yaml"
    file.parent.mkdir()
    file.write_text(content + "\n")
    with pytest.raises(ConfigError, match=message) as error:
        load(file)
    assert str(error.value).startswith(f"{file}")


TEXTS = st.text(st.characters()) | st.sampled_from(
    ["", "~", "null", "0123", "1e5", "yes", "???", "${a}", "\\${a}", "\ud800"]
)
PLAIN: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS | st.integers(), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=100, derandomize=True)
@given(text=TEXTS, tags=st.lists(TEXTS, max_size=3), scorers=st.dictionaries(TEXTS, TEXTS, max_size=2), free=PLAIN)
def test_a_stored_value_is_read_as_it_was(text: str, tags: list[str], scorers: dict[str, str], free: Any) -> None:
    kinds = {
        "text": str,
        "name": str | None,
        "tags": tuple[str, ...],
        "scorers": dict[str, str],
        "free": dict[str, Any],
    }
    values = {"text": text, "name": text, "tags": tuple(tags), "scorers": scorers, "free": {text: free}}
    tree = read(written(values), "config.yaml")
    assert {key: typed(tree[key], kind) for key, kind in kinds.items()} == values
    assert yaml.safe_load(written(values))["text"] == text  # to other readers, too


def test_a_record_is_read_key_by_key_and_a_name_keeps_its_dots(tmp_path: Path) -> None:
    """From overrides, from a file, and from a file that overrides change."""
    record = ["functions.environment.name=mine.Talk (a.py:3)", "functions.environment.signature=0123"]
    names = [
        "reward.scorers={a.b: gsm8k}",
        "reward.weights={acc: 0.5, b.c: 1}",
        "reward.parameters={a.b: {c.d: 1, e: {f.g: [0x1f.x]}}}",
        "data.template_arguments={a.b: {c.d: null}}",
    ]
    config = load(overrides=[*record, *names])
    assert config.functions.environment == FunctionRecord("mine.Talk (a.py:3)", "0123")
    assert config.reward.scorers == {"a.b": "gsm8k"}
    assert config.reward.weights == {"acc": 0.5, "b.c": 1.0}
    assert config.reward.parameters == {"a.b": {"c.d": 1, "e": {"f.g": ["0x1f.x"]}}}
    assert config.data.template_arguments == {"enable_thinking": False, "a.b": {"c.d": None}}
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(config))
    assert load(file) == config
    changed = load(file, ["functions.environment.signature=x", "functions.recipe={name: own}"]).functions
    assert changed.environment == FunctionRecord("mine.Talk (a.py:3)", "x")
    assert (changed.recipe, changed.reward) == (FunctionRecord("own"), None)
    assert load(file, ["functions.environment=null"]).functions == FunctionsConfig()
    with pytest.raises(
        ConfigError, match=r"unknown key 'functions\.reward\.nam'.* Did you mean functions\.reward\.name"
    ):
        load(overrides=["functions.reward.nam=mine"])
    with pytest.raises(ConfigError, match=r"leaves a value to you .* functions\.reward\.name=…"):
        load(overrides=["functions.reward.name=???"])


def test_a_tilde_at_the_beginning_of_a_path_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    keys = "output_dir model.senior model.junior model.critic judge.template retrieval.index retrieval.model"
    for key in keys.split():
        config = load(overrides=[f"{key}=~/a b"] + ["loss.recipe=ppo"] * (key == "model.critic"))
        assert flatten(to_dict(config))[key] == f"{tmp_path}/a b"
    for name in ("train", "eval", "monitor"):
        config = load(overrides=[f"data.{name}=[~/a.jsonl, ./~, 'synthetic:plain:train']"])
        assert getattr(config.data, name) == (f"{tmp_path}/a.jsonl", "./~", "synthetic:plain:train")
    assert load(overrides=["data.prompt_suffix=~/a"]).data.prompt_suffix == "~/a"
    assert Config(output_dir="~/a").output_dir == f"{tmp_path}/a"  # in Python, too
    (tmp_path / "own.yaml").write_text("output_dir: ~/a\n")
    assert load("~/own.yaml").output_dir == f"{tmp_path}/a"


def test_later_sources_win_and_steps_beside_the_epochs_of_a_config_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("train: {lr: 1.0e-4, epochs: 2}\ndata: {train: a.jsonl}\n")
    config = load(file, ["train.lr=2e-4", "train.lr=3e-4", "data.eval=b.jsonl", "train.steps=5", "train.epochs=null"])
    assert (config.train.lr, config.train.steps) == (3e-4, 5)
    assert (config.data.train, config.data.eval) == (("a.jsonl",), ("b.jsonl",))
    with pytest.raises(ConfigError, match=r"train\.steps=5 has no effect beside train\.epochs=2 of .*run\.yaml"):
        load(file, ["train.steps=5"])


def test_a_mapping_or_a_config_of_omegaconf_is_a_source_too() -> None:
    own = {"train": {"lr": 1e-5, "steps": 7}, "data": {"train": ["a${b}.jsonl"]}, "model": {"junior": None}}
    config = load(own, ["train.steps=9"])
    assert (config.train.lr, config.train.steps, config.model.junior) == (1e-5, 9, None)
    assert config.data.train == ("a${b}.jsonl",)
    theirs = OmegaConf.create({"seed": 5, "train": {"seed": "${seed}"}, "output_dir": "runs/${seed}"})
    del theirs["seed"]
    with pytest.raises(InterpolationKeyError):
        load(theirs)
    theirs = OmegaConf.create({"train": {"seed": 5}, "output_dir": "runs/${train.seed}"})
    assert (load(theirs).output_dir, load(theirs).train.seed) == ("runs/5", 5)
    with pytest.raises(ConfigError, match=r"the mapping leaves a value to you \(\?\?\?\); set train\.steps=…"):
        load(OmegaConf.create({"train": {"steps": "???"}}))
    with pytest.raises(ConfigError, match=r"train\.stps"):
        load({"train": {"stps": 1}})


def test_a_removed_key_says_so_unless_it_has_its_old_default() -> None:
    assert load({"rollout": {"in_flight": False}}) == load()
    said = r"rollout\.in_flight was removed in 0\.2; leave it out: train\.async_steps=1"
    for source in ({"path": {"rollout": {"in_flight": True}}}, {"overrides": ["rollout.in_flight=true"]}):
        with pytest.raises(ConfigError, match=said):
            load(**source)
    with pytest.raises(ConfigError, match=r"train\.wandb_name was removed in 0\.2"):  # though to be read in two ways
        load(overrides=["train.wandb_name=007"])


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


PUBLISHED = yaml.safe_load((Path(__file__).parent / "golden" / "published.yaml").read_text())


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_packaged_config_has_the_published_values(name: str) -> None:
    values = flatten(to_dict(packaged(name)))
    assert {key: values[key] for key in PUBLISHED[name] if values.get(key) != PUBLISHED[name][key]} == {}


@pytest.mark.parametrize(
    ("one", "other", "keys"),
    [
        ("deepscaler_tandem", "deepscaler_grpo", "selection.strategy loss.normalise_by VLLM"),
        ("deepscaler_grpo", "deepscaler_kl", "loss.kl_coef rollout.vllm.gpu_memory_utilization"),
        ("deepscaler_grpo", "deepscaler_grpo_g16", "rollout.group_size"),
        ("tinyzero", "tinyzero_3b", "model.senior model.gradient_checkpointing"),
        ("tinyzero_3b", "tinyzero_instruct", "model.senior data.train data.eval"),
        ("musique_grpo", "musique_tandem", "selection.strategy rollout.max_rows"),  # fewer rows fit; no token changes
        ("hops_grpo", "hops_tandem", "selection.strategy model.junior"),
    ],
)
def test_an_arm_and_its_control_differ_where_they_should(one: str, other: str, keys: str) -> None:
    places = {f"rollout.vllm.{name}" for name in ("junior_device", "multiprocess", "gpu_memory_utilization")}
    wanted = {"output_dir", *keys.replace("VLLM", " ".join(places)).split()}
    assert set(difference(packaged(one), packaged(other))) == wanted


def test_every_key_is_explained() -> None:
    keys = list(leaves(load()))
    assert [key.key for key in keys if not explanation(key).endswith((".", '"'))] == []
    assert explanation(next(key for key in keys if key.key == "selection.prob_senior")).startswith("p: probability")
    assert {key.key for key in keys if key.section.__doc__.startswith(f"{key.section.__name__}(")} == set()  # generated


OUTSIDE = {
    "at least 1": ("0", "-1"),
    "at least 64": ("63",),
    "0 or positive": ("-1",),
    "auto, 0 or positive": ("-1", "many"),
    "auto, or at least 1": ("0", "-1", "many"),
    "between 0 and 8": ("9", "-1"),
    "0 (off) or above 1": ("1", "0.5", "-1"),
    "positive": ("0", "-1"),
    "in [0, 1]": ("-0.1", "1.1"),
    "in (0, 1]": ("0", "1.1"),
    "in [0, 1)": ("-0.1", "1"),
    "two numbers in [0, 1)": ("[0.9,1]", "[-0.1,0.9]"),
    "at least one source": ("[]",),
    "some of top_k, min_p, repetition_penalty, presence_penalty, frequency_penalty, skip_special_tokens, samplers, "
    "mirostat, dynatemp_range": ("[top_k,seed]",),
    "columns of prompt, ground_truth, data_source and ability": ("{answer: gold}",),
    "an address such as http://localhost:8000/v1": ("localhost:8000", "ftp://localhost"),
}
"""Values that a range, as it is worded, excludes."""


@pytest.mark.parametrize("leaf", [leaf for leaf in leaves(load()) if leaf.allowed], ids=lambda leaf: leaf.key)
def test_a_value_outside_of_its_range_is_refused_with_the_range(leaf: Leaf) -> None:
    words = leaf.allowed.words
    for value in ("none-such",) if leaf.allowed.names else OUTSIDE[words.partition(": ")[0]]:
        with pytest.raises(
            ConfigError, match=rf"^{re.escape(leaf.key)}=.*: must be (null,? (or )?)?{re.escape(words)}$"
        ):
            load(overrides=[f"{leaf.key}={value}"])
    if "null" in expected(leaf.type):
        load(overrides=["loss.recipe=ppo", f"{leaf.key}=null"])  # which has a critic, too


def test_the_reference_is_printed_by_section_within_80_columns() -> None:
    keys_in = partial(re.findall, r"(?m)^([\w.]+) = ")
    everything, section = cli("config"), cli("config", "rollout.vllm")
    assert max(map(len, everything.splitlines())) <= 80
    keys = [leaf.key for leaf in leaves(load())]
    assert keys_in(everything) == keys
    assert keys_in(section) == [key for key in keys if key.startswith("rollout.vllm.")]
    shown = "selection.max_gap_tokens = 32   (a whole number; at least 1)\n    K: `word` redraws at the latest this"
    assert cli("config", "selection.max_gap_tokens").split("\n\n")[1].startswith(shown)
    assert "no section 'trian'; there are model, model.junior_endpoint, model.lora" in cli("config", "trian", fails=2)


VLLM = "rollout.engine=vllm"
SEVERAL = [VLLM, "rollout.vllm.multiprocess=true"]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ([VLLM], r"rollout\.vllm\.multiprocess=False: must be true with several processes"),
        ([*SEVERAL, "rollout.tensor_parallel=2"], r"rollout\.tensor_parallel=2: must be 1 with several processes"),
        (["model.device=cuda:0"], r"model\.device=cuda:0: must be cuda with several processes"),
    ],
)
def test_what_several_processes_cannot_do_is_refused(keys: list[str], message: str) -> None:
    """``parallel.dp_shard`` is null: the number comes from the launcher. Workers may have more than one GPU."""
    config = load(None, keys)
    check(config, Facts(processes=1))
    check(load(None, [VLLM, "rollout.workers=1", "rollout.tensor_parallel=2"]), Facts(processes=2))
    with pytest.raises(ConfigError, match=message):
        check(config, Facts(processes=2))
    with pytest.raises(ConfigError, match=message):
        load(None, [*keys, "parallel.dp_shard=2"])


def test_a_dry_run_under_the_launcher_checks_its_number_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "PROBLEM      processes: model.device=cuda:0: must be cuda" in cli(
        "train", "-c", "quickstart", "--dry-run", "model.device=cuda:0", fails=2
    )
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert "ok           processes: 1" in cli("train", "-c", "quickstart", "--dry-run", fails=2)


def test_a_mandatory_value_is_asked_for_until_it_or_what_makes_it_is_given() -> None:
    with pytest.raises(ConfigError, match=r"deepscaler_kl\.yaml leaves a value to you .*set loss\.kl_coef=…"):
        load("deepscaler_kl", ["train.lr=1e-6"])
    assert load("deepscaler_kl", ["loss.kl_coef=0.003"]).loss.kl_coef == 0.003
    assert load("rrm_train", ["model.senior=m", "train.epochs=12"]).train.epochs == 12
    with pytest.raises(ConfigError, match=r"set train\.steps=…$"):
        load("rrm_train", ["model.senior=m"])


def test_messages_name_keys_that_exist() -> None:
    """Every ``section.key`` in a text of the sources, with a ``=`` after it, is a key."""
    known = {leaf.key for leaf in leaves(Config())}
    mappings = tuple(f"{leaf.key}." for leaf in leaves(Config()) if isinstance(leaf.value, dict))
    known |= {key.rpartition(".")[0] for key in known} | set(REMOVED_KEYS)
    sections = "|".join(field.name for field in dataclasses.fields(Config) if field.name != "output_dir")
    assigned = re.compile(rf"(?<![\w./-])((?:{sections})(?:\.[a-z_]\w*)+)(?==)")
    root = Path(__file__).parents[1]
    for file in chain((root / "src").rglob("*.py"), (root / "cli").glob("*.py")):
        for key in chain.from_iterable(map(assigned.findall, _texts(file.read_text()))):
            assert key in known or key.startswith(mappings), f"{file}: {key}"


def _texts(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
