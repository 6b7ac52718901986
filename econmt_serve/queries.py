"""Bodies of requests: their fields, checks, and the sentences in them.

The fields are those of LibreTranslate and of ``econmt translate --json-input``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import PurePath
from typing import Annotated, Any, Literal, NamedTuple, TypeVar
from urllib.parse import parse_qsl

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema

from econmt.api import InputError, limits
from econmt.api import requests as api_requests
from econmt.api.checked_json import complaints, parse_json, shortened
from econmt.api.requests import Glossary, Request, check_request, parse_glossary, request_of
from econmt_serve.files import KINDS
from econmt_serve.settings import Refused
from econmt_serve.text.markup_reader import html_passage
from econmt_serve.text.passages import Passage, TextDivision, plain_passage

_FORM = re.compile('multipart/form-data *;.*boundary="?([^";]+)', re.IGNORECASE)
_PART_NAME = re.compile('^content-disposition:.*?[; ]name="?([^";\r]*)', re.IGNORECASE | re.MULTILINE)
_FILE_NAME = re.compile('^content-disposition:.*?[; ]filename="?([^";\r]*)', re.IGNORECASE | re.MULTILINE)
_PART_TYPE = re.compile("^content-type: *([^\r\n]*)", re.IGNORECASE | re.MULTILINE)
_HEAD_BYTES = 4096
"""Bytes that are read of the head of a form's part."""
Phrases = Annotated[list[str], Field(max_length=limits.PHRASES)]
BODY = "the request"
_ADVICE = 'send a JSON object, as {"q": "A dog runs.", "source": "en", "target": "de"}'


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    api_key: str = Field("", description="API key; the header Authorization: Bearer KEY is better.")


def _terms_of(glossary: Any) -> Any:
    """Returns the terms of a glossary's text, and any other value as it is; raises InputError with the line."""
    if not isinstance(glossary, str):
        return glossary
    return parse_glossary(glossary.replace("\r\n", "\n").split("\n"), "glossary").terms  # browsers write both


def _checked_q(q: Any) -> Any:
    """Returns ``q``; raises InputError for what is no text, since pydantic's error of a union names Python's types."""
    entries = q if isinstance(q, list) else [q]
    for number, entry in enumerate(entries):
        if not isinstance(entry, (str, dict)):
            name = f"q[{number}]: expected a text" if entries is q else "q: expected a text, a list of texts"
            raise InputError(f'{BODY}: {name} or an object, as {{"text": "A dog runs."}}')
    return q


def _number(value: Any) -> Any:
    """Returns the number that a text of digits stands for, and any other value as it is."""
    return int(value) if isinstance(value, str) and re.fullmatch("[0-9]{1,9}", value) else value


class _TextBody(_Body):
    """Languages of a request, and rules for the words of all of its translations."""

    source: str = Field("auto", description="Source language; auto if only one pair of the server fits.")
    target: str = Field(
        "", description="Target language; may be left out if only one pair of the server fits."
    )
    avoid: Phrases = Field([], description="Phrases that no translation may contain.")
    glossary: Annotated[dict[str, str], BeforeValidator(_terms_of)] = Field(
        {},
        max_length=limits.PHRASES,
        description="Terms and the translations that they must have, or the text of a glossary file.",
        json_schema_extra={"type": ["object", "string"]},
    )

    @property
    def terms(self) -> Glossary | None:
        """The glossary, checked; None if there is none."""
        return Glossary.checked(self.glossary, "glossary") if self.glossary else None

    @property
    def phrases(self) -> list[str]:
        """All phrases, whose characters a server limits."""
        return [*self.avoid, *self.glossary, *self.glossary.values()]


