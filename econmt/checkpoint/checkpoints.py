"""Saves and loads checkpoints; a crash at any moment is harmless, and loading validates files and executes nothing.

The order of writing a checkpoint of update U:

1. ``params.U.safetensors.new`` and ``hypotheses.U.new``, each under a temporary name, synced, renamed;
2. ``training_state/U.tmp/`` with the state and the optimizer's tensors, synced, renamed to ``training_state/U``:
   this rename is the commit;
3. everything that follows from the committed state: the files of step 1 get their final names; the state is read back;
   ``params.best.safetensors`` and ``metrics.tsv`` are written and old files removed.

After a crash before the commit, the previous checkpoint is the newest; :mod:`econmt.checkpoint.recovery` removes the
remains. After a crash later, recovery repeats step 3, which is idempotent. The state of the previous checkpoint and its
parameters are kept, so that recovery can fall back to it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from torch import Tensor

from econmt.checkpoint.folder import Commit, ModelFolder, pending
from econmt.checkpoint.state import TrainingState
from econmt.checkpoint.tensor_files import (
    FORMAT,
    check_tensors,
    dtype_name,
    model_description,
    read_tensors,
    restored,
    write_tensors,
    write_text,
)
from econmt.config.recipe import LanguageModelSection, Model, Recipe, read_recipe
from econmt.data.files import remove, sync_folder
from econmt.data.text.subwords import fingerprint, load_vocabularies
from econmt.data.text.vocabulary import Vocabularies
from econmt.errors import REMEDIES, InputError, TrainingError
from econmt.model import TranslationModel
from econmt.model.layers import SkipInitialization
from econmt.tasks.registry import task_of

_Model = TypeVar("_Model", bound=torch.nn.Module)

_CARRIED = "carried/"
"""Prefix of carried tensors in the optimizer's file."""

_SUMS = "SHA256SUMS"
"""File with the checksum of state.json, in the format of sha256sum."""
_RESTORE = "restore the vocabulary files that it was trained with"


@dataclass(frozen=True)
class LoadedModel(Generic[_Model]):
    """Trained model, in evaluation mode, with its vocabularies.

    Attributes:
        stored: type of the matrices in its file, if not float32.
    """

    model: _Model
    vocabularies: Vocabularies
    recipe: Recipe
    stored: str = ""


class Saved(NamedTuple):
    """Saved run: its state, parameters and optimizer tensors by name, and the optimizer's name.

    ``carried`` are states carried from step to step, see :meth:`econmt.engine.step.TrainingStep.carried`.
    """

    state: TrainingState
    parameters: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    optimizer_name: str
    carried: Mapping[str, Tensor] = MappingProxyType({})


def parameters_metadata(model: Mapping[str, Any], update: int, vocabulary: str) -> dict[str, str]:
    """Returns the metadata of a parameter file: format, update, vocabulary fingerprint, and model description."""
    description = json.dumps(model, sort_keys=True)
    return {"format": FORMAT, "update": str(update), "vocabulary": vocabulary, "model": description}


def save_commit(
    folder: ModelFolder,
    commit: Commit,
    saved: Saved,
    model: Mapping[str, Any],
    hypotheses: Sequence[str] | None = None,
) -> None:
    """Saves the state from which training continues, with the parameters that are validated.

    A checkpoint has a file of parameters of its own; between two checkpoints they are saved with the state.

    Args:
        saved: State, with the checkpoint's row of metrics; validated parameters; optimizer tensors to continue with.
        model: See :meth:`econmt.tasks.protocol.Task.description`.
        hypotheses: A checkpoint's translations of the validation text, if there are any.

    Raises:
        OSError: The disk is full; the previous checkpoint is untouched.
    """
    final = folder.state(commit)
    temporary = final.with_name(final.name + ".tmp")
    metadata = parameters_metadata(model, commit.update, saved.state.vocabulary)
    if commit.is_checkpoint:
        write_tensors(pending(folder.parameters(commit.update)), saved.parameters, metadata)
    if hypotheses is not None:
        write_text(pending(folder.hypotheses(commit.update)), "".join(line + "\n" for line in hypotheses))
    remove(temporary)
    temporary.mkdir(parents=True)
    optimizer_metadata = {**metadata, "optimizer": saved.optimizer_name}
    carried = {f"{_CARRIED}{name}": value for name, value in saved.carried.items()}
    write_tensors(temporary / "optimizer.safetensors", {**saved.optimizer, **carried}, optimizer_metadata)
    if not commit.is_checkpoint:
        write_tensors(temporary / "params.safetensors", saved.parameters, metadata)
    text = saved.state.to_json()
    write_text(temporary / "state.json", text)
    write_text(temporary / _SUMS, f"{hashlib.sha256(text.encode()).hexdigest()}  state.json\n")
    sync_folder(temporary)
    temporary.rename(final)
    sync_folder(folder.states)
    if commit.is_checkpoint:
        publish(folder, commit.update)


