"""Downloads against a server on this machine: whole, resumed, refused, cut off, and with every fault of a network.

Each fault ends in one line, and what arrived is kept.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import itertools
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from econmt.data.files import text_checksum
from econmt.data.text import catalog
from econmt.data.text.catalog import DataSet, RemoteFile, download
from econmt.data.text.corpus import find_corpus, find_text
from econmt.errors import InputError
from tests.conftest import PATIENCE

CONTENT = bytes(range(256)) * 400

Play = Callable[[socket.socket, "Server"], None]


def answers(connection: socket.socket, server: Server) -> None:
    """Sends the file that was asked for, from the byte that was asked for, as far as the connection holds."""
    content = server.files[server.requests[-1].split()[1].decode().lstrip("/")]
    wanted = server.wanted[-1] if server.ranges else ""
    first, whole = int(wanted.removeprefix("bytes=").removesuffix("-") or 0), len(content)
    status, place = "200 OK", ""
    if wanted:
        status = "206 Partial Content" if first < whole else "416 Range Not Satisfiable"
        place = f"Content-Range: bytes {f'{first}-{whole - 1}' if first < whole else '*'}/{whole}\r\n"
    body = content[first:]
    connection.sendall(f"HTTP/1.1 {status}\r\n{place}Content-Length: {len(body)}\r\n\r\n".encode())
    connection.sendall(body[: server.cut_after.pop(0)] if server.cut_after else body)


class Server:
    """A listening socket; each connection plays the next of ``plays``, the last one again and again.

    Attributes:
        files: What `answers` sends, by path.
        ranges: Whether it knows them.
        cut_after: Bytes after which the connection of each of the next answers breaks.
        requests: What was asked.
        arrived: Set by tests that wait for a part of an answer.
    """

    def __init__(self) -> None:
        self.plays: list[Play] = [answers]
        self.files = {"text": CONTENT}
        self.ranges, self.cut_after = True, list[int]()
        self.requests: list[bytes] = []
        self.arrived = threading.Event()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
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
    monkeypatch.setattr(catalog, "_TIMEOUT_SECONDS", PATIENCE)
    running = Server()
    yield running
    running.stop()


def sha256(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def remote(server: Server, checksum: str | None = sha256(CONTENT)) -> RemoteFile:
    return RemoteFile(f"{server.url}/text", checksum)


def test_whole(server: Server, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "new" / "folder" / "text"
    download(remote(server), file, progress=True)
    assert file.read_bytes() == CONTENT
    assert [path.name for path in file.parent.iterdir()] == ["text"]
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err == f"econmt: downloading {server.url}/text\n"


BEFORE: dict[str, tuple[bytes | None, bool, list[int], list[str]]] = {
    "a part": (CONTENT[:1000], True, [], ["bytes=1000-"]),
    "no ranges": (b"something old", False, [], ["bytes=13-"]),
    "all of it": (CONTENT, True, [], [f"bytes={len(CONTENT)}-"]),
    "it became smaller": (CONTENT + b"longer", True, [], [f"bytes={len(CONTENT) + 6}-", ""]),
    "broken connections": (None, True, [60_000, 30_000], ["", "bytes=60000-", "bytes=90000-"]),
}
"""What is there, whether the server knows ranges, where its connections break, and what is asked of it."""


@pytest.mark.parametrize("name", BEFORE)
def test_what_is_there_is_gone_on_with(server: Server, tmp_path: Path, name: str) -> None:
    before, server.ranges, server.cut_after, wanted = BEFORE[name]
    if before is not None:
        (tmp_path / "text.part").write_bytes(before)
    download(remote(server), tmp_path / "text", progress=False)
    assert (tmp_path / "text").read_bytes() == CONTENT
    assert server.wanted == wanted


def test_a_connection_that_keeps_breaking_keeps_what_came(server: Server, tmp_path: Path) -> None:
    server.cut_after = [10_000] * 4
    kept = f"40,000 bytes are kept in {tmp_path / 'text.part'}; run the same command again"
    with pytest.raises(InputError, match=f"the connection broke.*{re.escape(kept)}"):
        download(remote(server), tmp_path / "text", progress=False)
    download(remote(server), tmp_path / "text", progress=False)
    assert server.wanted[-1] == "bytes=40000-"
    assert (tmp_path / "text").read_bytes() == CONTENT


def test_a_connection_that_brings_nothing_new_ends_the_attempts(server: Server, tmp_path: Path) -> None:
    server.cut_after = [20_000, 0, 10_000, 10_000]
    with pytest.raises(InputError, match="20,000 bytes are kept"):
        download(remote(server), tmp_path / "text", progress=False)
    assert len(server.requests) == 2


def test_checksum_of_gzip_is_that_of_its_text_a_login_page_has_none(server: Server, tmp_path: Path) -> None:
    server.files["t.gz"] = gzip.compress(CONTENT, mtime=12345)
    download(RemoteFile(f"{server.url}/t.gz", sha256(CONTENT)), tmp_path / "t.gz", progress=False)
    assert gzip.decompress((tmp_path / "t.gz").read_bytes()) == CONTENT
    (tmp_path / "t.gz").unlink()
    server.files["t.gz"] = b"<html>please log in</html>"
    with pytest.raises(InputError, match=r"the downloaded file is not a valid gzip file .* and was removed"):
        download(RemoteFile(f"{server.url}/t.gz", sha256(CONTENT)), tmp_path / "t.gz", progress=False)
    assert list(tmp_path.iterdir()) == []


def test_without_a_network_the_remedy_is_told(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    told = r"cannot download \(.*refused.*\); no network\? put text into .*/set by hand, or set"
    with pytest.raises(InputError, match=told):
        download(RemoteFile(f"http://127.0.0.1:{port}/text", None), tmp_path / "set" / "text", progress=False)


def test_a_folder_that_cannot_be_made_is_named(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match=re.escape(str(tmp_path / "file"))):
        download(remote(server), tmp_path / "file" / "text", progress=False)


def test_kinds_of_checksum(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"hello\n")
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"hello\n"))
    for kind, expected in {
        "git": "ce013625030ba8dba906f756967f9e9ca394464a",
        "sha1": "f572d396fae9206628714fb2ce00f72e94f2258f",
        "sha256": "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03",
    }.items():
        assert text_checksum(tmp_path / "a", kind, compressed=False) == expected
        assert text_checksum(tmp_path / "a.gz", kind, compressed=True) == expected


def test_through_the_catalog(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = {"train.en.gz": b"one\n", "train.de.gz": b"eins\n", "all.txt": b"x\n"}
    for name, content in text.items():
        server.files[f"there/{name}"] = gzip.compress(content) if name.endswith("gz") else content
    files = {
        name: RemoteFile(f"{server.url}/there/{name}", sha256(content)) for name, content in text.items()
    }
    monkeypatch.setitem(catalog.CATALOG, "tiny", DataSet("two words", "nowhere", "none", files=files))
    cached = tmp_path / "cache" / "data" / "tiny"
    found = find_corpus("tiny/train", "de", "en", [], progress=False)
    assert found.files == [cached / "train.de.gz", cached / "train.en.gz"]
    assert find_text("tiny/all.txt", [], progress=False) == cached / "all.txt"
    asked = len(server.requests)
    assert find_corpus("tiny/train", "de", "en", [], progress=False) == found
    assert len(server.requests) == asked


OK = b"HTTP/1.1 200 OK\r\n"
WHOLE = OK + b"Content-Length: %d\r\n\r\n" % len(CONTENT) + CONTENT


def says(answer: bytes) -> Play:
    """Sends bytes as they are and closes the connection."""
    return lambda connection, _: connection.sendall(answer)


def resets(answer: bytes) -> Play:
    """Sends bytes, waits until a part of them has been read, and resets the connection."""

    def play(connection: socket.socket, server: Server) -> None:
        connection.sendall(answer)
        server.arrived.wait(PATIENCE)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    return play


def stalls(answer: bytes) -> Play:
    """Sends bytes and then nothing, until the client has left."""

    def play(connection: socket.socket, _: Server) -> None:
        connection.sendall(answer)
        connection.recv(1)

    return play


def fetch(server: Server, folder: Path, *plays: Play, checksum: bool = True) -> str:
    """Downloads while the server plays; the error's line, or nothing if the file arrived."""
    server.plays = list(plays)
    try:
        download(remote(server) if checksum else remote(server, None), folder / "text", progress=False)
    except InputError as error:
        (line,) = error.lines
        return line.replace(f"{server.url}/text", "URL").replace(str(folder), "FOLDER")
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


