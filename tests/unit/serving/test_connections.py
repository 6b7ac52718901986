"""Connections, over raw sockets: which are closed, when, and that the client still gets its answer."""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from econmt_serve import server, unread
from econmt_serve.access import Keys
from econmt_serve.settings import Settings
from tests.conftest import PATIENCE
from tests.unit.serving.conftest import Client, serving
from tests.unit.serving.test_server import exchange

POST = b"POST /translate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
JSON = {"Content-Type": "application/json"}
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
FILE = b"POST /translate_file HTTP/1.1\r\nHost: x\r\nContent-Type: text/plain\r\nContent-Length: %d\r\n\r\n"
GET = b"GET /languages HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture(autouse=True)
def short_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unread, "LINGER_SECONDS", 0.05)


@contextmanager
def connected(client: Client) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", client.port), timeout=PATIENCE) as connection:
        yield connection


def sent_until_refused(connection: socket.socket, block: bytes, head: bytes = b"") -> int:
    """Sends a head and a block again and again; how many bytes until the connection took no more."""
    sent = 0
    with contextlib.suppress(TimeoutError, ConnectionError):
        connection.sendall(head)
        while sent < 1 << 30:
            connection.sendall(block)
            sent += len(block)
    return sent


def statuses(said: bytes) -> list[int]:
    """Of all answers in what a server said."""
    return [int(part[:3]) for part in said.split(b"HTTP/1.1 ")[1:]]


