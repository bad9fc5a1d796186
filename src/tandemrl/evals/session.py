"""What the phases of an evaluation share: its configuration, and models, data, engine and judge, each loaded once."""

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tandemrl.config import EvalConfig, JudgeConfig, RewardConfig, RolloutConfig, SandboxConfig
from tandemrl.data.loading import load_rows
from tandemrl.data.rows import Prompt, Row, encode_prompts
from tandemrl.evals.files import digests, plain
from tandemrl.evals.protocol import Phase, Profile, profile_of
from tandemrl.models.loading import load_model, load_tokenizer, vocabulary_check
from tandemrl.rewards.code.scorer import score_code
from tandemrl.rewards.judge.in_process import make_judge
from tandemrl.rewards.judge.rubric import JudgePool
from tandemrl.rewards.scoring import Scorer
from tandemrl.rollout.engine import Engine
from tandemrl.rollout.factory import ModelSource, make_engine

WRITTEN_TOGETHER: tuple[Phase, ...] = ("tandem", "handoff")
NEED_JUNIOR: tuple[Phase, ...] = (*WRITTEN_TOGETHER, "legibility", "drift")
_TRAINING_ONLY = ("select_by", "train_samples", "train_problems")
_NO_PART_OF_A_MARK = ("url", "api_key_env", "backoff_s", "timeout_s", "concurrency", "max_failure_rate")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What is evaluated, on what and how; see ``run_all``."""

    model: str
    junior: str | None
    data: tuple[str, ...]
    eval: EvalConfig
    reward: RewardConfig
    sandbox: SandboxConfig
    judge: JudgeConfig
    dtype: str
    device: str
    prompt_suffix: str
    max_prompt_tokens: int
    limit: int | None
    prob_senior: float
    max_gap_tokens: int
    rollout: RolloutConfig


class Session:
    """Models, data, engine and judge of an evaluation: each is loaded when a phase first asks for it, and once."""

    def __init__(self, setup: Setup, phases: Sequence[Phase], stated: Collection[str] | None = None) -> None:
        self.setup = setup
        self._stated = stated
        self.junior = setup.junior if any(phase in NEED_JUNIOR for phase in phases) else None
        self.together = any(phase in WRITTEN_TOGETHER for phase in phases)
        self.has_judge = setup.judge.url is not None or setup.judge.model is not None
        self._models: dict[str, PreTrainedModel] = {}
        self._engine: Engine | None = None

    # what makes results comparable

    @cached_property
    def profile(self) -> Profile:
        return profile_of(self.setup.eval)

    @cached_property
    def digests(self) -> dict[str, str]:
        return digests([self.setup.model, *([self.junior] if self.junior else []), *self.setup.data])

    @cached_property
    def solo_config(self) -> dict[str, Any]:
        """The configuration of what the senior writes alone."""
        setup = self.setup
        return plain(
            {
                "model": setup.model,
                "data": setup.data,
                "eval": {key: value for key, value in asdict(setup.eval).items() if key not in _TRAINING_ONLY},
                "reward": {
                    key: value
                    for key, value in asdict(setup.reward).items()
                    if key != "workers" and (key != "weights" or value)
                },
                **({} if setup.sandbox == SandboxConfig() else {"sandbox": asdict(setup.sandbox)}),
                "dtype": setup.dtype,
                "device": setup.device,
                "prompt_suffix": setup.prompt_suffix,
                "max_prompt_tokens": setup.max_prompt_tokens,
                "limit": setup.limit,
                "engine": setup.rollout.engine,
                "digests": self._digests_of(setup.model, *setup.data),
            }
        )

    def config(self, phase: Phase) -> dict[str, Any]:
        """All that the result of a phase depends on; another one is another result."""
        setup, config = self.setup, dict(self.solo_config)
        if phase in NEED_JUNIOR:
            assert setup.junior is not None  # refused in run_all
            config |= {
                "junior": setup.junior,
                "digests": self._digests_of(setup.model, setup.junior, *setup.data),
            }
        if phase == "tandem":
            config |= {"prob_senior": setup.prob_senior, "max_gap_tokens": setup.max_gap_tokens}
        if self.has_judge:
            judge = {key: value for key, value in asdict(setup.judge).items() if key not in _NO_PART_OF_A_MARK}
            judge["digests"] = digests([each for each in (setup.judge.model, setup.judge.template) if each])
            if phase == "verified":
                judge["model"] = setup.judge.model or self.judges.judge.model
            config["judge"] = judge
        return plain(config)

    def _digests_of(self, *sources: str) -> dict[str, str]:
        return {source: self.digests[source] for source in map(str, map(Path, sources)) if source in self.digests}

    # what is loaded

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        tokenizer = load_tokenizer(self.setup.model)
        if self.junior is not None:
            vocabulary_check(tokenizer, load_tokenizer(self.junior))
        return tokenizer

    @cached_property
    def rows(self) -> list[Row]:
        """All rows of the data, before ``limit``."""
        return load_rows(self.setup.data)

    @cached_property
    def prompts(self) -> tuple[list[Prompt], int]:
        """The prompts, and how many rows were dropped as too long."""
        setup = self.setup
        return encode_prompts(
            self.rows[: setup.limit],
            self.tokenizer,
            max_prompt_tokens=setup.max_prompt_tokens,
            suffix=setup.prompt_suffix,
        )

    @cached_property
    def judges(self) -> JudgePool:
        setup = self.setup
        judge = make_judge(setup.judge, dtype=setup.dtype, device=setup.device, max_rows=setup.rollout.max_rows)
        assert judge is not None  # refused in run_all
        return JudgePool(judge, setup.judge)

    def scorer(self) -> Scorer:
        setup = self.setup
        return Scorer(
            setup.reward,
            code=partial(score_code, sandbox=setup.sandbox, credit=setup.reward.code_credit),
            judge=(lambda items: self.judges(items)) if self.has_judge else None,
        )

    def check_rewards(self) -> None:
        """Refuse rows that cannot be scored and rewards of no use, before anything is written for them.

        Raises:
            ConfigError, DataError, GraderError: see ``Scorer.check``.
        """
        with self.scorer() as scorer:
            sources = {row.data_source for row in self.rows}
            scorer.check((prompt.row for prompt in self.prompts[0]), sources=sources, stated=self._stated)

    def load(self, path: str | None) -> PreTrainedModel:
        assert path is not None  # refused in run_all
        if path not in self._models:
            self._models[path] = load_model(path, dtype=self.setup.dtype, device=self.setup.device)
        return self._models[path]

    def engine(self, phase: Phase) -> Engine:
        """An engine for what the phase writes. vLLM: one for all phases, with the junior if any of them needs it."""
        setup = self.setup
        shared = setup.rollout.engine == "vllm"
        if self._engine is None or not shared:
            junior = self.junior if (self.together if shared else phase in WRITTEN_TOGETHER) else None
            self._engine = make_engine(
                setup.rollout,
                ModelSource(setup.model, partial(self.load, setup.model)),
                None if junior is None else ModelSource(junior, partial(self.load, junior)),
                self.tokenizer,
                dtype=setup.dtype,
                device=setup.device,
                longest=self.profile.longest(max((len(prompt.tokens) for prompt in self.prompts[0]), default=0)),
            )
        return self._engine

    def close_engine(self) -> None:
        if self._engine is not None:
            engine, self._engine = self._engine, None
            engine.close()
