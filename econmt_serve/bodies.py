"""Bodies of requests, received within a limit of time and, of all requests together, of memory."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from starlette.requests import Request

from econmt_serve.settings import Refused

_FREE_BYTES = 1 << 16
"""Bytes of each body that do not count, so that large bodies, finished or not, leave room for small ones."""
_MOST_BYTES = 1 << 27
"""Maximum number of bytes of all bodies together, beyond the free ones of each."""


class Bodies:
    """Receiver of bodies.

    Args:
        seconds: seconds within which a body must arrive.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._held = 0

    @contextlib.asynccontextmanager
    async def received(self, request: Request, most: int) -> AsyncIterator[bytes]:
        """Receives a body of at most ``most`` bytes, which counts until the context is left.

        Raises:
            Refused: the body is too long or too slow, or the server holds too many others.
        """
        held = 0

        async def read() -> bytes:
            nonlocal held
            parts, size = list[bytes](), 0
            async for part in request.stream():
                size += len(part)
                more = max(0, size - _FREE_BYTES) - held
                if size > most:
                    raise _too_long(most)
                if self._held + more > _MOST_BYTES:
                    raise Refused(
                        503, "the server has too many large requests; ask again in a few seconds", 5
                    )
                self._held += more
                held += more
                parts.append(part)
            return b"".join(parts)

        declared = request.headers.get("content-length", "0")
        if declared.isdecimal() and int(declared) > most:
            raise _too_long(most)
        try:
            try:
                content = await asyncio.wait_for(read(), self._seconds)
            except asyncio.TimeoutError:
                raise Refused(408, f"the request took more than {self._seconds:g} s to arrive") from None
            yield content
        finally:
            self._held -= held


def _too_long(most: int) -> Refused:
    return Refused(413, f"the request has more than {most:,} bytes; send parts")
