"""Uvicorn server of the HTTP interface, with limits for clients that send or read slowly."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from econmt.api import InputError
from econmt.api.commands import Interrupts
from econmt_serve.app import Service

_HEAD_SECONDS = 10.0
"""Seconds within which the head of a request must arrive."""
_IDLE_SECONDS = 30
"""Seconds between the requests of a connection."""
_DRAIN_SECONDS = 30
"""Seconds in which a stopping server still answers earlier requests; it refuses the rest."""
_REFUSE_SECONDS = 5
"""Seconds after that in which clients may take their refusals."""
_CONNECTIONS = 1_000
"""Maximum number of connections; others are answered with status 503."""
_WRITE_SECONDS = 30.0
_WRITE_BYTES = 1 << 15
"""Bytes of a response that a client must accept within :data:`_WRITE_SECONDS`."""


class _Protocol(H11Protocol):
    """HTTP/1.1 that closes connections of clients that send no request, send it too slowly, or do not read."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._timers = dict[str, asyncio.TimerHandle]()
        transport.set_write_buffer_limits(0)  # any byte that the client has not taken pauses writing
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_timer("head")
        self._stop_timer("write")

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
        self._stop_timer("write")

    def _watch_writes(self, size: int) -> None:
        """Aborts the connection, even one that is being closed, unless the client reads the response fast enough."""

        def check() -> None:
            remaining = self.transport.get_write_buffer_size()
            if remaining > size - _WRITE_BYTES:
                self.transport.abort()
            else:
                self._watch_writes(remaining)

        self._timers["write"] = self.loop.call_later(_WRITE_SECONDS, check)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_head()

    def _watch_head(self) -> None:
        """Limits the time of a request's head from its first byte, of the first one from the connection on."""
        if self.conn.their_state is not h11.IDLE:
            self._stop_timer("head")
        elif "head" not in self._timers:
            self._timers["head"] = self.loop.call_later(_HEAD_SECONDS, self.transport.close)

    def _stop_timer(self, name: str) -> None:
        if name in self._timers:
            self._timers.pop(name).cancel()


def bind(host: str, port: int) -> socket.socket:
    """Opens a socket that listens on an address; port 0 takes any free port."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise InputError(f"--host {host}: no address that can be used ({error.strerror})") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_CONNECTIONS)
    except OSError as error:
        listener.close()
        raise InputError(
            f"{host}:{port} cannot be listened on ({error.strerror}); give another --host or --port"
        ) from None
    return listener


def url_of(bound: socket.socket) -> str:
    """Returns the URL of a listening socket."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


class _Server(uvicorn.Server):
    """Uvicorn's server, which refuses what it cannot answer in time when it stops."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self.interrupts = Interrupts()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.should_exit |= self.interrupts.pending  # by a signal that came before uvicorn's handlers

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.refuse_files()
        late = asyncio.get_running_loop().call_later(_DRAIN_SECONDS, self._service.refuse_rest)
        await super().shutdown(sockets)
        late.cancel()


class Server:
    """Server of a service; ``proxies`` are addresses and networks whose ``X-Forwarded-For`` header names the client."""

    def __init__(self, service: Service, proxies: Sequence[str] = ()) -> None:
        self._service = service
        config = uvicorn.Config(
            service.application(self.stop),
            loop="asyncio",
            http=_Protocol,
            ws="none",
            lifespan="on",
            log_config=None,
            log_level="error",  # mistakes of a client are told to the client only
            access_log=False,
            server_header=False,
            proxy_headers=bool(proxies),
            forwarded_allow_ips=list(proxies),
            timeout_keep_alive=_IDLE_SECONDS,
            timeout_graceful_shutdown=_DRAIN_SECONDS + _REFUSE_SECONDS,
            limit_concurrency=_CONNECTIONS,
        )
        self._server = _Server(config, service)

    def stop(self) -> None:
        """Stops after answering earlier requests."""
        self._server.should_exit = True

    def run(self, bound: socket.socket) -> Interrupts:
        """Answers requests until :meth:`stop` or a signal, which it returns; raises the error of translating again."""
        with self._server.interrupts:
            self._server.run(sockets=[bound])
        if self._service.failure is not None:
            raise self._service.failure
        return self._server.interrupts
