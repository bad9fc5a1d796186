"""Evaluation over turns: samples whose own tokens count and whose world does not, their metrics, and phases."""

import json
import re
from functools import partial

import numpy as np
import pytest
import torch

import small_world
from agents import make_agents
from helpers import tokenizer
from runs import lines
from tandemrl import evals
from tandemrl.config import ConfigError, load
from tandemrl.data.rows import Row
from tandemrl.evals import Sample, authors_of, measures, protocol, remote
from tandemrl.evals.measures import author_runs
from tandemrl.processes.http import Response, RetryableError
from tandemrl.rewards.calls import is_metric
from tandemrl.rollout.envs.environment import schema_of
from tandemrl.selection import replay


def graded_sample(problem, number=0, *, correct=False, group=None, counts=None, arm="solo", **more):
    """A sample of the set "a"; ``counts`` make it an episode."""
    transcript = None if counts is None else {"messages": [], "state": None, "counts": counts}
    written = ("text", [], 4, "S4", 1, 1.0, "eos", float(correct), correct, None)
    sample = Sample(problem, f"a/{problem}", "a", arm, number, 0, *written)
    return sample._replace(group=group, transcript=transcript, **more)


def summary(samples, k=(1,), bootstrap=0):
    return evals.summarise(samples, partial(evals.graded, k=k), bootstrap=bootstrap, seed=0)["macro"]


def test_authors_as_run_lengths_know_the_world():
    author = np.array([1, 1, 0, -1, -1, -1, 0, 1], dtype=np.int8)
    assert author_runs(author) == "S2J1C3J1S1"
    assert np.array_equal(authors_of("S2J1C3J1S1"), author)
    assert authors_of("").tolist() == []
    with pytest.raises(ValueError, match="S1W2"):
        authors_of("S1W2")


def test_a_line_of_one_turn_is_what_it_was_and_an_old_one_is_read():
    old = graded_sample(0).to_json()
    assert {"turns", "parts", "transcript", "group"}.isdisjoint(old)
    assert Sample(**old) == graded_sample(0)
    new = graded_sample(0, turns=2, parts={"f1": 0.5}, group="hops=2", counts={"tool_calls": 1.0})
    assert list(new.to_json())[-4:] == ["turns", "parts", "transcript", "group"]
    assert Sample(**new.to_json()) == new


