"""Validated reading of JSON files that econmt wrote, and JSON text that is safe to print on a terminal."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from pydantic import AfterValidator, BaseModel, ConfigDict

from econmt.config.yaml_reader import SectionType, check_section, shortened
from econmt.errors import InputError

_UNPRINTABLE = re.compile("[\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff\ufff9-\ufffb]")


class Record(BaseModel):
    """Base class of the schema of a JSON file: checks types strictly, ignores unknown keys of later versions."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)


def shaped_like(kind: type[BaseModel], *, may_be_empty: bool = False) -> AfterValidator:
    """Returns a validator that checks a field of plain data against ``kind`` and leaves it unchanged."""

    def check(value: Any) -> Any:
        if value or not may_be_empty:
            kind.model_validate(value)
        return value

    return AfterValidator(check)


def strict_json(text: str) -> Any:
    """Parses untrusted JSON strictly by RFC 8259; raises ValueError for duplicate keys and NaN or infinite numbers."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        for key, value in pairs:
            if key in mapping:
                raise ValueError(f"the key {shortened(key)!r} is given twice")
            mapping[key] = value
        return mapping

    def finite(number: str) -> float:
        if not math.isfinite(float(number)):
            raise ValueError(f"{shortened(number)} is not a finite number")
        return float(number)

    return json.loads(text, object_pairs_hook=unique, parse_float=finite, parse_constant=finite)


def parse_json(text: str | bytes, where: str, advice: str, *, strict: bool = False) -> dict[str, Any]:
    """Parses a text that contains a JSON object.

    Args:
        text: the text, or its bytes in UTF-8. where: its name in messages. advice: remedy, the end of messages.
        strict: True if duplicate keys and numbers that are not finite are refused, as by RFC 8259.

    Raises:
        InputError: if the text is anything else.
    """
    parse = strict_json if strict else json.loads
    try:
        value = parse(text if isinstance(text, str) else str(text, "utf-8"))
    except UnicodeDecodeError:
        raise InputError(f"{where}: broken, not valid UTF-8; {advice}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: broken, not valid JSON ({error}); {advice}") from None
    if not isinstance(value, dict):
        raise InputError(f"{where}: broken, not a JSON object; {advice}")
    return value


def read_json(kind: type[SectionType], path: Path, advice: str) -> SectionType:
    """Reads a JSON file and validates it against ``kind``.

    Args:
        kind: class of the content, for example a subclass of :class:`Record`.
        path: the file. advice: what errors tell the user to do.

    Raises:
        InputError: if it is unreadable or invalid; one line with the file, the key and ``advice``.
        FileNotFoundError: if there is no such file.
    """
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(path) from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None
    return check_section(kind, parse_json(content, str(path), advice), str(path), advice)


def json_text(value: Any, indent: int | None = None) -> str:
    """Returns a value as JSON with readable non-ASCII text; escapes characters that could control a terminal."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, indent=indent)
    return _UNPRINTABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
