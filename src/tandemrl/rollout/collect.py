"""Prompts and an engine give completions, and a replay of the author draws verifies who wrote each token."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from tandemrl.data.rows import Prompt
from tandemrl.rollout.engine import Completion, Draws, Engine, OnProgress, Passes, Request, Sampling, generate_verified
from tandemrl.rollout.envs.episodes import EpisodeRunner
from tandemrl.selection import Strategy
from tandemrl.selection.draws import completion_keys


class CompletionBatch(NamedTuple):
    """Completions of some prompts, one list per prompt, with the author draws of them all and the forward passes that
    they took."""

    prompts: list[Prompt]
    completions: list[list[Completion]]
    draws: Draws
    passes: Passes = Passes()


def generate(
    engine: Engine,
    prompts: Sequence[tuple[int, Prompt]],
    *,
    strategy: Strategy,
    sampling: Sampling,
    group_size: int,
    seed: int,
    step: int,
    drawn: int = 0,
    episode_runner: EpisodeRunner | None = None,
    progress: OnProgress | None = None,
) -> CompletionBatch:
    """Let an engine write ``group_size`` completions of each prompt, and verify their authors by replay.

    Args:
        prompts: pairs (number of the example in its dataset, prompt). The number enters the request keys.
        seed: seed of the run, which enters the request keys.
        step: training step, which enters the request keys.
        drawn: how many prompts already got completions in this step. Keys start after theirs, so that none is repeated.
        episode_runner: where the authors take turns with an environment. None means that a prompt gets one response.
        progress: called with the number of new tokens.

    Raises:
        EngineError: a completion is missing, in another's place, aborted, from other weights or lacks a channel, or
            its authors are not those the strategy gives for its key; or the environment is broken, or never answers.
    """
    requests, seen = [], Counter[int]()
    for example, prompt in prompts:
        # An example drawn twice in a step, as at the end of an epoch, is not copied.
        first = group_size * (drawn + seen[example])
        seen[example] += 1
        keys = completion_keys(seed, step, example, first, group_size, shared=strategy.shared_draws)
        request = Request(prompt.tokens, keys, sampling, strategy, junior_prompt=prompt.junior)
        requests.append(request if episode_runner is None else episode_runner.episode(request, prompt.row))
    write = generate_verified if episode_runner is None else episode_runner.generate
    completions, draws = write(engine, requests, strategy, progress=progress)
    passes = engine.passes  # now: the engine's next call may be about anything
    return CompletionBatch([prompt for _, prompt in prompts], completions, draws, passes)
