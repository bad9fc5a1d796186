"""A junior behind an endpoint that knows nothing of words: what it writes is cut, asked for again, counted."""

import json
import socket
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fake_judge import FakeJudge, Reply
from helpers import flat, prepared, qwen3, tokenizer
from runs import config, metrics, samples
from tandemrl.config import ConfigError
from tandemrl.config.schema import JuniorEndpointConfig
from tandemrl.models.loading import load_tokenizer
from tandemrl.rollout.endpoint_partner import EndpointJunior
from tandemrl.rollout.engine import Completion, EngineError, Request, Sampling, check_authors
from tandemrl.rollout.torch_engine import TorchEngine
from tandemrl.selection.whole_words import before_text_word, text_tables
from tandemrl.training.loop import train
from tandemrl.training.preflight import Preflight

RULE = before_text_word(0.5, text_tables(tokenizer()))
KEYS = tuple(range(40))


def reply(text: str, reason: str = "length") -> Reply:
    return Reply(body=json.dumps({"choices": [{"text": text, "finish_reason": reason}]}).encode())


def junior(url: str, **settings: Any) -> EndpointJunior:
    patience = {"retries": 1, "backoff_s": 0.01, "timeout_s": 5.0} | settings
    return EndpointJunior(JuniorEndpointConfig(url=url, **patience), tokenizer())


def written(partner: EndpointJunior, max_tokens: int = 24) -> list[Completion]:
    engine = TorchEngine(prepared(qwen3(5)), None, tokenizer(), partner=partner)
    asked = Request((3, 4), KEYS, Sampling(max_tokens=max_tokens), RULE, junior_prompt=(5, 6, 7))
    found = flat(engine.generate([asked]))
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


def endpoint(answer: Callable[[list[int], int], Reply]) -> FakeJudge:
    return FakeJudge(answer, path="/v1/completions")


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
    assert len(said) > 20
    assert any("caf\u00e9" in text for _, text in said)
    for before, text in said:
        assert text.startswith("" if not before else " ")
        assert set(text.split()[:-1]) <= {"caf\u00e9", "go", "on", "and"}  # the last one may be cut at max_tokens
    assert {c.stop_reason for c in found} <= {"eos", "length", "untranslatable"}
    body = server.bodies[0]
    assert {"model", "prompt", "max_tokens", "seed", "temperature", "top_p"} == set(body)
    assert len({each["seed"] for each in server.bodies}) > 0.9 * len(server.bodies)


def test_the_end_of_a_text_is_the_end_unless_the_senior_has_the_next_word() -> None:
    with endpoint(lambda prompt, number: reply(" ok" if prompt[3:] else "ok", "stop")) as server:
        found = written(junior(server.url))
    last = [(completion, *text) for completion in found for text in [*spans(completion)][-1:]]
    ended = [completion for completion, *_ in last if completion.author[-1] == 0 and completion.stop_reason == "eos"]
    went_on = [completion for completion in found for text in [*spans(completion)] if completion.author[-1] == 1]
    assert len(ended) > 3
    assert len(went_on) > 3  # it had written all of its words, so its end was dropped
    assert all(completion.tokens[-1] == tokenizer().eos_token_id for completion in ended)


def test_answers_that_begin_no_word_are_asked_again_with_another_seed() -> None:
    with endpoint(lambda prompt, number: reply("go on and on" if number % 2 else " go on and on")) as server:
        found = written(junior(server.url, attempts=9))
    assert not any(c.stop_reason == "failed" for c in found)
    with endpoint(lambda prompt, number: reply("on and on", "stop") if prompt[3:] else reply("go on and on")) as server:
        found = written(junior(server.url, attempts=3, max_failure_rate=0.99))
        failed = [c for c in found if c.stop_reason == "failed"]
        assert len(failed) > 10
        assert all(c.author[-1] == 1 for c in failed if len(c.tokens))
        with pytest.raises(EngineError, match=r"rollouts got no words .*max_failure_rate=0\.1; .* word in 3 attempts"):
            written(junior(server.url, attempts=3))


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Reply(body=b"{}"), "not a completion"),
        (Reply(body=b"<html>"), "not JSON"),
        (Reply(status=503, body=b"loading"), "HTTP 503: loading"),
        (Reply(status=400, body=b"prompt must be a string"), "HTTP 400: prompt must be"),
        (Reply(body=b"{}", delay=1.0), "ReadTimeout"),
        (reply("a\ufffdb"), "began with a word in 8 attempts"),
        (reply("", "length"), "began with a word in 8 attempts"),
    ],
    ids=["garbage", "html", "loading", "strings", "slow", "cut", "nothing"],
)
def test_an_endpoint_that_does_not_work_ends_the_run_with_its_reason(answer: Reply, reason: str) -> None:
    with (
        endpoint(lambda prompt, number: answer) as server,
        pytest.raises(EngineError, match=rf"(?s)rollouts got no words from the junior, .*{reason}"),
    ):
        written(junior(server.url, timeout_s=0.3))


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
        own = [line["stop_reason"] for line in samples(out) if line["step"] == step["step"]]
        assert step["tandem/failed"] == own.count("failed") / len(own)
        assert step["reward/unscored"] == pytest.approx(step["tandem/failed"] + step["tandem/untranslatable"])
    assert 0 < sum(line["stop_reason"] == "failed" for line in samples(out)) < 30
