"""Downloads from a server that plays every fault of a network: each ends in one line, and what arrived is kept."""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from econmt.data.text import catalog as module
from econmt.data.text.catalog import RemoteFile, download
from econmt.errors import InputError

CONTENT = bytes(range(256)) * 400
OK = b"HTTP/1.1 200 OK\r\n"
WHOLE = OK + b"Content-Length: %d\r\n\r\n" % len(CONTENT) + CONTENT

Play = Callable[[socket.socket, "Server"], None]


def says(answer: bytes) -> Play:
    """Sends bytes as they are and closes the connection."""
    return lambda connection, _: connection.sendall(answer)


def resets(answer: bytes) -> Play:
    """Sends bytes, waits until a part of them has been read, and resets the connection."""

    def play(connection: socket.socket, server: Server) -> None:
        connection.sendall(answer)
        server.arrived.wait(20)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    return play


def stalls(answer: bytes) -> Play:
    """Sends bytes and then nothing, until the client has left."""

    def play(connection: socket.socket, _: Server) -> None:
        connection.sendall(answer)
        connection.recv(1)

    return play


class Server:
    """A listening socket; each connection plays the next of ``plays``, the last one again and again."""

    def __init__(self) -> None:
        self.plays: list[Play] = []
        self.requests: list[bytes] = []
        self.arrived = threading.Event()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}/text"
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        for number in itertools.count():
            connection, _ = self._listening.accept()
            with connection:
                request = b""
                while b"\r\n\r\n" not in request and (block := connection.recv(65536)):
                    request += block
                if request == b"stop":
                    return
                self.requests.append(request)
                with contextlib.suppress(ConnectionError):  # the client has seen enough
                    self.plays[min(number, len(self.plays) - 1)](connection, self)

    def stop(self) -> None:
        with socket.create_connection(self._listening.getsockname()) as connection:
            connection.sendall(b"stop")
        self._thread.join()
        self._listening.close()

    @property
    def wanted(self) -> list[str]:
        """The Range header of each request, or nothing."""
        lines = [request.decode().split("\r\n") for request in self.requests]
        return ["".join(line[7:] for line in each if line.startswith("Range: ")) for each in lines]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(module, "_TIMEOUT_SECONDS", 10.0)
    running = Server()
    yield running
    running.stop()


def fetch(server: Server, folder: Path, *plays: Play, checksum: bool = True) -> str:
    """Downloads while the server plays; the error's line, or nothing if the file arrived."""
    server.plays = list(plays)
    digest = f"sha256:{hashlib.sha256(CONTENT).hexdigest()}" if checksum else None
    try:
        download(RemoteFile(server.url, digest), folder / "text", progress=False)
    except InputError as error:
        (line,) = error.lines
        return line.replace(server.url, "URL").replace(str(folder), "FOLDER")
    assert (folder / "text").read_bytes() == CONTENT
    return ""


BY_HAND = "put text into FOLDER by hand, or set ECONMT_DATA to a folder that has"
UNREADABLE = [
    (b"SSH-2.0-OpenSSH_9.6\r\n", "SSH-2.0-OpenSSH_9.6"),
    (b"\x16\x03\x01\x00\xff\xfe\r\n\r\n", r"\x16\x03\x01\x00"),
    (b"HTTP/1.1 " + b"9" * 60_000 + b"\r\n\r\n", "HTTP/1.1 9999"),
    (b"HTTP/1.1 " + b"9" * 100_000 + b"\r\n\r\n", "got more than 65536 bytes when reading status line"),
    (OK + b"X: " + b"x" * 100_000 + b"\r\n\r\n", "got more than 65536 bytes when reading header line"),
    (OK + b"X: x\r\n" * 200 + b"\r\n", "got more than 100 headers"),
    (OK + b"Content-Length: abc\r\n\r\n" + CONTENT, "Content-Length is 'abc'"),
    (OK + b"Content-Length: -1\r\n\r\n" + CONTENT, "Content-Length is '-1'"),
    (b"HTTP/1.1 302 Found\r\nLocation: http://[x/\r\n\r\n", "Invalid IPv6 URL"),
    (b"HTTP/1.1 302 Found\r\nLocation: http://x:y/\r\n\r\n", "nonnumeric port: 'y'"),
]


@pytest.mark.parametrize(("answer", "why"), UNREADABLE, ids=[why[:30] for _, why in UNREADABLE])
def test_an_answer_that_is_not_http(server: Server, tmp_path: Path, answer: bytes, why: str) -> None:
    said = fetch(server, tmp_path, says(answer))
    assert said.startswith("URL: the server's answer cannot be read (")
    assert why in said
    assert f"); try again later, or {BY_HAND}" in said
    assert len(said) < 600
    assert list(tmp_path.iterdir()) == []


