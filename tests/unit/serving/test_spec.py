"""The OpenAPI description says what the server has."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from econmt_serve.access import Keys
from econmt_serve.app import Service
from econmt_serve.pages import page_files, specification
from econmt_serve.settings import Settings
from tests.unit.serving.conftest import Client


def nodes(tree: Any) -> Iterator[dict[str, Any]]:
    if isinstance(tree, dict):
        yield tree
    for each in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        yield from nodes(each)


def test_every_route_is_described() -> None:
    routes = Service([], Settings(), Keys()).application().routes
    served = {(method.lower(), route.path) for route in routes for method in route.methods - {"HEAD"}}  # type: ignore[attr-defined]
    pages = {("get", path) for path in page_files()}
    described = {
        (method, path) for path, methods in specification(keys=False)["paths"].items() for method in methods
    }
    assert described == served - pages
    assert ("get", "/docs") in pages


def test_the_description_is_whole(client: Client) -> None:
    tree = client.get("/spec").json
    assert tree == specification(keys=False)
    assert re.fullmatch(r"3\.1\.\d", tree["openapi"])
    assert tree["info"].keys() >= {"title", "version"}
    for node in nodes(tree):
        reference = node.get("$ref")
        if isinstance(reference, str):
            *_, section, name = reference.split("/")
            assert name in tree["components"][section]
    for methods in tree["paths"].values():
        for operation in methods.values():
            assert operation["summary"]
            assert all(response["description"] for response in operation["responses"].values())
    body = tree["components"]["schemas"]["TranslateBody"]
    assert body["required"] == ["q"]
    assert all(field["description"] for field in body["properties"].values())
    assert specification(keys=True)["security"] == [{"key": []}]


def test_an_answer_is_as_described(client: Client) -> None:
    schemas = client.get("/spec").json
    for path, content in (
        ("/languages", client.get("/languages").json[0]),
        ("/frontend/settings", client.get("/frontend/settings").json),
    ):
        (operation,) = schemas["paths"][path].values()
        schema = operation["responses"]["200"]["content"]["application/json"]["schema"]
        assert set(content) == set(schema.get("items", schema)["properties"])
