"""The load test of the server, with few clients for a few seconds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.bench import serve_load
from tests.conftest import run_python
from tests.unit.serving.conftest import folder as folder


@pytest.mark.slow
def test_nothing_is_lost_or_mixed_up(folder: Path, tmp_path: Path) -> None:
    text, figures = tmp_path / "lines.src", tmp_path / "rows.json"
    text.write_text(
        "".join(f"{' '.join(line)}\n" for line in ("abc", "hg", "d", "abcdefgh", "ee", "fab", "cab"))
    )
    command = ("-m", "scripts.bench", "serve-load", "-m", folder, "--text", text)
    load = ("--seconds", "2", "--clients", "12", "--rate", "10", "--json", figures)
    done = run_python(*command, *load, "--", "--precision", "float32", "--threads", "1", check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(figures.read_text())["rows"]
    assert [row["load"] for row in rows] == ["one by one", "10 a second", "12 clients"]
    assert not any(row["wrong"] for row in rows)
    assert "the server ended with exit code 0" in done.stdout


def test_answers_that_are_wrong_are_told_apart() -> None:
    class Fake(serve_load.Connection):
        def __init__(self, answer: str | Exception) -> None:
            super().__init__(0)
            self.answer = answer

        async def ask(self, text: str) -> str:
            if isinstance(self.answer, Exception):
                raise self.answer
            return self.answer

    async def all_of_them() -> serve_load.Tally:
        tally = serve_load.Tally({"a": "A", "b": "B"})
        for answer in ("A", "B", "C", OSError("gone"), ValueError("HTTP/1.1 503")):
            await tally.ask(Fake(answer), "a")
        return tally

    tally = serve_load.asyncio.run(all_of_them())
    assert tally.wrong == {
        "another's": 1,
        serve_load.OTHERWISE: 1,
        "lost: OSError gone": 1,
        "lost: ValueError HTTP/1.1 503": 1,
    }
    assert len(tally.seconds) == 3
