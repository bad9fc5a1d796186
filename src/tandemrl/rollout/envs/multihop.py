"""Questions that take several hops through documents: the authors search and read until they ``complete`` the episode
with an answer and its sources.

The documents are those of the row (`data.documents`), of ``retrieval.index``, or of a service. Only indexes of texts
are kept between calls.
"""

from collections.abc import Sequence
from urllib.parse import quote

from tandemrl.config import Config, ConfigError, RetrievalConfig
from tandemrl.data.documents import Document, documents_of, shown
from tandemrl.data.rows import DataError, Row
from tandemrl.rollout.envs.environment import Environment, Opening
from tandemrl.rollout.envs.retrieval import Retriever, make_retriever

SYSTEM = """\
Answer the question from the information that the tools give you.

1. Think about the question and about what you know by now, and plan the next step.
2. Search for documents with a tool.
3. Go on until the documents answer the question. They do, over several hops: one document leads to the next.
4. In the last step, call `complete` with
   - reasoning: how the answer follows from the documents
   - final_answer: the answer in a few words, without an explanation
   - cited_doc_ids: the ids of the documents that it rests on

Call one tool per step. There are no tools or arguments but those listed."""

MAX_QUERY_BYTES = 4096
"""How long a query may be in a URL, about half of what servers read there."""
MOST_AT_ONCE = 10
"""How many documents a search may return at most, if ``retrieval.top_n`` is not more. Without this limit, one search
could show everything."""


class MultihopEnvironment(Environment):
    """An environment with the tools ``retrieve_documents`` and ``complete``. ``rollout.tools`` can add `get_document`
    and `list_documents`.

    Args:
        retriever: finds the documents, instead of ``retrieval.retriever``.

    Raises:
        ConfigError: the retriever is no function.
    """

    ends = frozenset({"complete"})
    system = SYSTEM
    retriever: Retriever | None = None

    def __init__(self, retrieval: RetrievalConfig, retriever: Retriever | None = None) -> None:
        self.retrieval = retrieval
        if retriever is not None:
            if not callable(retriever):
                raise ConfigError(f"retriever={retriever!r:.100}: pass a function of (row, query, count) -> documents")
            self.retriever = retriever
        self.tools = (self.retrieve_documents, complete)

    def start(self, row: Row) -> Opening:
        """The rules of the environment, unless the row has a system message of its own, and the question.

        Raises:
            DataError: there is nothing to search in, since the row has no documents and ``retrieval.index`` is not set.
        """
        elsewhere = self.retriever or self.retrieval.index or self.retrieval.kind.hosted
        if not elsewhere and not documents_of(row):
            fix = "build it with `tandemrl data build musique`, or set retrieval.index, or retrieval.retriever=search"
            raise DataError(f"row {row.example_id}: no documents in 'extra_info.docs' to search in; {fix}")
        if row.messages[0]["role"] == "system":
            return Opening(row.messages, {})
        return super().start(row)

    def prepare(self) -> None:
        self.search()

    def search(self) -> Retriever:
        """The function that finds the documents."""
        return self.retriever or make_retriever(self.retrieval)

    def retrieve_documents(self, query: str, row: Row, top_n: int | None = None) -> str:
        """Search for documents. The more specific the query, the better what is found.

        Args:
            query: What to search for.
            top_n: How many documents to return at most.
        """
        count = self.retrieval.top_n if top_n is None else top_n
        most = max(MOST_AT_ONCE, self.retrieval.top_n)
        if not 1 <= count <= most:
            raise ValueError(f"top_n must be from 1 to {most}, not {count}")
        if not query.strip() or len(quote(query)) > MAX_QUERY_BYTES:  # a service would refuse it, which ends the run
            raise ValueError("query must not be empty" if not query.strip() else "query is too long: shorten it")
        return _listed(self.search()(row, query, count))


def multihop(config: Config) -> MultihopEnvironment:
    """The environment of ``rollout.environment=multihop``.

    Raises:
        BrokenEnvironmentError: a package or an index that the search needs is missing. Models are not checked here,
            since `prepare` loads them.
    """
    environment = MultihopEnvironment(config.retrieval)
    if not config.retrieval.kind.model:
        environment.prepare()
    return environment


def complete(reasoning: str, final_answer: str, cited_doc_ids: list[str]) -> None:
    """Give the final answer. Call it last, and once.

    Args:
        reasoning: How the answer follows from the documents.
        final_answer: The answer in a few words, without an explanation.
        cited_doc_ids: The ids of the documents that it rests on.
    """


def get_document(doc_id: str, row: Row) -> str:
    """Read a document.

    Args:
        doc_id: The id of the document.
    """
    found = [document for document in documents_of(row) if document.id == str(doc_id).strip()]
    return _listed(found) if found else f"There is no document with the id {doc_id!r}."


def list_documents(row: Row) -> str:
    """List the ids and titles of all documents."""
    return "\n".join(f"{document.id}. {document.title}" for document in documents_of(row))


def _listed(documents: Sequence[Document]) -> str:
    return "\n\n".join(map(shown, documents)) or "No documents were found."
