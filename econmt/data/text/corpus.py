"""Search for the files of parallel text, and strict reading line by line."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from econmt.config import limits
from econmt.config.recipe import Data, TextData
from econmt.data.files import cache_folder, notice, refuse_pipe, text_checksum
from econmt.data.text import catalog, parquet
from econmt.data.text.catalog import DownloadError
from econmt.data.text.tmx import read_tmx
from econmt.errors import InputError

_GZIP = b"\x1f\x8b"
"""First bytes of a file that is compressed with gzip."""
BYTE_ORDER_MARK = "\ufeff"


class Corpus(NamedTuple):
    """Files of one parallel text."""

    source: Path
    """File of the source side, or of both sides."""
    target: Path | None
    """File of the target side; None if ``source`` has both (.tsv, .tmx or .parquet)."""
    languages: tuple[str, str] = ("", "")
    """Names of both sides in a translation memory or a Parquet file."""
    more: tuple[Path, ...] = ()
    """Further files that continue ``source``, such as shards."""
    factors: tuple[Path, ...] = ()
    """Files of source factors, one per stream."""
    alignment: Path | None = None
    """File of word alignments."""
    weights: Path | None = None
    """File of the weights of pairs."""

    @property
    def files(self) -> list[Path]:
        """All files of the corpus."""
        each = [self.source, self.target, *self.more, *self.factors, self.alignment, self.weights]
        return [path for path in each if path is not None]

    @property
    def parts(self) -> list[Corpus]:
        """Corpora of the single files, in order; usually just the corpus itself."""
        return [self._replace(more=()), *(self._replace(source=path, more=()) for path in self.more)]


def search_path(recipe_folder: Path | None, data_dir: Path | None) -> list[Path]:
    """Returns the folders in which the prefixes of a recipe are searched, in order.

    These are the recipe's folder and its parent, ``--data-dir``, ``$ECONMT_DATA``, the working directory and the cache.
    """
    if data_dir is not None and not data_dir.is_dir():
        raise InputError(f"--data-dir {data_dir}: no such folder")
    try:
        here = Path.cwd()
    except FileNotFoundError:
        raise InputError("the working directory has been removed; change to another one") from None
    beside = [] if recipe_folder is None else [recipe_folder, recipe_folder / ".."]
    configured = [Path(folder) for folder in (data_dir, os.environ.get("ECONMT_DATA")) if folder]
    folders = [*beside, *configured, here, cache_folder() / "data"]
    return list(dict.fromkeys(folder.resolve() for folder in folders))


def find_corpus(
    prefix: str, source: str, target: str, search: Sequence[Path], progress: bool, *, fetch: bool = True
) -> Corpus:
    """Finds PREFIX.source and PREFIX.target (languages), PREFIX.tsv or PREFIX.tmx, plain or .gz, or PREFIX.parquet.

    Args:
        prefix: path without the language suffix; a relative one is tried in each folder of ``search``.
        source, target: languages, the suffixes of the files.
        search: folders, see :func:`search_path`.
        progress: True shows a bar during downloads.
        fetch: True consults the catalog, which may download, if no folder has the text.

    Raises:
        InputError: if the text is not found; the message names all folders searched.
    """
    stem = Path(prefix).expanduser()
    bases = [stem] if stem.is_absolute() else [folder / stem for folder in search]
    halves: list[str] = []
    for base in bases:
        found_source, found_target = _existing(base, source), _existing(base, target)
        if found_source is not None and found_target is not None:
            return Corpus(found_source, found_target)
        both = _existing(base, "tsv")
        if both is not None:
            return Corpus(both, None)
        memory, tables = _existing(base, "tmx"), parquet.shards(base)
        if memory is not None or tables:
            first, *more = tables if memory is None else [memory]
            return Corpus(first, None, (source, target), tuple(more))
        if found := found_source or found_target:
            absent = target if found_source else source
            halves.append(f"{found} exists but {base.name}.{absent}(.gz) does not")
    names = [f"{prefix}.{source}", f"{prefix}.{target}"]
    fetched = catalog.fetch(names, progress) if fetch else None
    if fetched is not None:
        return Corpus(fetched[0], fetched[1])
    wanted = (
        f"{prefix}.{source}(.gz) with {prefix}.{target}(.gz), or {prefix}.tsv(.gz), .tmx(.gz) or .parquet"
    )
    raise _not_found(prefix, wanted, bases, halves)


def find_companions(
    corpus: Corpus, prefix: str, names: Sequence[str], key: str, search: Sequence[Path]
) -> tuple[Path, ...]:
    """Finds the files PREFIX.NAME of a recipe's ``key``, plain or .gz; tries the corpus's folder before ``search``.

    Raises InputError for a corpus that is not line-based (.tmx, .parquet).
    """
    if names and corpus.target is None and not corpus.source.name.endswith((".tsv", ".tsv.gz")):
        raise InputError(
            f"{corpus.source}: {key} needs a line-based corpus; convert the pairs to {prefix}.tsv"
        )
    return tuple(
        existing_companion(corpus, prefix, name)
        or find_text(f"{prefix}.{name}", search, progress=False, fetch=False)
        for name in names
    )


def existing_companion(corpus: Corpus, prefix: str, name: str) -> Path | None:
    """Returns the file PREFIX.NAME, plain or .gz, in the corpus's folder; None if there is none."""
    return _existing(corpus.source.parent / Path(prefix).name, name)


