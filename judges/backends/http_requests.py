"""Requests to a server that is not trusted: bounds on time and bytes, one host, no compressed body.

The HTTP client of the openai package bounds each operation on a socket, but not a request: a server that sends one byte
at a time holds it for ever. Requests therefore run in an event loop, whose tasks can be canceled at any point.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import os
import ssl
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from types import ModuleType
from typing import Any, TypeVar

from edit_hooks.utils.printable import printable
from judges.backends.base import Fault, Role

MAX_BYTES = 16 << 20  # of a response; a reply of 100,000 tokens with their log-probabilities has about 10 million
MAX_ADDRESS = 100  # characters of a server's address in a message
CLOSING_SECONDS = 1.0
ABORTED = "the request was aborted"

Result = TypeVar("Result")


class RefusedResponse(Exception):
    """A response that is not read, or a redirection that is not followed."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.reason)
        self.fault = fault


class RequestLoop:
    """An event loop in a thread of its own, in which requests run for the duration of a block.

    Args:
        close: closes the client, in the loop at the end of the block.
    """

    def __init__(self, close: Callable[[], Awaitable[None]]) -> None:
        self._close = close
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="requests")
        self._running: set[concurrent.futures.Future[Any]] = set()
        self._lock = threading.Lock()
        self._is_aborted = False

    def __enter__(self) -> RequestLoop:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()
        with contextlib.suppress(Exception):  # an error about connections that are given up anyway
            asyncio.run_coroutine_threadsafe(self._finish(), self._loop).result(2 * CLOSING_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSING_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()

    def run(self, make: Callable[[], Awaitable[Result]], seconds: float) -> Result:
        """Await ``make()`` in the loop, from any other thread.

        Raises:
            asyncio.TimeoutError: after this many seconds; the task is canceled.
            Fault: after :meth:`abort`.
        """

        async def within_deadline() -> Result:
            return await asyncio.wait_for(make(), seconds)

        with self._lock:
            if self._is_aborted:
                raise Fault(ABORTED)
            future = asyncio.run_coroutine_threadsafe(within_deadline(), self._loop)
            self._running.add(future)
        try:
            return future.result()
        except (concurrent.futures.CancelledError, asyncio.CancelledError):
            raise Fault(ABORTED) from None
        finally:
            future.cancel()  # after an interrupt; without effect on a task that is done
            with self._lock:
                self._running.discard(future)

    def abort(self) -> None:
        """Cancel all tasks, and accept no more."""
        with self._lock:
            self._is_aborted = True
            running = list(self._running)
        for future in running:
            future.cancel()

    async def _finish(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSING_SECONDS)
        await self._close()


def bounded_client(openai: ModuleType, url: str, role: Role) -> Any:
    """Return an HTTP client for the openai package that talks to one server and reads bounded responses.

    Args:
        openai: the package, an optional one.
        url: address of the server.
        role: use of the model, for messages.
    """

    async def stay_at_server(request: Any) -> None:
        if not _is_same_server(request.url, type(request.url)(url)):
            reason = (
                f"the server {url} redirects requests to another one, {_address_of(request.url)}, to which no answer "
                "is sent; give that address as base_url if it is right"
            )
            raise RefusedResponse(Fault(reason, fatal=True))

    async def bound_body(response: Any) -> None:
        if response.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
            reason = f"the {role.name}'s server sent a compressed reply, for which it was not asked"
            raise RefusedResponse(Fault(reason, is_of_model=True))
        response.stream = _bounded_stream(response, role)

    return openai.DefaultAsyncHttpxClient(
        verify=_certificates(_library_of(openai), os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR")),
        headers={"Accept-Encoding": "identity"},
        event_hooks={"request": [stay_at_server], "response": [bound_body]},
    )


def _library_of(openai: ModuleType) -> str:
    """The HTTP library of the openai package: httpx, or httpx2 in later versions."""
    return str(openai.DefaultAsyncHttpxClient.__base__.__module__.partition(".")[0])


@functools.cache
def _certificates(library: str, *from_environment: str | None) -> ssl.SSLContext:
    """The library's default certificates, read once for all clients, which takes longer than a request on a machine."""
    context: ssl.SSLContext = sys.modules[library].create_ssl_context()
    return context


def refused_fault(error: BaseException) -> Fault | None:
    """The fault behind an error of the client, which versions of the openai package wrap; ``None`` for any other."""
    while not isinstance(error, RefusedResponse):
        if error.__cause__ is None:
            return None
        error = error.__cause__
    return error.fault


def _bounded_stream(response: Any, role: Role) -> Any:
    """The body of a response, which ends in a RefusedResponse at :data:`MAX_BYTES`."""
    # The client checks the class of a stream, and is of one of two libraries: httpx, or httpx2 in later versions.
    library = sys.modules[type(response).__module__.partition(".")[0]]
    stream = response.stream

    async def chunks(_: object) -> AsyncIterator[bytes]:
        size = 0
        async for chunk in stream:
            size += len(chunk)
            if size > MAX_BYTES:
                reason = f"the {role.name}'s server sent more than {MAX_BYTES >> 20} MiB"
                raise RefusedResponse(Fault(reason, is_of_model=True))
            yield chunk

    async def aclose(_: object) -> None:
        await stream.aclose()

    return type("BoundedStream", (library.AsyncByteStream,), {"__aiter__": chunks, "aclose": aclose})()


def _is_same_server(url: Any, server: Any) -> bool:
    """Whether a request goes to a server, or to its encrypted port; both are URLs of the client's library."""
    parts = [(one.scheme, one.host, one.port) for one in (url, server)]
    (scheme, host, port), _ = parts
    return parts[0] == parts[1] or ((scheme, port) == ("https", None) and parts[1] == ("http", host, None))


def _address_of(url: Any) -> str:
    """Scheme, host and port of an address, without a path and a query, which may hold a key."""
    port = "" if url.port is None else f":{url.port}"
    return printable(f"{url.scheme}://{url.host}{port}", MAX_ADDRESS)
