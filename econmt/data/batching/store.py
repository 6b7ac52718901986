"""Prepared data: a recipe's text as a folder of token stores, vocabularies and raw lines, created once and reused."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, Field, Strict

from econmt.config import limits
from econmt.config.json_reader import Record, parse_json
from econmt.config.migration import remove_keys
from econmt.config.recipe import Data, Recipe, TextData
from econmt.config.section import NO_PREPARED_TEXT, marked_keys
from econmt.config.yaml_reader import check_section
from econmt.data.batching.split_writer import SplitWriter, TrainingSplit, terms_of
from econmt.data.batching.token_store import TokenStore
from econmt.data.files import describe, is_as_described, notice, refuse_pipe, whole_folder
from econmt.data.progress_bars import counted, counting
from econmt.data.text.catalog import DownloadError
from econmt.data.text.corpus import (
    Corpus,
    compare_with_catalog,
    existing_companion,
    find_companions,
    find_corpus,
    find_text,
    without_network,
)
from econmt.data.text.filters import KEPT, Codes, Selection, no_pair_left
from econmt.data.text.own_vocabulary import find_own_vocabulary
from econmt.data.text.subwords import (
    fingerprint,
    load_vocabularies,
    train_factor_vocabularies,
    train_vocabularies,
)
from econmt.data.text.vocabulary import Vocabularies
from econmt.errors import InputError

FORMAT = "econmt-data-1"
META_FILE = "meta.json"
_STORE_FILES = re.compile(
    r"meta\.json|left-out\.txt|(train|valid|test)\.(tokens|index|lines|weights|(source|target|factor[0-9]+)\.txt)"
    r"|(train|valid)_links\.(tokens|index|lines)"
    r"|(subwords|vocab)(\.source|\.target|\.factor[0-9]+)?\.(model|txt|json)"
)
"""Names of a store's files; a folder with other files is never overwritten."""


Count = Annotated[int, Field(ge=0, le=limits.TOKENS)]


class SplitCounts(Record):
    """Statistics of a split, printed by ``econmt prepare``."""

    pairs: Count
    lines: Count
    too_long: Count
    empty: Count
    source_tokens: Count
    target_tokens: Count
    source_unknown: Count
    target_unknown: Count
    words: Count = 0
    annotated: Count = 0
    few_words: Count = 0
    many_words: Count = 0
    ratio: Count = 0
    repeats: Count = 0
    identical: Count = 0
    language: Count = 0
    duplicate: Count = 0


class SplitDescription(Record):
    """Description of a split from :meth:`econmt.data.batching.token_store.TokenStoreWriter.finish`."""

    pairs: Count
    tokens: Count
    type: Literal["<u2", "<u4", "<u8"]
    files: list[Annotated[tuple[str, str | None, int], Strict(False)]] = Field(min_length=1)
    corpora: list[Count]
    weighted: bool = False


class StoreStatistics(Record):
    """Vocabulary sizes, seconds of preparation, and statistics of each split."""

    source_vocabulary: Count
    target_vocabulary: Count
    factor_vocabularies: list[Count] = Field(default_factory=list)
    seconds: float
    train: SplitCounts
    valid: SplitCounts
    test: SplitCounts | None = None


class StoredFile(Record):
    """Description of a file by :func:`econmt.data.files.describe`."""

    size: Count
    time: int
    sha256: str
    sample: str


class TextFile(StoredFile):
    """Description of a text file that a store was made from."""

    split: str
    path: str


class Splits(Record):
    """Splits of a store."""

    train: SplitDescription
    valid: SplitDescription
    test: SplitDescription | None = None
    train_links: SplitDescription | None = None
    valid_links: SplitDescription | None = None


class StoreDescription(Record):
    """Content of meta.json."""

    format: str
    data: dict[str, Any]
    vocabulary: str
    splits: Splits
    statistics: StoreStatistics
    files: list[TextFile]
    store: dict[str, StoredFile]


class RawText(NamedTuple):
    """Raw lines of a split: sources, targets (the references), and for each stream of source factors its lines."""

    source: list[str]
    target: list[str]
    factors: tuple[list[str], ...] = ()


class PreparedData(NamedTuple):
    """Prepared data of one run, opened for reading."""

    folder: Path
    vocabularies: Vocabularies
    train: TokenStore
    valid: TokenStore
    valid_text: RawText
    test: TokenStore | None
    test_text: RawText
    """Raw text of the test split; empty without one."""
    train_links: TokenStore | None
    """Word alignments of the training pairs: source words as source, the target word of each as target."""
    valid_links: TokenStore | None
    """Word alignments of the validation pairs."""
    statistics: dict[str, Any]
    """Counts of pairs, tokens, unknown tokens and left-out pairs by split, and the words of a language model's text
    including line ends; see ``econmt prepare``."""
    checksums: dict[str, str]
    """SHA-256 of each file of the store, by name."""


