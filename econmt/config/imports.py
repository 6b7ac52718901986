"""Recipes made of the configurations of other toolkits."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from econmt.config.foreign_settings import Remark
from econmt.config.joey import import_joey
from econmt.config.opennmt import import_opennmt
from econmt.config.recipe import parse_recipe, recipe_text
from econmt.config.sockeye import import_sockeye
from econmt.config.yaml_reader import dump_yaml, read_mapping
from econmt.errors import InputError


class ImportedRecipe(NamedTuple):
    """A recipe as YAML, and the settings that it cannot hold as they are, which its comments name, too."""

    text: str
    remarks: list[Remark]


def import_configuration(file: Path) -> ImportedRecipe:
    """Makes a recipe of a configuration of Joey NMT, OpenNMT-py or Sockeye, which are told apart by their keys.

    Raises:
        InputError: The file cannot be read, is of neither toolkit, or describes a model that is not recurrent.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not valid UTF-8"
        raise InputError(f"{file}: cannot be read: {reason}") from None
    where = str(file)
    tree = read_mapping(text, where)
    data = tree.get("data")
    if isinstance(data, dict) and "train" in data and isinstance(tree.get("training"), dict):
        toolkit, settings = "Joey NMT", import_joey(tree, where)
    elif isinstance(data, dict) and any(
        isinstance(each, dict) and "path_src" in each for each in data.values()
    ):
        toolkit, settings = "OpenNMT-py", import_opennmt(tree, where)
    elif {"rnn_num_hidden", "rnn-num-hidden"} & tree.keys() or "validation_source" in tree:
        toolkit, settings = "Sockeye", import_sockeye(tree, where)
    else:
        raise InputError(
            f"{where}: neither a configuration of Joey NMT (sections data, model and training), nor of OpenNMT-py "
            "(data with corpora of path_src and path_tgt), nor args.yaml of Sockeye"
        )
    try:
        recipe = parse_recipe(dump_yaml(settings.nested()), where)
    except InputError as error:
        raise InputError(
            *(f"{where}: as a recipe: {line.partition(': ')[2]}" for line in error.lines)
        ) from None
    lines = [f"# {recipe.name}, made of {toolkit}'s {file.name}."]
    lines += [f"# {key}: {' '.join(text.split())}" for key, text in settings.remarks]
    return ImportedRecipe(
        "\n".join(lines) + "\n\n" + recipe_text(recipe, changed_only=True), settings.remarks
    )