FOUND = b"HTTP/1.1 302 Found\r\n"
SAID = {
    "closed without an answer": (
        b"",
        "the connection broke (Remote end closed connection without response); nothing was received; "
        f"try again later, or {BY_HAND}",
    ),
    "a length that never comes": (
        OK + b"Content-Length: 102401\r\n\r\n" + CONTENT,
        "the connection broke (102,400 of 102,401 bytes arrived); 102,400 bytes are kept",
    ),
    "a length that is too short": (
        OK + b"Content-Length: 1000\r\n\r\n" + CONTENT,
        f"the checksum of text does not match: expected sha256 {sha256(CONTENT)[7:]}, "
        f"got {sha256(CONTENT[:1000])[7:]}; the file was removed",
    ),
    "a redirect loop": (
        FOUND + b"Location: /text\r\nContent-Length: 0\r\n\r\n",
        "the server answers 302 The HTTP server returned a redirect error that would",
    ),
    "a redirect to a file of this machine": (
        FOUND + b"Location: file:///etc/passwd\r\n\r\n",
        "the server answers 302 Found - Redirection to url 'file:///etc/passwd' is not allowed",
    ),
    "a long reason": (b"HTTP/1.1 503 " + b"no " * 20_000 + b"\r\n\r\n", "the server answers 503 no no no"),
}


