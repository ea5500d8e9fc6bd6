"""A server on loopback that holds files in memory, and counts the requests for each."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FileServer:
    """Replies to GET and HEAD requests from ``files`` (path without the leading slash -> content), else with 404.

    ``redirects`` sends a path to another address; ``announced`` gives it another Content-Length than its content has;
    ``headers`` are part of every reply. Only GET requests are counted.
    """

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.redirects: dict[str, str] = {}
        self.announced: dict[str, int] = {}
        self.headers: dict[str, str] = {}
        self.requests: Counter[str] = Counter()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args: Any) -> None:
                pass

            def do_HEAD(self) -> None:
                self.send_head(self.path.lstrip("/"))

            def do_GET(self) -> None:
                path = self.path.lstrip("/")
                outer.requests[path] += 1
                self.wfile.write(self.send_head(path))

            def send_head(self, path: str) -> bytes:
                """Send the header; return the content."""
                content = outer.files.get(path)
                if address := outer.redirects.get(path):
                    self.send_response(302)
                    self.send_header("Location", address)
                else:
                    self.send_response(200 if content is not None else 404)
                self.send_header("Content-Length", str(outer.announced.get(path, len(content or b""))))
                self.send_header("ETag", f'"{hashlib.sha256(content or b"").hexdigest()}"')
                for name, value in outer.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                return content or b""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        """Address without a slash at the end."""
        return f"http://127.0.0.1:{self.server.server_port}"


@contextmanager
def serve_files(files: dict[str, bytes]) -> Iterator[FileServer]:
    """Run a file server in a thread."""
    server = FileServer(files)
    thread = threading.Thread(target=server.server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.server.shutdown()
        server.server.server_close()
        thread.join()
