"""Records of the settings and files that a stage's results were made from, by which changes are noticed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from econmt.api.checked_json import Record, json_text, read_json
from econmt.api.files import describe, is_as_described, write_atomically


class InputFile(Record):
    """File that was read: its path and its description by :func:`econmt.api.files.describe`."""

    path: str
    size: int
    time: int
    sha256: str
    sample: str


class StageInputs(Record):
    """Settings by the name that a user knows them by, and files by the name that messages give them."""

    settings: dict[str, str]
    files: dict[str, InputFile]

    @property
    def digest(self) -> str:
        """Checksum of the settings and of the content of the files."""
        content = self.settings, {name: file.sha256 for name, file in self.files.items()}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def take_inputs(
    settings: Mapping[str, str], files: Mapping[str, Path], recorded: StageInputs | None
) -> StageInputs:
    """Describes the inputs of a stage; files that are as ``recorded`` are not read again completely.

    Raises:
        InputError: A file cannot be read.
    """
    described = {}
    for name, path in files.items():
        before = None if recorded is None else recorded.files.get(name)
        if before is not None and is_as_described(path, before.model_dump(), verify=False):
            described[name] = before.model_copy(update={"path": str(path)})
        else:
            described[name] = InputFile(path=str(path), **describe(path))
    return StageInputs(settings=dict(settings), files=described)


def differences(old: StageInputs, new: StageInputs) -> list[str]:
    """Returns the differing inputs, each in words; empty if there are none."""
    found = [
        f"{name} {old.settings.get(name, 'not given')} -> {new.settings.get(name, 'not given')}"
        for name in dict.fromkeys([*old.settings, *new.settings])
        if old.settings.get(name) != new.settings.get(name)
    ]
    for name in dict.fromkeys([*old.files, *new.files]):
        before, now = old.files.get(name), new.files.get(name)
        if before is None or now is None:
            state = "is not given any more" if now is None else f"{now.path} was not given before"
            found.append(f"{name} {state}")
        elif before.sha256 != now.sha256:
            changed = (
                f"{before.path} has changed" if before.path == now.path else f"{before.path} -> {now.path}"
            )
            found.append(f"{name} {changed}")
    return found


def read_inputs(path: Path, remove: Path) -> StageInputs | None:
    """Reads the inputs in a file; None if there is no such file.

    Args:
        path: The file. remove: File or folder to remove if the file is broken.

    Raises:
        InputError: The file is broken.
    """
    try:
        return read_json(StageInputs, path, f"remove {remove} and run the command again")
    except FileNotFoundError:
        return None


def write_record(path: Path, record: Record) -> None:
    """Writes inputs, or results that contain them, to a file."""
    write_atomically(path, f"{json_text(record.model_dump(), indent=1)}\n".encode())
