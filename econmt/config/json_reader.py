"""JSON files that econmt wrote, read back with every check; JSON that any terminal can show."""

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
    """Base of what such a file holds: types are strict; keys of later versions are let pass."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)


def shaped_like(kind: type[BaseModel], *, may_be_empty: bool = False) -> AfterValidator:
    """For a field that keeps plain data: checks it against ``kind`` and leaves it as it is."""

    def check(value: Any) -> Any:
        if value or not may_be_empty:
            kind.model_validate(value)
        return value

    return AfterValidator(check)


def strict_json(text: str) -> Any:
    """The value of a JSON text from outside, by RFC 8259 alone: no key twice, no NaN, no number beyond a float's range.

    Raises:
        ValueError: it is not valid.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise ValueError(f"the key {shortened(key)!r} is given twice")
            found[key] = value
        return found

    def finite(number: str) -> float:
        if not math.isfinite(float(number)):
            raise ValueError(f"{shortened(number)} is not a finite number")
        return float(number)

    return json.loads(text, object_pairs_hook=unique, parse_float=finite, parse_constant=finite)


def parse_json(text: str | bytes, where: str, advice: str, *, strict: bool = False) -> dict[str, Any]:
    """The JSON object in a text; ``strict``: by :func:`strict_json`.

    Raises:
        InputError: one line that names ``where`` and what to do: it is none, or not valid UTF-8.
    """
    try:
        found = (strict_json if strict else json.loads)(
            text if isinstance(text, str) else text.decode("utf-8")
        )
    except UnicodeDecodeError:
        raise InputError(f"{where}: broken, not valid UTF-8; {advice}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: broken, not valid JSON ({error}); {advice}") from None
    if not isinstance(found, dict):
        raise InputError(f"{where}: broken, no JSON object; {advice}")
    return found


def read_json(kind: type[SectionType], path: Path, advice: str) -> SectionType:
    """What a JSON file holds, checked against ``kind``.

    Raises:
        InputError: one line that names the file, the key and what to do.
        FileNotFoundError: there is no such file.
    """
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(path) from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None
    return check_section(kind, parse_json(content, str(path), advice), str(path), advice)


def json_text(value: Any, indent: int | None = None) -> str:
    """JSON whose text stays readable, but for characters that could steer a terminal or are none: those are escaped."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, indent=indent)
    return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
