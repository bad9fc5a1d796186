"""Texts that a senior and a junior write together, without a training run: ``tandemrl.generate``."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeAlias

from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from tandemrl.config import Config, RolloutConfig, SelectionConfig
from tandemrl.config.compatibility import Facts, check
from tandemrl.data.messages import Message
from tandemrl.data.rows import chat_tokens, messages_of
from tandemrl.data.templates import DEFAULT_ARGUMENTS
from tandemrl.models.loading import (
    eos_token_ids,
    junior_tokenizer_of,
    load_model,
    load_tokenizer,
    prepare,
    resolve_device,
    stored_eos_token_ids,
)
from tandemrl.rollout.collect import ResponseReader
from tandemrl.rollout.engine import Completion, EngineError, Request, Sampling, generate_verified
from tandemrl.rollout.factory import ModelSource, make_engine
from tandemrl.rollout.schedule import schedule_of
from tandemrl.selection import Strategy, solo
from tandemrl.selection.draws import completion_keys

Model: TypeAlias = str | Path | PreTrainedModel
PromptLike = str | Sequence[int] | Sequence[Message]


@dataclass(frozen=True, slots=True, eq=False)
class Generated(Completion):
    """A completion with its text, without special tokens. ``authorship_mask`` says who wrote each of its tokens."""

    text: str = ""


def generate(
    senior: Model,
    junior: Model | None,
    prompts: Sequence[PromptLike],
    *,
    strategy: Strategy | str = "word",
    engine: str = "torch",
    n: int = 1,
    seed: int = 0,
    tokenizer: PreTrainedTokenizerBase | None = None,
    dtype: str = "float32",
    device: str = "auto",
    rollout: RolloutConfig | None = None,
    **sampling: Any,
) -> list[list[Generated]]:
    """Write ``n`` completions of each prompt, in the order of the prompts. The engine that does it is closed again.

    Args:
        senior: a folder or hub id, for the torch engine also a loaded model.
        junior: the same. Without one the senior writes alone.
        prompts: texts, which are tokenised as they are; lists of messages, which the chat template renders; or token
            ids.
        strategy: one, or a name of ``selection.strategy`` (by ``word``, an author is drawn at each word, both alike).
        engine: ``torch``, ``vllm`` or another ``rollout.engine``.
        seed: all draws follow from it. The same seed gives the same completions, on both engines.
        tokenizer: that of the senior; None loads it.
        dtype: of models that are loaded here.
        device: where they are loaded.
        rollout: further ``rollout.*``, such as ``vllm`` or ``draft_tokens``.
        sampling: fields of ``Sampling``, such as ``max_tokens=512, temperature=0.6``.

    Raises:
        ConfigError, EngineError: the engine cannot do it. ModelError: a model cannot be loaded. DataError: a prompt is
            none. TypeError, ValueError: a field of ``Sampling`` is unknown or out of range.
    """
    if isinstance(prompts, str) or not all(isinstance(prompt, str | Sequence) for prompt in prompts):
        raise EngineError("prompts: expected a list of texts, of lists of messages, or of lists of token ids")
    rollout, drawn = replace(rollout or RolloutConfig(), engine=engine), Sampling(**sampling)
    given = (senior, senior if junior is None else junior)
    loaded = [model for model in given if isinstance(model, PreTrainedModel)]
    paths = [str(model.name_or_path or "") if isinstance(model, PreTrainedModel) else str(model) for model in given]
    if loaded and not rollout.kind.in_trainer:
        raise EngineError(f"engine={engine}: loads its models itself; pass the folders of senior and junior")
    words = tokenizer or load_tokenizer(paths[0])
    other = junior_tokenizer_of(*paths) if junior is not None and all(paths) else None
    if isinstance(strategy, str):
        size = min(map(_logits, given[:1] if other else given))
        chosen = (
            solo("senior")
            if junior is None
            else schedule_of(SelectionConfig(strategy=strategy), words, size, by_text=other is not None).strategy(1)
        )
    else:
        chosen = strategy
    check(Config(rollout=rollout), Facts(drops=chosen.starts is not None))
    requests = []
    for number, prompt in enumerate(prompts):
        keys = completion_keys(seed, 0, number, 0, n, shared=chosen.shared_draws)
        read = () if other is None else _ids(other, prompt, number, own=False)
        requests.append(Request(_ids(words, prompt, number), keys, drawn, chosen, junior_prompt=read))
    longest = max((len(request.prompt) for request in requests), default=0) + drawn.max_tokens
    on = str(resolve_device(device))

    def source(model: Model, path: str, **more: Any) -> ModelSource:
        def load() -> PreTrainedModel:
            own = isinstance(model, PreTrainedModel)
            return prepare(model) if own else load_model(path, dtype=dtype, device=on)

        return ModelSource(path, load, **more)

    partner = None
    if junior is not None:
        partner = source(junior, paths[1], tokenizer=other)
    ends = None
    if loaded:
        theirs = load_tokenizer(paths[1]) if all(paths) and junior is not None and other is None else words
        ends = sorted({*_ends(senior, words), *(_ends(given[1], theirs) if other is None else ())})
    made = make_engine(
        rollout, source(senior, paths[0]), partner, words, dtype=dtype, device=on, longest=longest, ends=ends
    )
    with closing(made):
        groups, _ = generate_verified(made, requests, chosen)
    reader = ResponseReader(words)
    return [[_with_text(one, reader) for one in group] for group in groups]


def _ids(tokenizer: Any, prompt: PromptLike, number: int, *, own: bool = True) -> Sequence[int]:
    """The token ids of a prompt.

    Args:
        own: whether ids are those of this tokenizer.
    """
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    where = f"prompts[{number}]"
    if any(isinstance(part, Mapping) for part in prompt):
        return chat_tokens(tokenizer, messages_of(prompt, where), where, DEFAULT_ARGUMENTS)
    if not own:
        raise EngineError(f"{where}: token ids are the senior's, and the junior has others; pass a text or messages")
    return [int(token) for token in prompt if not isinstance(token, Mapping)]


def _logits(model: Model) -> int:
    """How many token ids a model can write."""
    if isinstance(model, PreTrainedModel):
        return model.get_output_embeddings().weight.shape[0]
    return AutoConfig.from_pretrained(model, trust_remote_code=False).get_text_config().vocab_size


def _ends(model: Model, tokenizer: PreTrainedTokenizerBase) -> Sequence[int]:
    if isinstance(model, PreTrainedModel):
        return eos_token_ids(model.generation_config, model.config, tokenizer)
    return stored_eos_token_ids(str(model), tokenizer)


def _with_text(one: Completion, reader: ResponseReader) -> Generated:
    told = {each.name: getattr(one, each.name) for each in fields(Completion)}
    return Generated(**told, text=reader.of(one).plain)
