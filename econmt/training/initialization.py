"""Initializes a run's parameters from another model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from econmt.checkpoint.checkpoints import check_model, check_vocabulary, load_parameters, parameter_file
from econmt.checkpoint.folder import ModelFolder
from econmt.checkpoint.tensor_files import read_metadata, read_tensors, restored
from econmt.config.recipe import Recipe
from econmt.data.text.subwords import fingerprint, load_vocabularies
from econmt.data.text.vocabulary import Vocabularies, Vocabulary
from econmt.errors import InputError
from econmt.model import TranslationModel

_ADVICE = "copy that model's model section into the recipe, or remove training.initialize_from"
_VOCABULARY_ADVICE = (
    "name the vocabulary files of that model in data.subwords (models, or lists for words), as subwords.model or "
    "vocab.*.txt of its folder, or set training.update_vocab=true"
)


def parameters_to_start_from(recipe: Recipe) -> Path | None:
    """Returns the file of ``training.initialize_from`` after all checks that need no text; None without that key.

    Raises:
        InputError: The file is missing, belongs to another kind of model, or is in the run's own output folder.
    """
    named = recipe.training.initialize_from
    if named is None:
        return None
    location, output = Path(named), Path(recipe.output)
    if not location.exists():
        raise InputError(
            f"training.initialize_from {named}: no such file or folder; use a model folder or a parameter file, "
            "relative to the working directory"
        )
    if output.resolve() in (location.resolve(), *location.resolve().parents):
        raise InputError(
            f"training.initialize_from {named}: is in the folder that this run writes; use another output=DIR"
        )
    path = parameter_file(ModelFolder(location), "best") if location.is_dir() else location
    check_model(read_metadata(path), recipe.model, path, advice=_ADVICE)
    return path


def initialize(
    model: nn.Module, recipe: Recipe, path: Path | None, vocabularies: Vocabularies, vocabulary: str
) -> list[str]:
    """Loads a file's parameters into a model; returns messages about them.

    ``path``: see :func:`parameters_to_start_from`. ``vocabulary``: fingerprint of the run's vocabularies.

    Raises:
        InputError: Vocabulary, or a parameter's name or shape, does not fit; the message names file and item.
    """
    if path is None:
        return []
    tensors, metadata = read_tensors(path)
    tensors = restored(tensors, path)
    notes = [f"initial parameters: update {metadata.get('update', '?')} of {path}"]
    if recipe.training.update_vocab and metadata.get("vocabulary") != vocabulary:
        check_vocabulary(metadata, fingerprint(path.parent), path)
        other_vocabularies = load_vocabularies(path.parent)
        tensors, match_notes = _matched(model, tensors, other_vocabularies, vocabularies, path)
        notes += match_notes
    else:
        check_vocabulary(metadata, vocabulary, path, _VOCABULARY_ADVICE)
    load_parameters(model, tensors, path)
    return notes


def _tokens(vocabulary: Vocabulary) -> list[str]:
    return vocabulary.tokens(range(vocabulary.size))


_SIDES = dict.fromkeys(("embedding", "target_embedding", "output"), "target") | {"source_embedding": "source"}
"""Side whose tokens index the rows of a table, by the table's name."""


def _matched(
    model: nn.Module, tensors: Mapping[str, Tensor], theirs: Vocabularies, ours: Vocabularies, path: Path
) -> tuple[dict[str, Tensor], list[str]]:
    """Maps a model's tensors to another vocabulary: returns tensors with a row for each of our tokens, and messages.

    A token in the other vocabulary gets its rows from there, other tokens keep their random initialization.
    """
    rows = {}
    notes = []
    sides = {"target": (theirs.target, ours.target)}
    if isinstance(model, TranslationModel):
        sides = {"source": (theirs.source, ours.source), **sides}
        factors = zip(theirs.factors, ours.factors, strict=True)
        sides |= {f"source_factor_embeddings.{number}": both for number, both in enumerate(factors)}
    for side, (before, now) in sides.items():
        numbers = {token: number for number, token in enumerate(_tokens(before))}
        known = [numbers.get(token, -1) for token in _tokens(now)]
        rows[side] = torch.tensor(known)
        count = sum(position >= 0 for position in known)
        number = side.removeprefix("source_factor_embeddings.")
        name = f"source factor {int(number) + 1}" if number != side else side
        notes.append(
            f"{name} vocabulary: {count:,} of {len(known):,} tokens are known there, other rows are random"
        )
    mapped = dict(tensors)
    for name, parameter in model.named_parameters():
        table = name.rpartition(".")[0]
        side = table if table in sides else _SIDES.get(table, "")
        if not side:
            continue
        positions, size = rows[side], sides[side][0].size
        tensor = tensors.get(name)
        if tensor is None or tensor.shape != (size, *parameter.shape[1:]):
            raise InputError(f"{path}: parameter '{name}' does not have one row per token of its vocabulary")
        rows_of_ours = parameter.detach().clone()
        rows_of_ours[positions >= 0] = tensor[positions[positions >= 0]].to(rows_of_ours.dtype)
        mapped[name] = rows_of_ours
    return mapped, notes
