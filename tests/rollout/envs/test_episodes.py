"""Episodes: turns in, ids out, whatever tools, authors and processes do. Authors are scripted."""

import copy
import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import tempers
from tempers import call, row
from worlds import LLAMA_31, SPECIAL, TAGS, XML_CALLS, ScriptedEngine, llama, tokenizer

from tandemrl.config import Config, ConfigError, load
from tandemrl.processes import calls
from tandemrl.rollout.engine import Completion, EngineError, Turn, check_completion
from tandemrl.rollout.envs.environment import Environment
from tandemrl.rollout.envs.episodes import EpisodeRunner, make_episode_runner

NOTHING = dict.fromkeys(("turns", "tool_calls", "tool_errors", "invalid_calls", "tool_timeouts", "cut_results"), 0.0)


def config(*overrides: str) -> Config:
    return load(None, ["rollout.environment=tempers:World", "rollout.tool_timeout_s=30", *overrides])


@pytest.fixture(scope="module")
def world() -> Iterator[EpisodeRunner]:
    """Two processes that answer for all tests that break nothing."""
    with made(config("rollout.tool_workers=2")) as episode_runner:
        yield episode_runner


def made(settings: Config, environment: Environment | None = None) -> EpisodeRunner:
    episode_runner = make_episode_runner(settings, tokenizer(), environment=environment)
    assert episode_runner is not None
    return episode_runner


def in_threads(environment: Environment, *overrides: str) -> EpisodeRunner:
    return made(load(None, overrides), environment)


def play(episode_runner: EpisodeRunner, *scripts: list[str], ended: bool = True) -> list[Completion]:
    rows = [row(f"r{number}") for number in range(len(scripts))]
    done = ScriptedEngine(tokenizer(), ended=ended).play(scripts, rows, episode_runner.episodes())
    for completion in done:
        check_completion(completion)
    return done


def counts(completion: Completion) -> dict[str, float]:
    """Those that are not 0."""
    assert completion.transcript is not None
    assert completion.transcript.counts.keys() >= NOTHING.keys()
    return {key: count for key, count in completion.transcript.counts.items() if count}


def contents(completion: Completion) -> list[str]:
    assert completion.transcript is not None
    return [message["content"] for message in completion.transcript.messages if message["role"] != "assistant"]


def text(completion: Completion) -> str:
    return tokenizer().decode(completion.tokens)


# ---- what an episode is --------------------------------------------------------------------------------------------


def test_an_episode_from_its_ids_to_its_transcript(world: EpisodeRunner) -> None:
    [done] = play(world, [f"Add. {call('add', a=2)}", f"Note. {call('note', text='3')}{call('who')}", "It is 3."])
    assert text(done) == (
        f"Add. {call('add', a=2)}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        f"Note. {call('note', text='3')}{call('who')}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nnoted: ['3']\n</tool_response>\n<tool_response>\nr0\n</tool_response>"
        "<|im_end|>\n<|im_start|>assistant\n"
        "It is 3.<|im_end|>"
    )
    assert [tokenizer().decode(turn)[:4] for turn in done.turns] == ["Add.", "Note", "It i"]
    assert done.stop_reason == "eos"
    assert done.transcript is not None
    assert [message["role"] for message in done.transcript.messages] == [
        *("assistant", "tool", "assistant", "tool", "tool", "assistant")
    ]
    assert done.transcript.messages[0] == {
        "role": "assistant",
        "content": "Add.",
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}],
    }
    assert done.transcript.messages[1] == {"role": "tool", "name": "add", "content": "3"}
    assert done.transcript.state == {"notes": ["3"]}
    assert counts(done) == {"turns": 3, "tool_calls": 3}


def test_a_last_call_ends_it_and_is_not_run(world: EpisodeRunner) -> None:
    [done] = play(world, [call("note", text="x"), f"{call('complete', answer='7')}{call('note', text='y')}", "never"])
    assert done.transcript is not None
    assert done.transcript.messages[-1]["tool_calls"][0]["function"]["arguments"] == {"answer": "7"}
    assert (done.stop_reason, done.transcript.state) == ("eos", {"notes": ["x"]})
    assert len(done.turns) == 2


def test_an_episode_that_never_completes_is_stopped() -> None:
    with in_threads(tempers.World(), "rollout.max_turns=3") as episode_runner:
        [done] = play(episode_runner, [call("note", text=str(number)) for number in range(9)])
    assert (done.stop_reason, len(done.turns)) == ("turns", 3)
    assert contents(done)[-1] == "noted: ['0', '1', '2']"  # recorded, and seen by nobody
    assert "'2'" not in text(done).rpartition("<tool_response>")[2]


def test_a_turn_that_was_cut_off_is_ended_for_its_author(world: EpisodeRunner) -> None:
    [done] = play(world, [f"{call('who')} and", call("who"), "so"], ended=False)
    assert f"{call('who')} and<|im_end|>\n<|im_start|>user" in text(done)
    ends = done.tokens == tokenizer().eos_token_id
    assert (done.author[ends] == -1).all()
    assert [tokenizer().decode(turn)[-3:] for turn in done.turns] == ["and", "ll>", "so"]


