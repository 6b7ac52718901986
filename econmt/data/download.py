"""Downloads that can be interrupted: resumed by range requests, checked, and renamed only when whole."""

from __future__ import annotations

import gzip
import hashlib
import http.client
import os
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from econmt.data.files import notice, sync_folder, writing
from econmt.data.progress_bars import download_bar
from econmt.errors import InputError

_TIMEOUT_SECONDS = 30.0
_BLOCK = 1 << 16
_ATTEMPTS = 4
# Some servers refuse the default name of Python's client.
_USER_AGENT = "Mozilla/5.0 (compatible; econmt)"


@dataclass(frozen=True)
class RemoteFile:
    """A file at a public address."""

    url: str
    checksum: str | None
    """``KIND:HEX`` of the text (decompressed where the file is gzip, whose headers differ between copies): ``sha256``,
    ``sha1``, or ``git`` for a git blob id, the SHA-1 of ``blob SIZE\\0`` and the content; None: none can be given."""


class _BrokenConnectionError(Exception):
    """The connection ended early; another attempt can go on where this one stopped."""


def download(remote: RemoteFile, path: Path, progress: bool) -> None:
    """Bring a file to ``path``.

    What has arrived lies in ``path.part`` and is gone on with by the next call. The finished file is checked, synced
    and renamed. ``progress``: show a bar if stderr is a terminal.

    Raises:
        InputError: no network, a refusal by the server, a checksum that does not match (what arrived is removed), or
            a folder that cannot be written.
    """
    partial = path.with_name(path.name + ".part")
    notice(f"downloading {remote.url}")
    with writing(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        for attempt in range(1, _ATTEMPTS + 1):
            before = _size(partial)
            try:
                _fetch(remote.url, partial, progress)
                break
            except _BrokenConnectionError as broken:
                if attempt == _ATTEMPTS or _size(partial) == before:
                    raise InputError(
                        f"{remote.url}: the connection broke ({broken}); {_size(partial):,} bytes are kept in "
                        f"{partial}, run the same command again to go on from there"
                    ) from broken
        _check(remote, partial, path.name)
        with partial.open("rb") as stream:
            os.fsync(stream.fileno())
        partial.replace(path)
        sync_folder(path.parent)


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _fetch(url: str, partial: Path, progress: bool) -> None:
    """Append what is missing of ``url`` to ``partial``."""
    have = _size(partial)
    headers = {"User-Agent": _USER_AGENT, "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    request = urllib.request.Request(url, headers=headers)  # noqa: S310  the addresses are those of the catalog
    try:
        opened = urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS)  # noqa: S310
        with cast("http.client.HTTPResponse", opened) as answer:
            resumed = answer.status == http.HTTPStatus.PARTIAL_CONTENT
            if not resumed:
                have = 0  # the server starts from the beginning again
            length = answer.headers.get("Content-Length")
            total = have + int(length) if length is not None else None
            bar = download_bar(partial.stem, total, show=progress)
            with partial.open("ab" if resumed else "wb") as stream, bar as arrived:
                _copy(answer, stream, have, total, arrived)
    except urllib.error.HTTPError as error:
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and have:
            if error.headers.get("Content-Range", "").endswith(f"/{have}"):
                return  # all of it is here already
            partial.unlink()
            raise _BrokenConnectionError("the file has changed on the server") from error
        raise InputError(
            f"{url}: the server answers {error.code} {error.reason}; {_by_hand(partial)}"
        ) from error
    except urllib.error.URLError as error:
        raise InputError(
            f"{url}: cannot download ({error.reason}); no network? {_by_hand(partial)}"
        ) from error


def _copy(
    answer: IO[bytes], stream: IO[bytes], have: int, total: int | None, arrived: Callable[[int], None]
) -> None:
    arrived(have)
    while True:
        try:
            block = answer.read(_BLOCK)
        except (OSError, http.client.HTTPException) as error:
            raise _BrokenConnectionError(str(error) or type(error).__name__) from error
        if not block:
            break
        stream.write(block)
        have += len(block)
        arrived(len(block))
    if total is not None and have < total:
        raise _BrokenConnectionError(f"{have:,} of {total:,} bytes arrived")


def _by_hand(partial: Path) -> str:
    folder = partial.parent
    return (
        f"put {partial.name.removesuffix('.part')} into {folder} by hand, or set ECONMT_DATA to a folder that has "
        f"{folder.name}/{partial.name.removesuffix('.part')}"
    )


def _check(remote: RemoteFile, partial: Path, name: str) -> None:
    if remote.checksum is None:
        return
    kind, _, expected = remote.checksum.partition(":")
    try:
        actual = text_checksum(partial, kind, compressed=name.endswith(".gz"))
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        partial.unlink()
        raise InputError(
            f"{remote.url}: what arrived is not a gzip file ({error}) and was removed"
        ) from error
    if actual != expected:
        partial.unlink()
        raise InputError(
            f"{remote.url}: the checksum of {name} does not match: expected {kind} {expected}, got {actual}; what "
            "arrived was removed; try again later, or get the file elsewhere and set ECONMT_DATA"
        )


def text_checksum(path: Path, kind: str, *, compressed: bool) -> str:
    """Hexadecimal "sha256", "sha1" or "git" (blob id) of a file, or if ``compressed`` of what its gzip holds."""
    if kind == "git":
        digest = hashlib.sha1(usedforsecurity=False)
        digest.update(f"blob {sum(map(len, _blocks(path, compressed)))}\0".encode())
    else:
        digest = hashlib.new(kind, usedforsecurity=False)
    for block in _blocks(path, compressed):
        digest.update(block)
    return digest.hexdigest()


def _blocks(path: Path, compressed: bool) -> Iterator[bytes]:
    with cast("IO[bytes]", gzip.open(path, "rb") if compressed else path.open("rb")) as stream:
        while block := stream.read(_BLOCK):
            yield block
