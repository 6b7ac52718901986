"""Keys, how often a client may ask, and the OpenAPI description of what the server has."""

from __future__ import annotations

import hmac
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from econmt.errors import InputError
from econmt_serve import access
from econmt_serve.access import Keys, Rates, read_keys
from econmt_serve.app import Service
from econmt_serve.pages import page_files, specification
from econmt_serve.settings import Refused, Settings
from tests.unit.serving.conftest import Client


def test_a_key_fits_or_not() -> None:
    keys = Keys(["first", "zweiter"])
    assert keys.wanted
    keys.check("first")
    keys.check("zweiter")
    for wrong in ("", "firs", "first ", "First", "ß", "\ud800"):
        with pytest.raises(Refused) as refused:
            keys.check(wrong)
        assert refused.value.status == 403
    Keys().check("")
    assert not Keys().wanted


def test_every_key_is_compared_whichever_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return hmac.compare_digest(one, other)

    monkeypatch.setattr(access, "hmac", SimpleNamespace(compare_digest=compare))
    Keys(["a", "a much longer key", "c"]).check("a")
    assert compared == [(32, 32)] * 3


def test_a_file_of_keys_and_a_client_may_ask_so_often_and_again_when_time_has_passed(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# of the office\nabc\n\n  def \n")
    keys = read_keys(path)
    keys.check("abc")
    keys.check("def")
    with pytest.raises(Refused):
        keys.check("# of the office")
    path.write_text("# none\n\n")
    with pytest.raises(InputError, match="no key in it"):
        read_keys(path)
    with pytest.raises(InputError, match="nosuch"):
        read_keys(tmp_path / "nosuch")
    now = [0.0]
    rates = Rates(3, lambda: now[0])
    rates.take("b")
    for moment, taken in ((0.0, 3), (19.9, 0), (20.0, 1), (1000.0, 3)):
        now[0] = moment
        for _ in range(taken):
            rates.take("a", 0.0)  # which counts nothing
            rates.take("a")
        for requests in (0.0, 1.0):
            with pytest.raises(Refused, match="more than 3 requests a minute; ask again in") as refused:
                rates.take("a", requests)
        if moment == 0.0:
            assert (refused.value.status, refused.value.retry_seconds) == (429, 20)
    Rates(None).take("a")


def test_few_clients_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "_REMEMBERED", 2)
    rates = Rates(1, lambda: 0.0)
    for client in ("a", "b", "c", "a"):
        rates.take(client)
    with pytest.raises(Refused):
        rates.take("c")


def test_routes_and_answers_are_as_described(client: Client) -> None:
    service = Service([], Settings(requests_per_minute=1), Keys())
    service._admit("a", "address")
    with pytest.raises(Refused):
        service._admit("b", "address")
    routes = Service([], Settings(), Keys()).application().routes
    served = {(method.lower(), route.path) for route in routes for method in route.methods - {"HEAD"}}  # type: ignore[attr-defined]
    pages = {("get", path) for path in page_files()}
    described = {
        (method, path) for path, methods in specification(keys=False)["paths"].items() for method in methods
    }
    assert described == served - pages
    assert ("get", "/docs") in pages
    tree = client.get("/spec").json
    assert tree == specification(keys=False)
    assert re.fullmatch(r"3\.1\.\d", tree["openapi"])
    assert tree["info"].keys() >= {"title", "version"}
    references = re.findall(r'"\$ref": "#/components/(\w+)/(\w+)"', json.dumps(tree))
    assert len(references) == json.dumps(tree).count('"$ref"') > 0
    for section, name in references:
        assert name in tree["components"][section]
    for methods in tree["paths"].values():
        for operation in methods.values():
            assert operation["summary"]
            assert all(response["description"] for response in operation["responses"].values())
    body = tree["components"]["schemas"]["TranslateBody"]
    assert body["required"] == ["q"]
    assert all(field["description"] for field in body["properties"].values())
    assert specification(keys=True)["security"] == [{"key": []}]
    schemas = client.get("/spec").json
    for path, content in (
        ("/languages", client.get("/languages").json[0]),
        ("/frontend/settings", client.get("/frontend/settings").json),
    ):
        (operation,) = schemas["paths"][path].values()
        schema = operation["responses"]["200"]["content"]["application/json"]["schema"]
        assert set(content) == set(schema.get("items", schema)["properties"])
