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
    ``headers`` are part of every reply. Only GET requests are counted. ``failures`` are status codes for the next
    requests of a path, ``cuts`` numbers of bytes after which its next replies break off. Ranges are served as asked,
    with ``If-Range``; not if ``ranges`` is off.
    """

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.redirects: dict[str, str] = {}
        self.announced: dict[str, int] = {}
        self.headers: dict[str, str] = {}
        self.failures: dict[str, list[int]] = {}
        self.cuts: dict[str, list[int]] = {}
        self.ranges = True
        self.starts: list[int] = []  # first byte of each reply with content
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
                content = self.send_head(path)
                cuts = outer.cuts.get(path)
                self.wfile.write(content[: cuts.pop(0)] if cuts else content)
                self.close_connection = True

            def send_head(self, path: str) -> bytes:
                """Send the header; return the content."""
                content = outer.files.get(path)
                etag, start, status = f'"{hashlib.sha256(content or b"").hexdigest()}"', 0, 200
                if failures := outer.failures.get(path):
                    content, status = b"try again", failures.pop(0)
                elif content is not None:
                    wanted = self.headers.get("Range", "")
                    if wanted and outer.ranges and self.headers.get("If-Range", etag) == etag:
                        start, size = int(wanted.removeprefix("bytes=").removesuffix("-")), len(content)
                        content, status = content[start:], 206 if start < size else 416
                    outer.starts.append(start)
                if address := outer.redirects.get(path):
                    self.send_response(302)
                    self.send_header("Location", address)
                else:
                    self.send_response(status if content is not None else 404)
                if status == 206:
                    self.send_header("Content-Range", f"bytes {start}-{size - 1}/{size}")
                self.send_header("Content-Length", str(outer.announced.get(path, len(content or b""))))
                self.send_header("ETag", etag)
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
