"""Generated parallel text, recipes over it, and token stores."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from econmt.config.recipe import Data, Recipe, Training
from econmt.data.batching.token_store import TokenStore, TokenStoreWriter

Pairs = list[tuple[str, str]]
SYLLABLES = ("ba", "de", "li", "mo", "nu", "ra", "ße", "tü", "vi", "zo")


def sentence(draw: random.Random, longest: int) -> str:
    words = ("".join(draw.choices(SYLLABLES, k=draw.randint(1, 4))) for _ in range(draw.randint(1, longest)))
    return " ".join(words)


def made_up_pairs(count: int, longest: int = 9, seed: int = 7) -> Pairs:
    draw = random.Random(seed)
    return [(sentence(draw, longest), sentence(draw, longest)) for _ in range(count)]


def write_pairs(folder: Path, name: str, pairs: Pairs) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.en").write_bytes("".join(source + "\n" for source, _ in pairs).encode())
    (folder / f"{name}.de").write_bytes("".join(target + "\n" for _, target in pairs).encode())
    return folder / name


@pytest.fixture(autouse=True)
def isolated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the person's text nor their cache is touched, and nothing is fetched from outside."""
    monkeypatch.setenv("ECONMT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("ECONMT_DATA", raising=False)
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A folder with train (200 pairs), valid (12) and test (7), languages en and de."""
    folder = tmp_path / "corpus"
    write_pairs(folder, "train", made_up_pairs(200))
    write_pairs(folder, "valid", made_up_pairs(12, seed=8))
    write_pairs(folder, "test", made_up_pairs(7, seed=9))
    return folder


@pytest.fixture
def make_recipe() -> Callable[..., Recipe]:
    """A recipe over ``train``, ``valid`` and ``test``; keywords replace keys of its data section."""

    def make(**changes: Any) -> Recipe:
        settings: dict[str, Any] = {"source": "en", "target": "de", "train": ["train"], "valid": "valid"}
        settings |= {"test": "test", "subwords": {"type": "bpe", "size": 60}, **changes}
        data = Data.model_validate(settings)
        return Recipe(name="try", output="model", data=data, training=Training(max_updates=1))

    return make


def write_store(
    folder: Path, pairs: Sequence[tuple[list[int], list[int]]], vocabulary: int = 1 << 20
) -> TokenStore:
    """A store of these ids of both sides."""
    writer = TokenStoreWriter(folder, "train", vocabulary)
    writer.begin_file(Path("text.en"), Path("text.de"))
    sides = [[pair[side] for pair in pairs] for side in (0, 1)]
    writer.add(*sides, list(range(1, len(pairs) + 1)))
    description = writer.finish()
    writer.close()
    return TokenStore(folder, "train", description)


def store_of(folder: Path, lengths: Sequence[tuple[int, int]]) -> TokenStore:
    """A store whose pair i has the given lengths and ids that tell pair, side and place apart."""
    pairs = [
        (
            [1000 + 100 * i + place for place in range(source)],
            [500_000 + 100 * i + place for place in range(target)],
        )
        for i, (source, target) in enumerate(lengths)
    ]
    return write_store(folder, pairs)


def random_lengths(count: int) -> list[tuple[int, int]]:
    """The same ones each time, from 1 to 20."""
    return [(int(s), int(t)) for s, t in np.random.default_rng(3).integers(1, 21, (count, 2))]
