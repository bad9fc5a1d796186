"""Measures what a tiny agent can do alone, before reinforcement learning."""

import copy
from collections.abc import Sequence

from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from tandemrl import evals
from tandemrl.config import Config
from tandemrl.data.rows import Row
from tandemrl.evals.measures import Sample
from tandemrl.models.loading import prepare
from tandemrl.rewards.scoring import Scorer
from tandemrl.rollout.envs.episodes import EpisodeRunner, opening_prompts
from tandemrl.rollout.envs.factory import make_environment
from tandemrl.rollout.torch_engine import TorchEngine
from tandemrl.selection import solo


def solo_episodes(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: Sequence[Row], seed: int, *, config: Config
) -> list[Sample]:
    """Run and grade one episode per row at temperature 1, in the environment and with the limits of a config."""
    environment = make_environment(config)
    assert environment is not None
    engine = TorchEngine(prepare(copy.deepcopy(model)), None, tokenizer, max_rows=512)
    with EpisodeRunner(environment, tokenizer, config.rollout) as episode_runner, Scorer(config.reward) as scorer:
        prompts, _ = opening_prompts(rows, tokenizer, config.data, episode_runner)
        samples = evals.generate_samples(
            {"solo": solo("senior")},
            engine=engine,
            tokenizer=tokenizer,
            prompts=prompts,
            profile=evals.profile_of(config.eval),
            samples=1,
            seed=seed,
            episode_runner=episode_runner,
        )
        return evals.grade(samples, prompts, scorer)
