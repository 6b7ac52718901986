"""Requests: lines to translate with their constraints, from a program or as JSON objects."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from econmt.config import limits
from econmt.config.json_reader import json_text, parse_json
from econmt.config.yaml_reader import complaints
from econmt.data.text.glossary import Glossary
from econmt.data.text.vocabulary import normalized
from econmt.errors import InputError

_UNREADABLE = re.compile("[\0\ud800-\udfff]")


class Request(NamedTuple):
    """A sentence to translate and the constraints of its translation, all as raw text.

    Attributes:
        text: the sentence.
        constraints: phrases that the translation must contain, each as often as it is listed.
        avoid: phrases that it must not contain.
        target_prefix: its beginning.
        passed: other fields of a JSON object, copied to the JSON output.
        factors: source factors: for each stream, a text with one token a word.
        glossary: terms of this sentence, with priority over those of a glossary for all sentences.
        source_prefix: words before the sentence that the model alone reads, as the tag of a target language.
    """

    text: str
    constraints: Sequence[str] = ()
    avoid: Sequence[str] = ()
    target_prefix: str = ""
    passed: Mapping[str, Any] = {}
    factors: Sequence[str] = ()
    glossary: Glossary | None = None
    source_prefix: str = ""

    @property
    def start(self) -> str:
        """Source prefix and a space, which the model reads before the text; "" if either is blank."""
        return f"{self.source_prefix} ".lstrip() if self.text.strip() else ""

    @property
    def is_plain(self) -> bool:
        """True if the request has no constraints and no glossary."""
        return self.glossary is None and not self.constrains

    @property
    def constrains(self) -> bool:
        """True if the request has constraints that belong to one sentence."""
        return bool(self.constraints or self.avoid or self.target_prefix)


_ADVICE = 'expected one JSON object per line, as {"text": "A dog.", "constraints": ["Hund"]}'


class _RequestFields(BaseModel):
    """Fields of a JSON request, by Sockeye's names where it has them; other fields are passed on."""

    model_config = ConfigDict(extra="allow", strict=True)

    text: str
    constraints: list[str] = Field([], max_length=limits.PHRASES)
    avoid: list[str] = Field([], max_length=limits.PHRASES)
    target_prefix: str = ""
    factors: list[str] | None = Field(None, max_length=limits.FACTORS)
    glossary: dict[str, str] = Field({}, max_length=limits.PHRASES)
    source_prefix: str = ""


_REFUSED = ("restrict_lexicon", "target_prefix_factors")
"""Fields of Sockeye that econmt does not support."""


def read_request(line: str, where: str) -> Request:
    """Reads a request from a line of JSON with Sockeye's fields and ``glossary``.

    Raises:
        InputError: The line is no JSON object, a field has a wrong type or a misspelt name or is not
            supported, a key occurs twice, or a number is NaN or out of range; the message names ``where``.
    """
    return request_of(parse_json(line, where, _ADVICE, strict=True), where)


def request_of(tree: Mapping[str, Any], where: str) -> Request:
    """Makes a request from the fields of a JSON object: Sockeye's, and ``glossary`` for the terms of this sentence.

    Args:
        tree: fields as :func:`~econmt.config.json_reader.parse_json` returns them; ``passed`` keeps unknown ones.
        where: name of the request in messages.

    Raises:
        InputError: if a field has a wrong type, a misspelt name or text that cannot be, or is not supported.
    """
    if not isinstance(tree, Mapping):
        raise InputError(f"{where}: {_ADVICE}")
    for name in _REFUSED:
        if tree.get(name) not in (None, [], ""):
            raise InputError(f"{where}: {name} is not supported by econmt; remove it")
    try:
        fields = _RequestFields.model_validate(tree)
        passed = dict(fields.model_extra or {})
        json_text(passed)
    except ValidationError as failure:
        raise InputError(f"{where}: {complaints(failure)[0]}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: cannot be passed on to the output: {error}") from None
    for name in passed:
        near = difflib.get_close_matches(name.lower(), _RequestFields.model_fields, n=1, cutoff=0.8)
        if near:
            raise InputError(f"{where}: unknown field {name}; did you mean {near[0]}?")
    known = {name: getattr(fields, name) for name in _RequestFields.model_fields}
    terms = Glossary.checked(fields.glossary, f"{where}: glossary") if fields.glossary else None
    request = Request(**known | {"factors": fields.factors or (), "glossary": terms}, passed=passed)
    check_request(request, where)
    return request


def check_request(request: Request, where: str) -> None:
    """Refuses texts with invalid characters and blank phrases.

    Args:
        request: the request. where: its name in messages.

    Raises:
        InputError: if a text or phrase is refused; the message names ``where`` and the field.
    """
    if not isinstance(request, Request):
        raise InputError(f"{where}: expected text or a Request, found {type(request).__name__}")
    if not isinstance(request.glossary, (Glossary, type(None))):
        raise InputError(f"{where}: glossary: expected an econmt.data.text.glossary.Glossary")
    for name in ("constraints", "avoid"):
        phrases = getattr(request, name)
        if not limits.is_list_of(phrases, str):
            raise InputError(f"{where}: {name}: expected a list of phrases")
        for number, phrase in enumerate(phrases):
            _check_text(phrase, f"{where}: {name}[{number}]")
            if not normalized(phrase):
                raise InputError(f"{where}: {name}[{number}] is blank; give a phrase, or remove it")
    if not limits.is_list_of(request.factors, str):
        raise InputError(f"{where}: factors: expected a list with one text per stream of source factors")
    for number, line in enumerate(request.factors):
        _check_text(line, f"{where}: factors[{number}]")
    for name in ("text", "target_prefix", "source_prefix"):
        _check_text(getattr(request, name), f"{where}: {name}")


def _check_text(text: str, where: str) -> None:
    if not isinstance(text, str):
        raise InputError(f"{where}: expected text, found {type(text).__name__}")
    if match := _UNREADABLE.search(text):
        raise InputError(f"{where}: the character U+{ord(match[0]):04X} is not allowed in text; remove it")
