"""Bodies of requests: LibreTranslate's fields, and those of ``econmt translate --json-input``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import parse_qsl

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from econmt.config import limits
from econmt.config.json_reader import parse_json
from econmt.config.yaml_reader import complaints, shortened
from econmt.data.text.subwords import normalized
from econmt.decoding.constraints.glossary import Glossary
from econmt.decoding.constraints.phrases import units
from econmt.decoding.requests import Request, check_request, request_of
from econmt.serving.markup import MarkupText, html_text, plain_text
from econmt.serving.settings import Refused

Phrases = Annotated[list[str], Field(max_length=limits.PHRASES)]
BODY = "the request"
_ADVICE = 'send a JSON object, as {"q": "A dog runs.", "source": "en", "target": "de"}'


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    api_key: str = ""


class _Wishes(_Body):
    source: str = "auto"
    target: str = ""
    constraints: Phrases = []
    avoid: Phrases = []
    glossary: dict[str, str] = Field({}, max_length=limits.PHRASES)


class TranslateBody(_Wishes):
    """Body of ``/translate``; ``q`` may hold objects as in lines of ``--json-input``."""

    q: str | dict[str, Any] | list[str | dict[str, Any]]
    format: Literal["text", "html"] = "text"
    alternatives: int = Field(0, ge=0, le=limits.BEAM)
    target_prefix: str = ""
    details: bool = False
    stream: bool = False


class WordsBody(_Wishes):
    """Body of ``/alternatives``: a sentence, and the words before the requested one."""

    q: str
    target_prefix: str = ""
    alternatives: int = Field(5, ge=1, le=20)


class DetectBody(_Body):
    """Body of ``/detect``."""

    q: str


BodyType = TypeVar("BodyType", bound=_Body)


def read_tree(content: bytes, content_type: str) -> dict[str, Any]:
    """The fields of a request's body, JSON or a form, not checked yet.

    Raises:
        Refused: it is neither.
    """
    name = content_type.partition(";")[0].strip().lower()
    if name == "application/json":
        return parse_json(content, BODY, _ADVICE, strict=True)
    if name == "application/x-www-form-urlencoded":
        return _form(content)
    raise Refused(
        415,
        f"content type {shortened(name) or 'none'} is not read; send application/json, or a form urlencoded",
    )


def checked_body(kind: type[BodyType], tree: dict[str, Any]) -> BodyType:
    """The fields of a request, checked against ``kind``.

    Raises:
        Refused: one line that names the field.
    """
    try:
        return kind.model_validate(tree)
    except ValidationError as failure:
        raise Refused(400, f"{BODY}: {complaints(failure)[0]}") from None


def _form(content: bytes) -> dict[str, Any]:
    try:
        pairs = parse_qsl(content.decode(), keep_blank_values=True, errors="strict")
    except (UnicodeDecodeError, ValueError) as error:
        raise Refused(400, f"{BODY}: no form that can be read ({error})") from None
    tree: dict[str, Any] = dict(pairs)
    if len(tree) < len(pairs):
        raise Refused(400, f"{BODY}: a field is given twice; give each once")
    if "alternatives" in tree:
        try:
            tree["alternatives"] = int(tree["alternatives"])
        except ValueError:
            raise Refused(400, f"{BODY}: alternatives: expected a whole number") from None
    return tree


def texts_of(body: TranslateBody, most_characters: int) -> list[MarkupText]:
    """The texts of a request, in order.

    Raises:
        InputError: something in it cannot be used; the message names it.
    """
    check_size(body, body.target_prefix, most_characters)
    if body.stream and body.format == "html":
        raise Refused(
            400, "stream writes sentences without what stands around them: give no stream with format html"
        )
    glossary = read_terms(body.glossary)
    given = body.q if isinstance(body.q, list) else [body.q]
    read = [_entry(each, number, isinstance(body.q, list)) for number, each in enumerate(given)]
    # What the whole request wishes is looked at once, not for each of its texts.
    check_request(Request("", body.constraints, body.avoid, body.target_prefix), BODY)
    if (body.constraints or body.target_prefix) and len(read) != 1:
        raise Refused(
            400,
            "constraints and target_prefix belong to one sentence: give each text of q as an object "
            '{"text": ..., "constraints": ...}',
        )
    texts = []
    for number, request in enumerate(read):
        whole = request._replace(
            constraints=[*request.constraints, *body.constraints],
            avoid=[*request.avoid, *body.avoid] if request.avoid else body.avoid,
            target_prefix=request.target_prefix or body.target_prefix,
        )
        where = f"q[{number}]" if isinstance(body.q, list) else "q"
        text = html_text(whole) if body.format == "html" else plain_text(whole)
        if len(text.lines) > 1 and (whole.constraints or whole.target_prefix):
            raise Refused(
                400,
                f"{where}: constraints and target_prefix belong to one sentence; this has {len(text.lines)}",
            )
        texts.append(text._replace(lines=[with_terms(line, glossary) for line in text.lines]))
    return texts


def _entry(given: str | dict[str, Any], number: int, listed: bool) -> Request:
    where = f"q[{number}]" if listed else "q"
    if not isinstance(given, str):
        request = request_of(given, where)
        if request.factors:  # none that reads such is served
            raise Refused(400, f"{where}: factors: the model has no source factors")
        return request
    check_request(request := Request(given), where)
    return request


def word_request(body: WordsBody, most_characters: int) -> Request:
    """The sentence of a request for words.

    Raises:
        InputError: something in it cannot be used.
    """
    check_size(body, body.target_prefix, most_characters)
    request = Request(body.q.strip(), body.constraints, body.avoid, body.target_prefix)
    check_request(request, "q")
    if not request.text or "\n" in request.text:
        raise Refused(400, "q: expected one sentence on one line")
    return with_terms(request, read_terms(body.glossary))


def check_size(body: TranslateBody | WordsBody, target_prefix: str, most: int) -> None:
    """Refuses a request with more characters than a server takes at a time, what is wished included.

    Each text, phrase and name counts one more, as if a line end stood between them: a list of many blank ones is long.
    """
    texts = _characters([body.q]) - 1
    wished = _characters(
        [*body.constraints, *body.avoid, *body.glossary, *body.glossary.values(), target_prefix]
    )
    characters = texts + wished - 1
    if characters > most:
        what = "q has" if texts > most else "q and what is wished of it have"
        count = texts if texts > most else characters
        raise Refused(413, f"{what} {count:,} characters, this server takes {most:,} at a time; send parts")


def _characters(trees: Iterable[Any]) -> int:
    """Counts the characters of all texts in JSON values, plus one for each value and name."""
    count, left = 0, list(trees)
    while left:
        tree = left.pop()
        count += 1
        if isinstance(tree, str):
            count += len(tree)
        elif isinstance(tree, list):
            left += tree
        elif isinstance(tree, dict):
            left += [*tree, *tree.values()]
    return count


def read_terms(terms: Mapping[str, str]) -> Glossary | None:
    """A glossary of source and target phrases, or None for no terms."""
    for source, target in terms.items():
        if not units(source) or not normalized(target):
            side = "target" if units(source) else "source"
            raise Refused(
                400,
                f"glossary: the {side} phrase of {shortened(source)!r} is blank; give one, or leave the term out",
            )
    return (
        Glossary({normalized(source): normalized(target) for source, target in terms.items()})
        if terms
        else None
    )


def with_terms(request: Request, glossary: Glossary | None) -> Request:
    """A request whose constraints are also the translations of the terms that occur in it."""
    if glossary is None:
        return request
    return request._replace(constraints=[*request.constraints, *glossary.constraints(request.text)])
