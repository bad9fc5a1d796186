"""Runs in an environment with a junior that has a vocabulary of its own: what is trained and evaluated."""

import copy
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AddedToken, AutoModelForCausalLM, PreTrainedTokenizerFast

import small_world
from agents import TOOLS, config, make_agents
from helpers import AGENT_TEMPLATE, EOS, PAD, SURFACES, byte_level, qwen3, small_qwen3
from runs import metrics, samples
from tandemrl import evals
from tandemrl.config import Config, ConfigError
from tandemrl.data.loading import load_rows
from tandemrl.rollout.envs.environment import make_environment
from tandemrl.selection.boundaries import token_bytes
from tandemrl.selection.words import word_starts
from tandemrl.training.loop import train
from tandemrl.training.preflight import Preflight
from tandemrl.types import own_turns

CALLS = [call.replace(", ", ",").replace(": ", ":") for call in small_world.CALLS]
"""In whose tokens no word begins."""
SETTINGS = [
    "selection.strategy=before_word",
    "selection.max_untranslatable=1",
    "train.seed=2",  # with which each author ends a turn
    "data.max_prompt_tokens=40",
    "train.tokens_per_micro_batch=512",
    *TOOLS,
]
EVALUATED = ["eval.profile=custom", "eval.max_tokens=24", "eval.k=[1]", "eval.samples=2", "eval.bootstrap=5"]


LETTERS = [each for each in SURFACES[2:] if each.strip("Ġ") in {*"abnoxyz", "", "Ċ", "ĊĊ", ".", "!", *"0123456789"}]
PAIRS = [("Ġ" + one, other) for one in "abn" for other in "xyz"]


def tokenizer_of(surfaces: Sequence[str], pairs: Sequence[tuple[str, str]], template: str) -> PreTrainedTokenizerFast:
    known = [EOS, PAD, *surfaces]
    bpe = byte_level({surface: i for i, surface in enumerate(known)}, pairs)
    made = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=EOS, pad_token=PAD, chat_template=template)
    made.add_tokens([AddedToken(call, normalized=False) for call in CALLS])
    return made


def own_tokenizer() -> PreTrainedTokenizerFast:
    """Few letters, so that calls are written now and then."""
    return tokenizer_of(LETTERS, [], AGENT_TEMPLATE)


def other_tokenizer() -> PreTrainedTokenizerFast:
    """The letters in another order, some pairs of them, and other marks around messages."""
    template = AGENT_TEMPLATE.replace("'!'", "'z'").replace("%}!{%", "%}z{%").replace("'.'", "'y'")
    return tokenizer_of([*reversed(LETTERS), *map("".join, PAIRS)], PAIRS, template)


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = make_agents(tmp_path_factory.mktemp("strangers"))
    for name, made, model in (("senior", own_tokenizer(), qwen3), ("junior", other_tokenizer(), small_qwen3)):
        model(3, vocabulary=len(made)).save_pretrained(out / name)
        made.save_pretrained(out / name)
    return out


def turns_of(line: dict[str, Any]) -> list[list[tuple[int, int]]]:
    """(author, token) of each turn of a line of samples.jsonl."""
    runs = groupby(zip(line["author"], line["tokens"], strict=True), key=lambda each: each[0] >= 0)
    return [list(run) for own, run in runs if own]


def test_a_run_of_episodes_trains_the_senior(strangers: Path, tmp_path: Path) -> None:
    whole = train(config(strangers, tmp_path, *SETTINGS), quiet=True)
    pieces = token_bytes(own_tokenizer())
    lines, ends = samples(whole), list[int]()
    assert {line["stop_reason"] for line in lines} >= {"turns", "untranslatable"}
    for line in lines:
        observed = np.array(line["author"]) < 0
        assert not np.array(line["behaviour_logprobs"])[observed].any()
        assert ("unscored" in line["reward_parts"]) == (line["stop_reason"] == "untranslatable")
        for turn in turns_of(line):
            authors, text = [who for who, _ in turn], [pieces.get(token, b"") for _, token in turn]
            offsets = np.cumsum([0, *map(len, text)])
            changes = {int(offsets[i]) for i in np.flatnonzero(np.diff(authors)) + 1}
            assert changes <= {*word_starts(b"".join(text)), int(offsets[-1])}
            ends += [authors[-1]] if turn[-1][1] == 0 else []
    assert {*ends} == {0, 1}
    for step in metrics(whole):
        own = [line for line in lines if line["step"] == step["step"]]
        assert step["mismatch/mean_abs"] < 1e-5
        assert step["ratio"] == pytest.approx(1.0, abs=1e-6)
        assert step["tandem/untranslatable"] == np.mean([line["stop_reason"] == "untranslatable" for line in own]) < 1
        assert step["tokens/response"] == sum(len(turn) for line in own for turn in turns_of(line))
        assert step["env/turns"] == np.mean([line["transcript"]["counts"]["turns"] for line in own]) >= 1
        assert step["grad_norm"] > 0
    assert sum(step["env/tool_calls"] for step in metrics(whole)) > 0