def different_lengths(path: Path, lines: int, source: Path, pairs: int) -> InputError:
    """Returns the error for a companion file whose number of lines is not the number of pairs."""
    return InputError(
        f"{path} has {lines:,} line{'' if lines == 1 else 's'} but {source} has {pairs:,}; line n of one must belong "
        "to line n of the other"
    )


def without_network(error: InputError, data: Data | TextData, search: Sequence[Path]) -> list[str]:
    """Returns further lines of a failed download: all files that are missing, and what needs none of them."""
    if not isinstance(error, DownloadError):
        return []
    suffixes = [data.text] if isinstance(data, TextData) else [data.source, data.target]
    prefixes = [*data.train, data.valid, *([] if data.test is None else [data.test])]
    names = (f"{prefix}.{suffix}" for prefix in prefixes for suffix in suffixes)
    known = filter(catalog.is_known, names)
    missing = [name for name in known if not any(_existing(folder / name) for folder in search)]
    return [
        f"missing are {', '.join(missing)} (plain or .gz)",
        "without a network, econmt train quickstart trains on text that it makes, and econmt profile RECIPE --estimate "
        "needs no text",
    ]


def compare_with_catalog(path: Path) -> None:
    """Says that a file with the name of one in the catalog is another text than the catalog's.

    Raises:
        InputError: it is in the cache, which holds the catalog's texts and no others.
    """
    remote = catalog.entry_of(path)
    if remote is None or remote.checksum is None:
        return
    kind, _, expected = remote.checksum.partition(":")
    try:
        actual = text_checksum(path, kind, compressed=path.name.endswith(".gz"))
    except (EOFError, gzip.BadGzipFile, zlib.error):  # read_lines reports the error with its line
        return
    if actual == expected:
        return
    differs = (
        f"{path}: not the catalog's text of {path.parent.name}: it has {count_lines(path) or 0:,} lines and the {kind} "
        f"checksum {actual} instead of {expected}"
    )
    if path.resolve().is_relative_to((cache_folder() / "data").resolve()):
        raise InputError(
            f"{differs}; remove it to get the catalog's, or to use it all the same, move its folder to another one and "
            "name that with --data-dir"
        )
    notice(differs)


def find_text(name: str, search: Sequence[Path], progress: bool, *, fetch: bool = True) -> Path:
    """Finds one monolingual file such as ``wikitext-2/train.txt``, plain or ``.gz``, as :func:`find_corpus` does."""
    stem = Path(name).expanduser()
    bases = [stem] if stem.is_absolute() else [folder / stem for folder in search]
    found = next(filter(None, map(_existing, bases)), None)
    if found is not None:
        return found
    fetched = catalog.fetch([name], progress) if fetch else None
    if fetched is not None:
        return fetched[0]
    raise _not_found(name, f"{name}(.gz)", bases, [])


def _existing(base: Path, suffix: str = "") -> Path | None:
    """Returns the file with a name and suffix, plain or .gz; None if there is none."""
    name = f"{base.name}.{suffix}" if suffix else base.name
    return next(filter(Path.is_file, (base.with_name(name), base.with_name(f"{name}.gz"))), None)


def _not_found(prefix: str, wanted: str, bases: Sequence[Path], halves: Sequence[str]) -> InputError:
    folders = dict.fromkeys(base.parent for base in bases)
    looked = ", ".join(str(folder) if folder.is_dir() else f"{folder} (no such folder)" for folder in folders)
    half = "".join(f" {sentence};" for sentence in halves)
    reason = catalog.why_not(prefix)
    return InputError(f"text {prefix} not found: looked for {wanted} in {looked};{half} {reason}")


