"""Known data sets: their public addresses and checksums, and how they come into the cache folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from econmt.data import number_words
from econmt.data.files import data_cache, write_atomically


@dataclass(frozen=True)
class DataSet:
    """One known data set."""

    description: str
    generated: bool = False
    splits: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


CATALOG: dict[str, DataSet] = {
    "number-words": DataSet(
        description="English to German number words, generated",
        generated=True,
        splits={split: ("en", "de") for split in number_words.SPLIT_SIZES},
    ),
}


def fetch_pair(prefix: str, source: str, target: str, progress: bool) -> tuple[Path, Path] | None:
    """Bring ``NAME/SPLIT`` into the cache; None if the catalog does not know it."""
    name, _, split = prefix.partition("/")
    data_set = CATALOG.get(name)
    if data_set is None or split not in data_set.splits:
        return None
    if not {source, target} <= set(data_set.splits[split]):
        return None
    folder = data_cache() / name
    paths = {language: folder / f"{split}.{language}" for language in ("en", "de")}
    if not all(path.is_file() for path in paths.values()):
        pairs = number_words.generate(split)
        for column, language in enumerate(("en", "de")):
            write_atomically(paths[language], "".join(pair[column] + "\n" for pair in pairs).encode())
    return paths[source], paths[target]


def fetch_file(name: str, progress: bool) -> Path | None:
    """Bring one monolingual file into the cache; None if the catalog does not know it."""
    return None


def why_not(prefix: str) -> str:
    """Half a sentence that says why the catalog could not help with ``prefix``."""
    return f"the catalog knows {', '.join(sorted(CATALOG))}"