class TranslateBody(_TextBody):
    """Body of ``/translate``; ``q`` may hold objects as in lines of ``--json-input``."""

    constraints: Phrases = Field(
        [], description="Phrases that the translation of the only sentence must contain."
    )
    target_prefix: str = Field("", description="Beginning of the translation of the only sentence.")
    q: Annotated[str | dict[str, Any] | list[str | dict[str, Any]], BeforeValidator(_checked_q)] = Field(
        description="Text, or a list of texts; instead of a text an object with text, constraints and the like.",
        examples=["Tom bought a new car. He likes it."],
    )
    format: Literal["text", "html"] = Field("text", description="Plain text or HTML.")
    alternatives: Annotated[int, BeforeValidator(_number)] = Field(
        0, ge=0, le=limits.BEAM, description="Number of further translations; less than the server's beam."
    )
    details: bool = Field(
        False, description="Return tokens, scores, attention and the n best translations of each sentence."
    )
    attention: bool = Field(True, description="Include attention and alignment in the details.")
    stream: bool = Field(
        False, description="Return a line of JSON for each sentence as soon as it is ready; for text only."
    )


class FileBody(_TextBody):
    """Form of ``/translate_file``; ``file`` is the content with its type."""

    file: Annotated[tuple[bytes, str], WithJsonSchema({"type": "string", "format": "binary"})]


class DetectBody(_Body):
    """Body of ``/detect``."""

    q: str = Field(description="Text.", examples=["A dog runs."])


class Text(NamedTuple):
    """A text of a request, and the request of each of its sentences."""

    passage: Passage
    sentences: list[Request]


BodyType = TypeVar("BodyType", bound=_Body)


def read_tree(content: bytes, content_type: str, *, is_file: bool = False) -> dict[str, Any]:
    """Parses a body into fields, which are not checked yet; raises Refused if it is not of its type.

    With ``is_file`` a body that is no form is the field ``file``; otherwise it must be JSON or a form.
    """
    name = content_type.partition(";")[0].strip().lower()
    form = _FORM.match(content_type)
    if form is None and is_file:
        return {"file": (content, content_type)}
    if name == "application/json":
        return parse_json(content, BODY, _ADVICE, strict=True)
    if form is None and name != "application/x-www-form-urlencoded" and (name or content):
        problem = f"content type {shortened(name) or 'none'} is not read"
        raise Refused(415, f"{problem}; send application/json or a form")
    tree = dict[str, Any]()
    try:
        for name, value in _form_fields(content, form[1] if form else None):
            if name == "avoid":
                tree.setdefault(name, []).append(value)
            elif name in tree:
                raise Refused(400, f"{BODY}: a field is given twice; give each once")
            else:
                tree[name] = value
    except ValueError as error:
        raise Refused(400, f"{BODY}: no form that can be read ({error})") from None
    return tree


def _form_fields(content: bytes, border: str | None) -> Iterator[tuple[str, Any]]:
    """Yields name and value of the fields of a form, between borders or urlencoded; a file's type is in its value."""
    if border is None:
        yield from parse_qsl(content.decode(), keep_blank_values=True, errors="strict")
        return
    for part in (b"\r\n" + content).split(f"\r\n--{border}".encode(), limits.PHRASES + 20)[1:-1]:
        lines, _, value = part.partition(b"\r\n\r\n")
        head = lines[:_HEAD_BYTES].decode(errors="replace")
        name, file, kind = ("".join(each.findall(head)[:1]) for each in (_PART_NAME, _FILE_NAME, _PART_TYPE))
        if kind in ("", "application/octet-stream"):
            kind = KINDS.get(PurePath(file).suffix.lower(), kind)
        yield name, (value, kind) if name == "file" else value.decode()


def checked_body(kind: type[BodyType], tree: dict[str, Any]) -> BodyType:
    """Checks the fields of a request; raises Refused, naming the field, if one is invalid or missing."""
    try:
        return kind.model_validate({name: value for name, value in tree.items() if value is not None})
    except ValidationError as failure:
        first = failure.errors()[0]
        if first["type"] == "missing":
            raise Refused(400, f"Invalid request: missing {first['loc'][0]} parameter") from None
        raise Refused(400, f"{BODY}: {complaints(failure)[0]}") from None


