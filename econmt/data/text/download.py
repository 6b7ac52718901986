"""Resumable downloads by range requests, with checksums; files get their final name only when complete.

Built on ``urllib``, because pooch cannot resume, supports neither git blob ids nor checksums of decompressed content,
and does not translate network errors.
"""

from __future__ import annotations

import gzip
import hashlib
import http.client
import os
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from econmt.config.yaml_reader import shortened
from econmt.data.files import notice, sync_folder, writing
from econmt.data.progress_bars import download_bar
from econmt.errors import InputError

_TIMEOUT_SECONDS = 30.0
"""Timeout in seconds of connecting and of each read."""
_SLOW_SECONDS = 60.0
_SLOW_BYTES = 1 << 16
"""Minimum number of bytes in :data:`_SLOW_SECONDS`; slower connections are dropped."""
_clock = time.monotonic
_BLOCK = 1 << 16
_ATTEMPTS = 4
# Some servers refuse the default name of Python's client.
_USER_AGENT = "Mozilla/5.0 (compatible; econmt)"


@dataclass(frozen=True)
class RemoteFile:
    """File at a public URL."""

    url: str
    checksum: str | None
    """Checksum ``KIND:HEX`` of the decompressed text (gzip headers differ between copies): ``sha256``, ``sha1``, or
    ``git`` for a git blob id, the SHA-1 of ``blob SIZE\\0`` and the content; None if unknown."""


class DownloadError(InputError):
    """Failed download of a file, which could be got in another way."""


class _BrokenConnectionError(Exception):
    """Connection that ended early; another attempt can resume the download."""


_forbidden = False


@contextmanager
def no_downloads() -> Iterator[None]:
    """Makes :func:`download` refuse every file within a context."""
    global _forbidden
    _forbidden = True
    try:
        yield
    finally:
        _forbidden = False


