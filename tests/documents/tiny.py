"""A small stub of what the documentation's commands work on: recipes, text, models, and their sizes.

Commands are executed as they stand, but training takes two updates of a narrow model on a few sentences, and
benchmarks take small shapes. What is replaced is in this module, so that a reader can see what a test does not try.
"""

from __future__ import annotations

import gzip
import json
import re
import shlex
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

SOAKS = Path(__file__).parents[2] / "docs" / "results" / "soak"
NARROW = {"model.embedding": "32", "model.encoder.size": "64", "model.decoder.size": "64"}
TRANSLATION = {
    **NARROW,
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
SHORT = {"data.max_length": "4", "training.max_buckets": "1", "training.bucket_width": "null"}
"""Keys of translation for ``econmt profile``, which takes the longest sentences that a recipe allows."""
LANGUAGE_MODELS = ("wikitext2", "wikitext2-awd", "ptb")
BENCHES = {
    "training": "--length 4 --seconds 0.01 --threads 1",
    "select": "--bucket 4x4 --batch 2 --seconds 0.01 --threads 1",
}
"""Options that replace those of ``econmt bench VERB``."""
SCRIPTS = {
    "lstm": "--samples 1 --threads 1 --dtype float32",
    "scan": "--shape 2x8x4 --seconds 0.01 --threads 1 --device cpu",
    "memory-task": "--steps 8 --cell gilr --hidden 8 --batch 2 --symbols 4 --limit 0.1 --threads 1 --device cpu",
    "language-model": "--hidden 8 --batch 2 --vocabulary 20 --seconds 0.01 --threads 1 --device cpu",
    "parallel": "--processes 1,2 --length 4 --seconds 0.1 --limit 60 --device cpu",
    "account": "--models LoRA --rounds 1 --size 1",
    "choices": "--part 1/140 --seconds 0.2 --threads 1",
    "layout": "--seconds 0.01 --threads 1 --dtype float32 --device cpu",
    "cells": "--sizes 2x4x8 --ranks 2 --turns 1 --device cpu",
    "checksums": "--megabytes 1",
    "chunks": "--size 8 --turns 1",
    "constraints": "--beams 2 --lines 4 --turns 1",
    "data": "--pairs 2000 --batches 4",
    "filters": "",
    "inference": "--rounds 1 --threads 1",
    "memory": "--quick --seconds 0.01 --lengths 4x3",
    "options": "--only quickstart --seconds 0.01",
    "tables": "sizes",
    "serve-load": "--lines 4 --seconds 1 --clients 2 --rate 5 --trouble 1",
    "scripts.kill_campaign": "--kinds translation --kills 1 --updates 4",
    "scripts.soak run": "--minutes 0.001",
    "scripts.soak draw": "",
}
"""Options that replace those of ``python -m scripts.bench NAME`` and of other scripts."""
LEFT_OUT = ("--ctranslate2", "--data-dir")
"""Options of scripts that are left out, with their values: they name what small sizes do not have."""
TOO_SHORT = {
    "scripts.soak run": "fewer than two full minutes from minute 2 on; soak for longer",
    "choices --summary": "has no rows of this benchmark",  # the parts are measured on seven pairs of cores
}
"""Commands that at small sizes end with exit code 2, and the error that says why."""
PLACEHOLDERS = {"RECIPE": "multi30k", "RUN": "runs/multi30k", "RUN-average": "runs/RUN-average", "ROWS": "2"}
"""Words that pages have where a reader puts a word of his own."""


def shrink(words: Sequence[str]) -> list[str]:
    """The arguments of an ``econmt`` command, with small sizes in the place of those that the documentation names."""
    words = [PLACEHOLDERS.get(word, word) for word in words]
    if not words:
        return []
    if words[0] == "profile" and len(words) > 1:
        words = ["64MiB" if word == "8GiB" else word for word in words]
        return _with_keys(words, _keys(words[1]) | SHORT)
    if words[0] == "distill":
        keys = {**LENGTH, "training.batch.size": "8", "data.subwords.size": "120"}
        return [*words, *(f"{key}={value}" for key, value in keys.items())]
    if words[0] in ("train", "prepare") and len(words) > 1:
        words = [re.sub(r"rank=\d+", "rank=16", word.replace("device=cuda", "device=cpu")) for word in words]
        return _with_keys(words, _keys(words[1]))
    if words[0] == "bench" and len(words) > 1 and words[1] in BENCHES:
        small = [] if "--simulate" in words else shlex.split(BENCHES[words[1]])
        kept = _without(words[2:], small)
        recipe = next((word for word in kept if not word.startswith("-")), "")
        if words[1] == "training":
            small += [part for key, value in TRANSLATION.items() for part in ("--set", f"{key}={value}")]
        if words[1] == "select" and recipe:
            return ["bench", words[1], *_with_keys(kept, _keys(recipe)), *small]
        return ["bench", words[1], *kept, *small]
    return list(words)


def shrink_script(words: Sequence[str]) -> list[str]:
    """The arguments of ``python -m MODULE``, with small sizes if it is one of the project's scripts."""
    if words[1] == "scripts.bench":
        name, first = words[2], 3
    elif words[1] == "scripts.soak":
        name, first = " ".join(words[1:3]), 3
    else:
        name, first = words[1], 2
    if name not in SCRIPTS:
        return list(words)
    end = words.index("--") if "--" in words else len(words)
    small = shlex.split(SCRIPTS[name])
    own = [_placed(word) for word in words[first:end]]
    own = _without(own, [*(word for word in small if word.startswith("--")), *LEFT_OUT])
    if name == "parallel":
        own = _with_keys(own, _keys(next(word for word in own if not word.startswith("-"))))
    if name == "scripts.soak draw":  # what is drawn took half an hour
        own = [str(SOAKS / word) if (SOAKS / word).is_file() else word for word in own]
    return [*words[:first], *own, *small, *words[end:]]


def _placed(word: str) -> str:
    """A word of a command, or ``KEY=WORD``, in which a placeholder is replaced."""
    key, equals, value = word.rpartition("=")
    return key + equals + PLACEHOLDERS.get(value, value)


def _without(words: Sequence[str], options: Sequence[str]) -> list[str]:
    """The words without the options that are replaced and without their values.

    Words that follow such an option up to the next option are its values.
    """
    kept, skipping = [], False
    for word in words:
        if word.startswith("--"):
            skipping = word.partition("=")[0] in options
        if not skipping:
            kept.append(word)
    return kept


def _keys(recipe: str) -> dict[str, str]:
    if Path(recipe).stem == "quickstart":
        return LENGTH | NARROW
    if Path(recipe).stem in LANGUAGE_MODELS:
        return LENGTH | LANGUAGE_MODEL
    return LENGTH | TRANSLATION


def _with_keys(words: Sequence[str], keys: dict[str, str]) -> list[str]:
    """The words without the keys that are replaced, and with the replacements after the recipe.

    A key that names subwords of a model which the page has is not replaced.
    """
    keys = {key: value for key, value in keys.items() if not _has_models(words, key)}
    kept = [word for word in words if word.partition("=")[0] not in keys]
    first = next(
        place
        for place, word in enumerate(kept)
        if not word.startswith("-") and place >= (words[0] in ("train", "prepare", "profile"))
    )
    return [*kept[: first + 1], *(f"{key}={value}" for key, value in keys.items()), *kept[first + 1 :]]


def _has_models(words: Sequence[str], key: str) -> bool:
    return any(word.startswith(f"{key}=") and "models: [runs/" in word for word in words)


_NOUNS = {"dog": "Hund", "cat": "Kater", "man": "Mann", "boy": "Junge"}
_VERBS = {"runs": "läuft", "sleeps": "schläft", "sits": "sitzt", "sings": "singt"}
_PLACES = {
    "in the park": "im Park",
    "on the grass": "auf dem Gras",
    "at home": "zu Hause",
    "by the stall": "am Würstchenstand",
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
        ("laws-en-fr", "fr", ("train", "valid", "test")),
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
    sizes = {"mytext": 64, "mytext.valid": 6, "talks": 64, "talks.valid": 6, "talks.test": 6}
    for prefix, size in sizes.items():
        _write(folder / f"{prefix}.en", english[:size])
        _write(folder / f"{prefix}.de", german[:size])
    for name in ("new.en", "report.en", "mine.txt", "training.txt", "test_2016_flickr.en"):
        _write(folder / name, english[:4])
    for name, lines in (
        ("new.en", english),
        ("test_2016_flickr.en", english),
        ("test_2016_flickr.de", german),
        ("vlsp20-en-vi/news_valid.vi", german),
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        with gzip.open(folder / f"{name}.gz", "wt", encoding="utf-8") as file:
            file.write("".join(f"{line}\n" for line in lines[:4]))
    for split, size in (("train", 64), ("tst2012", 6), ("tst2013", 6)):
        _write(folder / "en-vi" / f"{split}.en", english[:size])
        _write(folder / "en-vi" / f"{split}.vi", german[:size])
    for split, size in (("train", 64), ("valid", 12), ("test", 12)):
        _write(folder / "corpora" / "ptb" / f"ptb.{split}.txt", english[:size])
    _write(folder / "test_2016_flickr.de", german[:4])
    _write(folder / "baseline.de", german[:6])
    _write(folder / "terms.tsv", ["dog\tHund"])
    _write(folder / "avoid.txt", ["Kater"])
    _write(folder / "test.jsonl", [json.dumps({"text": english[0], "constraints": ["Hund"]})])
    for prefix, size in (("talks/train", 64), ("talks/valid", 6), ("test", 4)):
        _write(folder / f"{prefix}.en", english[:size])
        _write(folder / f"{prefix}.de", german[:size])
        for name, tag in (("pos", "NOUN"), ("case", "low")):
            tags = [" ".join([tag] * len(line.split())) for line in english[:size]]
            _write(folder / f"{prefix}.{name}", tags)


def _write(path: Path, lines: Sequence[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


MODELS = {
    "multi30k": "train multi30k",
    **{name: f"train multi30k output=runs/{name}" for name in ("talks", "en-de", "one", "mine")},
    "talks2": "train multi30k output=runs/talks2 training.seed=2",
    "two": "train multi30k output=runs/two training.seed=2",
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