def test_parts_of_scores_are_rates_and_a_missing_one_is_nothing():
    """Problem 0: f1 .5 and 1, em 0 and 1. Problem 1: f1 0 twice, of which one sample does not say so, and no em."""
    parts = [{"f1": 0.5, "em": 0.0}, {"f1": 1.0, "em": 1.0}, {"f1": 0.0}, None]
    samples = [graded_sample(i // 2, i % 2, parts=part) for i, part in enumerate(parts)]
    macro = summary(samples, bootstrap=10)
    assert (macro["f1"], macro["em"]) == ((0.75 + 0.0) / 2, (0.5 + 0.0) / 2)
    assert macro["f1/low"] <= macro["f1"] <= macro["f1/high"]


def test_no_score_may_have_a_part_with_the_name_of_a_metric_of_evaluations():
    """Such a part would be replaced by the metric without a word."""
    samples = [graded_sample(0, turns=2, counts={})]
    named = evals.summarise(samples, partial(measures.accepted, k=(1, 1)), bootstrap=0, seed=0)["macro"]
    assert [name for name in named if not is_metric(name)] == ["unscored"]  # that a judge gave none, which a score says
    assert {"pass@1", "verified_pass@1", "rejected_rate", "problems", "out_of_turns"} <= named.keys()


def test_turns_and_what_happened_in_them_are_averaged():
    samples = [
        graded_sample(0, 0, turns=3, counts={"tool_calls": 2.0, "tool_errors": 1.0}, stop_reason="turns"),
        graded_sample(0, 1, turns=1, counts={}),
        graded_sample(1, 0, turns=4, counts={"tool_calls": 4.0, "invalid_calls": 2.0}),
        graded_sample(1, 1, turns=2, counts={"tool_calls": 1.0}, stop_reason="length"),
    ]
    macro = summary(samples)
    assert macro["turns"] == (2.0 + 3.0) / 2
    assert (macro["tool_calls"], macro["tool_errors"], macro["invalid_calls"]) == ((1 + 2.5) / 2, 0.5 / 2, 1.0 / 2)
    assert (macro["out_of_turns"], macro["unfinished"]) == (1, 1)
    assert "turns" not in summary([graded_sample(0)])


def test_headline_rates_are_given_by_hops_too_in_every_arm():
    """Two problems of 2 hops (em 1 and 0), one of 3 hops (em 0); the second arm solves the third problem alone."""
    ems = {"one": (1.0, 0.0, 0.0), "two": (0.0, 0.0, 1.0)}
    samples = [
        graded_sample(i, arm=arm, parts={"em": em}, group=("hops=2", "hops=2", "hops=3")[i], correct=em == 1.0)
        for arm, values in ems.items()
        for i, em in enumerate(values)
    ]
    macro = summary(samples)
    assert (macro["em"], macro["one/em"], macro["two/em"]) == (1 / 3, 1 / 3, 1 / 3)
    assert (macro["hops=2/one/em"], macro["hops=2/two/em"], macro["hops=2/em"]) == (0.5, 0.0, 0.25)
    assert (macro["hops=3/one/em"], macro["hops=3/two/em"], macro["hops=3/em"]) == (0.0, 1.0, 0.5)
    assert (macro["hops=2/problems"], macro["hops=3/problems"], macro["problems"]) == (2, 1, 3)
    assert macro["hops=3/pass@1"] == 0.5
    assert "hops=3/rounds" not in macro
    assert evals.is_headline("hops=2/em")
    assert not evals.is_headline("hops=2/emphasis")  # a user's


# -------------------------------------------------------------------------------------------------------------- phases


def test_handoff_by_turns_has_three_more_arms_where_there_are_turns():
    """Turns of 2, 1, 3 and 1 tokens; the authors of each are written out."""
    keys, tokens = torch.tensor([7]), torch.zeros(1, 7, dtype=torch.int64)
    starts = torch.tensor([[False, False, True, True, False, False, True]])
    wanted = {
        "senior_first_turns": [1, 1, 0, 1, 1, 1, 0],
        "junior_first_turns": [0, 0, 1, 0, 0, 0, 1],
        "senior_then_junior": [1, 1, 0, 0, 0, 0, 0],
    }
    arms = protocol.strategies("handoff", tokenizer(), episodes=True)
    assert list(arms) == ["senior_first", "junior_first", *wanted]
    assert list(protocol.strategies("handoff", tokenizer())) == ["senior_first", "junior_first"]
    for arm, authors in wanted.items():
        assert replay(arms[arm], keys, tokens, torch.tensor([7]), starts).author[0].tolist() == authors


@pytest.fixture(scope="module")
def agents(tmp_path_factory):
    """Random models that call tools now and then, and three rows."""
    out = make_agents(tmp_path_factory.mktemp("agents"))
    rows = [row | {"extra_info": {"n_hops": n}} for n, row in enumerate(lines(out / "rows.jsonl")[:3], 2)]
    (out / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return out


def episodes(agents, out, *extra, phases=("pass-at-k",), **more):
    config = load(
        None,
        [
            *(f"model.junior={agents}/junior", f"data.eval=[{agents}/rows.jsonl]", "train.threads=1"),
            *("eval.profile=custom", "eval.max_tokens=40", "eval.samples=2", "eval.k=[1]", "eval.bootstrap=5"),
            *(
                "rollout.turn_tokens=12",
                "rollout.observation_tokens=60",
                "rollout.max_turns=3",
                "data.max_prompt_tokens=24",
            ),
            *extra,
        ],
    )
    return evals.evaluate(config, model=f"{agents}/senior", out=out, phases=phases, **more)


TOOLS = (
    *("rollout.environment=tools", "rollout.tools=[small_world:add]", "rollout.tool_workers=1"),
    *("reward.scorers={own: small_world:sums_for_letters}", "selection.strategy=turn"),
)


@pytest.fixture(scope="module")
def played(agents, tmp_path_factory):
    """All phases in an environment with a tool, and their samples."""
    out = tmp_path_factory.mktemp("played")
    results = episodes(agents, out, *TOOLS, phases=None)
    return {phase: (result, evals.read_samples(out / result["samples"])) for phase, result in results.items()}


def test_every_phase_takes_turns(played):
    assert list(played) == ["pass-at-k", "tandem", "handoff", "legibility", "drift", "junior"]
    arms = {phase: list(dict.fromkeys(sample.arm for sample in samples)) for phase, (_, samples) in played.items()}
    by_turns = ["senior_first_turns", "junior_first_turns", "senior_then_junior"]
    assert arms["handoff"] == ["senior_first", "junior_first", *by_turns]
    assert (arms["tandem"], arms["drift"]) == (["turn"], ["solo"])
    for _, samples in played.values():
        for sample in samples:
            author = authors_of(sample.author)
            own = author[author >= 0]
            assert (len(author), len(own)) == (len(sample.tokens), sample.length)
            assert 0 < sample.length <= 40
            assert sample.senior_share == pytest.approx(own.mean())
            runs = re.findall(r"([SJC])\d+", sample.author)
            assert sample.rounds == 1 + int((np.diff(own) != 0).sum())
            assert sample.turns == 1 + runs.count("C") == sample.transcript["counts"]["turns"]
            said = [message["role"] for message in sample.transcript["messages"]]
            assert said.count("assistant") == sample.turns
            assert sample.group in ("hops=2", "hops=3", "hops=4")
    several = [s for _, samples in played.values() for s in samples if s.turns == 3]
    assert several  # else nothing was tried


def test_results_have_the_metrics_of_episodes(played):
    result, samples = played["pass-at-k"]
    macro = result["metrics"]["macro"]
    assert macro["turns"] == pytest.approx(np.mean([sample.turns for sample in samples]))
    assert macro["tool_calls"] == pytest.approx(np.mean([s.transcript["counts"]["tool_calls"] for s in samples]))
    assert macro["score"] == pytest.approx(np.mean([sample.score for sample in samples]))
    for sample in samples:  # the reward read the transcript
        assert sample.score == pytest.approx(
            len((sample.transcript["state"] or {}).get("sums", ())) - len(sample.text) / 100
        )
    assert {"hops=2/pass@1", "hops=3/pass@1", "hops=4/pass@1"} < macro.keys()
    config = result["config"]
    assert (config["environment"], config["max_turns"], config["tools"]) == ("tools", 3, ["small_world:add"])
    assert played["tandem"][0]["config"]["strategy"] == "turn"


class Polite(small_world.Talk):
    """Another greeting is another environment."""

    def __init__(self, greeting="hello"):
        self.greeting = greeting


def session(*overrides, environment=None):
    config = load(None, ["data.eval=[rows.jsonl]", *TOOLS, *overrides])
    return evals.session.Session(config, "model", [evals.PHASES["pass-at-k"]], passed=environment)


def identity(*overrides, environment=None):
    return session(*overrides, environment=environment).identity(evals.PHASES["pass-at-k"])


def test_an_environment_counts_by_what_it_does():
    greetings = [identity(environment=Polite(greeting)) for greeting in ("hello", "hello", "bye")]
    assert greetings[0] == greetings[1] != greetings[2]


def test_a_run_with_an_environment_of_its_own_cannot_be_evaluated_without(agents, tmp_path):
    with pytest.raises(ConfigError, match=r"environment=<class .*Talk.*: pass Talk\(\)"):
        episodes(agents, tmp_path, environment=small_world.Talk)
    passed = ["functions.environment.name=mine.Talk", "functions.environment.signature=x"]
    with pytest.raises(evals.EvalError, match=r"took turns with mine\.Talk"):
        episodes(agents, tmp_path, *passed)


def test_an_environment_of_this_process_scores_its_episodes(agents, tmp_path):
    result = episodes(agents, tmp_path, environment=small_world.Talk())["pass-at-k"]
    samples = evals.read_samples(tmp_path / result["samples"])
    assert result["config"]["environment"] == "small_world:Talk"
    assert any(sample.turns > 1 for sample in samples)
    for sample in samples:
        assert sample.score == sum(sample.transcript["state"]["heard"]) % 5 / 5


# ---------------------------------------------------------------------------------------------------------- endpoints


def test_calls_of_an_endpoint_are_read_as_well_as_they_can_be():
    """Without an id or arguments, with arguments that are no text, and with keys that nobody asked for."""
    given = '{"a": 1, "b": 2}'
    calls = [
        {"id": "x", "index": 0, "function": {"name": "add", "arguments": given, "strict": True}},
        {"function": {"name": "add"}},
        {"id": None, "type": "function", "function": {"name": "add", "arguments": json.loads(given)}},
        {"id": "y"},
    ]
    reply = {"choices": [{"message": {"content": None, "tool_calls": calls}}], "usage": {"completion_tokens": 5}}
    said = remote._said(Response(200, json.dumps(reply).encode()))
    assert (said.content, said.tokens, said.cut) == ("", 5, False)
    episode, schemas = remote._Episode(0, Row("p/0", (), "p", "", {}), 0), {"add": schema_of(small_world.add)}
    episode.said.append(said)
    message = episode.hear(schemas)
    assert [call["function"] for call in message["tool_calls"]] == [{"name": "add", "arguments": json.loads(given)}] * 2
    assert len(message["invalid_calls"]) == 2
    assert message["invalid_after"] == [1, 2]
    assert episode.calls == ["x", "call_1_1", "call_1_2", "y"]  # in which the environment answers them
    again = [(call["id"], call["type"], call["function"]) for call in episode.conversation[-1]["tool_calls"]]
    assert again == [
        ("x", "function", {"name": "add", "arguments": given}),
        ("call_1_1", "function", {"name": "add", "arguments": "{}"}),
        ("call_1_2", "function", {"name": "add", "arguments": given}),
        ("y", "function", {"name": "", "arguments": "{}"}),
    ]


def test_a_call_of_an_endpoint_that_is_no_object_is_asked_for_again():
    reply = {"choices": [{"message": {"tool_calls": ["add"]}}], "usage": {"completion_tokens": 5}}
    with pytest.raises(RetryableError, match="does not say what it wrote"):
        remote._said(Response(200, json.dumps(reply).encode()))
