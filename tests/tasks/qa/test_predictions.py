"""`eval qa`: predictions in gold order, as MuSiQue's script takes them, and a model behind an endpoint."""

import json

import pytest

import small_world
from fake_judge import FakeJudge, Reply
from runs import cli
from tandemrl.config import load
from tandemrl.data.rows import Row
from tandemrl.evals import Endpoint, Sample, evaluate, read_samples
from tandemrl.rewards.protocol import Score
from tandemrl.rollout.envs.environment import Environment
from tandemrl.tasks.qa.predictions import Prediction, predictions


def question(name, answers, supporting, ids=("0", "1", "2"), **info):
    docs = [{"id": i, "title": i, "body": "words", "is_supporting": i in supporting} for i in ids]
    messages = ({"role": "user", "content": "Who?"},)
    return Row(f"musique/{name}", messages, "musique", json.dumps(answers), {"id": name, "docs": docs, **info})


def answered(row, answer=None, cited=None, number=0, **more):
    """A sample that completed with an answer; without one it stopped before."""
    call = {"name": "complete", "arguments": {"final_answer": answer, "cited_doc_ids": cited, "reasoning": "so"}}
    calls = [] if answer is None else [{"type": "function", "function": call}]
    messages = [{"role": "assistant", "content": "", "tool_calls": calls}]
    written = ("", [], 1, "S1", 1, 1.0, "eos")
    transcript = {"messages": messages, "state": {}, "counts": {}}
    return Sample(0, row.example_id, row.data_source, "solo", number, 0, *written, transcript=transcript)._replace(
        **more
    )


ROWS = [
    question("2hop__1", ["Ann Lee"], ("0", "2")),
    question("2hop__2", ["the sea", "ocean"], ("1",)),
    question("3hop__1", ["1912"], ("a",), ids=("a", "b")),
    question("2hop__3", ["Bo"], ("1",)),
]


def test_predictions_are_in_gold_order_and_complete():
    """The second sample of a problem does not count; what is cited twice, or is no document, is not either."""
    samples = [
        answered(ROWS[1], "Sea", ["1"]),
        answered(ROWS[1], "nothing", ["0"], number=1),
        answered(ROWS[0], "Ann", ["2", "0", "2", "17", "x"]),
        answered(ROWS[2]),
    ]
    assert predictions(samples, ROWS) == [
        Prediction("2hop__1", "Ann", [2, 0], True),
        Prediction("2hop__2", "Sea", [1], True),
        Prediction("3hop__1", "", [], False),
        Prediction("2hop__3", "", [], False),  # too long: no sample
    ]


# ------------------------------------------------------------------------------------------------------------- endpoint


def finish(answer: str) -> None:
    """Ends the episode.

    Args:
        answer: What is answered.
    """


class Adding(Environment):
    tools = (small_world.add, finish)
    ends = frozenset({"finish"})
    system = "Add."

    def score(self, row, transcript):
        sums = (transcript.state or {}).get("sums", [])
        return Score(float(len(sums)), {"acc": 1.0, "em": 0.5}, None)


def said(content="", calls=(), tokens=3, finish="stop"):
    """A chat completion with calls (id, name, arguments as text)."""
    wanted = [{"id": i, "type": "function", "function": {"name": n, "arguments": a}} for i, n, a in calls]
    message = {"role": "assistant", "content": content, **({"tool_calls": wanted} if wanted else {})}
    choice = {"message": message, "finish_reason": finish}
    return Reply(body=json.dumps({"choices": [choice], "usage": {"completion_tokens": tokens}}).encode())


ADD = ("c1", "add", '{"a": 1, "b": 2}')


def remote(tmp_path, rows, script, *extra, **more):
    """Play ``script(turn, body)`` behind an endpoint; the result, its samples, and what was asked."""
    data = tmp_path / "rows.jsonl"
    lines = [{"prompt": r.messages[-1]["content"], "data_source": "own", "extra_info": {"n_hops": 2}} for r in rows]
    data.write_text("".join(json.dumps(line | {"reward_model": {"ground_truth": "x"}}) + "\n" for line in lines))
    config = load(
        None,
        [f"data.eval=[{data}]", "eval.profile=custom", "eval.samples=1", "eval.k=[1]", "eval.max_tokens=20", *extra],
    )

    def answer(_, number):
        body = server.bodies[number - 1]
        return script(sum(m["role"] == "assistant" for m in body["messages"]), body)

    with FakeJudge(answer) as server:
        endpoint = Endpoint(server.url, retries=1, backoff_s=0.0, timeout_s=20.0)
        result, asked = None, []
        for _ in range(2):  # the second time nobody is asked
            kept = evaluate(config, model=endpoint, out=tmp_path / "out", environment=Adding(), **more)["pass-at-k"]
            assert (result or kept, asked or server.bodies) == (kept, server.bodies)
            result, asked = kept, [*server.bodies]
    return result, read_samples(tmp_path / "out" / result["samples"]), server.bodies


