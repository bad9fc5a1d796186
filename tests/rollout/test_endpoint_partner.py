"""A junior behind an endpoint that knows nothing of words: what it writes is cut, asked for again, counted."""

import json
import socket
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fake_judge import FakeJudge, Reply
from helpers import IDS, flat, prepared, qwen3, tokenizer
from runs import config, metrics, samples
from tandemrl.config import ConfigError
from tandemrl.config.schema import JuniorEndpointConfig
from tandemrl.models.loading import load_tokenizer
from tandemrl.rollout.endpoint_partner import EndpointJunior
from tandemrl.rollout.engine import Completion, EngineError, Request, Sampling, Turn, check_authors
from tandemrl.rollout.engine import Reply as Answer
from tandemrl.rollout.torch_engine import TorchEngine
from tandemrl.selection.whole_words import before_text_word, text_sentence, text_tables
from tandemrl.training.loop import train
from tandemrl.training.preflight import Preflight
from tandemrl.types import Transcript

EOS = IDS["<eos>"]
RULE = before_text_word(0.5, text_tables(tokenizer()))
KEYS = tuple(range(24))
SAMPLING = Sampling(24)


def reply(text: str, reason: str = "length") -> Reply:
    return Reply(body=json.dumps({"choices": [{"text": text, "finish_reason": reason}]}).encode())


def junior(url: str, **settings: Any) -> EndpointJunior:
    patience = {"retries": 1, "backoff_s": 0.01, "timeout_s": 30.0} | settings
    return EndpointJunior(JuniorEndpointConfig(url=url, **patience), tokenizer())


def engine_of(partner: EndpointJunior) -> TorchEngine:
    return TorchEngine(prepared(qwen3(5)), None, tokenizer(), partner=partner)


def written(partner: EndpointJunior, sampling: Sampling = SAMPLING, keys: Sequence[int] = KEYS) -> list[Completion]:
    asked = Request((3, 4), tuple(keys), sampling, RULE, junior_prompt=(5, 6, 7))
    found = flat(engine_of(partner).generate([asked]))
    check_authors(found, RULE)
    return found


def spans(completion: Completion) -> Iterator[tuple[str, str]]:
    """Each span of the junior, with what is before it."""
    edges = [0, *(np.flatnonzero(np.diff(completion.author)) + 1).tolist(), len(completion.tokens)]
    for start, end in pairwise(edges):
        if start < end and completion.author[start] == 0:
            parts = completion.tokens[:start], completion.tokens[start:end]
            before, span = (tokenizer().decode(part, skip_special_tokens=True) for part in parts)
            yield before, span


def endpoint(answer: Callable[[list[int], int], Reply], **listed: Any) -> FakeJudge:
    models = Reply(body=json.dumps({"data": [{"id": "fake", **listed}]}).encode())
    return FakeJudge(answer, path="/v1/completions", models=models)


def go_on(prompt: list[int], number: int) -> Reply:
    return reply(" go on and on and on" if prompt[3:] else "go on and on and on")


def test_words_are_cut_where_the_draws_say_and_characters_are_completed() -> None:
    def answer(prompt: list[int], number: int) -> Reply:
        so_far = tokenizer().decode(prompt[3:])
        assert prompt[:3] == [5, 6, 7]
        if so_far.endswith("caf"):  # the rest of a word that was cut amid a character
            return reply("\u00e9 on and on and on")
        said = "caf\ufffd" if number % 2 else "go on and on and on"
        return reply(f" {said}" if so_far else said)

    with endpoint(answer) as server:
        found = written(junior(server.url))
    said = [(before, text) for completion in found for before, text in spans(completion)]
    assert len(said) > 12
    assert any("caf\u00e9" in text for _, text in said)
    for before, text in said:
        assert text.startswith("" if not before else " ")
        assert set(text.split()[:-1]) <= {"caf\u00e9", "go", "on", "and"}  # the last one may be cut at max_tokens
    assert {c.stop_reason for c in found} <= {"eos", "length", "untranslatable"}
    assert len({each["seed"] for each in server.bodies}) > 0.9 * len(server.bodies)


def test_a_junior_that_finishes_steps_is_cut_after_a_blank_line() -> None:
    """However little comes at a time. Where the text ends with a step, its end belongs to the senior's."""
    rule, step = text_sentence("junior", text_tables(tokenizer())), "a b\n\nc"

    def answer(prompt: list[int], number: int) -> Reply:
        text = tokenizer().decode(prompt[3:])
        if text.endswith(step[:4]):  # amid the blank line
            return reply(f"{step[4:]} d\n\ne f")
        said = f" {step}" if text else step
        seed = server.bodies[number - 1]["seed"]
        return (reply(said[:-2]), reply(f"{said} d\n\ne f", "stop"), reply(said, "stop"))[seed % 3]

    with endpoint(answer) as server:
        asked = Request((3, 4), KEYS, Sampling(60), rule, junior_prompt=(5, 6, 7))
        found = flat(engine_of(junior(server.url)).generate([asked]))
    check_authors(found, rule)
    own = {text for c in found for _, text in spans(c)}
    assert own >= {step, f" {step}"}
    assert all(step.startswith(text.lstrip()) for text in own)  # the last one may be cut at max_tokens
    assert not any(c.stop_reason == "eos" and c.author[-1] == 0 for c in found)