_Input = tuple[str, Corpus]
"""Split, or ``_TERMS`` of a glossary, and corpus."""
_TERMS = "terms"


def prepare(
    recipe: Recipe,
    folder: Path,
    search: Sequence[Path],
    *,
    show_progress: bool,
    verify: bool = False,
    instead: Path | None = None,
) -> PreparedData:
    """Prepares a recipe's text in ``folder``, or reuses the store there if nothing has changed.

    A store is reused if it was made from the same data section and the same text. A new one is written under a
    temporary name, synced and renamed, so that ``folder`` is always complete.

    Args:
        recipe: recipe, whose data section is used.
        folder: folder of the store. search: folders of the text, see :func:`econmt.data.text.corpus.search_path`.
        show_progress: True shows bars on stderr if it is a terminal.
        verify: True reads the whole text and store to detect changes; otherwise sizes, times and a sample are compared,
            see :mod:`econmt.data.files`.
        instead: folder in which a store is made if that in ``folder`` cannot be reused; None: in ``folder``.
    """
    data = recipe.data
    meta = _read_meta(folder)
    changed = None if meta is None else _changed_setting(meta, data)
    fits = meta is not None and changed is None
    try:
        inputs = _find_inputs(data, search, show_progress, fetch=not fits)
        own = find_own_vocabulary(data, search)
    except InputError as error:
        if not fits:
            more = without_network(error, data, search)
            if changed is not None:
                more.append(f"{folder} cannot be used without the text: since it was prepared, {changed}")
            raise InputError(*error.lines, *more) from error
        notice(
            f"using the prepared data in {folder}; its text was not found, so it was not checked for changes"
        )
        return open_prepared(folder, verify=verify)
    vocabulary = [("vocabulary", Corpus(path, None)) for path in own]
    files = _describe_inputs([*inputs, *vocabulary], meta, verify)
    if meta is not None:
        reason = _why_outdated(meta, data, files)
        if reason is None:
            try:
                return open_prepared(folder, verify=verify)
            except InputError as error:
                reason = str(error)
        if instead is None:
            notice(f"preparing the data in {folder} again: {reason}")
    _build(data, instead or folder, inputs, files, own, show_progress)
    return open_prepared(instead or folder)


def holds_text_of(recipe: Recipe, folder: Path) -> bool:
    """Returns True if ``folder`` holds a store made with the recipe's data section; does not check the text."""
    try:
        meta = _read_meta(folder)
    except InputError:
        return False
    return meta is not None and _changed_setting(meta, recipe.data) is None


def store_folder(recipe: Recipe) -> Path:
    """Returns the folder of a recipe's store: ``data.prepared``, or ``prepared`` in the model folder."""
    return Path(recipe.data.prepared or f"{recipe.output}/prepared")


def open_prepared(folder: Path, *, verify: bool = False) -> PreparedData:
    """Opens a store that :func:`prepare` made; ``verify`` reads it completely to detect damage."""
    meta = _read_meta(folder)
    if meta is None:
        raise InputError(f"{folder}: no prepared data here; run econmt prepare")
    if fingerprint(folder) != meta["vocabulary"]:
        raise InputError(
            f"{folder}: the vocabulary files do not belong to the token store; remove the folder"
        )
    vocabularies = load_vocabularies(folder)
    streams = len(vocabularies.factors)
    stores = {split: TokenStore(folder, split, description) for split, description in meta["splits"].items()}
    texts = {split: _read_raw(folder, split, streams) for split in ("valid", "test") if split in stores}
    for split, text in texts.items():
        if {len(text.source), len(text.target), *map(len, text.factors)} != {len(stores[split])}:
            raise InputError(
                f"{folder}: the {split} text does not belong to the token store; remove the folder"
            )
    for name, description in meta["store"].items():
        if not is_as_described(folder / name, description, verify=verify):
            raise InputError(f"{folder / name}: has changed since it was written; remove {folder}")
    return PreparedData(
        folder=folder,
        vocabularies=vocabularies,
        train=stores["train"],
        valid=stores["valid"],
        valid_text=texts["valid"],
        test=stores.get("test"),
        test_text=texts.get("test", RawText([], [])),
        train_links=stores.get("train_links"),
        valid_links=stores.get("valid_links"),
        statistics=meta["statistics"],
        checksums={name: entry["sha256"] for name, entry in meta["store"].items()},
    )