def publish(folder: ModelFolder, update: int) -> None:
    """Renames the files of a committed checkpoint to their final names."""
    for path in folder.pending().get(update, []):
        path.replace(path.with_suffix(""))
    sync_folder(folder.path)


def remove_unfinished(folder: ModelFolder) -> None:
    """Removes what interrupted writes have left, and gives files of the newest commit their final names."""
    for path in folder.temporaries():
        remove(path)
    commits = folder.commits()
    newest = commits[-1].update if commits and commits[-1].is_checkpoint else None
    for update, paths in folder.pending().items():
        if update == newest:
            publish(folder, update)
        else:
            for path in paths:
                path.unlink()


def load_state(folder: ModelFolder, commit: Commit) -> TrainingState:
    """Loads the training state of a commit, without parameters and optimizer."""
    path = folder.state(commit) / "state.json"
    sums = path.with_name(_SUMS)
    try:
        content = path.read_bytes()
        state = TrainingState.from_json(content.decode("utf-8"), str(path))
        damaged = sums.read_bytes() != f"{hashlib.sha256(content).hexdigest()}  state.json\n".encode()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({error}); start anew with --overwrite-output") from error
    if damaged:
        raise InputError(f"{path}: damaged (its checksum is wrong); start anew with --overwrite-output")
    return state


def prove(folder: ModelFolder, commit: Commit) -> None:
    """Reads all files needed to resume from a commit, block by block; raises InputError if one cannot be used."""
    state = load_state(folder, commit)
    paths = _tensor_files(folder, commit, state)
    with ThreadPoolExecutor(len(paths)) as at_once:
        for path, metadata in zip(paths, at_once.map(check_tensors, paths), strict=True):
            check_vocabulary(metadata, state.vocabulary, path)


def _tensor_files(folder: ModelFolder, commit: Commit, state: TrainingState) -> tuple[Path, Path]:
    """Returns the files of a commit's parameters and optimizer tensors."""
    optimizer = folder.state(commit) / "optimizer.safetensors"
    interrupted_parameters = optimizer.with_name("params.safetensors")
    parameters = folder.parameters(state.parameters_from) if commit.is_checkpoint else interrupted_parameters
    return parameters, optimizer


def load_saved(folder: ModelFolder, commit: Commit) -> Saved:
    """Loads everything of a commit; raises InputError if a file is broken or belongs to another vocabulary."""
    state = load_state(folder, commit)
    parameters_path, optimizer_path = _tensor_files(folder, commit, state)
    parameters, metadata = read_tensors(parameters_path)
    optimizer, optimizer_metadata = read_tensors(optimizer_path)
    for file_metadata, path in ((metadata, parameters_path), (optimizer_metadata, optimizer_path)):
        check_vocabulary(file_metadata, state.vocabulary, path)
    names = [name for name in optimizer if name.startswith(_CARRIED)]
    carried = {name.removeprefix(_CARRIED): optimizer.pop(name) for name in names}
    return Saved(state, parameters, optimizer, optimizer_metadata.get("optimizer", ""), carried)


def check_vocabulary(metadata: Mapping[str, str], expected: str, path: Path, advice: str = _RESTORE) -> None:
    """Raises InputError if a file's parameters were learnt with another vocabulary."""
    if metadata.get("vocabulary") != expected:
        raise InputError(
            f"{path}: belongs to another vocabulary (fingerprint {metadata.get('vocabulary', 'none')[:12]}, here "
            f"{expected[:12]}); {advice}"
        )


def load_parameters(model: torch.nn.Module, tensors: Mapping[str, Tensor], where: Path | str) -> None:
    """Copies tensors into a model's parameters; raises InputError if their names, shapes or types differ."""
    parameters = dict(model.named_parameters())
    for name in [*parameters, *tensors]:
        if name not in tensors or name not in parameters:
            state = "has no parameter" if name not in tensors else "has a parameter unknown to the model,"
            raise InputError(
                f"{where}: {state} '{name}'; the file belongs to another model than the recipe's"
            )
        if tensors[name].shape != parameters[name].shape:
            raise InputError(
                f"{where}: parameter '{name}' has shape {tuple(tensors[name].shape)}, but the recipe's model needs "
                f"{tuple(parameters[name].shape)}; the file belongs to another model"
            )
        if tensors[name].dtype != parameters[name].dtype:
            raise InputError(
                f"{where}: parameter '{name}' has type {dtype_name(tensors[name].dtype)}, but the recipe's model needs "
                f"{dtype_name(parameters[name].dtype)}; the file is damaged or not from econmt: use another checkpoint"
            )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])


def load_model(
    folder: Path | str, which: str | int | Path = "best", device: torch.device | str = "cpu"
) -> LoadedModel[TranslationModel]:
    """Loads a trained translation model from its folder; see :func:`load_task`."""
    loaded = load_task(folder, which, device)
    if not isinstance(loaded.model, TranslationModel):
        raise InputError(
            f"{folder}: holds a language model, which does not translate; use it with econmt score or econmt generate"
        )
    return LoadedModel(loaded.model, loaded.vocabularies, loaded.recipe, loaded.stored)