@pytest.mark.parametrize("name", SAID)
def test_faults(server: Server, tmp_path: Path, name: str) -> None:
    answer, why = SAID[name]
    said = fetch(server, tmp_path, says(answer))
    assert said.startswith(f"URL: {why}")
    assert len(said) < 600
    assert BY_HAND in said or " are kept" in said or "checksum" in why
    kept = ["text.part"] if " are kept" in said else []
    assert [path.name for path in tmp_path.iterdir()] == kept


@pytest.mark.parametrize("body", [b"5\r\nhel", b"zz\r\nhello\r\n0\r\n\r\n", b"-5\r\nhello\r\n"])
def test_chunks_that_are_none(server: Server, tmp_path: Path, body: bytes) -> None:
    said = fetch(server, tmp_path, says(OK + b"Transfer-Encoding: chunked\r\n\r\n" + body))
    assert said.startswith("URL: the connection broke (")


def test_a_reset_within_the_body(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = itertools.count()

    def clock() -> float:
        if next(calls):  # not the call before the first block
            server.arrived.set()
        return 0.0

    monkeypatch.setattr(catalog, "_clock", clock)
    said = fetch(server, tmp_path, resets(WHOLE[:1000]))
    assert "the connection broke (" in said
    assert "reset by peer" in said
    assert "bytes are kept in FOLDER/text.part; run the same command again" in said


@pytest.mark.parametrize("before", [b"", b"HTTP/1.1 200", OK + b"Content-Length: 9\r\n\r\n"])
def test_a_server_that_falls_silent(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: bytes
) -> None:
    monkeypatch.setattr(catalog, "_TIMEOUT_SECONDS", 0.05)
    said = fetch(server, tmp_path, stalls(before))
    assert said.startswith("URL: the connection broke (timed out); nothing was received; try again later, or")


def test_a_server_that_sends_a_byte_now_and_then(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = itertools.count(0.0, 20.0)
    monkeypatch.setattr(catalog, "_clock", lambda: next(seconds))

    def trickles(connection: socket.socket, _: Server) -> None:
        connection.sendall(OK + b"Content-Length: 100000\r\n\r\n")
        while True:
            connection.sendall(b"x")

    said = fetch(server, tmp_path, trickles)
    assert "the connection broke (only " in said
    assert " bytes in 60 s); " in said


def test_a_server_that_becomes_slow_after_a_quick_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each minute counts for itself."""
    seconds, blocks = itertools.count(0.0, 61.0), iter([b"x" * catalog._SLOW_BYTES, b"y", b"z"])
    monkeypatch.setattr(catalog, "_clock", lambda: next(seconds))
    answer: Any = SimpleNamespace(read1=lambda _: next(blocks))
    stream = io.BytesIO()
    with pytest.raises(catalog._BrokenConnectionError, match=r"^only 1 bytes in 60 s$"):
        catalog._copy(answer, stream, 0, None, lambda _: None)
    assert stream.getvalue() == b"x" * catalog._SLOW_BYTES + b"y"


def test_another_part_than_the_one_requested(server: Server, tmp_path: Path) -> None:
    (tmp_path / "text.part").write_bytes(CONTENT[:500])
    other = b"HTTP/1.1 206 OK\r\nContent-Range: bytes 100-102399/102400\r\nContent-Length: 102300\r\n\r\n"
    assert fetch(server, tmp_path, says(other + CONTENT[100:]), says(WHOLE), checksum=False) == ""
    assert server.wanted == ["bytes=500-", ""]
