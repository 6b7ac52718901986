"""First parameters of a run that come from another model, and embeddings that come from files of vectors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from econmt.checkpoint.checkpoints import (
    check_model,
    check_vocabulary,
    load_parameters,
    named_parameters,
    parameter_file,
)
from econmt.checkpoint.folder import ModelFolder
from econmt.checkpoint.quantized import restored
from econmt.checkpoint.tensor_files import read_metadata, read_tensors
from econmt.config.recipe import Model, Recipe
from econmt.data.text.subwords import SPECIAL_TOKENS, Vocabularies, Vocabulary, fingerprint, load_vocabularies
from econmt.errors import InputError
from econmt.model import TranslationModel
from econmt.training.vector_files import read_vectors

_LENGTHS = "length_ratio."
_ADVICE = "give the recipe the model section of that model, or leave training.initialize_from out"


def parameters_to_start_from(recipe: Recipe) -> Path | None:
    """The file that ``training.initialize_from`` means, after every check that needs no text; None without that key.

    Raises:
        InputError: if there is none, it is of another kind of model, or it lies in the folder that the run writes; or a
            file of vectors is not there.
    """
    for side, vectors in _vector_files(recipe).items():
        if not vectors.is_file():
            raise InputError(
                f"model.initialization.{side}_embedding {vectors}: no such file; give one relative to the working "
                "directory"
            )
    given = recipe.training.initialize_from
    if given is None:
        return None
    place, output = Path(given), Path(recipe.output)
    if not place.exists():
        raise InputError(
            f"training.initialize_from {given}: no such file or folder; give a model folder or a parameter file, "
            "relative to the working directory"
        )
    if output.resolve() in (place.resolve(), *place.resolve().parents):
        raise InputError(
            f"training.initialize_from {given}: lies in the folder that this run writes; give another output=DIR"
        )
    path = parameter_file(ModelFolder(place), "best") if place.is_dir() else place
    # Scales of units, and a length task, begin where a model is tuned: they are drawn if the other model has none.
    may_differ = ("dropout", "initialization", "lhuc", "length_task", "length_task_layers")
    check_model(read_metadata(path), recipe.model, path, advice=_ADVICE, may_differ=may_differ)
    return path


def initialize(
    model: nn.Module, recipe: Recipe, path: Path | None, vocabularies: Vocabularies, vocabulary: str
) -> list[str]:
    """Gives a model the parameters of a file, and vectors to its embeddings; returns what a person should know.

    Args:
        model: as the recipe describes it, with parameters drawn.
        recipe: of the run.
        path: see :func:`parameters_to_start_from`.
        vocabularies: the run's.
        vocabulary: their fingerprint.

    Raises:
        InputError: naming the file and the first thing that does not fit: its vocabulary, a parameter's name or shape,
            or a vector.
    """
    notes = []
    if path is not None:
        tensors, metadata = read_tensors(path)
        tensors = restored(tensors, path)
        begin = f"first parameters: those of update {metadata.get('update', '?')} in {path}"
        if recipe.training.update_vocab and metadata.get("vocabulary") != vocabulary:
            check_vocabulary(metadata, fingerprint(path.parent), path)
            theirs = load_vocabularies(path.parent)
            tensors, told = _matched(model, tensors, theirs, vocabularies, path)
            notes += [begin, *told]
        else:
            check_vocabulary(metadata, vocabulary, path)
            notes.append(begin)
        own = {name: part.detach() for name, part in named_parameters(model).items()}
        drawn = {name: part for name, part in own.items() if name.endswith("lhuc")}
        lengths = {name for name in (*own, *tensors) if name.startswith(_LENGTHS)}
        if any(name not in own or name not in tensors for name in lengths):  # another length task, or none
            tensors = {name: part for name, part in tensors.items() if name not in lengths}
            drawn |= {name: own[name] for name in lengths & own.keys()}
            notes.append(f"model.length_task is another than in {path}: what it learns begins anew")
        load_parameters(model, {**drawn, **tensors}, path)
    for side, vectors in _vector_files(recipe).items():
        assert isinstance(model, TranslationModel)
        known = getattr(vocabularies, side)
        notes.append(_give_vectors(getattr(model, f"{side}_embedding").weight, known, vectors, side))
    return notes


def _vector_files(recipe: Recipe) -> dict[str, Path]:
    """Files of vectors by side."""
    if not isinstance(recipe.model, Model):
        return {}
    init = recipe.model.initialization
    given = {"source": init.source_embedding, "target": init.target_embedding}
    return {side: Path(name) for side, name in given.items() if name is not None}


def _tokens(vocabulary: Vocabulary) -> list[str]:
    return vocabulary.tokens(range(vocabulary.size))


_SIDES = {
    "embedding": "target",
    "source_embedding": "source",
    "target_embedding": "target",
    "output": "target",
}
"""By what has a row for each token: whose tokens these are."""


def _matched(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    theirs: Vocabularies,
    ours: Vocabularies,
    path: Path,
) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors of a model of another vocabulary, with a row for each of our tokens, and what is to be told.

    A token that the other vocabulary has gets its rows, the others keep what was drawn for them.
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
        found = sum(place >= 0 for place in known)
        number = side.removeprefix("source_factor_embeddings.")
        name = f"source factor {int(number) + 1}" if number != side else side
        notes.append(
            f"{name} vocabulary: {found:,} of {len(known):,} tokens are known there, the rows of the others are drawn"
        )
    made = dict(tensors)
    for name, parameter in named_parameters(model).items():
        table = name.rpartition(".")[0]
        side = table if table in sides else _SIDES.get(table, "")
        if not side:
            continue
        places, size = rows[side], sides[side][0].size
        tensor = tensors.get(name)
        if (
            tensor is None
            or tensor.dim() == 0
            or len(tensor) != size
            or tensor.shape[1:] != parameter.shape[1:]
        ):
            raise InputError(
                f"{path}: parameter '{name}' does not have a row for each token of its vocabulary"
            )
        whole = parameter.detach().clone()
        whole[places >= 0] = tensor[places[places >= 0]].to(whole.dtype)
        made[name] = whole
    return made, notes


def _give_vectors(table: nn.Parameter, vocabulary: Vocabulary, path: Path, side: str) -> str:
    """Gives the rows of tokens that a file has its vectors; says how many."""
    tokens = _tokens(vocabulary)
    found = read_vectors(path, set(tokens) - set(SPECIAL_TOKENS), table.shape[1])
    if not found:
        raise InputError(f"{path}: has a vector for none of the {len(tokens):,} {side} tokens")
    with torch.no_grad():
        for number, token in enumerate(tokens):
            if token in found:
                table[number] = found[token]
    return f"{side} embeddings: {len(found):,} of {len(tokens):,} from {path}, the others are drawn"
