"""The script that sends hostile requests finds what it is made for, and a little of it is run each time."""

from __future__ import annotations

import importlib
import random
from pathlib import Path
from types import ModuleType

import pytest

from tests.conftest import ROOT, run_python

pytest.importorskip("uvicorn", reason="econmt[serve] is not installed")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module("fuzz_server")


def test_the_same_seed_gives_the_same_inputs_of_every_kind(script: ModuleType) -> None:
    one, other = (
        [script.any_input(draw) for _ in range(200)] for draw in (random.Random(3), random.Random(3))
    )
    assert one == other
    assert {name for name, _ in one} == set(script.KINDS)


JSON = b"Content-Type: application/json\r\n\r\n"


@pytest.mark.parametrize(
    ("said", "seconds", "complaint"),
    [
        (b"", 1.0, None),
        (b"HTTP/1.1 200 OK\r\n\r\n", 1.0, None),
        (b"HTTP/1.1 400 Bad\r\n" + JSON + b'{"error": "a line"}', 1.0, None),
        (b"HTTP/1.1 200 OK\r\n\r\n", None, "the connection did not end"),
        (b"HTTP/1.1 200 OK\r\n\r\n{}HTTP/1.1 500 Bug\r\n\r\nx", 1.0, "status 500: b'x'"),
        (b"SSH-2.0", 1.0, "no HTTP: b'SSH-2.0'"),
        (b"HTTP/1.1 400 Bad\r\n" + JSON + b'{"error": "a\\nb"}', 1.0, "an error that is no printable line"),
        (b"HTTP/1.1 400 Bad\r\n" + JSON + b'{"error": "%s"}' % (b"x" * 1001), 1.0, "an error that is no"),
    ],
)
def test_what_a_server_says_is_looked_at(
    script: ModuleType, said: bytes, seconds: float | None, complaint: str | None
) -> None:
    found = script.complaint(said, seconds)
    assert found is None if complaint is None else found.startswith(complaint)


@pytest.mark.slow
def test_some_hostile_requests_find_nothing(tmp_path: Path) -> None:
    given = ("--requests", "100", "--failures", tmp_path / "failures")
    done = run_python("scripts/fuzz_server.py", *given, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "100 connections, 0 failed" in done.stdout
