"""The judge that a config asks for: a model behind HTTP, or one in this process through any rollout engine."""

import hashlib
from collections.abc import Sequence
from functools import partial

from transformers import PreTrainedTokenizerBase

from tandemrl.config import Config, JudgeConfig, RolloutConfig
from tandemrl.data.rows import chat_tokens
from tandemrl.models.loading import load_model, load_tokenizer
from tandemrl.rollout.engine import Engine, EngineError, Request, Sampling
from tandemrl.rollout.factory import ModelSource, make_engine
from tandemrl.rollout.groups import ResponseReader
from tandemrl.selection import solo
from tandemrl.tasks.rubric.judge import HttpJudge, Judge, JudgeError, JudgePool, Messages, Usable
from tandemrl.types import Response


class EngineJudge:
    """A `rubric.Judge` whose replies the senior of an `Engine` writes.

    The same prompt and attempt give the same reply in any batch.
    """

    def __init__(self, engine: Engine, tokenizer: PreTrainedTokenizerBase, config: JudgeConfig) -> None:
        self.engine, self.tokenizer, self.config = engine, tokenizer, config
        self.model = config.model or engine.info.name

    def ask(self, prompts: Sequence[Messages], usable: Usable = lambda reply: True) -> list[str]:
        """Get one reply per prompt, in order.

        Raises:
            JudgeError: a prompt and ``judge.max_tokens`` do not fit into the engine's context.
            DataError: the judge's chat template fails.
        """
        replies, open_ = [""] * len(prompts), [*range(len(prompts))]
        for attempt in range(1 + self.config.retries):
            for i, reply in zip(open_, self._attempt([prompts[i] for i in open_], attempt), strict=True):
                replies[i] = reply
            open_ = [i for i in open_ if not usable(replies[i])]
            if not open_:
                break
        return replies

    def _attempt(self, prompts: Sequence[Messages], attempt: int) -> list[str]:
        temperature = self.config.retry_temperature if attempt else self.config.temperature
        sampling = Sampling(max_tokens=self.config.max_tokens, temperature=temperature)
        asked = [tuple(chat_tokens(self.tokenizer, messages, "judge", {})) for messages in prompts]
        requests = [Request(tokens, (_key(tokens, attempt),), sampling, solo("senior")) for tokens in asked]
        try:
            completions = self.engine.generate(requests)
        except EngineError as error:
            fix = ". Its prompts and judge.max_tokens have to fit into it" if "the context" in str(error) else ""
            raise JudgeError(f"judge: {error}{fix}") from None
        if any(completion.stop_reason == "abort" for (completion,) in completions):
            raise JudgeError("the judge's replies were aborted")
        reader = ResponseReader(self.tokenizer)
        return [
            _reply(reader.of_turns(completion.turns, [], reader.opened(request.prompt)))
            for request, (completion,) in zip(requests, completions, strict=True)
        ]


def judge_pool(config: Config, judge: Judge | None = None) -> JudgePool:
    """A judge, or the one that a config asks for (`make_judge`), as one that scores batches."""
    return JudgePool(judge or make_judge(config), config.judge)


def make_judge(config: Config) -> Judge:
    """The judge that a config asks for (``judge.url`` or ``judge.model``), ready to be used.

    A judge in this process has the dtype and the device of the senior.

    Raises:
        JudgeError: the endpoint is down, or serves another model.
        ModelError: the model cannot be loaded.
    """
    judge = config.judge
    if judge.url is not None:
        return HttpJudge(judge)
    assert judge.model is not None
    tokenizer = load_tokenizer(judge.model)
    load = partial(load_model, judge.model, dtype=config.model.dtype, device=config.model.device)
    rollout = RolloutConfig(max_rows=config.rollout.max_rows)
    return EngineJudge(make_engine(rollout, ModelSource(judge.model, load), None, tokenizer), tokenizer, judge)


def _reply(response: Response) -> str:
    """The reply without special tokens, unless these end its thought; with a thought that the chat template opens."""
    return response.opened + (response.plain if "</think>" not in response.text else response.text)


def _key(tokens: Sequence[int], attempt: int) -> int:
    digest = hashlib.blake2b(repr((list(tokens), attempt)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)
