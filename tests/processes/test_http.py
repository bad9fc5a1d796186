"""A request ends when its time is over, wherever the server dawdles."""

import socket
import threading
import time
from collections.abc import Sequence

import pytest

from tandemrl.processes.http import Client, Service

HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 200\r\n\r\n"


@pytest.mark.parametrize(
    "said",
    [
        [],
        [b"H", b"T"],
        [b"HTTP/1.1 200 OK\r\n", *[b"x: y\r\n"] * 100],
        [HEAD, *[b"1"] * 100],
        [b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", *[b"1\r\n1\r\n"] * 100],
        [b"HTTP/1.1 100 Continue\r\n\r\n"] * 100,
        None,
    ],
    ids=["nothing", "status", "headers", "body", "chunks", "continues", "TLS"],
)
def test_the_limit_is_of_the_whole_attempt(said: Sequence[bytes] | None) -> None:
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def drip() -> None:
            connection, _ = listener.accept()
            with connection:
                for each in said or ():
                    try:
                        connection.sendall(each)
                    except OSError:
                        return
                    if over.wait(0.2):  # less than the limit of an attempt
                        return
                over.wait()

        server = threading.Thread(target=drip)
        server.start()
        address = f"{'https' if said is None else 'http'}://127.0.0.1:{listener.getsockname()[1]}"
        client = Client(Service("retrieval", "x", RuntimeError, address, None, 0.5, 0, 0.1, 4))
        begun = time.monotonic()
        with pytest.raises(RuntimeError, match=r"no complete reply within 0\.5 s"):
            client.get("/", lambda response: response.json())
        took = time.monotonic() - begun
        over.set()
        server.join()
        client.close()
    assert took < 10  # all that the server has to say takes 20 s
