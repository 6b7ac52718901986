"""Runs the HTTP interface on an address until it is told to stop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from econmt.errors import InputError
from econmt.serving.app import Service

_HEAD_SECONDS = 10.0
"""For the head of a request to arrive."""
_IDLE_SECONDS = 30
"""Between the requests of a connection."""
_DRAIN_SECONDS = 30
"""For what was asked before the server was told to stop."""
_CONNECTIONS = 1_000
"""Beyond so many the server answers 503."""
_WRITE_SECONDS = 30.0
_WRITE_BYTES = 1 << 15
"""Bytes of an answer that a client has to accept within :data:`_WRITE_SECONDS`."""


class _Protocol(H11Protocol):
    """HTTP that closes the connections of clients that send no request, or a byte at a time, or do not read."""

    _head_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # any byte that the client has not taken pauses writing
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_watching()
        self._stop_watching_writes()

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            if self.cycle is not None:
                self.cycle.disconnected = True  # this is the answer, the application's is dropped
            super().send_400_response(msg)
        else:  # an answer has begun
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writes(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_watching_writes()

    def _watch_writes(self, size: int) -> None:
        """Ends the connection, also one that is being closed, if too little of an answer has left in some time."""

        def look() -> None:
            now = self.transport.get_write_buffer_size()
            if now > size - _WRITE_BYTES:
                self.transport.abort()
            else:
                self._watch_writes(now)

        self._write_timer = self.loop.call_later(_WRITE_SECONDS, look)

    def _stop_watching_writes(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_head()

    def _watch_head(self) -> None:
        """Gives each request's head its time, counted from its first byte, the first one's from the connection on."""
        if self.conn.their_state is not h11.IDLE:
            self._stop_watching()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(_HEAD_SECONDS, self.transport.close)

    def _stop_watching(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens on an address, so that who comes early waits; port 0 takes any that is free.

    Raises:
        InputError: it is in use, or none of this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind, protocol)
    except OSError as error:
        raise InputError(f"--host {host}: no address that can be used ({error.strerror})") from None
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(_CONNECTIONS)
    except OSError as error:
        made.close()
        raise InputError(
            f"{host}:{port} cannot be listened on ({error.strerror}); give another --host or --port"
        ) from None
    return made


def url_of(bound: socket.socket) -> str:
    """Returns the URL of a listening socket."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


class Server:
    """One server.

    Args:
        service: what answers.
        proxies: addresses and networks whose ``X-Forwarded-For`` names the client; none: no header is believed.
    """

    def __init__(self, service: Service, proxies: Sequence[str] = ()) -> None:
        self._service = service
        config = uvicorn.Config(
            service.application(self.stop),
            loop="asyncio",
            http=_Protocol,
            ws="none",
            lifespan="on",
            log_config=None,
            log_level="error",  # what a client did wrong is said to the client alone
            access_log=False,
            server_header=False,
            proxy_headers=bool(proxies),
            forwarded_allow_ips=list(proxies),
            timeout_keep_alive=_IDLE_SECONDS,
            timeout_graceful_shutdown=_DRAIN_SECONDS,
            limit_concurrency=_CONNECTIONS,
        )
        self._server = uvicorn.Server(config)

    def stop(self) -> None:
        """Answers what has been asked, and leaves."""
        self._server.should_exit = True

    def run(self, bound: socket.socket) -> None:
        """Answers until SIGTERM, Ctrl-C or :meth:`stop`; the signal is raised again when all is answered.

        Raises:
            Exception: what stopped the translating, if something did.
        """
        self._server.run(sockets=[bound])
        if self._service.failed is not None:
            raise self._service.failed
