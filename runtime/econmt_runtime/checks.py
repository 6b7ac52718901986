"""Checks of an exported folder: checksums of its files and of model.json, and all values in model.json.

A checksum detects damage, but a hand-written model.json can contain the right one. Therefore every value is also
checked for its type and range.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from econmt_runtime.cells import CELLS
from econmt_runtime.errors import RuntimeInputError
from econmt_runtime.files import AGAIN, FILE_NAME, checksum, read_file
from econmt_runtime.shapes import COVERAGES

FORMAT = "econmt-runtime-4"
_LARGEST = 1 << 20
_COUNT, _WIDTH = range(1, 65), range(1, 65_537)
_TOKENS = range(1, 1_000_001)
_FLAG, _CELLS = range(2), frozenset(CELLS)

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
        "fed": _FLAG,
        "residual": _FLAG,
        "asked": range(_WIDTH.stop),
        "coverage": frozenset(COVERAGES),
        "width": range(_WIDTH.stop),
        "average": bool,
        "scale": (0.0, 1e3),
    },
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
"""Keys of model.json with the kind of their value: an object, a list with elements of one kind, a type, a range of
whole numbers, a set of names, or the bounds of a number."""


def read_config(path: Path) -> dict[str, Any]:
    """Reads model.json and checks its own checksum and every value.

    Raises:
        RuntimeInputError: If the file is absent, damaged or of another version; the message names the file and the key.
    """
    try:
        config = json.loads(read_file(path, _LARGEST).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise RuntimeInputError(
            f"{path}: not a file written by econmt export --runtime ({error}); {AGAIN}"
        ) from error
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise RuntimeInputError(f"{path}: not of format {FORMAT}; {AGAIN} with this version")
    expected = config.pop("checksum", None)
    rest = json.dumps(config, sort_keys=True, separators=(",", ":"))
    if hashlib.sha256(rest.encode()).hexdigest() != expected:
        raise RuntimeInputError(
            f"{path}: changed since it was exported, its checksum does not match; {AGAIN}"
        )
    wrong = _wrong(config, KEYS, "") or _wrong_file(config["files"], config["vocabulary_files"])
    if wrong is not None:
        raise RuntimeInputError(f"{path}: {wrong}; {AGAIN}")
    return config


def check_files(folder: Path, checksums: dict[str, str]) -> None:
    """Compares files with their checksums.

    Args:
        folder: Folder of the files.
        checksums: SHA-256 by file name.

    Raises:
        RuntimeInputError: If a file is absent or has changed; the message names it.
    """
    for name, expected in checksums.items():
        if checksum(folder / name) != expected:
            raise RuntimeInputError(
                f"{folder / name}: changed since it was exported, its checksum does not match; {AGAIN}"
            )


def _wrong(value: Any, kind: Any, key: str) -> str | None:
    """Returns a description of the error in a value, for its ``kind`` in :data:`KEYS`; None if it is valid."""
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
        return None if fits else f"{key}: not one of {', '.join(sorted(kind))}"
    return None if type(value) is kind else f"{key}: not a value of type {kind.__name__}"


def _wrong_file(files: dict[str, Any], vocabularies: list[str]) -> str | None:
    """Returns a description of the error in the file names and their checksums; None if they are valid."""
    for name, expected in files.items():
        if not FILE_NAME.fullmatch(name):
            return f"files: {name!r} is not the name of a file in this folder"
        if not isinstance(expected, str):
            return f"files: the checksum of {name} is not a string"
    for name in vocabularies:
        if name not in files:
            return f"vocabulary_files: {name!r} is not listed in files"
    return None if len(vocabularies) <= 2 else "vocabulary_files: more than two"