def texts_of(body: TranslateBody, most_characters: int, how: TextDivision, language: str = "") -> list[Text]:
    """Returns the texts of a request, in ``language``, each divided into sentences with their constraints."""
    check_size(body, most_characters)
    if body.stream and body.format == "html":
        raise Refused(
            400, "stream writes sentences without the markup around them; leave out stream or format html"
        )
    glossary = body.terms
    entries = body.q if isinstance(body.q, list) else [body.q]
    names = [f"q[{number}]" for number in range(len(entries))] if isinstance(body.q, list) else ["q"]
    requests = [_entry(*each) for each in zip(entries, names, strict=True)]
    # Constraints of the request as a whole are checked once, not for each of its texts.
    check_request(Request("", body.constraints, body.avoid, body.target_prefix), BODY)
    if (body.constraints or body.target_prefix) and len(requests) != 1:
        raise Refused(
            400,
            "constraints and target_prefix belong to one sentence: give each text of q as an object "
            '{"text": ..., "constraints": ...}',
        )
    texts = []
    for request, where in zip(requests, names, strict=True):
        request = request._replace(
            constraints=[*request.constraints, *body.constraints],
            avoid=[*request.avoid, *body.avoid] if request.avoid else body.avoid,
            target_prefix=request.target_prefix or body.target_prefix,
        )
        passage = (html_passage if body.format == "html" else plain_passage)(request.text, how)
        count = len(passage.sentences)
        if count > 1 and (request.constraints or request.target_prefix):
            raise Refused(
                400, f"{where}: constraints and target_prefix belong to one sentence; this has {count}"
            )
        sentences = [request._replace(text=sentence.text) for sentence in passage.sentences]
        texts.append(Text(passage, with_terms(sentences, glossary, language)))
    return texts


def _entry(entry: str | dict[str, Any], where: str) -> Request:
    request = request_of({"text": entry} if isinstance(entry, str) else entry, where)
    if request.factors:  # models with source factors are not served
        raise Refused(400, f"{where}: factors: the model has no source factors")
    return request


def check_size(body: TranslateBody, most: int) -> None:
    """Raises Refused if texts and phrases of a request have more than ``most`` characters.

    Each text, phrase and name counts one character more, so that a list of many blank ones is long.
    """
    texts = _characters([body.q]) - 1
    characters = texts + _characters([*body.constraints, *body.phrases, body.target_prefix]) - 1
    if characters > most:
        what, count = ("q has", texts) if texts > most else ("q and its constraints have", characters)
        raise Refused(413, f"{what} {count:,} characters, this server takes {most:,} at a time; send parts")


def _characters(trees: Iterable[Any]) -> int:
    """Counts the characters of all texts in JSON values, plus one for each value and name."""
    count, stack = 0, list(trees)
    while stack:  # not by recursion: the nesting is the client's
        tree = stack.pop()
        count += 1
        if isinstance(tree, str):
            count += len(tree)
        elif isinstance(tree, list):
            stack += tree
        elif isinstance(tree, dict):
            stack += [*tree, *tree.values()]
    return count


def check_rules(body: FileBody, most: int) -> None:
    """Raises an error if the rules for the words of a file are invalid or have more than ``most`` characters."""
    check_request(Request("", avoid=body.avoid), BODY)
    if (count := _characters(body.phrases)) > most:
        raise Refused(413, f"glossary and avoid have {count:,} characters, more than {most:,}")


def with_terms(requests: Iterable[Request], glossary: Glossary | None, language: str) -> list[Request]:
    """Adds a glossary to requests in whose sentences one of its terms occurs; terms of their own have priority."""
    return [each if glossary is None else _with_terms(each, glossary, language) for each in requests]


def _with_terms(request: Request, glossary: Glossary, language: str) -> Request:
    if request.glossary is not None:
        text = api_requests.normalized(request.text)
        found = api_requests.occurrences(request.text, (request.glossary, glossary), language)
        glossary = Glossary({text[each.start : each.end]: each.target for each in found})
    return request._replace(glossary=glossary) if glossary.occurrences(request.text, language) else request
