"""Runs LibreTranslate's own tests of its interface against a running server.

    econmt serve -m runs/multi30k
    python -m scripts.libretranslate_tests LIBRETRANSLATE_CHECKOUT --url http://127.0.0.1:5000

LibreTranslate need not be installed: its tests ask Flask's test client, in whose place is one that asks the server.
They translate from English to Spanish; the first pair of the server stands in for these.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from http.client import HTTPConnection
from json import dumps, loads
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode, urlsplit

import pytest


class Answer(NamedTuple):
    """Answer of the server, with the names of Flask's test client."""

    status_code: int
    data: bytes

    @property
    def json(self) -> Any:
        """The JSON of the body."""
        return loads(self.data)


class Client:
    """Stand-in for Flask's test client, which asks the server at a URL; a fixture of the same name returns it."""

    def __init__(self, url: str) -> None:
        self._address = urlsplit(url).netloc
        first = self.get("/languages").json[0]
        self._codes = {"en": first["code"], "es": first["targets"][0]}

    @pytest.fixture
    def client(self) -> Client:
        """The client."""
        return self

    def get(self, path: str) -> Answer:
        """Asks for a path."""
        return self._ask(path, None, "")

    def post(self, path: str, data: dict[str, Any] | None = None, json: Any = None) -> Answer:
        """Sends a form, JSON or nothing."""
        fields = {name: self._codes.get(str(value), value) for name, value in (json or data or {}).items()}
        if json is not None:
            return self._ask(path, dumps(fields).encode(), "application/json")
        return self._ask(
            path, urlencode(fields).encode(), "application/x-www-form-urlencoded" if data else ""
        )

    def _ask(self, path: str, body: bytes | None, kind: str) -> Answer:
        with closing(HTTPConnection(self._address)) as connection:
            connection.request(
                "GET" if body is None else "POST", path, body, {"Content-Type": kind} if kind else {}
            )
            answer = connection.getresponse()
            return Answer(answer.status, answer.read())


def main(words: Sequence[str] | None = None) -> int:
    """Runs the tests; returns the exit code of pytest."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path, help="folder of a clone of LibreTranslate")
    parser.add_argument("--url", default="http://127.0.0.1:5000", help="address of the server (%(default)s)")
    options = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as name:
        # Alone, since their package and their conftest.py import LibreTranslate.
        for file in (options.checkout / "libretranslate" / "tests" / "test_api").glob("test_*.py"):
            shutil.copy(file, name)
        return int(
            pytest.main([name, "--rootdir", name, "-q", "-p", "no:cacheprovider"], [Client(options.url)])
        )


if __name__ == "__main__":
    sys.exit(main())
