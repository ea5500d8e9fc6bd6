"""Connections that are slower than any useful one, ended from outside.

The timeout of a socket bounds the wait for the next byte. A server that sends one byte within each holds a download for
ever, in the header, in the body or in the framing of its parts.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import threading
import time
import urllib.request
from types import TracebackType


class Watch:
    """Shuts down the connections of a request that brings fewer bytes than a rate.

    Args:
        seconds, num_bytes: within each such span, this many bytes of the body have to come. The header has one span.
    """

    def __init__(self, seconds: float, num_bytes: int) -> None:
        self.seconds, self.num_bytes = seconds, num_bytes
        self.has_ended = False  # a request; what it has read is not the whole content then
        self._pending = 0
        self._deadline = time.monotonic() + seconds
        self._sockets: list[socket.socket] = []
        self._lock, self._is_done = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_done.set()
        self._thread.join()
        if self.has_ended and isinstance(error, (type(None), OSError, ValueError, http.client.HTTPException)):
            raise TimeoutError(f"fewer than {self.num_bytes:,} bytes in {self.seconds:g} seconds") from error

    def add(self, connection: socket.socket) -> None:
        """Watch a connection, such as that to the address of a redirection."""
        with self._lock:
            self._sockets.append(connection)

    def receive(self, num_bytes: int) -> None:
        """Count bytes of the body; 0 for a header."""
        with self._lock:
            self._pending += num_bytes
            if num_bytes == 0 or self._pending >= self.num_bytes:
                self._pending, self._deadline = 0, time.monotonic() + self.seconds

    def opener(self, *handlers: urllib.request.BaseHandler) -> urllib.request.OpenerDirector:
        """An opener whose connections are watched."""
        watch = self

        class Connection(http.client.HTTPConnection):
            def connect(self) -> None:
                super().connect()
                watch.add(self.sock)

        class SecureConnection(http.client.HTTPSConnection):
            def connect(self) -> None:
                super().connect()
                watch.add(self.sock)

        class Handler(urllib.request.HTTPHandler):
            def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
                return self.do_open(Connection, req)

        class SecureHandler(urllib.request.HTTPSHandler):
            def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
                return self.do_open(SecureConnection, req, context=ssl.create_default_context())

        return urllib.request.build_opener(Handler, SecureHandler, *handlers)

    def _run(self) -> None:
        while not self._is_done.wait(max(0.0, self._deadline - time.monotonic())):
            with self._lock:
                if time.monotonic() < self._deadline:
                    continue
                self.has_ended = True
                for connection in self._sockets:
                    with contextlib.suppress(OSError):  # closed by now
                        # Not the method of a TLS socket, which another thread is reading.
                        socket.socket.shutdown(connection, socket.SHUT_RDWR)
            return
