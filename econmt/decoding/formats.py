"""Output formats of translations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from econmt.config.json_reader import json_text
from econmt.decoding.translation import NBestEntry, Translation

OutputType = Literal["translation", "score", "translation_with_alignments", "json", "attention"]
ATTENTION_DIGITS = 5


def format_translation(
    translation: Translation, output_type: OutputType, passed: Mapping[str, Any] | None = None
) -> str:
    """Returns a translation as one line, without line end.

    ``translation`` is the text alone; ``score`` the score, a tab and the text; ``translation_with_alignments`` the
    text, a tab and pairs of source and target words as Pharaoh wrote them, ``0-0 1-2``; ``json`` an object with the
    text, the score, the log-probability, the tokens of both sides and all hypotheses; ``attention`` the same with a
    matrix of attention for each hypothesis, a row for each target token and EOS, a column for each source token and
    EOS. Objects begin with the fields ``passed``, except keys of their own.
    """
    if output_type == "translation":
        return translation.text
    if output_type == "score":
        return f"{translation.score:.6f}\t{translation.text}"
    if output_type == "translation_with_alignments":
        pairs = translation.hypotheses[0].alignment if translation.hypotheses else ()
        return f"{translation.text}\t{_pharaoh(pairs)}"
    return json_text(fields_of(translation, passed, with_attention=output_type == "attention"))


def fields_of(
    translation: Translation, passed: Mapping[str, Any] | None = None, *, with_attention: bool
) -> dict[str, Any]:
    """Returns a translation as fields of JSON.

    Args:
        translation: the translation.
        passed: fields to begin with, except keys of the translation's own.
        with_attention: True if hypotheses have their attention, a row for each target token and EOS.

    Returns:
        The fields that ``econmt translate --output-type json`` writes: ``translation``, ``score``,
        ``log_probability``, ``tokens``, ``source_tokens`` and ``nbest``.
    """
    candidates = [_as_dict(candidate, with_attention) for candidate in translation.hypotheses]
    best: dict[str, Any] = {
        **(passed or {}),
        "translation": translation.text,
        "score": translation.score,
        "log_probability": translation.log_probability,
        "tokens": translation.tokens,
        "source_tokens": translation.source_tokens,
        "nbest": candidates,
    }
    if with_attention:
        best["attention"] = candidates[0]["attention"] if candidates else []
    return best


def _pharaoh(pairs: Sequence[tuple[int, int]]) -> str:
    return " ".join(f"{source}-{target}" for source, target in pairs)


def format_nbest(translation: Translation, number: int, *, aligned: bool = False) -> list[str]:
    """Returns the hypotheses of a line in Moses' n-best format, one a line, best first.

    ``number ||| text ||| logprob= log-probability ||| score``, with the number of the source line from 0. Bars in a
    text are escaped as in Moses. A blank line has one hypothesis, the empty translation. With ``aligned`` a further
    field has pairs of source and target words, ``0-0 1-2``.
    """
    best: Sequence[NBestEntry | Translation] = translation.hypotheses or [translation]
    return [
        f"{number} ||| {each.text.replace('|||', '&#124;' * 3)} ||| logprob= {each.log_probability:.6f} ||| "
        f"{each.score:.6f}" + (f" ||| {_pharaoh(getattr(each, 'alignment', ()))}" if aligned else "")
        for each in best
    ]


def _as_dict(candidate: NBestEntry, with_attention: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "translation": candidate.text,
        "score": candidate.score,
        "log_probability": candidate.log_probability,
        "tokens": candidate.tokens,
        "cut": candidate.cut,
    }
    if with_attention:
        rows = [] if candidate.attention is None else candidate.attention.tolist()
        fields["attention"] = [[round(weight, ATTENTION_DIGITS) for weight in row] for row in rows]
    return fields