def test_episodes_of_both_are_evaluated(strangers: Path, tmp_path: Path) -> None:
    settings = config(strangers, tmp_path, *SETTINGS, *EVALUATED)
    found = evals.evaluate(settings, model=strangers / "senior", out=tmp_path)
    assert list(found) == ["pass-at-k", "tandem", "handoff", "legibility", "junior"]
    for phase in ("tandem", "handoff"):
        read = evals.read_samples(tmp_path / f"{phase}.samples.jsonl")
        assert {sample.turns for sample in read} > {1}
        assert {"S", "J", "C"} <= {each for sample in read for each in sample.author or ""}
        lost = [sample.stop_reason == "untranslatable" for sample in read]
        assert found[phase]["metrics"]["macro"]["untranslatable"] == sum(lost) < len(lost)
    read = evals.read_samples(tmp_path / "legibility.samples.jsonl")
    assert {sample.turns for sample in read} > {1}
    for sample in read:
        ids, own = as_the_junior_reads(sample, settings)
        assert sample.cross_entropy == pytest.approx(cross_entropy(strangers / "junior", ids, own), abs=1e-5)
    with pytest.raises(evals.EvalError, match=r"phase drift needs one vocabulary, .*; use tandem, or a junior of"):
        evals.evaluate(settings, model=strangers / "senior", out=tmp_path, phases=["drift"])


def as_the_junior_reads(sample: evals.Sample, settings: Config) -> tuple[list[int], list[bool]]:
    """An episode in the junior's tokens and chat template, and which tokens are those of turns."""
    tokenizer, environment = other_tokenizer(), make_environment(settings)
    assert environment is not None
    assert sample.transcript is not None
    row = load_rows(settings.data.eval)[sample.problem]

    def told(begun: Sequence[Any]) -> str:
        text = tokenizer.apply_chat_template(
            begun, tools=environment.tool_schemas(), tokenize=False, add_generation_prompt=True
        )
        assert isinstance(text, str)
        return text

    messages: list[Any] = [*environment.start(row).messages]
    ids = tokenizer.encode(told(messages), add_special_tokens=False)
    own = [False] * len(ids)
    heard = sample.transcript["messages"]
    begins = [i for i, message in enumerate(heard) if message["role"] == "assistant"]
    turns = own_turns(np.array(sample.tokens), evals.authors_of(sample.author or ""))
    for number, turn in enumerate(turns, 1):
        text = own_tokenizer().decode(turn.tolist(), skip_special_tokens=True)
        before = told(messages) + text
        answers = heard[begins[number - 1] + 1 : begins[number]] if number < len(turns) else []
        messages += [{"role": "assistant", "content": text}, *answers]
        between = told(messages).removeprefix(before) if number < len(turns) else ""
        for piece, written in ((text, True), (between, False)):
            new = tokenizer.encode(piece, add_special_tokens=False)
            ids, own = ids + new, own + [written] * len(new)
    return ids, own


def cross_entropy(model: Path, ids: Sequence[int], own: Sequence[bool]) -> float:
    """The mean over the own tokens of a sequence, by plain transformers."""
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(torch.tensor([ids])).logits[0]
    at = [i for i, each in enumerate(own) if each]
    return float(F.cross_entropy(logits[[i - 1 for i in at]], torch.tensor(ids)[at]))


def test_a_junior_that_cannot_act_is_refused_by_the_name_of_its_tokenizer(strangers: Path, tmp_path: Path) -> None:
    plain = copy.deepcopy(other_tokenizer())
    plain.chat_template = plain.chat_template.replace("t.function.name", "''")
    small_qwen3(7, vocabulary=len(plain)).save_pretrained(tmp_path / "plain")
    plain.save_pretrained(tmp_path / "plain")
    small = config(strangers, tmp_path / "small", *SETTINGS, *EVALUATED, f"model.junior={tmp_path}/plain")
    assert list(evals.evaluate(small, model=strangers / "senior", out=tmp_path / "small")) == ["pass-at-k"]
    with pytest.raises(evals.EvalError, match=r"phase tandem needs both in the environment: tokenizer '.*/plain'"):
        evals.evaluate(small, model=strangers / "senior", out=tmp_path / "small", phases=["tandem"])
    settings = config(strangers, tmp_path / "run", *SETTINGS, f"model.junior={tmp_path}/plain")
    with pytest.raises(ConfigError, match=r"tokenizer '.*/plain': its chat template does not tell of tools"):
        Preflight(settings).require()
    alone = config(strangers, tmp_path / "run", *SETTINGS, f"model.junior={tmp_path}/plain", "selection.strategy=solo")
    assert "tools: add" in Preflight(alone).episodes()
