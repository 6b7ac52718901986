"""Files of the page in the browser, and the OpenAPI description of the interface."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from econmt.api import __version__
from econmt_serve import files
from econmt_serve.queries import DetectBody, FileBody, TranslateBody

_MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_PATHS = {"index.html": "/", "docs.html": "/docs"}
_FORMS = ("application/json", "application/x-www-form-urlencoded", "multipart/form-data")
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
    """Path with a method: what it does, the schema of its answer, its body, and the media types of its answer."""

    summary: str
    answer: Mapping[str, Any]
    body: type[TranslateBody | DetectBody | FileBody] | None = None
    kinds: Sequence[str] = ("application/json",)


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


def _list_of(items: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


_TEXT: dict[str, Any] = {"type": "string"}
_NUMBER: dict[str, Any] = {"type": "number"}
_BOOLEAN: dict[str, Any] = {"type": "boolean"}
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
    ("get", "/health"): _Operation("Says that the server answers.", _object(status=_TEXT)),
    ("get", "/frontend/settings"): _Operation(
        "Returns what the server takes, and the languages of its first model.",
        _object(
            keyRequired=_BOOLEAN,
            apiKeys=_BOOLEAN,
            suggestions=_BOOLEAN,
            filesTranslation=_BOOLEAN,
            charLimit=_NUMBER,
            alternatives=_NUMBER,
            supportedFilesFormat=_list_of(_TEXT),
            language={"type": "object"},
        ),
    ),
    ("post", "/suggest"): _Operation("Refuses better translations, with status 403.", _object(error=_TEXT)),
    ("get", "/spec"): _Operation("Returns this description.", {"type": "object"}),
    ("get", "/metrics"): _Operation("Counters for Prometheus.", _TEXT, kinds=["text/plain"]),
    ("post", "/translate_file"): _Operation(
        "Translates text, HTML or a Word document; in a form, rules for its words stand beside the file.",
        {"type": "string", "format": "binary"},
        FileBody,
        list(files.KINDS.values()),
    ),
}


def specification(*, keys: bool) -> dict[str, Any]:
    """Returns the interface in OpenAPI 3.1; requests need an API key if ``keys`` is true."""
    paths: dict[str, dict[str, Any]] = {}
    schemas: dict[str, Any] = {"Error": _object(error=_TEXT)}
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    refusals = {status: {"description": reason, "content": error} for status, reason in _REASONS.items()}
    for (method, path), (summary, answer, body, kinds) in _OPERATIONS.items():
        content = {kind: {"schema": answer} for kind in kinds}
        responses: dict[str, Any] = {"200": {"description": "The answer.", "content": content}}
        operation: dict[str, Any] = {"summary": summary, "responses": responses}
        paths.setdefault(path, {})[method] = operation
        if body is not None:
            schema = body.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas |= {**schema.pop("$defs", {}), body.__name__: schema}
            fields = {"schema": {"$ref": f"#/components/schemas/{body.__name__}"}}
            forms = dict.fromkeys(_FORMS, fields) if body is not FileBody else {**content, _FORMS[-1]: fields}
            operation["requestBody"] = {"required": True, "content": forms}
            operation["responses"] |= refusals
    languages = [{"name": name, "in": "query", "schema": _TEXT} for name in ("source", "target")]
    paths["/translate_file"]["post"]["parameters"] = languages
    scheme = {"type": "http", "scheme": "bearer"}
    return {
        "openapi": "3.1.0",
        "info": {"title": "econmt", "version": __version__, "description": "LibreTranslate's API, and more."},
        "paths": paths,
        "components": {"schemas": schemas, **({"securitySchemes": {"key": scheme}} if keys else {})},
        **({"security": [{"key": []}]} if keys else {}),
    }
