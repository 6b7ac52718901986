"""Writes the English-Vietnamese text of the results.

Training text is VLSP 2020's news and wiki (composed to Unicode NFC, its CSV quoting undone); validation and test are
IWSLT'15's tst2012 and tst2013, whose public release is tokenised with HTML entities: here they are detokenised with
Moses' rules, so that training and test text look alike and BLEU is measured on detokenised text.

    pip install sacremoses
    python -m scripts.bench make-en-vi DATA_FOLDER en-vi
    econmt train scripts/bench/en-vi.yaml --data-dir .

DATA_FOLDER holds vlsp20-en-vi/{news,wiki}_train.{en,vi}.gz and iwslt15-en-vi/tst201{2,3}.{en,vi}.gz.
"""

from __future__ import annotations

import gzip
import sys
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path

from scripts.bench.frame import Bench


def lines(path: Path) -> Iterator[str]:
    """Yields the lines of a gzipped text, composed to NFC."""
    with gzip.open(path, "rt", encoding="utf-8", newline="\n") as file:
        for line in file:
            yield unicodedata.normalize("NFC", line.rstrip("\n"))


def unquote(line: str) -> str:
    """Undoes CSV quoting: a line in quotes whose inner quotes are doubled."""
    if len(line) > 1 and line.startswith('"') and line.endswith('"') and '""' in line:
        return line[1:-1].replace('""', '"')
    return line


def main(words: Sequence[str] | None = None) -> None:
    bench = Bench(__doc__)
    bench.add_argument("data", type=Path, help="folder that holds vlsp20-en-vi and iwslt15-en-vi")
    bench.add_argument("destination", type=Path, help="folder to write")
    arguments = bench.begin(words)
    from sacremoses import MosesDetokenizer

    arguments.destination.mkdir(parents=True, exist_ok=True)
    for language in ("en", "vi"):
        train = [
            unquote(line)
            for part in ("news_train", "wiki_train")
            for line in lines(arguments.data / "vlsp20-en-vi" / f"{part}.{language}.gz")
        ]
        write(arguments.destination / f"train.{language}", train)
        detokenizer = MosesDetokenizer(lang=language)
        for part in ("tst2012", "tst2013"):
            tokenised = lines(arguments.data / "iwslt15-en-vi" / f"{part}.{language}.gz")
            raw = [detokenizer.detokenize(line.split(" "), unescape=True) for line in tokenised]
            write(arguments.destination / f"{part}.{language}", raw)


def write(path: Path, text: list[str]) -> None:
    """Writes one sentence a line."""
    path.write_text("".join(line + "\n" for line in text), encoding="utf-8")
    print(f"{path}: {len(text)} lines", file=sys.stderr)
