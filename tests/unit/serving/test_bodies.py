"""Bodies of requests: their bounds exactly, and what the server holds of them, however they end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from econmt.errors import EconmtError, InputError
from econmt_serve import bodies
from econmt_serve.answers import refusal
from econmt_serve.bodies import Bodies
from econmt_serve.queries import FileBody, checked_body, read_tree
from econmt_serve.settings import Refused
from tests.conftest import PATIENCE

FREE, COMMON = 10, 50


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "_FREE_BYTES", FREE)
    monkeypatch.setattr(bodies, "_MOST_BYTES", COMMON)


class Sent:
    """A request whose body comes in parts; None: nothing more comes, an error: the connection ends with it."""

    def __init__(self, *parts: int | Exception | None, declared: str | None = None) -> None:
        self._parts = parts
        self.headers = {} if declared is None else {"content-length": declared}

    async def stream(self) -> AsyncIterator[bytes]:
        for part in self._parts:
            if isinstance(part, Exception):
                raise part
            if part is None:
                await asyncio.Event().wait()
            else:
                yield b"x" * part
                await asyncio.sleep(0)


async def outcome(received: Bodies, request: Any, most: int, held: Sequence[int] = ()) -> int:
    """Returns the length of a body, or the status of its refusal; checks what is held while it is used."""
    try:
        async with received.received(request, most) as content:
            if held:
                assert received._held == held[0]
            return len(content)
    except Refused as refused:
        return -refused.status


@pytest.mark.parametrize(
    ("request_", "most", "expected"),
    [
        (Sent(), 5, 0),
        (Sent(20), 20, 20),
        (Sent(21), 20, -413),
        (Sent(20, 1), 20, -413),
        (Sent(20, declared="20"), 20, 20),
        (Sent(20, declared="21"), 20, -413),
        (Sent(20, declared="-1"), 20, 20),
        (Sent(FREE + COMMON), 99, FREE + COMMON),
        (Sent(FREE + COMMON, 1), 99, -503),
        (Sent(*[1] * (FREE + COMMON + 1)), 99, -503),
        (Sent(30, None), 99, -408),
    ],
)
def test_nothing_is_held_of_a_body_that_has_ended(request_: Sent, most: int, expected: int) -> None:
    """Twice, as what the first left would count against the second."""

    async def run() -> None:
        received = Bodies(0.01 if expected == -408 else PATIENCE)
        for _ in range(2):
            held = [max(0, expected - FREE)] if expected >= 0 else []
            assert await outcome(received, request_, most, held) == expected
            assert received._held == 0

    asyncio.run(run())


def test_broken_connections_leave_nothing_and_refusals_are_answered() -> None:
    async def run() -> None:
        received = Bodies(PATIENCE)
        with pytest.raises(ConnectionError):
            await outcome(received, Sent(30, ConnectionError()), 99)
        assert received._held == 0
        with pytest.raises(KeyError):
            async with received.received(Sent(30), 99):  # type: ignore[arg-type]
                raise KeyError
        assert received._held == 0

    asyncio.run(run())
    for error, status, headers in (
        (Refused(413, "too long"), 413, {}),
        (Refused(503, "busy", 7), 503, {"retry-after": "7"}),
        (InputError("wrong"), 400, {}),
        (EconmtError("broken"), 500, {}),
    ):
        answer = refusal(error)
        assert (answer.status_code, json.loads(bytes(answer.body))) == (status, {"error": str(error)})
        assert {name: value for name, value in answer.headers.items() if name == "retry-after"} == headers


@pytest.mark.parametrize(
    ("sizes", "fits"), [((40, 30), True), ((40, 31), False), ((60, 10), True), ((60, 11), False)]
)
def test_two_bodies_share_the_bound(sizes: tuple[int, int], fits: bool) -> None:
    """Of each, ten bytes do not count."""

    async def run() -> None:
        received = Bodies(PATIENCE)
        async with received.received(Sent(sizes[0]), 99):  # type: ignore[arg-type]
            second = await outcome(received, Sent(*[1] * sizes[1]), 99)
            assert second == (sizes[1] if fits else -503)
            assert received._held == sizes[0] - FREE
        assert received._held == 0

    asyncio.run(run())


def test_a_form_may_have_as_many_phrases_as_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the file and a glossary, wherever they are in it."""
    monkeypatch.setattr("econmt_serve.queries.limits.PHRASES", 3)
    border, phrases = b"\r\n--x\r\n", [("avoid", word) for word in ("Hund", "Katze", "Maus")]
    for first in range(5):
        fields = [*phrases[:first], ("glossary", "dog = Tier"), *phrases[first:]]
        parts = [
            f'Content-Disposition: form-data; name="{name}"\r\n\r\n{text}'.encode() for name, text in fields
        ]
        parts.insert(
            first,
            b'Content-Disposition: form-data; name="file"\r\nContent-Type: text/plain\r\n\r\na\r\n\r\nb',
        )
        form = border.join([b"", *parts])[2:] + b"\r\n--x--\r\n"
        body = checked_body(FileBody, read_tree(form, "multipart/form-data; boundary=x", is_file=True))
        assert body.file == (b"a\r\n\r\nb", "text/plain")
        assert (body.avoid, body.glossary) == (["Hund", "Katze", "Maus"], {"dog": "Tier"})
