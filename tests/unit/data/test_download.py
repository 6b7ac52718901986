"""Downloads against a server on this machine: whole, resumed, refused, cut off, and wrong."""

from __future__ import annotations

import gzip
import hashlib
import http.server
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from econmt.data.files import text_checksum
from econmt.data.text import catalog
from econmt.data.text.catalog import DataSet, RemoteFile, download
from econmt.data.text.corpus import find_corpus, find_text
from econmt.errors import InputError

CONTENT = b"".join(b"line %d\n" % i for i in range(40_000))


@dataclass
class Server:
    """What the server has and how it behaves."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    ranges: bool = True
    cut_after: list[int] = field(default_factory=list)
    """Bytes after which the connection of each of the next answers breaks."""
    requests: list[tuple[str, str | None]] = field(default_factory=list)


@pytest.fixture
def server() -> Iterator[Server]:
    state = Server()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wanted = self.headers.get("Range")
            state.requests.append((self.path, wanted))
            content = state.files.get(self.path.lstrip("/"))
            if content is None:
                self.send_error(404)
                return
            first = 0
            if wanted is not None and state.ranges:
                first = int(wanted.removeprefix("bytes=").removesuffix("-"))
                if first >= len(content):
                    self.send_response(416)
                    self.send_header("Content-Range", f"bytes */{len(content)}")
                    self.end_headers()
                    return
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
            else:
                self.send_response(200)
            self.send_header("Content-Length", str(len(content) - first))
            self.end_headers()
            body = content[first:]
            if state.cut_after:
                body = body[: state.cut_after.pop(0)]
                self.close_connection = True
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        state.url = f"http://127.0.0.1:{running.server_port}"
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield state
        running.shutdown()
        thread.join()


def sha256(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def remote(server: Server, content: bytes = CONTENT, checksum: str | None = "right") -> RemoteFile:
    server.files["text"] = content
    return RemoteFile(f"{server.url}/text", sha256(content) if checksum == "right" else checksum)


def test_whole(server: Server, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "new" / "folder" / "text"
    download(remote(server), file, progress=True)
    assert file.read_bytes() == CONTENT
    assert [path.name for path in file.parent.iterdir()] == ["text"]
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err == f"econmt: downloading {server.url}/text\n"


def test_resumed(server: Server, tmp_path: Path) -> None:
    (tmp_path / "text.part").write_bytes(CONTENT[:1000])
    download(remote(server), tmp_path / "text", progress=False)
    assert (tmp_path / "text").read_bytes() == CONTENT
    assert server.requests == [("/text", "bytes=1000-")]


def test_server_that_knows_no_ranges(server: Server, tmp_path: Path) -> None:
    server.ranges = False
    (tmp_path / "text.part").write_bytes(b"something old")
    download(remote(server), tmp_path / "text", progress=False)
    assert (tmp_path / "text").read_bytes() == CONTENT


def test_all_of_it_was_there(server: Server, tmp_path: Path) -> None:
    (tmp_path / "text.part").write_bytes(CONTENT)
    download(remote(server), tmp_path / "text", progress=False)
    assert (tmp_path / "text").read_bytes() == CONTENT


def test_file_became_smaller_on_the_server(server: Server, tmp_path: Path) -> None:
    (tmp_path / "text.part").write_bytes(CONTENT + b"longer than before")
    download(remote(server), tmp_path / "text", progress=False)
    assert (tmp_path / "text").read_bytes() == CONTENT
    assert [wanted for _, wanted in server.requests] == [f"bytes={len(CONTENT) + 18}-", None]


def test_broken_connections_are_gone_on_with(server: Server, tmp_path: Path) -> None:
    server.cut_after = [100_000, 70_000]
    download(remote(server), tmp_path / "text", progress=False)
    assert (tmp_path / "text").read_bytes() == CONTENT
    assert [wanted for _, wanted in server.requests] == [None, "bytes=100000-", "bytes=170000-"]


def test_a_connection_that_keeps_breaking_keeps_what_came(server: Server, tmp_path: Path) -> None:
    server.cut_after = [10_000] * 4
    with pytest.raises(InputError) as caught:
        download(remote(server), tmp_path / "text", progress=False)
    assert "the connection broke" in str(caught.value)
    assert f"40,000 bytes are kept in {tmp_path / 'text.part'}; run the same command again" in str(
        caught.value
    )
    download(remote(server), tmp_path / "text", progress=False)
    assert server.requests[-1] == ("/text", "bytes=40000-")
    assert (tmp_path / "text").read_bytes() == CONTENT


def test_a_connection_that_brings_nothing_new_ends_the_attempts(server: Server, tmp_path: Path) -> None:
    server.cut_after = [20_000, 0, 10_000, 10_000]
    with pytest.raises(InputError, match="20,000 bytes are kept"):
        download(remote(server), tmp_path / "text", progress=False)
    assert len(server.requests) == 2


def test_wrong_checksum(server: Server, tmp_path: Path) -> None:
    wrong = "0" * 64
    with pytest.raises(InputError) as caught:
        download(remote(server, checksum=f"sha256:{wrong}"), tmp_path / "text", progress=False)
    actual = hashlib.sha256(CONTENT).hexdigest()
    assert (
        f"the checksum of text does not match: expected sha256 {wrong}, got {actual}; the file was removed"
        in str(caught.value)
    )
    assert list(tmp_path.iterdir()) == []


def test_checksum_of_gzip_is_that_of_its_text(server: Server, tmp_path: Path) -> None:
    server.files["t.gz"] = gzip.compress(CONTENT, mtime=12345)
    download(RemoteFile(f"{server.url}/t.gz", sha256(CONTENT)), tmp_path / "t.gz", progress=False)
    assert gzip.decompress((tmp_path / "t.gz").read_bytes()) == CONTENT


def test_a_login_page_instead_of_gzip(server: Server, tmp_path: Path) -> None:
    server.files["t.gz"] = b"<html>please log in</html>"
    with pytest.raises(InputError, match=r"the downloaded file is not a valid gzip file .* and was removed"):
        download(RemoteFile(f"{server.url}/t.gz", sha256(CONTENT)), tmp_path / "t.gz", progress=False)
    assert list(tmp_path.iterdir()) == []


def test_refused_by_the_server(server: Server, tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"gone: the server answers 404 Not Found; put gone into .* ECONMT_DATA"
    ):
        download(RemoteFile(f"{server.url}/gone", None), tmp_path / "gone", progress=False)


def test_no_network(tmp_path: Path) -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as closed:
        port = closed.server_port
    with pytest.raises(
        InputError,
        match=r"cannot download \(.*refused.*\); no network\? put text into .*/set by hand, or set",
    ):
        download(RemoteFile(f"http://127.0.0.1:{port}/text", None), tmp_path / "set" / "text", progress=False)


def test_folder_that_cannot_be_made(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match=re.escape(str(tmp_path / "file"))):
        download(remote(server), tmp_path / "file" / "text", progress=False)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("git", "ce013625030ba8dba906f756967f9e9ca394464a"),
        ("sha1", "f572d396fae9206628714fb2ce00f72e94f2258f"),
        ("sha256", "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03"),
    ],
)
def test_kinds_of_checksum(tmp_path: Path, kind: str, expected: str) -> None:
    (tmp_path / "a").write_bytes(b"hello\n")
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"hello\n"))
    assert text_checksum(tmp_path / "a", kind, compressed=False) == expected
    assert text_checksum(tmp_path / "a.gz", kind, compressed=True) == expected


def test_through_the_catalog(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = {
        "train.en.gz": gzip.compress(b"one\n"),
        "train.de.gz": gzip.compress(b"eins\n"),
        "all.txt": b"x\n",
    }
    server.files = {f"there/{name}": content for name, content in text.items()}
    files = {
        name: RemoteFile(
            f"{server.url}/there/{name}", sha256(gzip.decompress(content) if name.endswith("gz") else content)
        )
        for name, content in text.items()
    }
    monkeypatch.setitem(catalog.CATALOG, "tiny", DataSet("two words", "nowhere", "none", files=files))
    cached = tmp_path / "cache" / "data" / "tiny"
    found = find_corpus("tiny/train", "de", "en", [], progress=False)
    assert found.files == [cached / "train.de.gz", cached / "train.en.gz"]
    assert find_text("tiny/all.txt", [], progress=False) == cached / "all.txt"
    asked = len(server.requests)
    assert find_corpus("tiny/train", "de", "en", [], progress=False) == found
    assert len(server.requests) == asked
