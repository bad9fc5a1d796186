"""The tiny agents: their tokenizer, and the episodes they learn from, which must be those they meet in training."""

import itertools
import random

import numpy as np
import pytest

from tandemrl.apps.experiments.agents import EOS, WORLD_WEIGHT, Slips, demonstrate, hops_tokenizer, lessons
from tandemrl.config import RetrievalConfig, load
from tandemrl.rollout.engine import Turn
from tandemrl.rollout.envs.environment import Environment, make_environment
from tandemrl.rollout.envs.episodes import EpisodeRunner
from tandemrl.rollout.envs.multihop import MultihopEnvironment
from tandemrl.rollout.envs.parsing import parse_turn
from tandemrl.tasks.generated.hops import hops_row, uses_jargon, world

NO_SLIPS = Slips(0.0, 0.0, 0.0, 0.0)


@pytest.fixture(scope="module")
def tokenizer():
    return hops_tokenizer()


@pytest.fixture(scope="module")
def environment():
    return MultihopEnvironment(RetrievalConfig(retriever="hops"))


def episodes(environment, count, slips, *, jargon=False, seed=0):
    """(world, row, steps) of scripted episodes."""
    rng = random.Random(seed)
    for _ in range(count):
        told = world("train", rng)
        row = hops_row("hops_jargon", "train", 0, told)
        search = lambda query, row=row: environment.retrieve_documents(query, row)  # noqa: E731
        yield told, row, demonstrate(told, search, rng, slips, jargon=jargon)


def parsed(environment, turn):
    schemas = {schema["function"]["name"]: schema for schema in environment.tool_schemas()}
    return parse_turn(turn, schemas)


# ------------------------------------------------------------------------------------------------------- demonstrations


def test_without_slips_an_episode_finds_the_chain_and_cites_it(environment):
    for jargon in (False, True):
        for told, row, steps in episodes(environment, 40, NO_SLIPS, jargon=jargon):
            turns = [parsed(environment, step.turn) for step in steps]
            calls = [call["function"] for turn in turns for call in turn["tool_calls"]]
            facts = [fact.alias if jargon else fact for fact in told.chain]
            assert [call["arguments"] for call in calls[:-1]] == [
                {"query": f"{fact.subject}'s {fact.relation}"} for fact in facts
            ]
            supporting = {document["id"] for document in row.extra_info["docs"] if document["is_supporting"]}
            assert calls[-1]["name"] == "complete"
            assert calls[-1]["arguments"]["final_answer"] == facts[-1].object
            assert calls[-1]["arguments"]["final_answer"] in row.extra_info["answers"]
            assert set(calls[-1]["arguments"]["cited_doc_ids"]) == supporting
            assert [turn["content"].partition("] ")[2] for turn in turns[1:]] == [fact.text for fact in facts]
            assert all(uses_jargon(step.turn) == jargon for step in steps)
            assert all(uses_jargon(step.result) == jargon for step in steps[:-1])


def test_every_turn_is_read_and_every_result_is_the_tools(environment):
    for _, row, steps in episodes(environment, 60, Slips()):
        for step in steps:
            turn = parsed(environment, step.turn)
            assert "invalid_calls" not in turn
            assert len(turn["tool_calls"]) == 1
            answer = environment.reply(row, {}, turn)
            assert answer.over == (step.result is None)
            assert [message["content"] for message in answer.messages] == ([step.result] if step.result else [])


def test_a_lesson_is_what_an_episode_would_have_been(tokenizer):
    """Played again through the real environment: the same prompt, the same ids for what the world says."""
    config = load("hops_grpo")
    environment = make_environment(config)
    assert isinstance(environment, Environment)
    eos = tokenizer.convert_tokens_to_ids(EOS)
    with EpisodeRunner(environment, tokenizer, config.rollout) as episode_runner:
        for number, lesson in enumerate(itertools.islice(lessons(tokenizer, "hops", 3), 12)):
            prompt = tokenizer.apply_chat_template(
                [*lesson.row.messages], tools=episode_runner.tools, add_generation_prompt=True, return_dict=False
            )
            assert lesson.tokens[: len(prompt)] == prompt
            here, written, world_said = len(prompt), 0, 0
            game = episode_runner.episodes()
            for index in itertools.count():
                end = lesson.tokens.index(eos, here) + 1
                game.submit(Turn(number, lesson.row, index, np.array(lesson.tokens[here:end]), "eos"))
                (reply,) = game.replies(wait=True)
                assert set(lesson.weights[here:end]) == {1.0}
                written, here = written + end - here, end
                context = list(reply.context)
                assert lesson.tokens[here : here + len(context)] == context
                assert set(lesson.weights[here : here + len(context)]) <= {WORLD_WEIGHT}
                world_said, here = world_said + len(context), here + len(context)
                if not context:
                    break
            assert here == len(lesson.tokens) == len(lesson.weights)
            assert set(lesson.weights[: len(prompt)]) == {0.0}
            assert written <= config.rollout.max_tokens
            assert world_said <= config.rollout.observation_tokens
