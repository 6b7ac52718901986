"""A tiny trained model, a server of it on the loopback, and a client."""

from __future__ import annotations

import faulthandler
import http.client
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import econmt
from econmt_serve.access import Keys
from econmt_serve.app import Service
from econmt_serve.models import by_pair
from econmt_serve.server import Server, bind
from econmt_serve.settings import Settings
from tests.conftest import PATIENCE
from tests.unit.training.tiny import Run, write_text

MORE = (
    "data.subwords={type: bpe, size: 34}",
    "training.max_updates=12",
    "training.checkpoint_interval=12",
    "decoding.beam_size=4",
)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model over subwords: letters and their reverse in capitals, hardly learnt."""
    home = write_text(tmp_path_factory.mktemp("served"), {"train": 60, "valid": 6})
    run = Run(home, home / "run", MORE).trained()
    return run.folder.path


@pytest.fixture(scope="session")
def model(folder: Path) -> econmt.api.TrainedModel:
    """The same model, to compare with."""
    return econmt.load(folder, precision="float32")


class Answer(NamedTuple):
    """What a server said."""

    status: int
    headers: dict[str, str]
    content: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.content)


class Client:
    """Asks a server, a connection a request."""

    def __init__(self, port: int, service: Service, models: list[Any]) -> None:
        self.port, self.service, self.models = port, service, models

    def ask(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> Answer:
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)) as connection:
            connection.request(method, path, body, headers or {})
            response = connection.getresponse()
            named = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, named, response.read())

    def get(self, path: str) -> Answer:
        return self.ask("GET", path)

    def post(self, path: str, **fields: Any) -> Answer:
        return self.ask("POST", path, json.dumps(fields).encode(), {"Content-Type": "application/json"})


def form(*parts: tuple[str, str, bytes]) -> tuple[bytes, str]:
    """A form of parts, each with its name, further lines of its head and its content; and its content type."""
    written = b"".join(
        f'--=b+/\r\nContent-Disposition: form-data; name="{name}"{head}\r\n\r\n'.encode() + content + b"\r\n"
        for name, head, content in parts
    )
    return b"before\r\n" + written + b"--=b+/--\r\n", 'Multipart/Form-Data; boundary="=b+/"'


@contextmanager
def serving(
    folder: Path, settings: Settings, keys: Keys | None = None, proxies: Sequence[str] = ()
) -> Iterator[Client]:
    """A server in a thread of this process."""
    models = by_pair([folder], settings, lambda folders: econmt.load(list(folders), precision="float32"))
    service = Service(models, settings, keys or Keys())
    service._rates._clock = lambda: 0.0  # a minute never passes
    server = Server(service, proxies)
    with bind("127.0.0.1", 0) as bound:
        thread = threading.Thread(target=server.run, args=[bound])
        thread.start()
        try:
            yield Client(bound.getsockname()[1], service, models)
        finally:
            server._server.config.timeout_graceful_shutdown = 2  # for requests that a test has left behind
            server.stop()
            thread.join(PATIENCE)
            if thread.is_alive():
                faulthandler.dump_traceback(all_threads=True)
    assert not thread.is_alive()


@pytest.fixture(scope="session")
def client(folder: Path) -> Iterator[Client]:
    """A client of a server without keys."""
    with serving(folder, Settings(max_characters=500, read_seconds=PATIENCE, watch_seconds=0.05)) as made:
        yield made