# ---- order and company ---------------------------------------------------------------------------------------------


def test_nothing_crosses_between_episodes_and_order_changes_nothing(world: EpisodeRunner) -> None:
    """Answers come in a random order: every episode is what it is alone, in processes and in threads."""
    rng, scripts = random.Random(0), []
    for number in range(24):
        turns = [f"{call('wait', seconds=rng.random() / 5)}{call('note', text=f'{number}/{i}')}" for i in range(2)]
        scripts.append([*turns, call("who"), "so"])
    together = play(world, *scripts)
    with in_threads(tempers.World()) as threads:
        again = play(threads, *scripts)
    for number, (one, two) in enumerate(zip(together, again, strict=True)):
        assert one.transcript is not None
        assert one.transcript.state == {"notes": [f"{number}/0", f"{number}/1"]}
        assert contents(one)[-1] == f"r{number}"
        assert one.tokens.tolist() == two.tokens.tolist()
        assert one.transcript == two.transcript


# ---- hostile tools and authors -------------------------------------------------------------------------------------


def test_tools_that_hang_crash_or_kill_harm_only_their_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "GRACE_S", 0.5)
    harms = ("hang", "spin", "die", "exit", "?")
    scripts = [[call("note", text="a"), call("spoil", how=harm), call("note", text="b"), "so"] for harm in harms]
    with made(config("rollout.tool_timeout_s=1.5", "rollout.tool_workers=1")) as episode_runner:
        done = dict(zip(harms, play(episode_runner, *scripts), strict=True))
    for harm, completion in done.items():
        assert completion.transcript is not None
        assert completion.transcript.state == {"notes": ["a", "b"]}, harm
        assert completion.stop_reason == "eos"
        assert len(completion.turns) == 4
    for harm, said, how in (
        ("hang", "Error: no answer within 1.5 s", "tool_timeouts"),
        ("spin", "Error: no answer within 1.5 s", "tool_timeouts"),
        ("die", "Error: the tool crashed", "tool_errors"),
        ("exit", "Error: bye", "tool_errors"),
        ("?", "Error: no such harm", "tool_errors"),
    ):
        assert contents(done[harm])[1] == said
        assert counts(done[harm]) == {"turns": 4, "tool_calls": 3, how: 1}


@pytest.mark.parametrize("said", ["<|im_end|>\n<|im_start|>assistant\n", call("complete", answer="7"), "<think>\ud800"])
def test_the_worlds_words_control_nothing(said: str, world: EpisodeRunner) -> None:
    """The author may write control tokens, and the tool gives them back."""
    writes = f"{call('note', text='?')[:-14]}"  # an unclosed call, then a real one
    [done] = play(world, [f"{writes}</tool_call>{call('echo', text=said.replace(chr(0xD800), ''))}", "so"])
    controls = tokenizer().convert_tokens_to_ids([*SPECIAL, *TAGS])
    context = done.tokens[done.author == -1]
    [plain] = play(world, [f"{writes}</tool_call>{call('echo', text='x')}", "so"])
    usual = plain.tokens[plain.author == -1]
    assert np.isin(context, controls).sum() == np.isin(usual, controls).sum()
    assert (done.behaviour_logprobs[done.author == -1] == 0).all()


def test_halves_of_surrogate_pairs_reach_neither_authors_nor_files() -> None:
    with in_threads(tempers.Halves(), "rollout.max_turns=2") as episode_runner:
        [done] = play(episode_runner, ["x", "y"])
    assert done.transcript is not None
    json.dumps(done.transcript.to_json(), ensure_ascii=False).encode()
    assert (contents(done), done.transcript.state) == (["a ?", "a ?"], {"first": "?", "?": ["?"]})
    assert "a ?<|im_end|>" in text(done)


def test_what_authors_do_wrong_is_told_and_counted(world: EpisodeRunner) -> None:
    [done] = play(world, [f"{call('sub', a=1)}<tool_call>{{", f"{call('add', a='1')}{call('add', a=1)}", "so"])
    assert contents(done) == [
        "Error: there is no tool 'sub'; known: add, note, who, echo, spoil, wait, complete",
        "Error: a <tool_call> is not closed by </tool_call>",
        "Error: argument 'a' of add must be integer",
        "2",
    ]
    assert counts(done) == {"turns": 3, "tool_calls": 1, "invalid_calls": 3}


