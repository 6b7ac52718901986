"""Tests of a checkout run against a server, which gets their requests as Flask's test client would make them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from scripts import libretranslate_tests

TESTS = """
def test_requests(client):
    assert client.get("/languages").json[0]["code"] == "cs"
    form = client.post("/translate", data={"q": "a b", "source": "en", "target": "es"})
    assert form.json["said"] == ["application/x-www-form-urlencoded", "q=a+b&source=cs&target=de"]
    assert client.post("/translate", json={"q": ["a"]}).json["said"] == ["application/json", '{"q": ["a"]}']
    assert (client.post("/no").status_code, client.post("/no").json["said"]) == (404, [None, ""])

def test_that_fails(client):
    assert client.get("/no").status_code == 200
"""


class Handler(BaseHTTPRequestHandler):
    """Answers with the languages, or with what it was sent."""

    def do_GET(self) -> None:
        self._answer([{"code": "cs", "targets": ["de"]}])

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self._answer({"said": [self.headers["Content-Type"], body]})

    def _answer(self, content: object) -> None:
        self.send_response(404 if self.path == "/no" else 200)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())

    def log_message(self, *_: object) -> None:
        """Writes nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def test_tests_of_a_checkout_ask_the_server(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "libretranslate" / "tests" / "test_api"
    folder.mkdir(parents=True)
    (folder / "test_api_some.py").write_text(TESTS)
    (folder / "conftest.py").write_text("import no_such_module")
    assert libretranslate_tests.main([str(tmp_path), "--url", url]) == 1
    assert "1 failed, 1 passed" in capsys.readouterr().out
