"""Answers of the server, as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from starlette.responses import Response

from econmt.config.json_reader import json_text
from econmt.config.yaml_reader import shortened
from econmt.decoding.formats import fields_of
from econmt.decoding.next_words import NextWord
from econmt.decoding.translation import NBestEntry, Translation
from econmt.errors import EconmtError
from econmt.serving.languages import language_name
from econmt.serving.models import Served
from econmt.serving.settings import Refused

_MOST_WEIGHTS = 500_000
"""Largest number of attention weights in an answer; writing so many takes about half a second."""

_MOST_COMPLAINT = 1_000
"""Characters of an error."""


class JsonResponse(Response):
    """JSON whose text any terminal can show."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The bytes of the body."""
        return json_text(content).encode()


def refusal(error: EconmtError) -> JsonResponse:
    """The answer to a request that is not done, in LibreTranslate's form."""
    status = error.status if isinstance(error, Refused) else 400 if error.exit_code == 2 else 500
    retry = error.retry_seconds if isinstance(error, Refused) else None
    headers = {} if retry is None else {"Retry-After": str(retry)}
    return JsonResponse(complaint(error), status, headers)


def complaint(error: EconmtError) -> dict[str, str]:
    """Returns the answer about an error, with the client's own text shortened."""
    return {"error": shortened(str(error), _MOST_COMPLAINT)}


def confidence(candidate: Translation | NBestEntry) -> float:
    """The geometric mean of the probabilities of a translation's tokens, end of sentence included."""
    return round(math.exp(candidate.log_probability / (len(candidate.tokens) + 1)), 4)


def sentence(translation: Translation, passed: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that is known of a sentence: what ``translate --output-type attention`` writes, and more."""
    fields = fields_of(translation, passed, with_attention=True)
    for entry, found in zip(fields["nbest"], translation.hypotheses, strict=True):
        entry["confidence"] = confidence(found)
        entry["alignment"] = [list(pair) for pair in found.alignment]
    return {**fields, "confidence": confidence(translation)}


def check_details(found: Iterable[Translation]) -> None:
    """Refuses attention of more weights than are written at a time.

    Raises:
        Refused: there are more.
    """
    entries = [entry for each in found for entry in each.hypotheses]
    weights = sum(entry.attention.numel() for entry in entries if entry.attention is not None)
    if weights > _MOST_WEIGHTS:
        raise Refused(
            413,
            f"details: attention of {weights:,} weights, at most {_MOST_WEIGHTS:,} are written; send parts, or ask for "
            "no details",
        )


def words(found: Sequence[NextWord]) -> list[dict[str, Any]]:
    """The words that may follow."""
    return [
        {
            "word": each.word,
            "probability": round(each.probability, 5),
            "translation": each.text,
            "score": each.score,
        }
        for each in found
    ]


def languages(models: Sequence[Served]) -> list[dict[str, Any]]:
    """The source languages, each with its targets, and the targets that are no source, as LibreTranslate lists them."""
    targets: dict[str, list[str]] = {}
    for served in models:
        targets.setdefault(served.source, []).append(served.target)
        targets.setdefault(served.target, [])
    return [{"code": code, "name": language_name(code), "targets": found} for code, found in targets.items()]
