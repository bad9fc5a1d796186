"""Search in a corpus behind a service, such as rlvr's of Wikipedia: POST /search with ``query`` and ``top_n``."""

from urllib.parse import urlencode

from tandemrl.config import RetrievalConfig
from tandemrl.data.documents import Document, document
from tandemrl.data.rows import DataError, Row
from tandemrl.processes.http import PermanentError, Response, RetryableError, excerpt
from tandemrl.rollout.envs.retrieval import Retriever, of_row
from tandemrl.rollout.envs.semantic import client_of


def service(config: RetrievalConfig) -> Retriever:
    """The retriever that asks the service at ``retrieval.url``.

    What is asked is sent in the address and as JSON, since both forms are in use. A document is read as in a row's
    ``extra_info.docs``.

    Raises:
        BrokenEnvironmentError: the key of the service is not set. When it searches: the service fails, or calls another
            document by the id of one of the row's documents, so that sources could not be scored.
    """
    client = client_of(config, "a service with POST /search")

    def search(row: Row, query: str, count: int) -> list[Document]:
        asked = {"query": query, "top_n": count}
        found = client.post(f"/search?{urlencode(asked)}", asked, _documents)[:count]
        return of_row(row, found, f"the service at {config.url} (retrieval.url)")

    return search


def _documents(response: Response) -> list[Document]:
    """The documents in ``{"results": [{"document": {"id", "title", "body"}}]}``, or without the inner ``document``."""
    if response.status == 404:
        raise PermanentError(f"HTTP 404: {excerpt(response.body)}; retrieval.url must end where /search begins")
    content = response.json()
    results = content.get("results") if isinstance(content, dict) else content
    if not isinstance(results, list):
        raise RetryableError(f"not a list of documents: {excerpt(response.body)}")
    try:
        return [
            document(each["document"] if isinstance(each, dict) and "document" in each else each, "POST /search")
            for each in results
        ]
    except DataError as error:
        raise RetryableError(f"not a list of documents: {error}") from None
