"""Middleware that closes connections whose requests were answered before their bodies had arrived."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

LINGER_SECONDS = 1.0
"""Maximum time, in seconds, in which the rest of a body is read and dropped."""
_LINGER_BYTES = 1 << 22
"""Maximum number of bytes that are read and dropped."""


class CloseUnread:
    """ASGI middleware that closes the connection after answering a request whose body was not read to its end.

    An open connection would be read until the body ends, which may be never. The answer carries ``Connection: close``.
    The rest of the body is still read for a moment: closing a socket with unread data resets the connection, and a
    client that sends its whole body first would lose the answer.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the application for one request."""
        names = {name for name, value in scope.get("headers", []) if value != b"0"}
        unread = not names.isdisjoint({b"content-length", b"transfer-encoding"})
        closes = False

        async def noting_receive() -> Message:
            nonlocal unread
            message = await receive()
            unread = unread and bool(message.get("more_body"))
            return message

        async def closing_send(message: Message) -> None:
            nonlocal closes
            if message["type"] == "http.response.start" and unread:
                closes = True
                message = {**message, "headers": [*message.get("headers", []), (b"connection", b"close")]}
            elif closes and not message.get("more_body"):
                await send({**message, "more_body": True})
                await _drop_rest(receive)
                message = {"type": "http.response.body"}  # the server closes after the last part
            await send(message)

        await self._app(scope, noting_receive, closing_send)


async def _drop_rest(receive: Receive) -> None:
    async def drop() -> None:
        size, message = 0, await receive()
        while message.get("more_body") and size < _LINGER_BYTES:
            size += len(message["body"])
            message = await receive()

    try:
        await asyncio.wait_for(drop(), LINGER_SECONDS)
    except asyncio.TimeoutError:
        return