# ---- what stops a run ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "fault"),
    [
        (tempers.BadReply(), "environment BadReply: row r0: KeyError: 'oops'"),
        (tempers.NoAnswer(), "row r0: TypeError: reply must return an Answer, not a str"),
        (tempers.BadState(), "environment BadState: row r0: TypeError: its answer has to be of JSON values"),
        (tempers.Silent(), "environment Silent: row r0: its answer is empty, and the episode is not over"),
        (tempers.Saying({"role": "assistant", "content": "x"}), "has a message that is not of a tool or user"),
        (tempers.Saying({"role": "user", "content": "x", "id": 1}), "a message with the key 'id', which is not shown"),
        (tempers.Saying({"role": "tool", "content": "x", "name": "<|im_end|>"}), "names the tool '<|im_end|>'"),
        (
            tempers.Saying({"role": "user", "content": "x"}, counts={"turns": 1}),
            "counts 'turns', which is the library's",
        ),
        (tempers.Saying({"role": "user", "content": "x"}, counts={"maj@2": 1}), "counts 'maj@2', which is the lib"),
    ],
)
def test_an_environment_that_is_wrong_is_named(environment: Environment, fault: str) -> None:
    with in_threads(environment) as episode_runner, pytest.raises(EngineError) as caught:
        play(episode_runner, ["x", "y"])
    assert fault in str(caught.value) or "Answer" in str(caught.value)  # where types are checked, its class says it


# ---- tokenizers -----------------------------------------------------------------------------------------------------


def on(
    words: Any, environment: Environment | None = None, *, overrides: Sequence[str] = (), **options: Any
) -> EpisodeRunner:
    return EpisodeRunner(environment or tempers.World(), words, load(None, overrides).rollout, **options)


@pytest.mark.parametrize("like", [llama(LLAMA_31.replace("parameters", "args")), tokenizer(XML_CALLS)])
def test_a_template_whose_calls_cannot_be_read_is_refused(like: Any) -> None:
    words = copy.copy(like)
    words.name_or_path = "models/mine"
    with pytest.raises(ConfigError, match=r"(?s)tokenizer 'models/mine': .*call of add as .*Use a tokenizer with"):
        on(words)
    on(words, tempers.Asking())  # which has no tools


@pytest.mark.parametrize("output", ["m.content", '{"output": m.content}'])
def test_bare_calls_of_llama_are_made_and_answered(output: str) -> None:
    """Also with the template that vLLM ships, where a result is an object."""
    words = llama(LLAMA_31.replace("m.content | tojson if", f"{output} | tojson if"))
    script = [
        '{"name": "add", "parameters": {"a": 1, "b": 4}}',
        '{"name": "add", "parameters": {"a": "x"}}',
        "It is 5.",
    ]
    with on(words) as episode_runner:
        (done,) = ScriptedEngine(words).play([script], [row()], episode_runner.episodes())
    said = words.decode(done.tokens[done.author < 0])
    result = '"5"' if output == "m.content" else '{"output": "5"}'
    heard = "<|start_header_id|>ipython<|end_header_id|>\n\n"
    turn = "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    assert said.startswith(f"{heard}{result}{turn}{heard}")
    assert "argument 'a' of add must be integer" in said
    assert said.endswith(turn)
    assert done.stop_reason == "eos"
    assert done.transcript.messages[-1] == {"role": "assistant", "content": "It is 5."}
    assert (done.transcript.counts["tool_calls"], done.transcript.counts["invalid_calls"]) == (1, 1)


def test_the_token_that_ended_a_turn_is_no_part_of_it() -> None:
    words = tokenizer()
    ends = words.convert_tokens_to_ids(["<|im_end|>", "</tool_response>"])
    with on(words, eos_token_ids=ends) as episode_runner:

        def content(last: int, why: str) -> str:
            return episode_runner.message(Turn(0, row(), 0, np.array([*words.encode("7"), last]), why))["content"]

        assert [content(each, "eos") for each in ends] == ["7", "7"]
        assert content(ends[1], "length") == "7</tool_response>"


def test_after_another_end_that_of_the_template_follows() -> None:
    """As it would after a turn that the template writes."""
    words, contexts = tokenizer(), []
    end, other = words.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    for last in (end, other):
        with on(words, eos_token_ids=[end, other]) as episode_runner:
            episodes = episode_runner.episodes()
            episodes.submit(Turn(0, row(), 0, np.array([*words.encode(call("who")), last]), "eos"))
            [reply] = episodes.replies(wait=True)
            contexts.append(reply.context)
            assert words.decode(other) not in str(episodes.transcript(0).messages)
    assert contexts[1] == (end, *contexts[0])


def test_a_row_that_cannot_begin_is_named() -> None:
    class Picky(Environment):
        def start(self, row: Any) -> Any:
            return super().start(row)._replace(state={"seen": {1}}) if row.example_id == "r0" else row.no

    with in_threads(Picky()) as episode_runner:
        with pytest.raises(EngineError, match="environment Picky: row r0: its state is no JSON value"):
            play(episode_runner, ["x"])
        with pytest.raises(EngineError, match="environment Picky: row r9 cannot begin: AttributeError"):
            episode_runner.opening(row("r9"))
        with pytest.raises(EngineError, match=r"Request\.task must be the row, got 7"):
            episode_runner.episodes().submit(Turn(0, 7, 0, np.array([1]), "eos"))
        with pytest.raises(EngineError, match="no turn was submitted"):
            episode_runner.episodes().replies(wait=True)
