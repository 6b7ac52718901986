"""Files of the page in the browser, and the OpenAPI description of the interface."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from econmt.api import __version__
from econmt_serve import files
from econmt_serve.queries import DetectBody, Rules, TranslateBody

_MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_PATHS = {"index.html": "/", "docs.html": "/docs"}
_REASONS = {
    "400": "A field is missing, unknown or wrong, or a language is not served.",
    "403": "The API key is missing or wrong.",
    "408": "The request took too long to arrive.",
    "413": "The text is too long.",
    "415": "The content type is not read.",
    "429": "The client has sent too many requests; Retry-After says when the next is allowed.",
    "503": "Too many sentences wait or bodies arrive, or the server is stopping.",
}


def page_files() -> dict[str, tuple[bytes, str]]:
    """Returns content and media type of the page's files by path."""
    folder = resources.files("econmt_serve").joinpath("page")
    return {
        _PATHS.get(file.name, f"/{file.name}"): (file.read_bytes(), _MEDIA_TYPES[Path(file.name).suffix])
        for file in folder.iterdir()
    }


class _Operation(NamedTuple):
    """Path with a method: what it does, its body, and the schema of its answer."""

    summary: str
    answer: Mapping[str, Any]
    body: type[TranslateBody | DetectBody] | None = None


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


def _list_of(items: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


_TEXT: dict[str, Any] = {"type": "string"}
_NUMBER: dict[str, Any] = {"type": "number"}
_OPERATIONS = {
    ("post", "/translate"): _Operation(
        "Translates text or HTML. Every value is a list if q is one.",
        _object(
            translatedText={"anyOf": [_TEXT, _list_of(_TEXT)]},
            alternatives={"type": "array", "description": "Further translations, best first."},
            details={"type": "array", "description": "An object for each sentence."},
            detectedLanguage={"description": "The source language, if source is auto."},
            milliseconds=_NUMBER,
        ),
        TranslateBody,
    ),
    ("post", "/detect"): _Operation(
        "Returns the only source language of the server; the text is not looked at.",
        _list_of(_object(language=_TEXT, confidence=_NUMBER, note=_TEXT)),
        DetectBody,
    ),
    ("get", "/languages"): _Operation(
        "Lists the languages with their targets.",
        _list_of(_object(code=_TEXT, name=_TEXT, targets=_list_of(_TEXT))),
    ),
    ("get", "/health"): _Operation(
        "Lists the models.", _object(status=_TEXT, seconds=_NUMBER, models=_list_of({"type": "object"}))
    ),
    ("get", "/frontend/settings"): _Operation(
        "Returns the limits of the server.",
        _object(
            keyRequired={"type": "boolean"},
            apiKeys={"type": "boolean"},
            charLimit=_NUMBER,
            alternatives=_NUMBER,
        ),
    ),
    ("get", "/spec"): _Operation("Returns this description.", {"type": "object"}),
}


def specification(*, keys: bool) -> dict[str, Any]:
    """Returns the interface in OpenAPI 3.1; requests need an API key if ``keys`` is true."""
    paths: dict[str, dict[str, Any]] = {}
    schemas: dict[str, Any] = {"Error": _object(error=_TEXT)}
    for (method, path), (summary, answer, body) in _OPERATIONS.items():
        operation = paths.setdefault(path, {})[method] = _operation(summary, "application/json", answer)
        if body is not None:
            schema = body.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas |= {**schema.pop("$defs", {}), body.__name__: schema}
            reference = {"schema": {"$ref": f"#/components/schemas/{body.__name__}"}}
            forms = ("application/json", "application/x-www-form-urlencoded")
            operation["requestBody"] = {"required": True, "content": dict.fromkeys(forms, reference)}
            operation["responses"] |= _refusals()
    paths["/translate_file"] = {"post": _file_operation()}
    paths["/metrics"] = {"get": _operation("Counters for Prometheus.", "text/plain", _TEXT)}
    scheme = {"type": "http", "scheme": "bearer"}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "econmt",
            "version": __version__,
            "description": "LibreTranslate's interface, and more.",
        },
        "paths": paths,
        "components": {"schemas": schemas, **({"securitySchemes": {"key": scheme}} if keys else {})},
        **({"security": [{"key": []}]} if keys else {}),
    }


def _operation(summary: str, kind: str, answer: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "summary": summary,
        "responses": {"200": {"description": "The answer.", "content": {kind: {"schema": answer}}}},
    }


def _refusals() -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {status: {"description": reason, "content": error} for status, reason in _REASONS.items()}


def _file_operation() -> dict[str, Any]:
    """Describes ``/translate_file``, whose body and answer are files."""
    binary = {"type": "string", "format": "binary"}
    content: dict[str, Any] = {kind: {"schema": binary} for kind in files.KINDS}
    form = Rules.model_json_schema()
    form["properties"]["file"], form["required"] = binary, ["file"]
    names = ("source", "target")
    return {
        "summary": "Translates text, HTML or a Word document; in a form, rules for its words stand beside the file.",
        "parameters": [{"name": name, "in": "query", "required": False, "schema": _TEXT} for name in names],
        "requestBody": {"required": True, "content": {**content, "multipart/form-data": {"schema": form}}},
        "responses": {"200": {"description": "The translated file.", "content": content}, **_refusals()},
    }
