"""Files are read in processes of their own, which are bounded and end with their clients and the server."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from econmt.decoding.translation import Translation
from econmt_serve import bodies, file_processes, server
from econmt_serve.file_processes import FileProcesses
from econmt_serve.file_worker import FileTask
from econmt_serve.files import WORD
from econmt_serve.models import LoadedModels
from econmt_serve.settings import Refused, Settings, Stopping
from tests.conftest import PATIENCE, run_python
from tests.unit.serving.conftest import Client, serving
from tests.unit.serving.test_connections import FILE, connected
from tests.unit.serving.test_files import document, same, send

BEFORE = "import sys; sys.path[:] = sys.argv[1:]; import econmt_serve.file_worker as worker; "
TEXT = FileTask("text/plain", ("en", "de"), 1000)
STOPPING = {"error": "the server is stopping; ask again when it is back"}
LIMITS = Settings(max_file_characters=100, read_seconds=PATIENCE)


def read(content: bytes, task: FileTask = TEXT) -> list[tuple[str, bool]]:
    """Reads a file in a process."""
    return asyncio.run(FileProcesses().read(task, content))


def test_files_go_through_small_processes_and_stops_stay() -> None:
    large = ["torch", "numpy", "sentencepiece", "pydantic", "rich", "asyncio", "starlette"]
    program = f"import sys, econmt_serve.file_worker; print([m for m in {large} if m in sys.modules])"
    assert run_python("-c", program).stdout == "[]\n"
    task, content = FileTask("text/html", ("en", "de"), 30), b"<p>A <b>dog</b> runs. It barks."
    assert read(content, task) == [("A dog runs.", True), ("It barks.", False)]
    assert read(b"A dog. It barks.", TEXT._replace(languages=None)) == [("A dog. It barks.", False)]
    translated = [same("Ein Hund \u00fcbt."), same("Er bellt.")]
    written = asyncio.run(FileProcesses().write(task, content, translated))
    page = "<p>Ein <b>Hund</b> \u00fcbt. Er bellt.".encode()
    assert written == (page, "text/html; charset=utf-8")
    processes = FileProcesses()
    processes.stop(writing=True)
    processes.stop(writing=False)
    with pytest.raises(Stopping):
        asyncio.run(processes.write(TEXT, b"A", [same("Ein")]))


SPIN = "worker.MOST_SECONDS = 1; worker.read_file = lambda *_: exec('while True: pass'); worker.main()"
PROGRAMS = [
    (SPIN, 413, "10 s"),
    ("worker.MOST_BYTES = 1 << 28; worker.main()", 413, "the file takes more than 256 MiB of memory"),
    ("import os; os.kill(os.getpid(), 9)", 503, "no memory left"),
    ("sys.exit(3)", 500, "this is a bug in econmt: reading a file ended with code 3"),
]


@pytest.mark.parametrize(("program", "status", "said"), PROGRAMS)
def test_processes_that_end_too_soon(
    program: str, status: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_processes, "_PROGRAM", BEFORE + program)
    with pytest.raises(Refused, match=said) as caught:
        read(b"a" * (16 << 20), TEXT._replace(most_characters=1 << 30))
    assert caught.value.status == status


def hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every process wait for ever."""
    monkeypatch.setattr(file_processes, "_PROGRAM", BEFORE + "import signal; signal.pause()")


def wait_for(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.001)


def processes_of(client: Client) -> FileProcesses:
    """The processes of a server, after its start."""
    assert client.get("/health").status == 200
    assert client.service._files is not None
    return client.service._files


def test_a_client_that_leaves_ends_its_process(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    hang(monkeypatch)
    processes = processes_of(client)
    with connected(client) as connection:
        connection.sendall(FILE % 1 + b"a")
        wait_for(lambda: bool(processes._reading))
        (process,) = processes._reading
        assert process.returncode is None
    wait_for(lambda: process.returncode is not None and not processes._reading)
    monkeypatch.undo()
    assert send(client, b"a b", "text/plain").status == 200, "its turn is free again"


def test_files_that_take_long_stop_nothing_else_and_end_with_the_server(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hang(monkeypatch)
    monkeypatch.setattr(bodies, "_FREE_BYTES", 0)
    with ThreadPoolExecutor(6) as clients:
        with serving(folder, LIMITS) as client:
            processes = processes_of(client)
            answers = [clients.submit(send, client, b"a b", "text/plain") for _ in range(6)]
            wait_for(lambda: len(processes._reading) == 2 and client.service._bodies._held == 6 * len(b"a b"))
            assert client.get("/health").status == 200
            assert client.post("/translate", q="a b c").status == 200
            counted = b'econmt_requests_total{path="/translate_file"'
            assert counted not in client.get("/metrics").content, "all files still wait"
        found = [answer.result() for answer in answers]
    assert [(each.status, each.json) for each in found] == [(503, STOPPING)] * 6
    assert (client.service.refused, processes._reading, caplog.text) == (6, set(), "")


def test_what_takes_longer_than_a_stopping_server_waits_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "_DRAIN_SECONDS", 0.1)
    begun, going_on = threading.Event(), threading.Event()

    def translate(*_: object) -> list[Translation]:
        begun.set()
        going_on.wait()
        return []

    monkeypatch.setattr(LoadedModels, "translate", translate)
    with ThreadPoolExecutor(3) as clients:
        try:
            with serving(folder, LIMITS) as client:
                whole = clients.submit(client.post, "/translate", q="a b c")
                begun.wait()
                stream = clients.submit(client.post, "/translate", q="a b c", stream=True)
                file = clients.submit(send, client, b"a b", "text/plain")
                wait_for(lambda: b"econmt_waiting_sentences 2.0" in client.get("/metrics").content)
        finally:
            going_on.set()
    assert [(each.result().status, each.result().json) for each in (whole, file)] == [(503, STOPPING)] * 2
    assert (stream.result().status, stream.result().json) == (200, STOPPING)
    assert (client.service.refused, caplog.text) == (3, "")


RUNS = "<w:r><w:t>a </w:t></w:r><w:r><w:rPr><w:b/></w:rPr><w:t>b </w:t></w:r>" * 5000
FORMATS = "<w:r><w:rPr>" * 50_000 + "</w:rPr></w:r>" * 50_000
LARGE = {
    "line ends": (b"\n" * (1 << 20), "text/plain", 0),
    "paragraphs": (b"<p>" * (1 << 18), "text/html", 0),
    "tags": (b"<b>" * (1 << 18), "text/html", 0),
    "names": (b"".join(b"<x%d translate=no>" % number for number in range(1 << 15)), "text/html", 0),
    "unfinished values": (b"<a " + b"\"<a ' \" ' ' " * (1 << 16), "text/html", 1),
    "blanks before full stops": (b" " * (1 << 19) + b"a. " * 30_000, "text/plain", 1),
    "runs": (document(f"<w:p>{RUNS}</w:p>"), WORD, 1),
    "formats in formats": (document(f"<w:p>{FORMATS}</w:p>"), WORD, 0),
}
"""Files, their types, and the numbers of their sentences."""


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_large_files_are_read_within_the_limits(name: str) -> None:
    content, kind, count = LARGE[name]
    assert len(read(content, FileTask(kind, ("en", "de"), 1 << 20))) == count


def test_line_ends_of_a_packed_document_are_read_at_once() -> None:
    assert read(document("\n" * (32 << 20)), FileTask(WORD, ("en", "de"), 10)) == []
