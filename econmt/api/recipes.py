"""Recipes, and the text that they name.

Example::

    recipe = load_recipe("multi30k", ["training.max_updates=3000"])
    corpus = find_corpus(recipe.pairs.valid, "en", "de", search_path(Path("recipes"), None), progress=True)
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from econmt.config.recipe import Recipe as Recipe
from econmt.config.recipe import find_recipe as find_recipe
from econmt.config.recipe import load_recipe as load_recipe
from econmt.config.recipe import read_recipe as read_recipe
from econmt.config.recipe import shipped_recipes as shipped_recipes
from econmt.data.batching.store import prepare, store_folder
from econmt.data.text.corpus import Corpus as Corpus
from econmt.data.text.corpus import find_corpus as find_corpus
from econmt.data.text.corpus import search_path as search_path
from econmt.evaluation.metrics import recipe_tokenizer as recipe_tokenizer
from econmt.evaluation.metrics import tokenizer_of as tokenizer_of


class HeldOutText(NamedTuple):
    """Text by which a trained model is judged.

    Attributes:
        kind: test, or validation if the recipe has no test text.
        prefix: its name in the recipe.
        source, target: files of sources and references, as training prepared them.
    """

    kind: Literal["test", "validation"]
    prefix: str
    source: Path
    target: Path


def held_out_text(recipe: Recipe, search: Sequence[Path] | None = None) -> HeldOutText:
    """Returns the text by which the model of a recipe is judged, which training or ``econmt prepare`` has prepared.

    Args:
        recipe: recipe of a translation model.
        search: folders of its text, which is prepared again if it has changed; None: it is not looked at.
    """
    data, folder = recipe.pairs, store_folder(recipe)
    if search is not None:
        prepare(recipe, folder, search, show_progress=False)
    split = "valid" if data.test is None else "test"
    source, target = (folder / f"{split}.{side}.txt" for side in ("source", "target"))
    return HeldOutText("validation" if data.test is None else "test", data.test or data.valid, source, target)
