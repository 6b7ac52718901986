"""A small stub of what the documentation's commands work on: recipes, text, models, and their sizes.

Commands are executed as they stand, but training takes two updates of a narrow model on a few sentences, and
benchmarks take small shapes. What is replaced is in this module, so that a reader can see what a test does not try.
"""

from __future__ import annotations

import gzip
import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

TRANSLATION = {
    "model.embedding": "128",
    "model.encoder.size": "256",
    "model.decoder.size": "256",
    "data.subwords": "{type: bpe, size: 120, joint: true}",
    "training.batch": "{type: sentence, size: 8}",
}
LANGUAGE_MODEL = {
    "model.embedding": "32",
    "model.size": "32",
    "data.subwords": "{type: words, size: 200}",
    "training.batch.size": "2",
    "training.bptt": "8",
    "training.valid_rows": "2",
}
LENGTH = {
    "training.max_updates": "2",
    "training.checkpoint_interval": "1",
    "training.early_stopping.max_num_checkpoint_not_improved": "null",
}
LANGUAGE_MODELS = ("wikitext2", "wikitext2-awd", "ptb")
BENCHES = {
    "lstm": "--layers 2 --steps 4 --hidden 16 --batch 2 --samples 1 --threads 1 --dtype float32",
    "scan": "--shape 2x8x4 --seconds 0.01 --threads 1",
    "memory-task": "--steps 8 --cell gilr --hidden 8 --batch 2 --symbols 4 --limit 1 --threads 1",
    "low-rank": "--hidden 16 --steps 4 --batch 2 --rank 2 --seconds 0.01 --threads 1 --dtype float32",
    "language-model": "--hidden 8 --batch 2 --vocabulary 20 --bptt 4 --layers 1 --seconds 0.01 --threads 1",
    "layout": "--seconds 0.01 --threads 1",
    "training": "--length 4 --seconds 0.01 --threads 1",
    "select": "--bucket 4x4 --batch 2 --seconds 0.01 --threads 1",
    "parallel": "--processes 1,2 --length 4 --seconds 0.1 --limit 60",
}


def shrink(words: Sequence[str]) -> list[str]:
    """The arguments of an ``econmt`` command, with small sizes in the place of those that the documentation names."""
    if not words:
        return []
    if words[0] == "compress":  # of a model that has learnt nothing, whose matrices have no small rank
        return ["0.4" if word == "0.95" else word for word in words]
    if words[0] in ("train", "prepare", "profile") and len(words) > 1:
        return _with_keys(words, _keys(words[1]))
    if words[0] == "bench" and len(words) > 1 and words[1] in BENCHES:
        small = [] if "--simulate" in words else BENCHES[words[1]].split()
        replaced = {word for word in small if word.startswith("--")}
        kept: list[str] = []
        rest = iter(words[2:])
        for word in rest:
            if word in replaced:
                next(rest, None)
            else:
                kept.append(word)
        recipe = next((word for word in kept if not word.startswith("-")), "")
        if words[1] == "training":
            small += [part for key, value in TRANSLATION.items() for part in ("--set", f"{key}={value}")]
        if words[1] in ("select", "parallel") and recipe:
            return ["bench", words[1], *_with_keys(kept, _keys(recipe)), *small]
        return ["bench", words[1], *kept, *small]
    return list(words)


def _keys(recipe: str) -> dict[str, str]:
    if Path(recipe).stem == "quickstart":
        return LENGTH
    if Path(recipe).stem in LANGUAGE_MODELS:
        return LENGTH | LANGUAGE_MODEL
    return LENGTH | TRANSLATION


def _with_keys(words: Sequence[str], keys: dict[str, str]) -> list[str]:
    """The words without the keys that are replaced, and with the replacements after the recipe."""
    kept = [word for word in words if word.partition("=")[0] not in keys]
    first = next(
        place
        for place, word in enumerate(kept)
        if not word.startswith("-") and place >= (words[0] in ("train", "prepare", "profile"))
    )
    return [*kept[: first + 1], *(f"{key}={value}" for key, value in keys.items()), *kept[first + 1 :]]


_NOUNS = {"dog": "Hund", "cat": "Kater", "man": "Mann", "boy": "Junge"}
_VERBS = {"runs": "läuft", "sleeps": "schläft", "sits": "sitzt", "sings": "singt"}
_PLACES = {
    "in the park": "im Park",
    "on the grass": "auf dem Gras",
    "at home": "zu Hause",
    "by the sea": "am Meer",
}


