"""Schema of the description of prepared data (meta.json), by which damaged ones are detected."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from econmt.config import limits
from econmt.config.json_reader import Record


def _check_file(entry: list[Any]) -> list[Any]:
    kinds = [(str,), (str, type(None)), (int,)]
    if len(entry) != 3 or not all(type(part) in kind for part, kind in zip(entry, kinds, strict=True)):
        raise ValueError("expected the names of two files and the number of their first pair")
    return entry


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
    few_words: Count = 0
    many_words: Count = 0
    ratio: Count = 0
    identical: Count = 0
    language: Count = 0
    duplicate: Count = 0


class SplitDescription(Record):
    """Description of a split from :meth:`econmt.data.batching.token_store.TokenStoreWriter.finish`."""

    pairs: Count
    tokens: Count
    type: Literal["<u2", "<u4", "<u8"]
    files: list[Annotated[list[Any], AfterValidator(_check_file)]] = Field(min_length=1)
    corpora: list[Count] = Field(default_factory=list)


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
    """Description of a file by :func:`econmt.data.fingerprints.describe`; earlier versions have no sample."""

    size: Count
    time: int
    sha256: str
    sample: str = ""


class TextFile(StoredFile):
    """Description of a text file that a store was made from."""

    split: str
    path: str


class Splits(Record):
    """Splits of a store."""

    train: SplitDescription
    valid: SplitDescription
    test: SplitDescription | None = None


class StoreDescription(Record):
    """Content of meta.json."""

    format: str
    data: dict[str, Any]
    vocabulary: str
    splits: Splits
    statistics: StoreStatistics
    files: list[TextFile]
    store: dict[str, StoredFile] = Field(default_factory=dict)