def _read_meta(folder: Path) -> dict[str, Any] | None:
    """Reads the store's description; None if ``folder`` holds no store of this format."""
    path = folder / META_FILE
    advice = f"not a description of prepared data, or damaged; choose another folder or remove {folder}"
    for each in folder.iterdir() if folder.is_dir() else ():
        if _STORE_FILES.fullmatch(each.name):
            refuse_pipe(each)
    try:
        meta = parse_json(path.read_bytes(), str(path), advice)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from error
    if meta.get("format") != FORMAT and isinstance(meta.get("format"), str):
        return None
    check_section(StoreDescription, meta, str(path), advice)
    remove_keys({"data": meta["data"]})
    return meta


def _data_settings(data: Data | TextData) -> dict[str, Any]:
    """Returns the settings that a store depends on, as in JSON: the data section without keys that do not matter."""
    settings = data.model_dump(mode="json")
    for key in marked_keys(type(data), NO_PREPARED_TEXT):
        section, _, name = key.rpartition(".")
        owner = settings.get(section, {}) if section else settings
        owner.pop(name, None)
    return settings


def _changed_setting(meta: dict[str, Any], data: Data | TextData) -> str | None:
    """Describes a setting that has changed since a store was made; None if there is none.

    A key that the store lacks is newer than the store and had its default value.
    """
    settings = _data_settings(data)
    fields = type(data).model_fields
    for key in dict.fromkeys((*settings, *meta["data"])):
        old, new = meta["data"].get(key), settings.get(key)
        is_newer = key not in meta["data"] and getattr(data, key) == fields[key].get_default()
        section = getattr(data, key, None)
        if isinstance(old, dict) and isinstance(new, dict) and isinstance(section, BaseModel):
            defaults = {name: field.get_default() for name, field in type(section).model_fields.items()}
            new = {name: value for name, value in new.items() if name in old or value != defaults[name]}
        if old != new and not is_newer:
            return f"data.{key} changed from {old!r} to {new!r}"
    return None


def _find_inputs(
    data: Data | TextData, search: Sequence[Path], progress: bool, *, fetch: bool
) -> list[_Input]:
    prefixes = [*(("train", prefix) for prefix in data.train), ("valid", data.valid)]
    prefixes += [] if data.test is None else [("test", data.test)]
    if isinstance(data, Data) and data.annotate_terms.glossary is not None:
        prefixes.insert(0, (_TERMS, data.annotate_terms.glossary))

    def find(split: str, prefix: str) -> Corpus:
        if split == _TERMS:
            return Corpus(find_text(prefix, search, progress=False, fetch=False), None)
        if isinstance(data, TextData):
            return Corpus(find_text(f"{prefix}.{data.text}", search, progress, fetch=fetch), None)
        corpus = find_corpus(prefix, data.source, data.target, search, progress, fetch=fetch)
        factors = find_companions(corpus, prefix, data.source_factors, "data.source_factors", search)
        return _with_guides(corpus._replace(factors=factors), data, split, prefix, search)

    inputs, missing = list[_Input](), list[str]()
    for split, prefix in prefixes:
        try:
            inputs.append((split, find(split, prefix)))
        except DownloadError:  # its message names all other files, too
            raise
        except InputError as error:
            missing += error.lines
    if missing:
        raise InputError(*missing)
    return inputs


def _with_guides(corpus: Corpus, data: Data, split: str, prefix: str, search: Sequence[Path]) -> Corpus:
    """Adds the files of alignments and weights to a training corpus, and existing alignments to validation text."""
    if split == "valid" and data.alignment is not None:
        return corpus._replace(alignment=existing_companion(corpus, prefix, data.alignment))
    found: dict[str, Any] = {}
    for key in ("alignment", "weights") if split == "train" else ():
        name = getattr(data, key)
        if name is not None:
            (found[key],) = find_companions(corpus, prefix, [name], f"data.{key}", search)
    return corpus._replace(**found)


def _describe_inputs(
    inputs: Sequence[_Input], meta: dict[str, Any] | None, verify: bool
) -> list[dict[str, Any]]:
    """Returns descriptions of all text files; takes those of unchanged files from ``meta``."""
    known_entries = {entry["path"]: entry for entry in (meta or {}).get("files", [])}
    described = []
    for split, corpus in inputs:
        for path in corpus.files:
            resolved = str(path.resolve())
            entry = known_entries.get(resolved)
            if entry is None or not is_as_described(path, entry, verify=verify):
                compare_with_catalog(path)
                entry = describe(path)
            described.append({**entry, "split": split, "path": resolved})
    return described