def load_task(
    folder: Path | str, which: str | int | Path = "best", device: torch.device | str = "cpu"
) -> LoadedModel[torch.nn.Module]:
    """Loads a trained model of any task from its folder.

    Args:
        folder: Model folder, or an export of one.
        which: "best", "last", the update of a checkpoint, or the path of a parameter file.
        device: Device of the parameters.
    """
    model_folder = ModelFolder(folder)
    if not model_folder.recipe.is_file():
        problem = "no such model folder"
        if model_folder.path.exists():
            problem = "not a model folder, as it " + (
                "has no recipe.yaml" if model_folder.path.is_dir() else "is a file"
            )
        raise InputError(f"{model_folder.path}: {problem}; use a folder written by econmt train")
    recipe = read_recipe(model_folder.recipe)
    path = parameter_file(model_folder, which)
    stored_tensors, metadata = read_tensors(path)
    tensors = restored(stored_tensors, path)
    check_vocabulary(metadata, fingerprint(model_folder.path), path)
    check_model(metadata, recipe.model, path)
    vocabularies = load_vocabularies(model_folder.path)
    with SkipInitialization():
        model = task_of(recipe, vocabularies).build_model()
    load_parameters(model, tensors, path)
    return LoadedModel(model.to(device).eval(), vocabularies, recipe, metadata.get("quantized", ""))


def parameter_file(folder: ModelFolder, which: str | int | Path) -> Path:
    """Returns the parameter file for "best", "last", an update or a path; raises InputError if there is none."""
    if isinstance(which, Path):
        return which
    numbered = folder.numbered_parameters()
    if which == "best":
        path: Path | None = folder.best
    elif which == "last":
        path = numbered[max(numbered)] if numbered else None
    elif re.fullmatch("[0-9]{1,15}", str(which)):
        path = folder.parameters(int(which))
    else:
        raise InputError(f"checkpoint '{str(which)[:40]}': use best, last or the number of an update")
    if path is None or not path.exists():
        available = ", ".join(str(update) for update in sorted(numbered))
        if not available and folder.best.exists():
            raise InputError(f"{folder.path}: no checkpoint '{which}'; it has the best one alone")
        if not available:
            raise InputError(
                f"{folder.path}: no checkpoint '{which}', and no other; train until the first, which comes after "
                "training.checkpoint_interval updates"
            )
        raise InputError(f"{folder.path}: no checkpoint '{which}' (checkpoints of updates: {available})")
    return path


def check_model(
    metadata: Mapping[str, str],
    model: Model | LanguageModelSection,
    path: Path,
    advice: str = "put back the recipe.yaml that it was trained with",
) -> None:
    """Raises InputError if parameters belong to another kind of model; dropout and initial values may differ."""
    stored = _description(type(model), metadata, path)
    expected = model.model_dump(mode="json")
    for key in sorted(set(expected) & set(stored) - {"dropout", "initialization"}):
        if expected[key] != stored[key]:
            raise InputError(
                f"{path}: was trained with model.{key} {_short(stored[key])}, the recipe has {_short(expected[key])}; "
                f"{advice}"
            )


def _description(
    kind: type[Model | LanguageModelSection], metadata: Mapping[str, str], path: Path
) -> dict[str, Any]:
    """Returns the model that a file describes; keys added to recipes after it was written get their defaults."""
    described = model_description(metadata, path)
    known = {key: value for key, value in described.items() if key in kind.model_fields}
    try:
        validated = kind.model_validate(known).model_dump(mode="json")
    except ValidationError:  # of an unknown model, which is compared unchanged
        return described
    return {key: validated[key] for key in known}


@contextlib.contextmanager
def saving(folder: ModelFolder, update: int, last: int) -> Iterator[None]:
    """Turns a failure to write into a TrainingError of one line that says which checkpoint is intact.

    Removes what was written, which may be what fills the disk.
    """
    try:
        yield
    except (OSError, SafetensorError, InputError) as error:
        good = f"the checkpoint of update {last} is intact" if last else "there is no earlier one"
        if isinstance(error, InputError):
            raise TrainingError(
                f"{folder.path}: the checkpoint of update {update} cannot be read back ({error}); {good}; check the "
                "disk, and run the same command to resume"
            ) from error
        with contextlib.suppress(OSError):  # else the next start does it
            remove_unfinished(folder)
        number, reason = (error.errno, error.strerror) if isinstance(error, OSError) else (None, str(error))
        remedy = REMEDIES.get(number or 0, "check the disk")
        raise TrainingError(
            f"{folder.path}: cannot save the checkpoint of update {update} ({reason}); {good}; {remedy} and run the "
            "same command to resume"
        ) from error


def _short(value: Any) -> str:
    return json.dumps(value) if not isinstance(value, str) else value
