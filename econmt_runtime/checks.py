"""Is the folder what was exported? Its files have the checksums that model.json has, and that has its own."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from econmt_runtime.errors import RuntimeInputError

FORMAT = "econmt-runtime-2"
_AGAIN = "export the model again"


def read_config(path: Path) -> dict[str, Any]:
    """What model.json holds.

    Raises:
        RuntimeInputError: naming the file: it is absent, damaged, or another version's.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RuntimeInputError(f"{path}: not what econmt export --runtime writes ({error})") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise RuntimeInputError(f"{path}: not of format {FORMAT}; {_AGAIN} with this version")
    wanted = found.pop("checksum", None)
    rest = json.dumps(found, sort_keys=True, separators=(",", ":"))
    if hashlib.sha256(rest.encode()).hexdigest() != wanted:
        raise RuntimeInputError(
            f"{path}: changed since it was exported, its checksum is another one; {_AGAIN}"
        )
    return found


def check_files(folder: Path, wanted: dict[str, str]) -> None:
    """Compares files with their checksums.

    Args:
        folder: where they lie. wanted: SHA-256 by name.

    Raises:
        RuntimeInputError: naming the file that is absent or another one.
    """
    for name, checksum in wanted.items():
        try:
            found = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        except OSError as error:
            raise RuntimeInputError(f"{folder / name}: cannot be read ({error}); {_AGAIN}") from error
        if found != checksum:
            raise RuntimeInputError(
                f"{folder / name}: changed since it was exported, its checksum is another one; {_AGAIN}"
            )