def _why_outdated(meta: dict[str, Any], data: Data | TextData, files: Sequence[dict[str, Any]]) -> str | None:
    changed = _changed_setting(meta, data)
    if changed is not None:
        return changed
    if len(meta["files"]) != len(files):
        return "the number of text files has changed"
    for old, new in zip(meta["files"], files, strict=True):
        if (old["split"], old["sha256"]) != (new["split"], new["sha256"]):
            return f"{new['path']} has changed"
    return None


def _build(
    data: Data | TextData,
    folder: Path,
    inputs: Sequence[_Input],
    files: list[dict[str, Any]],
    own: Sequence[Path],
    progress: bool,
) -> None:
    began = time.monotonic()
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: is a file; prepared data needs a folder")
    files_before = list(folder.iterdir()) if folder.is_dir() else []
    other_files = [path.name for path in files_before if not _STORE_FILES.fullmatch(path.name)]
    if other_files or (files_before and not (folder / META_FILE).is_file()):
        examples = f" ({', '.join(sorted(other_files)[:3])})" if other_files else ""
        raise InputError(
            f"{folder}: the folder contains other files{examples}; move them, or choose an empty or new folder"
        )
    with whole_folder(folder) as partial:
        meta = _write_store(data, partial, inputs, own, progress)
        meta["files"] = files
        meta["store"] = {path.name: describe(path) for path in sorted(partial.iterdir())}
        assert all(map(_STORE_FILES.fullmatch, meta["store"])), "the store could not be prepared again"
        meta["statistics"]["seconds"] = round(time.monotonic() - began, 2)
        (partial / META_FILE).write_text(
            json.dumps(meta, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
        )


def _training(data: Data | TextData, corpora: Sequence[Corpus], progress: bool) -> list[TrainingSplit]:
    if isinstance(data, TextData):
        return [TrainingSplit(corpus) for corpus in corpora]
    codes: list[Codes] | list[None] = [None] * len(corpora)
    if not data.filters.is_default:
        with counting("filtering the text", None, "pairs read", show=progress) as more:
            selection = Selection(data, corpora, more)
        codes = selection.codes
        if all(KEPT not in each for each in codes):
            raise no_pair_left([str(corpus.source) for corpus in corpora], selection.counts, data)
    return [
        TrainingSplit(corpus, data.tag(number), corpus_codes)
        for number, (corpus, corpus_codes) in enumerate(zip(corpora, codes, strict=True))
    ]


def _write_store(
    data: Data | TextData, folder: Path, inputs: Sequence[_Input], own: Sequence[Path], progress: bool
) -> dict[str, Any]:
    train = _training(data, [corpus for split, corpus in inputs if split == "train"], progress)

    with counting("learning the vocabulary", None, "pairs read", show=progress) as more:

        def train_pairs() -> Iterator[tuple[str, str]]:
            return counted(((row[0], row[1]) for each in train for row in each.kept(data)), more)

        if isinstance(data, Data) and data.source_factors:
            rows = (row[2:] for each in train for row in each.kept(data))
            train_factor_vocabularies(rows, len(data.source_factors), folder)
        vocabularies = train_vocabularies(data, train_pairs, folder, own)
    splits: dict[str, Any] = {}
    sizes = vocabularies.source.size, vocabularies.target.size
    statistics: dict[str, Any] = dict(zip(("source_vocabulary", "target_vocabulary"), sizes, strict=True))
    if vocabularies.factors:
        statistics["factor_vocabularies"] = vocabularies.factor_sizes
    terms = terms_of(data, train, next((corpus.source for split, corpus in inputs if split == _TERMS), None))
    train = [each._replace(terms=terms) for each in train]
    for split in dict.fromkeys(split for split, _ in inputs if split != _TERMS):
        with contextlib.closing(SplitWriter(data, vocabularies, folder, split)) as writer:
            others = [TrainingSplit(corpus) for name, corpus in inputs if name == split]
            for each in train if split == "train" else others:
                writer.write(each, progress)
            descriptions, statistics[split] = writer.finish()
            splits |= descriptions
    return {
        "format": FORMAT,
        "data": _data_settings(data),
        "vocabulary": fingerprint(folder),
        "splits": splits,
        "statistics": statistics,
    }


def _read_raw(folder: Path, split: str, streams: int) -> RawText:
    sides = []
    for side in ("source", "target", *(f"factor{number}" for number in range(1, streams + 1))):
        path = folder / f"{split}.{side}.txt"
        try:
            sides.append(path.read_bytes().decode("utf-8").split("\n")[:-1])
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{path}: the prepared data is damaged ({error}); remove {folder}") from error
    return RawText(sides[0], sides[1], tuple(sides[2:]))
