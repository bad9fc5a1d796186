"""The HTTP judge against a real server: what it sends, how patient it is, and that nothing becomes a silent reply."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from fake_judge import FakeJudge, Reply, completion
from tandemrl.config import JudgeConfig
from tandemrl.tasks.rubric.judge import HttpJudge, JudgeError

QUICK = JudgeConfig(retries=2, backoff_s=0.01, timeout_s=5.0, concurrency=4)


def ask(judge: FakeJudge, prompts: list[str], **changes: object) -> list[str]:
    engine = HttpJudge(replace(QUICK, url=judge.url, **changes))
    return engine.ask([[{"role": "user", "content": prompt}] for prompt in prompts])


def failing(times: int, problem: Reply) -> Callable[[str, int], str | Reply]:
    """Every prompt fails so often before it is answered."""
    seen: dict[str, int] = {}
    lock = threading.Lock()

    def answer(prompt: str, _: int) -> str | Reply:
        with lock:
            seen[prompt] = seen.get(prompt, 0) + 1
            return f"re: {prompt}" if seen[prompt] > times else problem

    return answer


def test_replies_come_in_order_and_no_more_at_once_than_allowed() -> None:
    def slowest_first(prompt: str, _: int) -> str:
        time.sleep(0.2 / (1 + int(prompt)))
        return f"re: {prompt}"

    with FakeJudge(slowest_first) as judge:
        assert ask(judge, [str(i) for i in range(24)]) == [f"re: {i}" for i in range(24)]
        assert judge.most_at_once == 4
        assert ask(judge, ["3"], concurrency=1) == ["re: 3"]
        assert len(judge.bodies) == 25


def test_what_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", "s3cret")
    with FakeJudge(lambda prompt, _: "ok", models=("first", "second")) as judge:
        engine = HttpJudge(replace(QUICK, url=judge.url + "/", max_tokens=7, api_key_env="A_KEY"))
        messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
        assert engine.ask([messages], lambda reply: len(judge.bodies) == 3) == ["ok"]
    common = {"model": "first", "messages": messages, "max_completion_tokens": 7, "top_p": 1.0}
    again = [common | {"temperature": 0.3, "seed": seed} for seed in (1, 2)]
    assert judge.bodies == [common | {"temperature": 0.0}, *again]
    assert judge.authorizations == ["Bearer s3cret"] * 3


@pytest.mark.parametrize(
    "problem",
    [
        Reply(429, b"slow down"),
        Reply(200, b"<html>a proxy's page</html>"),
        Reply(200, b'{"choices": []}'),
        Reply(200, b'{"choices": [{"message": {"content": 7}}]}'),
        Reply(200, b"[" * 200_000),
        Reply(200, b"9" * 100_000),  # more digits than Python reads
        Reply(200, completion("fine"), (("content-encoding", "gzip"),)),
    ],
    ids=lambda problem: f"{problem.status} {problem.body[:12]!r} {len(problem.body)}",
)
def test_what_may_pass_is_tried_again(problem: Reply) -> None:
    with FakeJudge(failing(2, problem)) as judge:
        assert ask(judge, ["a", "b"]) == ["re: a", "re: b"]
        assert len(judge.bodies) == 6
    with FakeJudge(failing(3, problem)) as judge, pytest.raises(JudgeError, match=r"failed 3 time\(s\), at last with"):
        ask(judge, ["a", "b"])


def test_failures_and_replies_without_a_score_share_the_retries() -> None:
    """At most 1 + retries requests for a prompt. A failure alone leaves the temperature as it is."""
    said = {"fails": ["", "hm", "7", "no"], "odd": ["hm", "hm", "no", "7"], "odd, then down": ["hm", "", "", "7"]}
    asked: dict[str, list[str]] = {prompt: [*replies] for prompt, replies in said.items()}
    lock = threading.Lock()

    def answer(prompt: str, _: int) -> str | Reply:
        with lock:
            return asked[prompt].pop(0) or Reply(503, b"busy")

    with FakeJudge(answer) as judge:
        engine = HttpJudge(replace(QUICK, url=judge.url))
        prompts = [[{"role": "user", "content": prompt}] for prompt in said]
        assert engine.ask(prompts, str.isdigit) == ["7", "no", "hm"]
        assert len(judge.bodies) == 3 * (1 + QUICK.retries)
    sent = [body["temperature"] for body in judge.bodies if body["messages"][0]["content"] == "fails"]
    assert sent == [0.0, 0.0, 0.3]


def test_one_prompt_without_a_reply_fails_the_batch_and_stops_the_rest() -> None:
    def answer(prompt: str, _: int) -> str | Reply:
        time.sleep(0.02)
        return Reply(400, b"too long") if prompt == "5" else "fine"

    with FakeJudge(answer) as judge, pytest.raises(JudgeError, match="HTTP 400: too long"):
        ask(judge, [str(i) for i in range(400)])
    assert len(judge.bodies) < 100


def test_a_judge_that_is_not_there_is_found_out_at_once() -> None:
    with FakeJudge(lambda prompt, _: "fine") as judge:
        url = judge.url
    with pytest.raises(JudgeError, match=r"at http://127\.0\.0\.1.*ConnectError"):
        HttpJudge(replace(QUICK, url=url, model="named"))
    with pytest.raises(JudgeError, match=r"judge\.url is not set"):
        HttpJudge(QUICK)
    with pytest.raises(JudgeError, match=r"judge\.api_key_env=NO_SUCH_KEY"):
        HttpJudge(replace(QUICK, url=url, api_key_env="NO_SUCH_KEY"))


def test_a_server_that_is_still_starting_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandemrl.processes.http.POLL_S", 0.01)
    with FakeJudge(lambda prompt, number: "fine", models=Reply(503, b"loading")) as judge:
        threading.Timer(0.2, lambda: setattr(judge, "models", ("rrm",))).start()
        assert HttpJudge(JudgeConfig(url=judge.url, wait_s=60.0)).model == "rrm"
        judge.models = Reply(503, b"loading")
        began = time.monotonic()
        with pytest.raises(JudgeError, match=r"failed 1 time\(s\), at last with: HTTP 503: loading"):
            HttpJudge(JudgeConfig(url=judge.url, wait_s=0.2, retries=0))
        assert time.monotonic() - began >= 0.2


def test_the_model_is_the_one_that_is_served() -> None:
    def model(models: tuple[str, ...] | Reply, wanted: str | None) -> str:
        with FakeJudge(lambda prompt, _: "fine", models=models) as judge:
            return HttpJudge(replace(QUICK, url=judge.url, model=wanted)).model

    assert model(("a", "b"), None) == "a"
    assert model(("a", "b"), "b") == "b"
    assert model(Reply(404), "b") == "b"  # an endpoint without a list
    with pytest.raises(JudgeError, match=r"judge\.model=c: .* serves a, b"):
        model(("a", "b"), "c")
    with pytest.raises(JudgeError, match=r"set judge\.model"):
        model(Reply(404), None)
    with pytest.raises(JudgeError, match="list of models is empty"):
        model((), None)
