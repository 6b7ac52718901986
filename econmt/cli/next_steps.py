"""Commands that use a model which has just been trained, ready to be pasted."""

from __future__ import annotations

import importlib.util
import shlex
from pathlib import Path

from econmt.cli.doctor import EXTRAS
from econmt.config.recipe import Recipe, TextData
from econmt.data.batching.store import store_folder

LONGEST_SAMPLE = 60
"""Characters of a sample sentence that is quoted whole."""


def commands_for(recipe: Recipe, sample: str) -> list[str]:
    """Returns lines that translate, serve and evaluate with a recipe's model; of a language model: write and score.

    ``sample`` is a source sentence, replaced if it is too long for a line.
    """
    model, store = shlex.quote(recipe.output), store_folder(recipe)
    split = "valid" if recipe.data.test is None else "test"
    if isinstance(recipe.data, TextData):
        text = _quoted(store / f"{split}.target.txt")
        return [
            f"econmt generate -m {model} --length 50",
            f"econmt score -m {model} -t {text} --score-type perplexity --total",
        ]
    streams = range(1, len(recipe.data.source_factors) + 1)
    factors = "".join(f" --input-factors {_quoted(store / f'{split}.factor{n}.txt')}" for n in streams)
    translated = _quoted(Path(f"{recipe.output}.{split}.{recipe.data.target}"))
    sentence = sample if len(sample) <= LONGEST_SAMPLE else "A sentence."
    serve = f"econmt serve -m {model}"
    if not all(map(importlib.util.find_spec, EXTRAS["serve"][0])):
        serve += "   # after: pip install 'econmt[serve]'"
    source, reference = (_quoted(store / f"{split}.{side}.txt") for side in ("source", "target"))
    return [
        *([] if factors else [f"echo {shlex.quote(sentence)} | econmt translate -m {model}"]),
        f"econmt translate -m {model} -i {source}{factors} -o {translated}",
        f"econmt evaluate -r {reference} -i {translated}",
        *([] if factors else [serve]),
    ]


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))
