"""Lines from descriptors, output that is whole or absent, and JSON lines of translations."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path

import pytest
import torch

from econmt.config import limits
from econmt.data.text.corpus import read_lines
from econmt.decoding.formats import format_translation
from econmt.decoding.streams import BLOCK_BYTES, LineOutput, decode_line, read_chunks, shown_on_terminal
from econmt.decoding.translation import EMPTY, NBestEntry, Translation
from econmt.errors import InputError
from tests.conftest import PATIENCE


@pytest.fixture
def pipe() -> Iterator[tuple[int, Callable[[bytes], int], Callable[[], None]]]:
    """A read end, and functions that write and close the other end; a reader that waits for ever is let go."""
    reader, writer = os.pipe()
    closed = threading.Event()

    def close() -> None:
        if not closed.is_set():
            closed.set()
            os.close(writer)

    rescue = threading.Timer(PATIENCE, close)
    rescue.start()
    yield reader, lambda content: os.write(writer, content), close
    rescue.cancel()
    rescue.join()
    close()
    os.close(reader)


@pytest.mark.parametrize(
    ("content", "size", "chunks"),
    [
        ("a\nb\n\nc\nd\n", 2, [["a", "b"], ["", "c"], ["d"]]),
        ("a\nb", 9, [["a", "b"]]),
        ("a\n", 9, [["a"]]),
        ("", 9, []),
        ("\n", 9, [[""]]),
        # Only newlines end a line, and a byte order mark belongs to the first one.
        ("a\u2028b\u0085c\x0bd\re\r\nf\n", 9, [["a\u2028b\u0085c\x0bd\re", "f"]]),
        ("\ufeffa\n\ufeffb\n", 9, [["a", "\ufeffb"]]),
        ("x" + "ä" * BLOCK_BYTES + "\nb\n", 9, [["x" + "ä" * BLOCK_BYTES, "b"]]),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_lines_come_in_chunks(tmp_path: Path, content: str, size: int, chunks: list[list[str]]) -> None:
    (tmp_path / "text").write_bytes(content.encode())
    with (tmp_path / "text").open("rb") as stream:
        assert list(read_chunks(stream.fileno(), size, "text")) == chunks


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"ab\xffc\n", r"text:3: not valid UTF-8 \(byte 0xff at column 3\)"),
        (b"ab\xe2\x82\n", r"text:3: not valid UTF-8 \(byte 0xe2 at column 3\)"),
        (b"a\0b\n", r"text:3: NUL byte at column 2"),
    ],
)
def test_a_bad_line_is_named_after_those_before_it(tmp_path: Path, line: bytes, message: str) -> None:
    (tmp_path / "text").write_bytes(b"one\ntwo\n" + line + b"four\n")
    with (tmp_path / "text").open("rb") as stream:
        chunks = read_chunks(stream.fileno(), 1000, "text")
        assert next(chunks) == ["one", "two"]
        with pytest.raises(InputError, match=message):
            next(chunks)


def test_a_pipe_that_pauses_gives_what_it_has_and_spaces_stay(
    pipe: tuple[int, Callable[[bytes], None], Callable[[], None]],
) -> None:
    reader, write, close = pipe
    chunks = read_chunks(reader, 1000)
    write(b"first\nsec")
    assert next(chunks) == ["first"]
    write(b"ond\nthird\n")
    assert next(chunks) == ["second", "third"]
    write(b"last")
    close()
    assert next(chunks) == ["last"]
    assert list(chunks) == []
    assert decode_line(b" a \t\r\n", "text", 2) == " a \t"


def test_output_grows_as_lines_come(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text("old")
    with LineOutput(path) as write:
        assert path.read_text() == "old"
        write(["ä", ""])
        assert path.read_text() == "ä\n\n"
        write(["c"])
        assert path.read_bytes() == "ä\n\nc\n".encode()
    assert list(tmp_path.iterdir()) == [path]


def test_output_keeps_permissions_and_follows_links(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    target.chmod(0o600)
    link.symlink_to(target)
    with LineOutput(link) as write:
        write(["new"])
    assert link.is_symlink()
    assert target.read_text() == "new\n"
    assert target.stat().st_mode & 0o777 == 0o600


def test_output_goes_into_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with LineOutput(pipe) as write:
        write(["a", "b"])
        assert os.read(reader, 100) == b"a\nb\n"
    os.close(reader)
    assert pipe.is_fifo()


def test_what_is_read_is_not_written(tmp_path: Path) -> None:
    path, link = tmp_path / "in", tmp_path / "link"
    path.write_text("precious")
    link.hardlink_to(path)
    with pytest.raises(InputError, match="is also an input"):
        LineOutput(link, [path])
    assert path.read_text() == "precious"
    LineOutput(Path("/dev/null"), [Path("/dev/null")])


def test_a_terminal_gets_no_control_characters() -> None:
    assert shown_on_terminal("a\tb\x1b[31m\x9b\u202ec\nd\n") == "a\tb\\x1b[31m\\x9b\\u202ec\nd\n"


@pytest.mark.parametrize(
    ("lines", "fails", "content"), [(["new"], True, "new\n"), ([], True, "old"), ([], False, "")]
)
def test_output_has_the_lines_until_the_end(
    tmp_path: Path, lines: list[str], fails: bool, content: str
) -> None:
    """A run that fails before its first line leaves the old file; one without lines empties it."""
    path = tmp_path / "out"
    path.write_text("old")
    with suppress(KeyError), LineOutput(path) as write:
        if lines:
            write(lines)
        if fails:
            raise KeyError
    assert path.read_text() == content
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Path.open
    monkeypatch.setattr(Path, "open", lambda self, *rest, **more: opened(Path("/dev/full"), *rest, **more))
    path = tmp_path / "out"
    with pytest.raises(InputError, match="the disk is full"), LineOutput(path) as write:
        write(["text"])


def test_standard_output_is_flushed_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with LineOutput(None) as write:
        write(["a", "b"])
        assert capsys.readouterr().out == "a\nb\n"
    print("still open", file=sys.stdout)
    assert capsys.readouterr().out == "still open\n"


def test_a_line_without_end_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(limits, "LINE_BYTES", 100_000)
    path = tmp_path / "text"
    path.write_bytes(b"a\n" + b"x" * 99_000 + b"\n" + b"\0" * 200_000)
    for lines in (read_lines(path), chain.from_iterable(read_chunks(os.open(path, os.O_RDONLY), 5))):
        found = []
        told = r":3: NUL bytes, a line of [0-9,]+ bytes or more; is this a text file"
        with pytest.raises(InputError, match=told):
            found += lines
        assert len(found) in (0, 2)
    path.write_bytes(b"x" * 70_000 + b"\ny\n" + b"z" * 70_000)
    with path.open("rb") as stream:
        found = [line for chunk in read_chunks(stream.fileno(), 5) for line in chunk]
        assert found == ["x" * 70_000, "y", "z" * 70_000]


ATTENTION = torch.tensor([[0.25, 0.75], [1 / 3, 2 / 3]])
CANDIDATES = [
    NBestEntry("Größe", ["▁Größe"], [9], -0.5, -1.0, ATTENTION, False),
    NBestEntry("Maß", ["▁Maß"], [8], -0.75, -1.5, None, True),
]
TRANSLATION = Translation("Größe", -0.5, -1.0, ["▁Größe"], ATTENTION, CANDIDATES, ["▁size"])


def test_json_of_a_line_with_attention_and_without() -> None:
    line = format_translation(TRANSLATION, "json")
    assert "\n" not in line
    assert "Größe" in line
    assert json.loads(line) == {
        "translation": "Größe",
        "score": -0.5,
        "log_probability": -1.0,
        "tokens": ["▁Größe"],
        "source_tokens": ["▁size"],
        "nbest": [
            {
                "translation": "Größe",
                "score": -0.5,
                "log_probability": -1.0,
                "tokens": ["▁Größe"],
                "cut": False,
            },
            {"translation": "Maß", "score": -0.75, "log_probability": -1.5, "tokens": ["▁Maß"], "cut": True},
        ],
    }
    found = json.loads(format_translation(TRANSLATION, "attention"))
    assert found["attention"] == [[0.25, 0.75], [0.33333, 0.66667]]
    assert found["nbest"][0]["attention"] == found["attention"]
    assert found["nbest"][1]["attention"] == []
    lists = {name: [] for name in ("tokens", "source_tokens", "nbest", "attention")}
    found = json.loads(format_translation(EMPTY, "attention"))
    assert found == {"translation": "", "score": 0.0, "log_probability": 0.0, **lists}
