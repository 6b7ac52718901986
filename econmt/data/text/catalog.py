"""Catalog of known data sets: their URLs and checksums, and their download into the cache folder.

The project ships no text. A recipe prefix such as ``multi30k/train`` that is in no local folder is looked up here and
downloaded (or generated) into the cache.
"""

from __future__ import annotations

import hashlib
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from econmt.data.files import cache_folder, notice, write_atomically
from econmt.data.text import number_words
from econmt.data.text.download import RemoteFile, download
from econmt.errors import InputError

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
    return [_fetch(name, progress) for name in names] if all(map(is_known, names)) else None


def is_known(name: str) -> bool:
    """Returns True if the catalog has a file, such as ``multi30k/train.en``."""
    data_set, _, file = name.partition("/")
    return data_set in CATALOG and file in CATALOG[data_set].names


def _fetch(name: str, progress: bool) -> Path:
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
