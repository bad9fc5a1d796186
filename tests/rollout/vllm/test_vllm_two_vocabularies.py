"""Whole words on vLLM, with one vocabulary and with two: the texts of the reference engine, token by token."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pairs import VLLM, assert_equal_completions, by_programs

from helpers import flat
from runs import config, metrics
from scripted_world import ScriptedWorld
from tandemrl import evals
from tandemrl.config import ConfigError, RolloutConfig, VllmConfig
from tandemrl.data.loading import load_rows
from tandemrl.data.messages import Message
from tandemrl.data.rows import Row, encode_prompts
from tandemrl.models.loading import load_model, load_tokenizer
from tandemrl.rollout.call import Finished
from tandemrl.rollout.engine import Completion, EngineError, Request, Sampling
from tandemrl.rollout.envs.environment import Answer, Environment, State
from tandemrl.rollout.envs.episodes import EpisodeRunner, Reader
from tandemrl.rollout.torch_engine import TorchEngine
from tandemrl.selection import before_word, solo, turn, word
from tandemrl.selection.boundaries import start_table, word_boundary_table
from tandemrl.selection.whole_words import before_text_word, in_two_vocabularies, text_sentence, text_tables
from tandemrl.training.loop import train
from tandemrl.training.preflight import Preflight

pytestmark = VLLM

SAMPLINGS = [
    Sampling(max_tokens=36),
    Sampling(max_tokens=36, temperature=0.0),
    Sampling(max_tokens=30, temperature=1.3, top_k=20, top_p=0.9),
    Sampling(max_tokens=30, min_p=0.05),
]


@pytest.fixture(scope="module")
def folders(tiny_pair: Path, other_junior: Path) -> tuple[Path, Path]:
    return tiny_pair / "senior", other_junior


def started(senior: Path, junior: Path, own: Any = None) -> Iterator[Any]:
    from tandemrl.rollout.vllm.engine import VllmTwoEngines

    config = RolloutConfig(max_rows=12, vllm=VllmConfig(kv_cache_gb=0.05))
    engine = VllmTwoEngines(senior, junior, load_tokenizer(senior), own, config)
    yield engine
    for each in engine.engines.values():
        each._close.detach()


@pytest.fixture(scope="module")
def vllm_engine(folders: tuple[Path, Path]) -> Iterator[Any]:
    yield from started(*folders, load_tokenizer(folders[1]))


@pytest.fixture(scope="module")
def one_vocabulary(tiny_pair: Path) -> Iterator[Any]:
    yield from started(tiny_pair / "senior", tiny_pair / "junior")


def requests(folders: tuple[Path, Path], p: float = 0.5) -> list[Request]:
    ours, theirs = (load_tokenizer(folder) for folder in folders)
    rows = load_rows(["synthetic:plain:train:8"])
    strategy = before_text_word(p, text_tables(ours))
    prompts = [encode_prompts(rows, each, max_prompt_tokens=256)[0] for each in (ours, theirs)]
    return [
        Request(p.tokens, (3 + i, 40 + i), SAMPLINGS[i % len(SAMPLINGS)], strategy, junior_prompt=q.tokens)
        for i, (p, q) in enumerate(zip(*prompts, strict=True))
    ]


@pytest.fixture(scope="module")
def reference(folders: tuple[Path, Path]) -> TorchEngine:
    senior, junior = (load_model(folder) for folder in folders)
    ours, theirs = (load_tokenizer(folder) for folder in folders)
    return TorchEngine(senior, junior, ours, junior_tokenizer=theirs)


def test_vllm_writes_what_the_reference_engine_writes(folders, reference, vllm_engine):
    asked = requests(folders)
    turn = tuple(flat(reference.generate(asked[:1]))[0].tokens.tolist())
    asked += [replace(asked[0], prompt=(*asked[0].prompt, *turn), history=(turn,))]
    text = load_tokenizer(folders[0]).decode(turn)
    asked += [replace(asked[0], sampling=replace(SAMPLINGS[0], stop=(text[n : n + 3],))) for n in (10, 20, 30)]
    wanted = flat(reference.generate(asked))
    assert [each.stop_reason for each in wanted[-6::2]] == ["stop"] * 3
    assert assert_same(flat(vllm_engine.generate(asked)), wanted) > 20


def test_it_hands_over_by_steps_too(folders: tuple[Path, Path], reference: TorchEngine, vllm_engine: Any) -> None:
    tables = text_tables(load_tokenizer(folders[0]))
    by_steps = [text_sentence(who, tables) for who in ("senior", "junior")]
    asked = [
        replace(each, strategy=by_steps[i % 4 // 2], sampling=replace(each.sampling, max_tokens=80))
        for i, each in enumerate(requests(folders))
    ]
    wanted = flat(reference.generate(asked))
    assert assert_same(flat(vllm_engine.generate(asked)), wanted) > 3
    assert {int(each.author[0]) for each in wanted} == {0, 1}
    assert sum((np.diff(each.author) != 0).sum() for each in wanted) > 8


def test_an_open_call_takes_the_senior_alone(folders, reference, vllm_engine):
    """As of `tandemrl serve` with ``"solo": "senior"``, beside a text of both."""
    asked = [replace(each, strategy=solo("senior")) for each in requests(folders)]
    asked += requests(folders)[:1]
    with vllm_engine.open() as call:
        numbers, ended = call.submit(asked), set[int]()
        while len(ended) < len(numbers):
            ended |= {event.number for event in call.step() if isinstance(event, Finished)}
        found = call.take(numbers)
    assert_equal_completions(found, flat(reference.generate(asked)))


def assert_same(found: Sequence[Completion], wanted: Sequence[Completion]) -> int:
    """Returns how many words the senior ended before one of the junior's."""
    handed = 0
    assert_equal_completions(found, wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one.handover_logprobs is not None
        assert other.handover_logprobs is not None
        assert np.allclose(one.handover_logprobs, other.handover_logprobs, atol=1e-4)
        handed += int((one.handover_logprobs != 0).sum())
    return handed


class Counts(Environment):
    """Says how long a turn was."""

    def reply(self, row: Row, state: State, message: Message) -> Answer:
        return Answer([{"role": "user", "content": f"{len(message['content'])} so far"}], {})


def test_in_an_environment_too(folders: tuple[Path, Path], reference: TorchEngine, vllm_engine: Any) -> None:
    """Where limits cut turns, and either author ends some."""
    ours, theirs = (load_tokenizer(folder) for folder in folders)
    limits = RolloutConfig(max_turns=3, turn_tokens=40, observation_tokens=60, tool_timeout_s=60.0)
    reader, tables = Reader(theirs, (theirs.eos_token_id,)), text_tables(ours)
    rows, ends = load_rows(["synthetic:plain:train:8"]), set[tuple[bool, int]]()
    both = before_text_word(0.5, tables), in_two_vocabularies(turn(0.5), tables)
    with EpisodeRunner(Counts(), ours, limits, eos_token_ids=(ours.eos_token_id,), junior=reader) as runner:
        asked = [
            runner.episode(
                replace(each, strategy=both[i // 4], sampling=replace(each.sampling, max_tokens=70)), rows[i]
            )
            for i, each in enumerate(requests(folders))
        ]
        wanted = flat(reference.generate(asked, responder=runner.episodes()))
        found = flat(vllm_engine.generate(asked, responder=runner.episodes()))
    assert assert_same(found, wanted) > 10
    assert [each.transcript for each in found] == [each.transcript for each in wanted]
    assert {each.stop_reason for each in wanted} == {"turns", "length"}
    for each in wanted:
        last = np.flatnonzero(np.diff(each.author >= 0, append=False) & (each.author >= 0))
        ends |= {(int(each.tokens[i]) == ours.eos_token_id, int(each.author[i])) for i in last}
    assert ends == {(by_token, who) for by_token in (False, True) for who in (0, 1)}


def test_in_one_vocabulary_too(tiny_pair: Path, one_vocabulary: Any) -> None:
    """Also with stop strings, stop ids, turns, earlier turns, and of programs that ask in two turns and a fork."""
    tokenizer = load_tokenizer(tiny_pair / "senior")
    reference = TorchEngine(*(load_model(tiny_pair / who) for who in ("senior", "junior")), tokenizer)
    starts = start_table(tokenizer, reference.vocabulary)
    prompts, _ = encode_prompts(load_rows(["synthetic:plain:train:8"]), tokenizer, max_prompt_tokens=256)
    strategy = before_word(0.5, starts)
    asked = [
        Request(prompt.tokens, (3 + i, 40 + i), SAMPLINGS[i % len(SAMPLINGS)], strategy)
        for i, prompt in enumerate(prompts)
    ]
    wanted = flat(reference.generate(asked))
    assert all((completion.behaviour_logprobs[completion.author == 0] < 0).any() for completion in wanted[:2])
    text = tokenizer.decode(wanted[0].tokens.tolist())
    begins = [token for token in wanted[1].tokens.tolist() if starts[token]]
    own = tuple(wanted[0].tokens.tolist()[:6])
    more = [
        replace(asked[0], sampling=replace(SAMPLINGS[0], stop=(text[20:23],))),
        replace(asked[0], sampling=replace(SAMPLINGS[0], stop_token_ids=(begins[len(begins) // 2],))),
        replace(asked[0], prompt=(*asked[0].prompt, *own), history=(own,)),
    ]
    found = flat(one_vocabulary.generate([*asked, *more]))
    assert assert_same(found, [*wanted, *flat(reference.generate(more))]) > 15
    assert "stop" in {each.stop_reason for each in found}
    turns = [replace(each, turn_tokens=9, observation_tokens=30) for each in asked[:4]]
    wanted = flat(reference.generate(turns, responder=ScriptedWorld()))
    assert assert_same(flat(one_vocabulary.generate(turns, responder=ScriptedWorld())), wanted) > 5
    assert max(len(each.turns) for each in wanted) == 3
    found, wanted = (
        by_programs(each, tokenizer, strategy, [tokenizer.eos_token_id]) for each in (one_vocabulary, reference)
    )
    assert assert_same(found, wanted) > 5
    by_gaps = replace(asked[0], strategy=word(0.5, 8, word_boundary_table(tokenizer)))
    for why, refused in {
        "ignore_eos": replace(asked[0], sampling=Sampling(max_tokens=8, ignore_eos=True)),
        "frequency_penalty": replace(asked[0], sampling=Sampling(max_tokens=8, frequency_penalty=0.1)),
        "strategies such as before_word in all steps": by_gaps,
        "not where words begin": replace(asked[0], strategy=before_word(0.5, torch.ones_like(starts))),
    }.items():
        with pytest.raises(EngineError, match=why):
            one_vocabulary.generate([asked[1], refused])


def test_what_it_cannot_do_is_refused_by_name(folders: tuple[Path, Path], vllm_engine: Any, tmp_path: Path) -> None:
    penalised = replace(requests(folders)[0], sampling=Sampling(max_tokens=8, presence_penalty=0.5))
    with pytest.raises(EngineError, match="count the tokens of each span alone; leave out repetition_penalty"):
        vllm_engine.generate([penalised])
    senior, junior = folders

    def checked(*more: str) -> str:
        keys = ["rollout.engine=vllm", "selection.strategy=before_word", *more]
        return Preflight(config(senior.parent, tmp_path, *keys)).vocabularies()

    two = f"model.junior={junior}"
    for more, refusal in {
        ("rollout.tensor_parallel=2",): r"=2: must be 1 with rollout\.engine=vllm and selection\.strategy=before_word",
        (two, "rollout.tensor_parallel=2"): r"rollout\.tensor_parallel=2: must be 1 with rollout\.engine=vllm",
        (two, "rollout.vllm.junior_device=cuda:1"): r"junior_device=cuda:1: must be null",
    }.items():
        with pytest.raises(ConfigError, match=refusal):
            checked(*more)
    assert "the junior has 290 of its own" in checked(two)


@pytest.mark.parametrize("vocabularies", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_trains_the_senior(vocabularies: int, folders: tuple[Path, Path], tmp_path: Path) -> None:
    """In one vocabulary, with adapters on the weights of the junior, which cannot be shared by two engines."""
    senior, junior = folders
    pair = ["model.junior=null", "model.lora.rank=2"] if vocabularies == 1 else [f"model.junior={junior}"]
    keys = [*pair, "rollout.engine=vllm", "rollout.vllm.kv_cache_gb=0.05", "selection.strategy=before_word"]
    made = config(senior.parent, tmp_path, *keys, "selection.max_untranslatable=1", "train.steps=1")
    out = train(made, quiet=True)
    (step,) = metrics(out)
    assert step["mismatch/mean_abs"] < 1e-4
    assert step["weights/version_lag"] == 0
    assert step["tandem/handovers"] > 2


@pytest.mark.slow
@pytest.mark.parametrize("vocabularies", [1, 2])
def test_it_evaluates_what_the_reference_engine_does(vocabularies, folders, tmp_path):
    senior, junior = folders
    keys = ["selection.strategy=before_word", "selection.max_untranslatable=1", "data.eval=[synthetic:plain:heldout:6]"]
    keys += [f"model.junior={junior}"] if vocabularies == 2 else []
    found = {}
    for engine in ("torch", "vllm"):
        own = [*keys, f"rollout.engine={engine}", "rollout.vllm.kv_cache_gb=0.05", "eval.samples=2", "eval.k=[1]"]
        made = config(senior.parent, tmp_path / engine, *own)
        found[engine] = evals.evaluate(made, model=senior, out=tmp_path / engine)
    assert set(found["vllm"]) == set(found["torch"]) >= {"pass-at-k", "tandem", "handoff", "legibility"}
    for phase in ("pass-at-k", "tandem", "handoff"):
        one, other = (evals.read_samples(tmp_path / engine / f"{phase}.samples.jsonl") for engine in found)
        assert [(s.tokens, s.author) for s in one] == [(s.tokens, s.author) for s in other]
    for one, other in zip(*(evals.read_samples(tmp_path / e / "legibility.samples.jsonl") for e in found), strict=True):
        assert one.cross_entropy == pytest.approx(other.cross_entropy, abs=1e-4)
