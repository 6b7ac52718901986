"""Checks of an exported folder: its files have the checksums that model.json has, and model.json has its own.

A checksum shows damage, but whoever writes a model.json by hand can give it the right one. So every value is also
compared with the type and the range that a model can have.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from econmt_runtime.cells import CELLS
from econmt_runtime.errors import RuntimeInputError
from econmt_runtime.files import AGAIN, checksum, read_file

FORMAT = "econmt-runtime-2"
_LARGEST = 1 << 20
_COUNT, _WIDTH = range(1, 65), range(1, 65_537)
_TOKENS = range(1, 1_000_001)
_CELLS = frozenset(CELLS)
_FILE = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)*", re.ASCII)

KEYS: dict[str, Any] = {
    "name": str,
    "vocabulary_files": [str],
    "one_table": bool,
    "tied_output": bool,
    "encoder": {"cell": _CELLS, "directions": [range(1, 3)], "residual": bool, "reverse_input": bool},
    "decoder": {
        "cell": _CELLS,
        "layers": _COUNT,
        "size": _WIDTH,
        "feeding": bool,
        "residual": bool,
        "average": bool,
        "asked": range(_WIDTH.stop),
    },
    "attention": {"norm": bool, "scale": (0.0, 1e3)},
    "decoding": {
        "beam_size": _COUNT,
        "length_penalty_alpha": (0.0, 10.0),
        "length_penalty_beta": (0.0, 1000.0),
        "max_output_factor": (0.0, 100.0),
    },
    "max_length": range(1, 10_001),
    "max_input_length": _TOKENS,
    "joint": bool,
    "arrays": str,
    "files": {},
}
"""Keys of model.json, each with the kind of its value: an object, a list whose elements are of one kind, a type, a
range of whole numbers, a set of names, or the bounds of a number."""


def read_config(path: Path) -> dict[str, Any]:
    """Reads model.json and checks its own checksum and every value.

    Raises:
        RuntimeInputError: naming the file, and the key if it is one: it is absent, damaged, or another version's.
    """
    try:
        found = json.loads(read_file(path, _LARGEST).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise RuntimeInputError(f"{path}: not what econmt export --runtime writes ({error})") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise RuntimeInputError(f"{path}: not of format {FORMAT}; {AGAIN} with this version")
    wanted = found.pop("checksum", None)
    rest = json.dumps(found, sort_keys=True, separators=(",", ":"))
    if hashlib.sha256(rest.encode()).hexdigest() != wanted:
        raise RuntimeInputError(
            f"{path}: changed since it was exported, its checksum is another one; {AGAIN}"
        )
    wrong = _wrong(found, KEYS, "") or _wrong_file(found["files"], found["vocabulary_files"])
    if wrong is None and found["decoder"]["feeding"] and found["decoder"]["cell"] != "lstm":
        wrong = "decoder.feeding: for a decoder of lstm only"
    if wrong is not None:
        raise RuntimeInputError(f"{path}: {wrong}; {AGAIN}")
    return found


def check_files(folder: Path, wanted: dict[str, str]) -> None:
    """Compares files with their checksums.

    Args:
        folder: where they lie. wanted: SHA-256 by name.

    Raises:
        RuntimeInputError: naming the file that is absent or another one.
    """
    for name, expected in wanted.items():
        if checksum(folder / name) != expected:
            raise RuntimeInputError(
                f"{folder / name}: changed since it was exported, its checksum is another one; {AGAIN}"
            )


def _wrong(value: Any, kind: Any, key: str) -> str | None:
    """Says what is wrong with a value, for its ``kind`` in :data:`KEYS`; None: nothing."""
    if isinstance(kind, dict):
        if not isinstance(value, dict):
            return f"{key}: not an object"
        for name, inner in kind.items():
            inside = f"{key}.{name}".lstrip(".")
            if name not in value:
                return f"{inside} is missing"
            if (wrong := _wrong(value[name], inner, inside)) is not None:
                return wrong
        return None
    if isinstance(kind, list):
        if not isinstance(value, list) or not 1 <= len(value) < _COUNT.stop:
            return f"{key}: not a list of 1 to {_COUNT[-1]} values"
        inner = (_wrong(each, kind[0], f"{key}[{number}]") for number, each in enumerate(value))
        return next(filter(None, inner), None)
    if isinstance(kind, range):
        fits = type(value) is int and value in kind
        return None if fits else f"{key}: not a whole number from {kind.start} to {kind[-1]}"
    if isinstance(kind, tuple):
        fits = type(value) in (int, float) and kind[0] <= value <= kind[1]
        return None if fits else f"{key}: not a number from {kind[0]:g} to {kind[1]:g}"
    if isinstance(kind, frozenset):
        fits = isinstance(value, str) and value in kind
        return None if fits else f"{key}: none of {', '.join(sorted(kind))}"
    return None if type(value) is kind else f"{key}: not a value of type {kind.__name__}"


def _wrong_file(files: dict[str, Any], vocabularies: list[str]) -> str | None:
    """Says what is wrong with the names of files and their checksums; None: nothing."""
    for name, expected in files.items():
        if not _FILE.fullmatch(name):
            return f"files: {name!r} is no name of a file in this folder"
        if not isinstance(expected, str):
            return f"files: the checksum of {name} is no text"
    for name in vocabularies:
        if name not in files:
            return f"vocabulary_files: {name!r} is none of its files"
    return None if len(vocabularies) <= 2 else "vocabulary_files: more than two"