def test_closed_without_an_answer(server: Server, tmp_path: Path) -> None:
    said = fetch(server, tmp_path, says(b""))
    assert said.startswith(
        "URL: the connection broke (Remote end closed connection without response); nothing was received; "
        f"try again later, or {BY_HAND}"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_length_that_never_comes(server: Server, tmp_path: Path) -> None:
    said = fetch(server, tmp_path, says(OK + b"Content-Length: 102401\r\n\r\n" + CONTENT))
    assert "URL: the connection broke (102,400 of 102,401 bytes arrived); 102,400 bytes are kept" in said
    assert [path.name for path in tmp_path.iterdir()] == ["text.part"]


def test_a_length_that_is_too_short(server: Server, tmp_path: Path) -> None:
    said = fetch(server, tmp_path, says(OK + b"Content-Length: 1000\r\n\r\n" + CONTENT))
    assert said.startswith("URL: the checksum of text does not match: expected sha256 ")
    assert list(tmp_path.iterdir()) == []


def test_a_reset_within_the_body(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = itertools.count()

    def clock() -> float:
        if next(calls):  # not the call before the first block
            server.arrived.set()
        return 0.0

    monkeypatch.setattr(module, "_clock", clock)
    said = fetch(server, tmp_path, resets(WHOLE[:1000]))
    assert "the connection broke (" in said
    assert "reset by peer" in said
    assert "bytes are kept in FOLDER/text.part; run the same command again" in said


@pytest.mark.parametrize("before", [b"", b"HTTP/1.1 200", OK + b"Content-Length: 9\r\n\r\n"])
def test_a_server_that_falls_silent(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: bytes
) -> None:
    monkeypatch.setattr(module, "_TIMEOUT_SECONDS", 0.05)
    said = fetch(server, tmp_path, stalls(before))
    assert said.startswith(
        "URL: the connection broke (timed out); nothing was received; try again later, or "
    )


def test_a_server_that_sends_a_byte_now_and_then(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = itertools.count(0.0, 20.0)
    monkeypatch.setattr(module, "_clock", lambda: next(seconds))

    def trickles(connection: socket.socket, _: Server) -> None:
        connection.sendall(OK + b"Content-Length: 100000\r\n\r\n")
        while True:
            connection.sendall(b"x")

    said = fetch(server, tmp_path, trickles)
    assert "the connection broke (only " in said
    assert " bytes in 60 s); " in said


def test_a_server_that_becomes_slow_after_a_quick_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each minute counts for itself."""
    seconds, blocks = itertools.count(0.0, 61.0), iter([b"x" * module._SLOW_BYTES, b"y", b"z"])
    monkeypatch.setattr(module, "_clock", lambda: next(seconds))
    answer: Any = SimpleNamespace(read1=lambda _: next(blocks))
    stream = io.BytesIO()
    with pytest.raises(module._BrokenConnectionError, match=r"^only 1 bytes in 60 s$"):
        module._copy(answer, stream, 0, None, lambda _: None)
    assert stream.getvalue() == b"x" * module._SLOW_BYTES + b"y"


def test_a_redirect_loop(server: Server, tmp_path: Path) -> None:
    said = fetch(
        server, tmp_path, says(b"HTTP/1.1 302 Found\r\nLocation: /text\r\nContent-Length: 0\r\n\r\n")
    )
    assert said.startswith("URL: the server answers 302 The HTTP server returned a redirect error that would")
    assert BY_HAND in said


def test_a_redirect_to_a_file_of_this_machine(server: Server, tmp_path: Path) -> None:
    said = fetch(server, tmp_path, says(b"HTTP/1.1 302 Found\r\nLocation: file:///etc/passwd\r\n\r\n"))
    assert said.startswith(
        "URL: the server answers 302 Found - Redirection to url 'file:///etc/passwd' is not allowed"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_long_reason_is_cut(server: Server, tmp_path: Path) -> None:
    said = fetch(server, tmp_path, says(b"HTTP/1.1 503 " + b"no " * 20_000 + b"\r\n\r\n"))
    assert said.startswith("URL: the server answers 503 no no no")
    assert len(said) < 600


@pytest.mark.parametrize("body", [b"5\r\nhel", b"zz\r\nhello\r\n0\r\n\r\n", b"-5\r\nhello\r\n"])
def test_chunks_that_are_none(server: Server, tmp_path: Path, body: bytes) -> None:
    said = fetch(server, tmp_path, says(OK + b"Transfer-Encoding: chunked\r\n\r\n" + body))
    assert said.startswith("URL: the connection broke (")


def test_another_part_than_the_one_requested(server: Server, tmp_path: Path) -> None:
    (tmp_path / "text.part").write_bytes(CONTENT[:500])
    other = b"HTTP/1.1 206 OK\r\nContent-Range: bytes 100-102399/102400\r\nContent-Length: 102300\r\n\r\n"
    assert fetch(server, tmp_path, says(other + CONTENT[100:]), says(WHOLE), checksum=False) == ""
    assert server.wanted == ["bytes=500-", ""]
