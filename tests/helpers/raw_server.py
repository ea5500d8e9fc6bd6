"""A server on loopback that writes bytes as it likes: too slowly, too many, or none that a protocol allows."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class RawServer:
    """Passes each connection, after its request, to ``respond``; keeps the first lines of requests."""

    def __init__(self, respond: Callable[[socket.socket], None]) -> None:
        self.respond = respond
        self.lines: list[str] = []
        self.headers: list[str] = []
        self.num_sent = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the listener is closed
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            head, _, body = b"", b"", b""
            while b"\r\n\r\n" not in head:
                head += connection.recv(65536)
            head, _, body = head.partition(b"\r\n\r\n")
            self.lines.append(head.decode().splitlines()[0])
            self.headers.append(head.decode())
            lengths = [line.split(b":")[1] for line in head.lower().splitlines() if line.startswith(b"content-length")]
            while len(body) < int(lengths[0] if lengths else 0):
                body += connection.recv(65536)
            self.respond(connection)

    def close(self) -> None:
        """Accept no more connections."""
        self._listener.close()


@contextmanager
def serve_raw(respond: Callable[[socket.socket], None]) -> Iterator[RawServer]:
    """Run a server for the duration of a block."""
    server = RawServer(respond)
    try:
        yield server
    finally:
        server.close()


def drip(head: bytes, pause: float = 0.02) -> Callable[[socket.socket], None]:
    """Send some bytes at once, then one at a time, until the other side closes the connection."""

    def respond(connection: socket.socket) -> None:
        connection.sendall(head)
        while True:
            connection.sendall(b" ")
            time.sleep(pause)

    return respond


def reply(body: bytes, *headers: str, status: str = "200 OK") -> Callable[[socket.socket], None]:
    """Send a response of known length."""
    lines = [f"HTTP/1.1 {status}", "Content-Type: application/json", f"Content-Length: {len(body)}", *headers]
    head = "\r\n".join([*lines, "Connection: close", "", ""]).encode()
    return lambda connection: connection.sendall(head + body)