def test_a_model_behind_an_endpoint_plays_the_same_episodes(tmp_path):
    """A call that can be made and one that cannot, each answered by its id; then an answer in words."""

    def script(turn, body):
        if turn == 0:
            return said("first", [("bad", "sub", "{}"), ADD])
        if turn == 1:
            return said("", [("c2", "add", "{not json"), ("c3", "add", '{"a": 3, "b": 1}')])
        return said("it is \ud800 three")

    result, (sample,), bodies = remote(tmp_path, ROWS[:1], script)
    assert [m["role"] for m in bodies[0]["messages"]] == ["system", "user"]
    assert [tool["function"]["name"] for tool in bodies[0]["tools"]] == ["add", "finish"]
    assert bodies[0]["model"] == "fake"
    second = bodies[1]["messages"][2:]
    assert [call["id"] for call in second[0]["tool_calls"]] == ["bad", "c1"]
    answers = {m["tool_call_id"]: m["content"] for m in second[1:]}
    assert answers["c1"] == "3 x"
    assert answers["bad"].startswith("Error: there is no tool 'sub'")
    third = {m["tool_call_id"]: m["content"] for m in bodies[2]["messages"] if m.get("tool_call_id") in ("c2", "c3")}
    assert third["c2"] == "Error: the arguments of add must be an object"
    assert third["c3"] == "Error: no threes"
    assert [body["max_completion_tokens"] for body in bodies] == [20, 17, 14]
    assert (sample.author, sample.senior_share, sample.tokens) == (None, None, [])
    assert (sample.length, sample.turns, sample.stop_reason, sample.score) == (9, 3, "eos", 1.0)
    assert sample.text.splitlines()[0] == "first"
    assert sample.text.endswith("it is ? three")
    counts = sample.transcript["counts"]
    assert (counts["tool_calls"], counts["invalid_calls"], counts["tool_errors"]) == (2, 2, 1)
    macro = result["metrics"]["macro"]
    assert (macro["em"], macro["hops=2/em"], macro["turns"], macro["pass@1"]) == (0.5, 0.5, 3.0, 1.0)
    assert "senior_share" not in macro
    assert (result["config"]["engine"], result["config"]["authors"]) == ("endpoint", "unknown")


def test_an_endpoint_without_a_parser_of_calls_has_them_in_the_text(tmp_path):
    """One call is told as such, and answered by an id; where another one cannot be read, both are in words."""
    call = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'

    def script(turn, body):
        return said([f"so {call}", f"{call}<tool_call>{{", "3"][turn])

    _, (sample,), bodies = remote(tmp_path, ROWS[:1], script)
    written, answer = bodies[1]["messages"][2:]
    assert (written["content"], json.loads(written["tool_calls"][0]["function"]["arguments"])) == (
        "so",
        {"a": 1, "b": 2},
    )
    assert answer == {"role": "tool", "tool_call_id": written["tool_calls"][0]["id"], "content": "3 x"}
    assert [(m["role"], m["content"]) for m in bodies[2]["messages"][4:]] == [
        ("assistant", f"{call}<tool_call>{{"),
        ("user", "3 x"),
        ("user", "Error: a <tool_call> is not closed by </tool_call>"),
    ]
    counts = sample.transcript["counts"]
    assert (counts["tool_calls"], counts["invalid_calls"], sample.turns) == (2, 1, 3)


@pytest.mark.parametrize(
    ("script", "extra", "turns", "stop"),
    [
        (lambda turn, body: said("", [ADD]), "rollout.max_turns=2", 2, "turns"),
        (lambda turn, body: said("", [ADD], tokens=11), "rollout.max_turns=9", 2, "length"),
        (lambda turn, body: said("", [ADD]), "rollout.observation_tokens=1", 2, "length"),
        (lambda turn, body: said("cut", finish="length"), "rollout.max_turns=9", 1, "length"),
        (lambda turn, body: said("", [("f", "finish", '{"answer": "3"}')]), "rollout.max_turns=9", 1, "eos"),
    ],
)
def test_an_episode_ends_at_its_limits(tmp_path, script, extra, turns, stop):
    _, (sample,), _ = remote(tmp_path, ROWS[:1], script, extra)
    assert (sample.turns, sample.stop_reason) == (turns, stop)


def test_the_command_evaluates_an_endpoint_and_writes_predictions(tmp_path):
    """Two hops, golden retrieval: it searches, then cites one of the two documents, with the right answer."""
    gold = question("2hop__7", ["Ann"], ("0", "2"), n_hops=2)
    line = {"prompt": "Who?", "data_source": "musique", "extra_info": gold.extra_info}
    data = tmp_path / "gold.jsonl"
    data.write_text(json.dumps(line | {"reward_model": {"ground_truth": '["Ann"]'}}) + "\n")
    given = {"reasoning": "so", "final_answer": "Ann", "cited_doc_ids": ["2"]}

    def answer(_, number):
        search = ("s", "retrieve_documents", '{"query": "who"}')
        return said("", [search if number == 1 else ("c", "complete", json.dumps(given))])

    with FakeJudge(answer) as server:
        command = ["eval", "qa", "--endpoint", server.url, "--data", str(data), "--out", str(tmp_path / "out")]
        command += ["--predictions", str(tmp_path / "p.jsonl"), "retrieval.retriever=golden", "rollout.tool_workers=1"]
        output = cli(*command)
        assert "Document ID: 0" in server.bodies[1]["messages"][-1]["content"]
    assert "hops 2" in output
    assert "authors unknown" in output
    wanted = {"id": "2hop__7", "predicted_answer": "Ann", "predicted_support_idxs": [2], "predicted_answerable": True}
    assert json.loads((tmp_path / "p.jsonl").read_text()) == wanted
    macro = json.loads((tmp_path / "out" / "pass-at-k.json").read_text())["metrics"]["macro"]
    assert (macro["em"], macro["citation"], macro["recall"], macro["hops=2/f1"]) == (1.0, 0.5, 1.0, 1.0)
    assert (macro["f1_official"], macro["support_f1"]) == (1.0, pytest.approx(2 / 3))  # 1 of 2, and nothing wrong