class World:
    """Answers each of the first two turns with one letter; to the junior it says another one, after an end."""

    def __init__(self) -> None:
        self.ready: list[Answer] = []

    def submit(self, turn: Turn) -> None:
        said = {"context": (30,), "junior_context": (EOS, 40)} if turn.index < 2 else {"stop_reason": "turns"}
        self.ready.append(Answer(turn.number, **said))

    def replies(self, *, wait: bool) -> list[Answer]:
        ready, self.ready = self.ready, []
        return ready

    def transcript(self, number: int) -> Transcript:
        return Transcript(())


def test_in_a_later_turn_the_junior_reads_the_longer_conversation() -> None:
    def answer(prompt: list[int], number: int) -> Reply:
        return reply(" go", "stop") if prompt[3:] and prompt[-1] != 40 else reply("go", "stop")

    asked = Request((3, 4), KEYS, SAMPLING, RULE, 8, 9, junior_prompt=(5, 6, 7))
    with endpoint(answer) as server:
        found = flat(engine_of(junior(server.url)).generate([asked], responder=World()))
    check_authors(found, RULE)
    wanted = {(5, 6, 7)}
    for completion in found:
        so_far: tuple[int, ...] = (5, 6, 7)
        for turn in completion.turns:
            so_far += (*tokenizer().encode(tokenizer().decode(turn, skip_special_tokens=True)), EOS, 40)
            wanted.add(so_far)
    turns = [body["prompt"].count(40) for body in server.bodies]
    for body, count in zip(server.bodies, turns, strict=True):
        end = max((i for i, token in enumerate(body["prompt"]) if token == 40), default=2) if count else 2
        assert tuple(body["prompt"][: end + 1]) in wanted
    assert min(map(turns.count, (0, 1, 2))) > 3
    assert len({body["seed"] for body in server.bodies}) > 0.9 * len(server.bodies)
    assert {len(completion.turns) for completion in found if completion.stop_reason == "turns"} == {3}


