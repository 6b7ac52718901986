"""Catalog of known data sets: their URLs and checksums, and their download into the cache folder.

The project ships no text. A recipe prefix such as ``multi30k/train`` that is in no local folder is looked up here and
downloaded (or generated) into the cache. Downloads are resumed by range requests, and files get their final name only
when complete. They are built on ``urllib``, because pooch cannot resume, supports neither git blob ids nor checksums of
decompressed content, and does not translate network errors.
"""

from __future__ import annotations

import gzip
import hashlib
import http.client
import os
import time
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from econmt.config.yaml_reader import shortened
from econmt.data.files import cache_folder, notice, sync_folder, text_checksum, write_atomically, writing
from econmt.data.progress_bars import download_bar
from econmt.data.text import number_words
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


_STANFORD = "https://nlp.stanford.edu/projects/nmt/data/iwslt15.en-vi"
_MULTI30K = "https://raw.githubusercontent.com/multi30k/dataset/master/data/task1/raw"
_WIKITEXT2 = "https://raw.githubusercontent.com/pytorch/examples/main/word_language_model/data/wikitext-2"


@dataclass(frozen=True)
class DataSet:
    """Known data set: downloaded as is, converted from a download, or generated."""

    description: str
    origin: str
    licence: str
    files: Mapping[str, RemoteFile] = field(default_factory=dict)
    """Files to download, by name in the cache."""
    made: tuple[str, ...] = ()
    """Names of the files that ``make`` writes; empty if the downloads are used as they are."""
    make: Callable[[Path], None] | None = None
    """Function that writes the files ``made`` into the data set's folder, next to the downloads."""

    @property
    def names(self) -> list[str]:
        """Names of all text files, without ``.gz``."""
        return [name.removesuffix(".gz") for name in (self.made or self.files)]


def _write_split(folder: Path, split: str, pairs: Iterable[tuple[str, str]]) -> None:
    for language, lines in zip(("en", "de"), zip(*pairs, strict=True), strict=True):
        write_atomically(folder / f"{split}.{language}", "".join(f"{line}\n" for line in lines).encode())


def _make_number_words(folder: Path) -> None:
    for split in number_words.SPLIT_SIZES:
        _write_split(folder, split, number_words.generate(split))


def _make_tatoeba(folder: Path) -> None:
    """Splits ``deu.txt`` (English, German, attribution) by the SHA-256 of the English sentence: 1 % valid, 1 % test.

    All translations of an English sentence fall into one split, and training pairs whose German side occurs in valid
    or test are left out, so no held-out sentence is seen in training.
    """
    archive = folder / "deu-eng.zip"
    try:
        with zipfile.ZipFile(archive) as opened:
            text = opened.read("deu.txt").decode("utf-8")
    except (zipfile.BadZipFile, zlib.error, RuntimeError, KeyError, UnicodeDecodeError, EOFError) as error:
        # RuntimeError: encrypted, or packed by a method that zipfile does not have.
        archive.unlink()
        raise InputError(
            f"{archive}: not a valid archive ({error}), so it was removed; run the command again"
        ) from error
    splits: dict[str, list[tuple[str, str]]] = {"train": [], "valid": [], "test": []}
    seen: set[tuple[str, str]] = set()
    for line in text.split("\n"):
        columns = line.rstrip("\r").split("\t")
        pair = (columns[0], columns[1]) if len(columns) > 1 else ("", "")
        if not all(side.strip() for side in pair) or pair in seen:
            continue
        seen.add(pair)
        share = int.from_bytes(hashlib.sha256(pair[0].encode()).digest()[:4], "big") % 100
        splits[{0: "valid", 1: "test"}.get(share, "train")].append(pair)
    held_out = {target for split in ("valid", "test") for _, target in splits[split]}
    splits["train"] = [pair for pair in splits["train"] if pair[1] not in held_out]
    for split, pairs in splits.items():
        # Sentences come sorted by length; the hash is also an order that mixes them.
        pairs.sort(key=lambda pair: hashlib.sha256("\t".join(pair).encode()).digest())
        _write_split(folder, split, pairs)