def pairs() -> list[tuple[str, str]]:
    """Sixty-four sentence pairs, English and German."""
    return [
        (f"A {noun} {verb} {place}.", f"Ein {nomen} {verbum} {ort}.")
        for noun, nomen in _NOUNS.items()
        for verb, verbum in _VERBS.items()
        for place, ort in _PLACES.items()
    ]


def write_data(folder: Path) -> None:
    """Writes the stub of every data set of the catalog that a document names, as ``--data-dir`` finds it."""
    english, german = zip(*pairs(), strict=True)
    for name, target, splits in (
        ("multi30k", "de", ("train", "valid", "test_2016_flickr")),
        ("tatoeba-en-de", "de", ("train", "valid", "test")),
        ("iwslt15-en-vi", "vi", ("train", "tst2012", "tst2013")),
        ("wmt16-en-de", "de", ("train", "newstest2013", "newstest2014")),
    ):
        for split in splits:
            size = len(english) if split == "train" else 6
            _write(folder / name / f"{split}.en", english[:size])
            _write(folder / name / f"{split}.{target}", german[:size])
    for split in ("train", "valid", "test"):
        size = len(english) if split == "train" else 12
        _write(folder / "wikitext-2" / f"{split}.txt", english[:size])


def write_texts(folder: Path) -> None:
    """Writes the files that a reader of the documentation is supposed to have of his own."""
    english, german = zip(*pairs(), strict=True)
    for prefix, size in (
        ("mytext", 64),
        ("mytext.valid", 6),
        ("talks", 64),
        ("talks.valid", 6),
        ("talks.test", 6),
    ):
        _write(folder / f"{prefix}.en", english[:size])
        _write(folder / f"{prefix}.de", german[:size])
    for name in ("new.en", "report.en", "mine.txt", "test.en"):
        _write(folder / name, english[:4])
    with gzip.open(folder / "new.en.gz", "wt", encoding="utf-8") as file:
        file.write("".join(f"{line}\n" for line in english[:4]))
    _write(folder / "test.de", german[:4])
    _write(folder / "baseline.de", german[:6])
    _write(folder / "terms.tsv", ["dog\tHund"])
    _write(folder / "avoid.txt", ["Kater"])
    _write(folder / "test.jsonl", [json.dumps({"text": english[0], "constraints": ["Hund"]})])
    for name, tag in (("pos", "NOUN"), ("case", "low")):
        for prefix, size in (("talks/train", 64), ("talks/valid", 6), ("test", 4)):
            _write(
                folder / f"{prefix}.{name}", [" ".join([tag] * len(line.split())) for line in english[:size]]
            )
    for prefix, size in (("talks/train", 64), ("talks/valid", 6)):
        _write(folder / f"{prefix}.en", english[:size])
        _write(folder / f"{prefix}.de", german[:size])


def _write(path: Path, lines: Sequence[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


MODELS = {
    "multi30k": "train multi30k",
    "talks": "train multi30k output=runs/talks",
    "talks2": "train multi30k output=runs/talks2 training.seed=2",
    "en-de": "train multi30k output=runs/en-de",
    "one": "train multi30k output=runs/one",
    "two": "train multi30k output=runs/two training.seed=2",
    "mine": "train multi30k output=runs/mine",
    "de-en": "train multi30k output=runs/de-en data.source=de data.target=en",
    "quickstart": "train quickstart",
    "tatoeba-en-de": "train tatoeba",
    "wikitext2": "train wikitext2",
    "factored": "train multi30k output=runs/factored data.train=[talks/train] data.valid=talks/valid data.test=null "
    "data.source_factors=[pos,case] model.source_factors_num_embed=[4,2] model.source_factors_combine=concat",
}
"""Model folders under ``runs/`` that pages take for granted, and the command that makes each."""


def provide_models(folder: Path, text: str, store: Path, run: Callable[[str, Path], None]) -> None:
    """Lays the model folders that ``text`` names into ``folder``; each is trained once a session, in ``store``."""
    for name, command in MODELS.items():
        used = re.search(rf"runs/{name}\b(?!-)", text)
        recipe = "mine.yaml" if name in ("mine", "talks") else command.split()[1]
        trained = re.search(rf"econmt(\.train\(\s*\"| train ){recipe}(?!.*output=)", text)
        if used is None or (trained is not None and trained.start() < used.start()):
            continue
        if not (store / "runs" / name).is_dir():
            run(f"econmt {command}", store)
        shutil.copytree(store / "runs" / name, folder / "runs" / name)