def read_lines(path: Path) -> Iterator[str]:
    """Yields the lines of a text file (gzip if its name ends in ``.gz``) without line ends.

    Only ``\\n`` or ``\\r\\n`` ends a line; all other characters belong to the text. A byte order mark at the start of
    the file is dropped.

    Raises:
        InputError: if the file is missing, unreadable, empty or corrupt gzip, or has invalid UTF-8 or a NUL byte; the
            message names file and line.
    """
    number = 0
    refuse_pipe(path)
    try:
        with gzip.open(path) if path.name.endswith(".gz") else path.open("rb") as stream:
            while raw := stream.readline(limits.LINE_BYTES):
                number += 1
                yield decode_line(raw, path, number)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(
            f"{path}: corrupt gzip file after line {number} ({error}); fetch it again"
        ) from error
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file") from error
    except IsADirectoryError as error:
        raise InputError(f"{path}: is a folder, not a text file") from error
    except PermissionError as error:
        raise InputError(f"{path}: no permission to read") from error
    except OSError as error:
        raise InputError(f"{path}: cannot read after line {number}: {error.strerror or error}") from error
    if number == 0:
        raise InputError(f"{path}: the file is empty")


def count_lines(path: Path) -> int | None:
    """Counts the lines that :func:`read_lines` will read; None if the file cannot be counted in advance."""
    if not path.is_file():
        return None
    count, last = 0, b"\n"
    try:
        with gzip.open(path) if path.name.endswith(".gz") else path.open("rb") as stream:
            while block := stream.read(1 << 20):
                count, last = count + block.count(b"\n"), block[-1:]
    except (EOFError, zlib.error, OSError):  # read_lines reports the error with its line
        return None
    return count + (last != b"\n")


def decode_line(raw: bytes, where: Path | str, number: int) -> str:
    """Decodes a line and drops its end (\\n or \\r\\n) and, in the first line, a byte order mark.

    Raises:
        InputError: if it is compressed, too long (devices and binary files have lines without end), is not UTF-8 or has
            a NUL byte; the message names ``where`` and the line ``number``.
    """
    if number == 1 and raw.startswith(_GZIP):
        raise InputError(f"{where}: is compressed with gzip; unpack it, or give a file's name the ending .gz")
    raw = raw.removesuffix(b"\n")
    if len(raw) >= limits.LINE_BYTES:
        kind = "NUL bytes, a line" if b"\0" in raw else "a line"
        raise InputError(f"{where}:{number}: {kind} of {len(raw):,} bytes or more; is this a text file?")
    try:
        line = raw.removesuffix(b"\r").decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{where}:{number}: not valid UTF-8 (byte 0x{raw[error.start]:02x} at column {error.start + 1}); "
            "convert the text to UTF-8"
        ) from None
    if "\0" in line:
        raise InputError(
            f"{where}:{number}: NUL byte at column {line.index(chr(0)) + 1}; is this a text file?"
        )
    return line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line


def read_pairs(corpus: Corpus) -> Iterator[tuple[str, str]]:
    """Yields the sentence pairs of a corpus, holding one line at a time in memory.

    Raises:
        InputError: as :func:`read_lines`; if the sides have different numbers of lines, or a tab-separated line does
            not have two columns.
    """
    for kind, read in (((".tmx", ".tmx.gz"), read_tmx), ((".parquet",), parquet.read_parquet)):
        if corpus.target is None and corpus.source.name.endswith(kind):
            for path in (corpus.source, *corpus.more):
                yield from read(path, *corpus.languages)
            return
    if corpus.target is None:
        for number, line in enumerate(read_lines(corpus.source), start=1):
            yield split_pair(line, corpus.source, number)
        return
    pairs = zip_longest(read_lines(corpus.source), read_lines(corpus.target))
    for count, (source, target) in enumerate(pairs):
        if source is None or target is None:
            longest = count + 1 + sum(1 for _ in pairs)
            counts = [count if line is None else longest for line in (source, target)]
            raise InputError(
                f"{corpus.source} has {counts[0]} lines but {corpus.target} has {counts[1]}; "
                "line n of one must be the translation of line n of the other"
            )
        yield source, target


def split_pair(line: str, where: Path | str, number: int) -> tuple[str, str]:
    """Splits a tab-separated line into source and target; raises InputError if it does not have two columns."""
    columns = line.split("\t")
    if len(columns) != 2:
        raise InputError(
            f"{where}:{number}: {len(columns) - 1} tabs; expected one, between the source and its translation"
        )
    return columns[0], columns[1]
