"""First parameters of a run that come from another model."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from econmt.errors import InputError
from econmt.recipe import Recipe
from econmt.training.checkpoints import check_model, check_vocabulary, load_parameters, parameter_file
from econmt.training.folder import ModelFolder
from econmt.training.quantized import restored
from econmt.training.tensor_files import read_metadata, read_tensors

_ADVICE = "give the recipe the model section of that model, or leave training.initialize_from out"


def parameters_to_start_from(recipe: Recipe) -> Path | None:
    """The file that ``training.initialize_from`` means, after every check that needs no text; None without that key.

    Raises:
        InputError: if there is none, it is of another kind of model, or it lies in the folder that the run writes.
    """
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
    check_model(read_metadata(path), recipe.model, path, advice=_ADVICE)
    return path


def initialize(model: nn.Module, path: Path, vocabulary: str) -> str:
    """Gives a model the parameters of a file; returns what a person should know.

    Args:
        model: as the recipe describes it.
        path: see :func:`parameters_to_start_from`.
        vocabulary: the fingerprint of the run's.

    Raises:
        InputError: naming the file and the first thing that does not fit: its vocabulary, or a parameter's name or
            shape.
    """
    tensors, metadata = read_tensors(path)
    check_vocabulary(metadata, vocabulary, path)
    load_parameters(model, restored(tensors, path), path)
    return f"first parameters: those of update {metadata.get('update', '?')} in {path}"
