"""JSON answers of the server: translations with details, languages and errors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from starlette.responses import Response

from econmt.api import EconmtError
from econmt.api.checked_json import json_text, shortened
from econmt.api.requests import fields_of
from econmt.api.text import NBestEntry, Translation
from econmt_serve.models import AUTO, LanguagePair
from econmt_serve.settings import Refused

_MOST_WEIGHTS = 500_000
"""Largest number of attention weights in an answer; writing so many takes about half a second."""

_MOST_COMPLAINT = 1_000
"""Maximum number of characters of an error."""

SAFE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_LANGUAGES = """
ar Arabic, bg Bulgarian, bn Bengali, ca Catalan, cs Czech, cy Welsh, da Danish, de German, el Greek, en English,
eo Esperanto, es Spanish, et Estonian, eu Basque, fa Persian, fi Finnish, fr French, ga Irish, gl Galician, he Hebrew,
hi Hindi, hr Croatian, hu Hungarian, id Indonesian, is Icelandic, it Italian, ja Japanese, ko Korean, lt Lithuanian,
lv Latvian, mk Macedonian, ms Malay, nb Norwegian Bokmål, nl Dutch, nn Norwegian Nynorsk, no Norwegian, pl Polish,
pt Portuguese, ro Romanian, ru Russian, sk Slovak, sl Slovenian, sq Albanian, sr Serbian, sv Swedish, sw Swahili,
ta Tamil, te Telugu, th Thai, tl Tagalog, tr Turkish, uk Ukrainian, ur Urdu, vi Vietnamese, zh Chinese
"""
"""Codes of ISO 639-1, as recipes name the suffixes of files, and English names."""
_NAME_BY_CODE = {AUTO: "Any language"} | dict(each.strip().split(" ", 1) for each in _LANGUAGES.split(","))


class JsonResponse(Response):
    """JSON response whose text is safe to print on a terminal."""

    media_type = "application/json"

    def __init__(self, content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(content, status, {**SAFE_HEADERS, **(headers or {})})

    def render(self, content: Any) -> bytes:
        """Returns the body."""
        return json_text(content).encode()


def refusal(error: EconmtError) -> JsonResponse:
    """Returns the response to a request that is refused, in LibreTranslate's form."""
    status = error.status if isinstance(error, Refused) else 400 if error.exit_code == 2 else 500
    retry = error.retry_seconds if isinstance(error, Refused) else None
    return JsonResponse(complaint(error), status, {} if retry is None else {"Retry-After": str(retry)})


def complaint(error: EconmtError) -> dict[str, str]:
    """Returns the content of a response about an error; text of the client in it is shortened."""
    hint = {"hint": error.hint} if isinstance(error, Refused) and error.hint else {}
    return {"error": shortened(str(error), _MOST_COMPLAINT), **hint}


def confidence(candidate: Translation | NBestEntry) -> float:
    """Returns the geometric mean of the probabilities of a translation's tokens, end of sentence included."""
    return round(math.exp(candidate.log_probability / (len(candidate.tokens) + 1)), 4)


def sentence(translation: Translation, passed: Mapping[str, Any], *, attention: bool) -> dict[str, Any]:
    """Returns the details of a translation: as ``translate --output-type attention``, with confidence and alignment."""
    fields = fields_of(translation, passed, with_attention=attention)
    for entry, hypothesis in zip(fields["nbest"], translation.hypotheses, strict=True):
        entry["confidence"] = confidence(hypothesis)
        if attention:
            entry["alignment"] = [list(pair) for pair in hypothesis.alignment]
    return {**fields, "confidence": confidence(translation)}


def check_details(translations: Iterable[Translation]) -> None:
    """Raises Refused if an answer would have too many attention weights."""
    entries = [entry for each in translations for entry in each.hypotheses]
    weights = sum(entry.attention.numel() for entry in entries if entry.attention is not None)
    if weights > _MOST_WEIGHTS:
        written = f"at most {_MOST_WEIGHTS:,} are written; send parts, or set attention to false"
        raise Refused(413, f"details: attention of {weights:,} weights, {written}")


def languages(pairs: Sequence[LanguagePair]) -> list[dict[str, Any]]:
    """Lists the languages as LibreTranslate does: sources with their targets, then targets that are no source."""
    targets: dict[str, dict[str, None]] = {}
    for each in pairs:
        targets.setdefault(each.source, {})[each.target] = None
        targets.setdefault(each.target, {})
    return [{**language(code), "targets": list(others)} for code, others in targets.items() if code != AUTO]


def language(code: str) -> dict[str, str]:
    """Returns the code of a language with its name."""
    return {"code": code, "name": _NAME_BY_CODE.get(code, code)}