UNFINISHED = {
    "408 of a length": (POST + b'Content-Length: 100000\r\n\r\n{"q": ', 408),
    "408 of chunks": (CHUNKED + b"5\r\n{    \r\n", 408),
    "413 of a length": (POST + b"Content-Length: 100000000\r\n\r\n{", 413),
    "413 of a long number": (POST + b"Content-Length: 99999999999999999999\r\n\r\n{", 413),
    "413 of chunks": (CHUNKED + b"50000\r\n" + b" " * 268_145, 413),
    "404": (b"POST /nothing HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{", 404),
    "405": (b"POST /health HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n", 405),
    "GET with a body": (b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{", 200),
}


@pytest.mark.parametrize("name", UNFINISHED)
def test_closed_after_a_body_that_was_not_read_whole(
    client: Client, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    sent, status = UNFINISHED[name]
    if status == 408:
        monkeypatch.setattr(client.service._bodies, "_seconds", 0.5)
    said = exchange(client, sent)  # until the server closes
    assert (b"took more than 0.5 s to arrive" in said) == (status == 408)
    assert statuses(said) == [status]
    assert b"\r\nconnection: close\r\n" in said.lower()


def test_nothing_after_a_refused_body_is_read(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unread, "LINGER_SECONDS", 60.0)
    block = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    with connected(client) as connection:
        sent = sent_until_refused(connection, block, CHUNKED)
    assert sent < 64 << 20  # what the buffers of both systems hold included


def test_a_client_that_sends_first_gets_its_answer(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unread, "LINGER_SECONDS", PATIENCE)
    for _ in range(5):
        answer = client.ask("POST", "/translate", b" " * 2_000_000, JSON)
        assert answer.status == 413
        assert answer.json == {"error": "the request has more than 268,144 bytes; send parts"}


def test_connections_of_refused_and_whole_requests(client: Client) -> None:
    said = exchange(client, POST + b"Expect: 100-continue\r\nContent-Length: 100000000\r\n\r\n")
    assert statuses(said) == [413]
    body = b'{"q": 1}'
    whole = POST + b"Content-Length: %d\r\n\r\n" % len(body) + body
    last = b"GET /languages HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    said = exchange(client, whole + GET + CHUNKED + b"2\r\n{}\r\n0\r\n\r\n" + GET + last)
    assert statuses(said) == [400, 200, 400, 200, 200]


def test_a_client_that_does_not_read_is_let_go(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_WRITE_SECONDS", 0.1)
    with serving(folder, Settings()) as client, connected(client) as connection:
        connection.settimeout(0.05)
        page = b"GET /page.js HTTP/1.1\r\nHost: x\r\n\r\n"
        sent_until_refused(connection, page * 100)
        watched = select.poll()
        watched.register(connection, 0)  # only its end
        assert watched.poll(1000 * PATIENCE)


def test_a_key_in_the_head_is_looked_at_before_the_body(folder: Path) -> None:
    head = POST + b"Authorization: Bearer %s\r\nContent-Length: 100\r\n\r\n"
    with serving(folder, Settings(requests_per_minute=2, read_seconds=PATIENCE), Keys(["sesame"])) as client:
        sent = head % b"wrong", FILE % 100, head % b"wrong"
        assert [statuses(exchange(client, each)) for each in sent] == [[403], [403], [429]]
        body = {**JSON, "Authorization": "bearer sesame"}
        *answers, late = [client.ask("POST", "/translate", b"{", body) for _ in range(3)]
        assert [each.status for each in answers] == [400, 400]
        assert (late.status, late.headers["retry-after"]) == (429, "30")
        assert client.get("/frontend/settings").json["keyRequired"] is True
        assert statuses(exchange(client, head % b"sesame")) == [429]


def test_a_key_in_the_body_is_looked_at_before_the_fields(folder: Path) -> None:
    with serving(folder, Settings(requests_per_minute=4, read_seconds=PATIENCE), Keys(["sesame"])) as client:
        basic = {**JSON, "Authorization": "Basic c2VzYW1l"}  # of a proxy
        assert client.ask("POST", "/translate", b'{"q": "a", "api_key": "sesame"}', basic).status == 200
        wrong = [b'{"nothing": 1}', b'{"q": "a", "api_key": ["sesame"]}', b'{"q": "a", "api_key": ""}']
        assert [client.ask("POST", "/translate", each, JSON).status for each in wrong] == [403] * 3
        nobody = client.post("/translate", q="a")
        assert nobody.json == {"error": "this server wants an api_key; ask whoever runs it for one"}
        # The address has used up its requests without a key: its bodies are not read any more.
        assert statuses(exchange(client, POST + b"Content-Length: 100\r\n\r\n")) == [429]
        named = {**JSON, "Authorization": "Bearer sesame"}
        assert client.ask("POST", "/translate", b'{"q": "a"}', named).status == 200


def test_without_keys_a_rate_is_looked_at_before_the_body(folder: Path) -> None:
    with serving(folder, Settings(requests_per_minute=2, read_seconds=PATIENCE)) as client:
        assert client.ask("POST", "/translate", b"{", JSON).status == 400
        assert client.post("/detect", q="a").status == 200
        assert statuses(exchange(client, POST + b"Content-Length: 100\r\n\r\n")) == [429]


def forwarded(client: Client, address: str) -> int:
    headers = {**JSON, "X-Forwarded-For": address}
    return client.ask("POST", "/detect", b'{"q": "a"}', headers).status


def test_forwarded_addresses_of_others_do_not_count(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")  # read by uvicorn
    with serving(folder, Settings(requests_per_minute=2)) as client:
        assert [forwarded(client, f"10.0.0.{number}") for number in range(3)] == [200, 200, 429]
    with serving(folder, Settings(requests_per_minute=2), proxies=["192.0.2.1"]) as client:
        assert [forwarded(client, f"10.0.0.{number}") for number in range(3)] == [200, 200, 429]


@pytest.mark.parametrize("proxies", [["127.0.0.1"], ["192.0.2.1", "127.0.0.0/8"]])
def test_forwarded_addresses_of_a_named_proxy_count(folder: Path, proxies: list[str]) -> None:
    with serving(folder, Settings(requests_per_minute=1), proxies=proxies) as client:
        assert [forwarded(client, f"10.0.0.{number}") for number in range(3)] == [200] * 3
        assert forwarded(client, "10.0.0.1") == 429
        both = "203.0.113.9, 10.0.0.1"  # the client wrote the first, the proxy the last
        assert forwarded(client, both) == 429
        long = "x" * 30_000
        assert [forwarded(client, long), forwarded(client, long)] == [200, 429]


def test_a_broken_body_is_refused_once_and_nothing_is_logged(
    client: Client, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unread, "LINGER_SECONDS", PATIENCE)
    head = b"POST /nothing HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert statuses(exchange(client, head + b"no size\r\n")) == [400]
    assert statuses(exchange(client, CHUNKED + b"5\r\n{    \r\nno size\r\n")) == [400]
    with connected(client) as connection:
        connection.sendall(head)
        said = b""
        while b'"Not Found"}' not in said:
            said += connection.recv(65536)
        connection.sendall(b"no size\r\n")
        assert connection.recv(65536) == b""
    assert caplog.text == ""