def download(remote: RemoteFile, path: Path, progress: bool) -> None:
    """Downloads a file to ``path``.

    Partial content is kept in ``path.part`` and resumed by the next call. The complete file is checked, synced and
    renamed. ``progress`` shows a bar if stderr is a terminal.

    Raises:
        DownloadError: if there is no network, the server refuses or sends an invalid response, or the connection breaks
            or stalls.
        InputError: if the checksum differs (the file is removed), or the folder cannot be written.
    """
    partial = path.with_name(path.name + ".part")
    if _forbidden:
        raise InputError(
            f"{path.name}: would be downloaded from {remote.url}; a dry run downloads nothing, econmt prepare does"
        )
    notice(f"downloading {remote.url}")
    with writing(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        for attempt in range(1, _ATTEMPTS + 1):
            before = _size(partial)
            try:
                _fetch(remote.url, partial, progress)
                break
            except _BrokenConnectionError as broken:
                size = _size(partial)
                if attempt == _ATTEMPTS or size == before:
                    remedy = f"{size:,} bytes are kept in {partial}; run the same command again to resume"
                    if not size:
                        remedy = f"nothing was received; try again later, or {_by_hand(partial)}"
                    raise DownloadError(
                        f"{remote.url}: the connection broke ({broken}); {remedy}"
                    ) from broken
        _check(remote, partial, path.name)
        with partial.open("rb") as stream:
            os.fsync(stream.fileno())
        partial.replace(path)
        sync_folder(path.parent)


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _fetch(url: str, partial: Path, progress: bool) -> None:
    """Appends the missing rest of ``url`` to ``partial``."""
    have = _size(partial)
    answer = _request(url, have, partial)
    if answer is None:
        return
    with answer:
        resumed = answer.status == http.HTTPStatus.PARTIAL_CONTENT
        if resumed and not answer.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
            partial.unlink(missing_ok=True)
            raise _BrokenConnectionError("the server sent another part of the file than the one requested")
        if not resumed:
            have = 0  # the server starts from the beginning again
        length = None if answer.chunked or "Content-Length" not in answer.headers else answer.length
        total = None if length is None else have + length
        bar = download_bar(partial.stem, total, show=progress)
        with partial.open("ab" if resumed else "wb") as stream, bar as arrived:
            _copy(answer, stream, have, total, arrived)


def _request(url: str, have: int, partial: Path) -> http.client.HTTPResponse | None:
    """Requests a file from byte ``have`` on; returns the response, or None if ``partial`` is already complete."""
    headers = {"User-Agent": _USER_AGENT, "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    request = urllib.request.Request(url, headers=headers)  # noqa: S310  the addresses are those of the catalog
    try:
        answer = urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS)  # noqa: S310
        if not isinstance(answer, http.client.HTTPResponse):
            answer.close()
            raise http.client.HTTPException(f"redirected to {answer.url}, which is not HTTP")
        length = answer.headers.get("Content-Length")
        if length is not None and answer.length is None and not answer.chunked:
            answer.close()
            raise http.client.HTTPException(f"Content-Length is {length!r}")
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and have:
            if error.headers.get("Content-Range", "").endswith(f"/{have}"):
                return None
            partial.unlink()
            raise _BrokenConnectionError("the file has changed on the server") from error
        raise DownloadError(
            f"{url}: the server answers {error.code} {_error_text(error.reason)}; {_by_hand(partial)}"
        ) from error
    except urllib.error.URLError as error:
        raise DownloadError(
            f"{url}: cannot download ({_error_text(error.reason)}); no network? {_by_hand(partial)}"
        ) from error
    except OSError as error:
        raise _BrokenConnectionError(_error_text(error)) from error
    except (http.client.HTTPException, ValueError) as error:  # ValueError: a redirect to an invalid URL
        raise DownloadError(
            f"{url}: the server's answer cannot be read ({_error_text(error)}); try again later, or {_by_hand(partial)}"
        ) from error
    return answer


def _error_text(error: object) -> str:
    """Formats a network error as one short line; servers control parts of its text."""
    return shortened(" ".join(str(error).split()) or type(error).__name__, 200)


def _copy(
    answer: http.client.HTTPResponse,
    stream: IO[bytes],
    have: int,
    total: int | None,
    arrived: Callable[[int], None],
) -> None:
    arrived(have)
    since, recent = _clock(), 0
    while True:
        try:
            block = answer.read1(_BLOCK)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise _BrokenConnectionError(_error_text(error)) from error
        if not block:
            break
        stream.write(block)
        have += len(block)
        recent += len(block)
        arrived(len(block))
        if _clock() - since >= _SLOW_SECONDS:
            if recent < _SLOW_BYTES:
                raise _BrokenConnectionError(f"only {recent:,} bytes in {_SLOW_SECONDS:g} s")
            since, recent = _clock(), 0
    if total is not None and have < total:
        raise _BrokenConnectionError(f"{have:,} of {total:,} bytes arrived")


def _by_hand(partial: Path) -> str:
    folder, name = partial.parent, partial.name.removesuffix(".part")
    return f"put {name} into {folder} by hand, or set ECONMT_DATA to a folder that has {folder.name}/{name}"


def _check(remote: RemoteFile, partial: Path, name: str) -> None:
    if remote.checksum is None:
        return
    kind, _, expected = remote.checksum.partition(":")
    try:
        actual = text_checksum(partial, kind, compressed=name.endswith(".gz"))
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        partial.unlink()
        raise InputError(
            f"{remote.url}: the downloaded file is not a valid gzip file ({error}) and was removed; run the command "
            "again"
        ) from error
    if actual != expected:
        partial.unlink()
        raise InputError(
            f"{remote.url}: the checksum of {name} does not match: expected {kind} {expected}, got {actual}; the "
            "file was removed; try again later, or get the file elsewhere and set ECONMT_DATA"
        )


def text_checksum(path: Path, kind: str, *, compressed: bool) -> str:
    """Returns the hexadecimal "sha256", "sha1" or "git" (blob id) of a file, decompressed first if ``compressed``."""
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