CATALOG: dict[str, DataSet] = {
    "iwslt15-en-vi": DataSet(
        description="TED talks, English and Vietnamese: 133,317 training pairs, dev tst2012, test tst2013; tokenised",
        origin="https://nlp.stanford.edu/projects/nmt/ (Luong and Manning, 2015)",
        licence="CC BY-NC-ND 4.0 (TED)",
        files={
            name: RemoteFile(f"{_STANFORD}/{name}", f"git:{blob}")
            for name, blob in {
                "train.en": "15ead8ee3fb979c06b314594e1d2602d4308c1e5",
                "train.vi": "985cf3b6bb7aeda61cc06f439e3a7e0327470661",
                "tst2012.en": "45cd1b201802bcc13c27588d3027a87eb4db2c10",
                "tst2012.vi": "43cfd75aac1aa06cdecd8e43b47f7544b0c01bb2",
                "tst2013.en": "60c5e128e533ddb0bfdf39f0d1631da6ae0079b7",
                "tst2013.vi": "19534b384ba2511186e92f84f57a5e16a80a28ee",
            }.items()
        },
    ),
    "multi30k": DataSet(
        description="image captions, English and German: 29,000 training pairs, valid (there: val), test_2016_flickr",
        origin="https://github.com/multi30k/dataset (Elliott et al., 2016); checksums of the decompressed text",
        licence="non-commercial research and education",
        files={
            f"{name}.gz": RemoteFile(f"{_MULTI30K}/{name.replace('valid', 'val')}.gz", f"sha256:{checksum}")
            for name, checksum in {
                "train.en": "460a15fbd157e34a7a9957ee388c1ca247fe47af3ef25fb50442af6c274e0fc6",
                "train.de": "2c2b73fd2b548fbcde3a875e0a78d6ee94d498bfdee6bd3eae3945779e9ddf72",
                "valid.en": "1f2a23d992769b5b3d209b0a10dd0b77c08cceb1f20dfb97ed0aafa49d107227",
                "valid.de": "660e09eb7e1da2f856ea13ee5ad3cf6d36b3d5b0b733c857e94c5747a3dfc660",
                "test_2016_flickr.en": "399a4382932c1aadd3ceb9bef1008d388a64c76d4ae4e9d4728c6f4301cac182",
                "test_2016_flickr.de": "4be6b5b3236b79c25475c6bb829800a7ce559e9ba7a1f6c2394fe4d40be46d16",
            }.items()
        },
    ),
    "tatoeba-en-de": DataSet(
        description="short everyday sentences, English and German; raw; split by us: 98 % train, 1 % valid, 1 % test",
        origin="https://www.manythings.org/anki/ from https://tatoeba.org; the archive there grows, so it has no fixed "
        "checksum, and figures of two downloads can differ",
        licence="CC BY 2.0 FR",
        files={"deu-eng.zip": RemoteFile("https://www.manythings.org/anki/deu-eng.zip", None)},
        made=tuple(
            f"{split}.{language}" for split in ("train", "valid", "test") for language in ("en", "de")
        ),
        make=_make_tatoeba,
    ),
    "wikitext-2": DataSet(
        description="Wikipedia articles, English, tokenised, rare words <unk>: train, valid, test .txt",
        origin="Salesforce (Merity et al., 2016), by the copy in https://github.com/pytorch/examples; checksums of "
        "Salesforce's own wiki.{train,valid,test}.tokens",
        licence="CC BY-SA 3.0",
        files={
            f"{split}.txt": RemoteFile(f"{_WIKITEXT2}/{split}.txt", f"sha1:{checksum}")
            for split, checksum in {
                "train": "863f29c46ef9d167fff4940ec821195882fe29d1",
                "valid": "0418625c8b4da6e4b5c7a0b9e78d4ae8f7ee5422",
                "test": "c7b8ce0aa086fb34dab808c5c49224211eb2b172",
            }.items()
        },
    ),
    "number-words": DataSet(
        description="English and German number words, generated: 12,000 training pairs, valid, test",
        origin="generated by econmt with num2words",
        licence="none needed",
        made=tuple(f"{split}.{language}" for split in number_words.SPLIT_SIZES for language in ("en", "de")),
        make=_make_number_words,
    ),
}


def fetch(names: Sequence[str], progress: bool) -> list[Path] | None:
    """Fetches files, such as ``multi30k/train.en``, into the cache; None if one of them is not known."""
    return [_text_file(name, progress) for name in names] if all(map(is_known, names)) else None


def is_known(name: str) -> bool:
    """Returns True if the catalog has a file, such as ``multi30k/train.en``."""
    data_set, _, file = name.partition("/")
    return data_set in CATALOG and file in CATALOG[data_set].names


def _text_file(name: str, progress: bool) -> Path:
    data_set_name, _, file = name.partition("/")
    data_set, folder = CATALOG[data_set_name], cache_folder() / "data" / data_set_name
    for cached in (folder / file, folder / f"{file}.gz"):
        if cached.is_file():
            return cached
    if data_set.make is None:
        cached_name = file if file in data_set.files else f"{file}.gz"
        download(data_set.files[cached_name], folder / cached_name, progress)
        return folder / cached_name
    for cached_name, remote in data_set.files.items():
        if not (folder / cached_name).is_file():
            download(remote, folder / cached_name, progress)
    notice(f"making the text of {data_set_name} in {folder}")
    data_set.make(folder)
    return folder / file


def entry_of(path: Path) -> RemoteFile | None:
    """Returns the download with a file's name, whether packed or not; None if the catalog has none."""
    data_set, name = CATALOG.get(path.parent.name), path.name.removesuffix(".gz")
    files = {} if data_set is None or data_set.made else data_set.files
    return files.get(name) or files.get(f"{name}.gz")


def why_not(prefix: str) -> str:
    """Returns a clause for an error message on why the catalog lacks ``prefix``."""
    data_set = CATALOG.get(prefix.partition("/")[0])
    if data_set is None:
        return f"not in the catalog either (it has {', '.join(sorted(CATALOG))})"
    return f"the catalog's {prefix.partition('/')[0]} has {', '.join(data_set.names)}"
