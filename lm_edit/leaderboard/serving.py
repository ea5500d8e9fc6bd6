"""The leaderboard's folder on a web server of this machine, which no other machine reaches."""

from __future__ import annotations

import contextlib
import http.server
import threading
from http import HTTPStatus
from pathlib import Path

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.storage.files import blocks_of
from lm_edit.leaderboard.site import FILES, is_part

HOST = "127.0.0.1"
TYPES = {".html": "text/html", ".txt": "text/plain", ".md": "text/plain", ".csv": "text/csv", ".tex": "text/plain"}


def serve(folder: Path, port: int) -> http.server.ThreadingHTTPServer:
    """Serve the files of a leaderboard in a thread that ends with the process; port 0: any that is free.

    Raises:
        EditingError: for a port that is taken.
    """

    class OfFolder(_Handler):
        root = folder

    try:
        server = http.server.ThreadingHTTPServer((HOST, port), OfFolder)
    except OSError as error:
        raise EditingError(f"--serve {port}: {error.strerror}; give another port, or 0 for any that is free.") from None
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


class _Handler(http.server.BaseHTTPRequestHandler):
    """Answers with the files that ``lm-edit leaderboard`` writes, and with nothing else of the folder."""

    root: Path
    server_version, sys_version = "lm-edit", ""

    def do_GET(self) -> None:
        """Send a file."""
        # A page of another site whose name resolves to this machine has its own name in the header.
        host = self.headers.get("Host", "").partition(":")[0]
        name = self.path.partition("?")[0].removeprefix("/") or "index.html"
        if host not in (HOST, "localhost"):
            return self.send_error(HTTPStatus.FORBIDDEN)
        if name not in FILES and not is_part(name):
            return self.send_error(HTTPStatus.NOT_FOUND)
        try:
            content = b"".join(blocks_of(self.root / name))
        except OSError:
            return self.send_error(HTTPStatus.NOT_FOUND)
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", f"{TYPES[Path(name).suffix]}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "max-age=31536000, immutable" if is_part(name) else "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        with contextlib.suppress(ConnectionError):  # a browser that loads the page again drops the connection
            self.end_headers()
            self.wfile.write(content)
        return None

    def log_message(self, format: str, *arguments: object) -> None:
        """Log no requests."""
