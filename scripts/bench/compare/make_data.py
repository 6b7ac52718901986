"""Token files that all compared toolkits read."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from econmt.config.recipe import parse_recipe
from econmt.data.batching.store import PreparedData, open_prepared, prepare
from econmt.data.batching.token_store import TokenStore
from econmt.data.text.corpus import search_path
from econmt.data.text.vocabulary import UNK, Vocabulary

from .toolkit import SOURCE, TARGET

SUBWORDS = 8000
TEST_SENTENCES = 200
_CHUNK = 10_000
"""Pairs of a store that are read at a time."""
SIDES = SOURCE, TARGET
VALID_SENTENCES = 64
"""Few: some toolkits save a model only after validation, which is not measured."""
STRANGE = "\N{REPLACEMENT CHARACTER}"
DONE = "counts.json"
SPECIAL = ("<pad>", "<unk>", "<s>", "</s>")
RECIPE = f"""
name: compare
output: compare
data:
  source: {SOURCE}
  target: {TARGET}
  train: [multi30k/train]
  valid: multi30k/valid
  test: multi30k/test_2016_flickr
  subwords: {{type: bpe, size: {SUBWORDS}, joint: false}}
  max_length: 80
training: {{max_updates: 1}}
"""


def visible(piece: str) -> str:
    """Returns a piece without white space: a no-break space becomes ``<U+00A0>``, since tools split lines there."""
    return "".join(f"<U+{ord(letter):04X}>" if letter.isspace() else letter for letter in piece)


def vocabulary_files(pieces: Sequence[str], counts: Counter[str]) -> dict[str, str]:
    """Returns each toolkit's vocabulary file by its ending, for pieces in the order of their ids and their counts."""
    ranked = sorted(map(visible, pieces), key=lambda piece: -counts[piece])
    return {
        "joeynmt.txt": "".join(f"{piece}\n" for piece in ranked),
        "opennmt.txt": "".join(f"{piece}\t{counts[piece]}\n" for piece in ranked),
        "fairseq.txt": "".join(f"{piece} {counts[piece]}\n" for piece in ranked),
    }


def sentences(
    store: TokenStore, vocabularies: Sequence[Vocabulary], limit: int | None
) -> list[tuple[str, str]]:
    """Returns both sides of the first ``limit`` pairs as lines of pieces."""
    count = len(store) if limit is None else min(limit, len(store))
    made: list[tuple[str, str]] = []
    for first in range(0, count, _CHUNK):
        chunk = store.gather(np.arange(first, min(first + _CHUNK, count))).lists()
        made += zip(*map(piece_lines, vocabularies, chunk), strict=True)
    return made


def piece_lines(vocabulary: Vocabulary, rows: Sequence[Sequence[int]]) -> list[str]:
    """Returns sentences of ids as lines of pieces; unknown ones become a piece that no toolkit's vocabulary has.

    Raises ValueError if a sentence has another special symbol.
    """
    names = enumerate(map(visible, vocabulary.tokens(range(vocabulary.size))))
    known = {number: piece for number, piece in names if piece not in SPECIAL} | {UNK: STRANGE}
    try:
        return [" ".join([known[number] for number in row]) for row in rows]
    except KeyError as error:
        raise ValueError(f"the text has id {error}, which cannot stand in the token files") from error


def write_lines(path: Path, lines: Iterable[str]) -> None:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def write_test(
    folder: Path, vocabularies: Sequence[Vocabulary], pairs: Sequence[tuple[str, str]]
) -> tuple[int, int]:
    """Writes the test text, raw and as pieces; returns its pairs and target tokens, ``</s>`` counted."""
    tokens = 0
    for side, vocabulary, lines in zip(SIDES, vocabularies, zip(*pairs, strict=True), strict=True):
        pieces = piece_lines(vocabulary, vocabulary.encode_many(lines))
        write_lines(folder / f"test.raw.{side}", lines)
        write_lines(folder / f"test.{side}", pieces)
        tokens = sum(len(line.split()) + 1 for line in pieces)
    return len(pairs), tokens


def make_data(folder: Path, data_dir: Path | None) -> dict[str, int]:
    """Writes token files, vocabularies and the raw test text unless they exist; returns their pairs and tokens.

    ``data_dir`` has ``multi30k``.
    """
    done = folder / DONE
    if done.is_file():
        counts: dict[str, int] = json.loads(done.read_text(encoding="utf-8"))
        return counts
    folder.mkdir(parents=True, exist_ok=True)
    recipe = parse_recipe(RECIPE, "the comparison's recipe")
    prepare(recipe, folder / "store", search_path(None, data_dir), show_progress=False)
    prepared = open_prepared(folder / "store")
    counts = write_training(folder, prepared)
    test = list(zip(prepared.test_text.source, prepared.test_text.target, strict=True))[:TEST_SENTENCES]
    counts["test_pairs"], counts["test_target_tokens"] = write_test(folder, prepared.vocabularies.sides, test)
    done.write_text(json.dumps(counts, indent=1) + "\n", encoding="utf-8")
    return counts


def write_training(folder: Path, prepared: PreparedData) -> dict[str, int]:
    """Writes the training text, some of the validation text and the vocabularies; returns pairs and target tokens."""
    counts = {}
    pieces: list[Counter[str]] = [Counter(), Counter()]
    for split, store, limit in (("train", prepared.train, None), ("valid", prepared.valid, VALID_SENTENCES)):
        pairs = sentences(store, prepared.vocabularies.sides, limit)
        for side, lines, found in zip(SIDES, zip(*pairs, strict=True), pieces, strict=True):
            write_lines(folder / f"{split}.{side}", lines)
            if split == "train":
                for line in lines:
                    found.update(line.split())
        counts[f"{split}_pairs"] = len(pairs)
        counts[f"{split}_target_tokens"] = sum(len(target.split()) + 1 for _, target in pairs)
    for side, vocabulary, found in zip(SIDES, prepared.vocabularies.sides, pieces, strict=True):
        names = vocabulary.tokens(range(len(SPECIAL), vocabulary.size))
        for name, content in vocabulary_files(names, found).items():
            (folder / f"vocabulary.{side}.{name}").write_text(content, encoding="utf-8")
    return counts
