"""A server on loopback that holds files in memory, and counts the requests for each."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FileServer:
    """Replies to GET requests from ``files`` (path without the leading slash -> content), else with 404."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.requests: Counter[str] = Counter()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                path = self.path.lstrip("/")
                outer.requests[path] += 1
                content = outer.files.get(path)
                self.send_response(200 if content is not None else 404)
                self.send_header("Content-Length", str(len(content or b"")))
                self.end_headers()
                self.wfile.write(content or b"")

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        """Address without a slash at the end."""
        return f"http://127.0.0.1:{self.server.server_port}"


@contextmanager
def serve_files(files: dict[str, bytes]) -> Iterator[FileServer]:
    """Run a file server in a thread."""
    server = FileServer(files)
    thread = threading.Thread(target=server.server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.server.shutdown()
        server.server.server_close()
        thread.join()