def test_no_default_of_a_server_changes_how_the_junior_samples() -> None:
    own = {"temperature": 0.7, "top_p": 0.8, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    neutral = own | {"presence_penalty": 0.0, "frequency_penalty": 0.0, "skip_special_tokens": False}
    neutral |= {"samplers": ["temperature", "min_p", "top_k", "top_p"], "mirostat": 0, "dynatemp_range": 0.0}
    with endpoint(go_on) as server:
        written(junior(server.url), Sampling(8, 0.7, 0.8))
        body = server.bodies[-1]
        assert {name: body[name] for name in body if name not in ("model", "prompt", "max_tokens", "seed")} == neutral
        written(junior(server.url, leave_out=("top_k", "skip_special_tokens")), Sampling(8, 0.7, 0.8, min_p=0.1))
        assert not {"top_k", "skip_special_tokens"} & server.bodies[-1].keys()
        assert server.bodies[-1]["min_p"] == 0.1
        with pytest.raises(EngineError, match=r"top_k=20: model\.junior_endpoint\.leave_out keeps it"):
            written(junior(server.url, leave_out=("top_k",)), Sampling(8, top_k=20))
        with pytest.raises(EngineError, match=r"penalties: .*leave out repetition_penalty"):
            written(junior(server.url), Sampling(8, repetition_penalty=1.1))


def test_control_tokens_of_the_junior_are_no_text() -> None:
    with endpoint(lambda prompt, number: reply(" a<pad> b" if prompt[3:] else "a<pad>")) as server:
        lost = [c for c in written(junior(server.url)) if (c.author == 0).any() or c.stop_reason == "untranslatable"]
    assert len(lost) > 12
    assert {c.stop_reason for c in lost} == {"untranslatable"}
    ends = []
    for end in ("", "<eos>"):
        with endpoint(lambda prompt, number, end=end: reply((" ok" if prompt[3:] else "ok") + end, "stop")) as server:
            ends.append([c.tokens.tolist() for c in written(junior(server.url))])
    assert ends[0] == ends[1]


@pytest.mark.parametrize("listed", [{"max_model_len": 12}, {"meta": {"n_ctx_train": 99, "n_ctx": 12}}])
def test_the_junior_is_asked_for_no_more_than_it_can_read(listed: dict[str, Any]) -> None:
    with endpoint(go_on, **listed) as server:
        found = written(junior(server.url))
    assert all(len(body["prompt"]) + body["max_tokens"] <= 12 for body in server.bodies)
    assert sum(c.stop_reason == "length" and len(c.tokens) < 24 for c in found) > 12
    assert not any(c.stop_reason == "failed" for c in found)


def test_the_end_of_a_text_is_the_end_unless_the_senior_has_the_next_word() -> None:
    with endpoint(lambda prompt, number: reply(" ok" if prompt[3:] else "ok", "stop")) as server:
        found = written(junior(server.url))
    last = [(completion, *text) for completion in found for text in [*spans(completion)][-1:]]
    ended = [completion for completion, *_ in last if completion.author[-1] == 0 and completion.stop_reason == "eos"]
    went_on = [completion for completion in found for text in [*spans(completion)] if completion.author[-1] == 1]
    assert len(ended) > 1
    assert len(went_on) > 1  # it had written all of its words, so its end was dropped
    assert all(completion.tokens[-1] == tokenizer().eos_token_id for completion in ended)


def test_answers_that_begin_no_word_are_asked_again_with_another_seed() -> None:
    def answer(prompt: list[int], number: int) -> Reply:  # a third of the seeds begin no word
        return reply(" go on and on" if server.bodies[number - 1]["seed"] % 3 else "go on and on")

    with endpoint(answer) as server:
        engine = engine_of(junior(server.url, attempts=9))
        found = flat(engine.generate([Request((3, 4), KEYS, SAMPLING, RULE, junior_prompt=(5, 6, 7))]))
    assert not any(c.stop_reason == "failed" for c in found)
    assert engine.passes.spans < engine.passes.asks <= len(server.bodies)
    with endpoint(lambda prompt, number: reply("on and on", "stop") if prompt[3:] else reply("go on and on")) as server:
        found = written(junior(server.url, attempts=3, max_failure_rate=0.99))
        failed = [c for c in found if c.stop_reason == "failed"]
        assert len(failed) > 6
        assert all(c.author[-1] == 1 for c in failed if len(c.tokens))
        with pytest.raises(EngineError, match=r"rollouts got no words .*max_failure_rate=0\.1; .* word in 3 attempts"):
            written(junior(server.url, attempts=3))


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Reply(body=b"{}"), "not a completion"),
        (Reply(status=503, body=b"loading"), "HTTP 503: loading"),
        (Reply(status=400, body=b"prompt must be a string"), "HTTP 400: prompt must be"),
        (Reply(body=b"{}", delay=3.0), "no complete reply within 1 s"),
        (reply("a\ufffdb"), "began with a word in 8 attempts"),
        (reply("", "length"), "began with a word in 8 attempts"),
    ],
    ids=["garbage", "loading", "strings", "slow", "cut", "nothing"],
)
def test_an_endpoint_that_does_not_work_ends_the_run_with_its_reason(answer: Reply, reason: str) -> None:
    with (
        endpoint(lambda prompt, number: answer) as server,
        pytest.raises(EngineError, match=rf"(?s)rollouts got no words from the junior, .*{reason}"),
    ):
        written(junior(server.url, timeout_s=1.0 if answer.delay else 30.0), keys=KEYS[:6])


def test_a_dead_endpoint_is_found_before_the_run() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    with pytest.raises(EngineError, match=r"model\.junior_endpoint\.url\) failed 2 time"):
        junior(url)


def test_a_run_trains_with_a_junior_behind_an_endpoint(tiny_pair: Path, other_junior: Path, tmp_path: Path) -> None:
    known = load_tokenizer(other_junior)

    def answer(prompt: list[int], number: int) -> Reply:
        text = known.decode(prompt)
        if text.endswith("is"):
            return reply("nothing", "stop")
        return reply((" " if text[-1:] not in "\n" else "") + "First 3 plus 4 is 7.\n\nNext 7")

    with endpoint(answer) as server:
        knobs = ["selection.strategy=before_word", f"model.junior_endpoint.url={server.url}", "train.steps=2"]
        more = ["model.junior_endpoint.attempts=2", "model.junior_endpoint.max_failure_rate=0.9", "train.eval_every=0"]
        settings = config(tiny_pair, tmp_path / "out", f"model.junior={other_junior}", *knobs, *more, "data.eval=[]")
        preflight = Preflight(settings)
        assert preflight.checks["model.junior_endpoint.url"]() == f"{server.url} serves fake"
        assert "model.junior" not in preflight.checks
        out = train(settings, quiet=True)
        with pytest.raises(ConfigError, match="must be before_word, since the junior is behind an endpoint"):
            Preflight(config(tiny_pair, tmp_path, *knobs[1:])).vocabularies()
    for step in metrics(out):
        assert step["mismatch/mean_abs"] < 1e-5
        assert 1 <= step["tandem/asks_per_span"] <= 2
        own = [line["stop_reason"] for line in samples(out) if line["step"] == step["step"]]
        assert step["tandem/failed"] == own.count("failed") / len(own)
        assert step["reward/unscored"] == pytest.approx(step["tandem/failed"] + step["tandem/untranslatable"])
    assert 0 < sum(line["stop_reason"] == "failed" for line in samples(out)) < 30
