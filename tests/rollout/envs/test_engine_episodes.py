"""Episodes that the reference engine plays: random models, real tools in real processes."""

import numpy as np
import pytest
import tempers
from tempers import call, row
from transformers import PreTrainedTokenizerFast

from helpers import agent_tokenizer, prepared, qwen3, small_qwen3
from tandemrl.config import load
from tandemrl.data.rows import encode_prompts
from tandemrl.rollout.engine import Completion, Request, Sampling, generate_verified
from tandemrl.rollout.envs.episodes import EpisodeRunner, make_episode_runner
from tandemrl.rollout.torch_engine import TorchEngine
from tandemrl.selection import word
from tandemrl.selection.boundaries import word_boundary_table
from tandemrl.selection.draws import request_key

WHO = call("who")
CALLS = [call("note", text="ab"), call("echo", text=WHO), WHO, call("spoil", how="?"), "<tool_call>{"]
"""Each is a token, which is written now and then."""
LIMITS = ["rollout.max_turns=4", "rollout.turn_tokens=14", "rollout.observation_tokens=150", "rollout.result_tokens=60"]
ROWS = [row(f"r{number}", question="ab c") for number in range(12)]


@pytest.fixture(scope="module")
def words() -> PreTrainedTokenizerFast:
    """Also the marks of a call, so that the world can spell one."""
    return agent_tokenizer([*CALLS, *"<>_{}:,[]/'\"", *map(str.upper, "abcdefghijklmnopqrstuvwxyz")])


@pytest.fixture(scope="module")
def engine(words: PreTrainedTokenizerFast) -> TorchEngine:
    senior, junior = (prepared(model(vocabulary=len(words))) for model in (qwen3, small_qwen3))
    return TorchEngine(senior, junior, words, max_rows=8)


def played(engine: TorchEngine, words: PreTrainedTokenizerFast, episode_runner: EpisodeRunner) -> list[Completion]:
    prompts, _ = encode_prompts(
        ROWS,
        words,
        max_prompt_tokens=200,
        opening=lambda each: episode_runner.opening(each).messages,
        tools=episode_runner.tools,
    )
    strategy = word(0.5, 4, word_boundary_table(words))
    requests = []
    for number, prompt in enumerate(prompts):
        keys = (request_key(0, 0, number, 0), request_key(0, 0, number, 1))
        requests.append(episode_runner.episode(Request(prompt.tokens, keys, Sampling(56), strategy), prompt.row))
    groups, _ = generate_verified(engine, requests, strategy, responder=episode_runner.episodes())
    return [completion for group in groups for completion in group]


def test_episodes_are_the_same_wherever_tools_run(engine: TorchEngine, words: PreTrainedTokenizerFast) -> None:
    """Authors are proved, the world's tokens are nobody's, and what it says of calls is text."""
    settings = load(None, [*LIMITS, "rollout.environment=tempers:World", "rollout.tool_workers=2"])
    both = []
    for episode_runner in (
        make_episode_runner(settings, words),
        make_episode_runner(load(None, LIMITS), words, environment=tempers.World()),
    ):
        assert episode_runner is not None
        with episode_runner:
            both.append(played(engine, words, episode_runner))
    for one, other in zip(*both, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.author.tolist() == other.author.tolist()
        assert one.transcript == other.transcript
    total = {"turns": 0.0, "tool_calls": 0.0, "invalid_calls": 0.0, "tool_errors": 0.0}
    heard = []
    marks = words.convert_tokens_to_ids(CALLS)
    for number, completion in enumerate(both[0]):
        assert completion.transcript is not None
        written = [message for message in completion.transcript.messages if message["role"] == "assistant"]
        assert len(completion.turns) == len(written) == completion.transcript.counts["turns"] <= 4
        assert not np.isin(completion.tokens[completion.author == -1], marks).any()
        assert not completion.behaviour_logprobs[completion.author == -1].any()
        context = words.decode(completion.tokens[completion.author == -1])
        heard += [context] if WHO in context else []
        for message in completion.transcript.messages:
            if message.get("name") == "who":
                assert message["content"] == f"r{number // 2}"
        calls = [each["function"] for message in written for each in message.get("tool_calls", ())]
        notes = [each["arguments"]["text"] for each in calls if each["name"] == "note"]
        assert (completion.transcript.state or {}).get("notes", []) == notes
        total = {key: count + completion.transcript.counts[key] for key, count in total.items()}
    assert all(total.values()), total
    assert max(len(completion.turns) for completion in both[0]) >= 3
    assert heard
