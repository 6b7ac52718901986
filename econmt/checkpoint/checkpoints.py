"""Checkpoints: written so that a crash at any moment is harmless, read with every check, nothing ever executed.

The order of a checkpoint of update U:

1. ``params.U.safetensors.new`` and ``hypotheses.U.new``, each under a temporary name, synced, renamed;
2. ``training_state/U.tmp/`` with the state and the optimizer's tensors, synced, renamed to ``training_state/U``:
   this rename is the commit;
3. what follows from the committed state: the files of 1 get their names; the state is read back; then
   ``params.best.safetensors``, ``metrics.tsv``, old files removed.

A crash before the commit leaves the checkpoint before; :mod:`econmt.checkpoint.recovery` removes the debris. A crash
after it leaves step 3 to recovery, which does it again; doing it twice changes nothing. The state of the checkpoint
before stays, with the parameters that it needs, so that recovery can fall back to it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from torch import Tensor
from torch.overrides import TorchFunctionMode

from econmt.checkpoint.folder import Commit, ModelFolder, pending, remove
from econmt.checkpoint.quantized import restored
from econmt.checkpoint.state import TrainingState
from econmt.checkpoint.tensor_files import (
    FORMAT,
    check_tensors,
    model_description,
    read_tensors,
    write_tensors,
    write_text,
)
from econmt.config.recipe import LanguageModelSection, Model, Recipe, read_recipe
from econmt.data.files import sync_folder
from econmt.data.text.subwords import Vocabularies, fingerprint, load_vocabularies
from econmt.errors import InputError, TrainingError
from econmt.model import TranslationModel
from econmt.tasks.protocol import Task
from econmt.tasks.registry import TASKS

_CARRIED = "carried/"
"""Prefix of the names of carried tensors in the optimizer's file."""

_SUMS = "SHA256SUMS"
"""The file with the checksum of a state.json, in the form that sha256sum reads; older states have none."""


class LoadedTask(NamedTuple):
    """A trained model of any task, in evaluation mode, and what turns text into its ids and back.

    Attributes:
        stored: the type in which its file has the matrices, if that is not float32.
    """

    model: torch.nn.Module
    vocabularies: Vocabularies
    task: Task
    stored: str = ""


class LoadedModel(NamedTuple):
    """A trained translation model, in evaluation mode, and what turns text into its ids and back.

    Attributes:
        stored: as of :class:`LoadedTask`.
    """

    model: TranslationModel
    vocabularies: Vocabularies
    recipe: Recipe
    stored: str = ""


class Saved(NamedTuple):
    """A run as it is saved: parameters and optimizer tensors by name, the optimizer's name, and the rest.

    ``carried`` is what a step hands to the next one, see :meth:`econmt.engine.step.TrainingStep.carried`.
    """

    state: TrainingState
    parameters: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    optimizer_name: str
    carried: Mapping[str, Tensor] = MappingProxyType({})

    def given_to(self, name: str, current: Mapping[str, Tensor]) -> Saved:
        """Returns a copy for an optimizer of this name, with its ``current`` tensors if the saved ones do not fit."""
        return self if self.optimizer_name == name else self._replace(optimizer=current, optimizer_name=name)


def parameters_metadata(model: Mapping[str, Any], update: int, vocabulary: str) -> dict[str, str]:
    """Returns the metadata of a parameter file: format, update, fingerprint of the vocabulary, model sizes."""
    description = json.dumps(model, sort_keys=True)
    return {"format": FORMAT, "update": str(update), "vocabulary": vocabulary, "model": description}


def named_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Parameters by name; a matrix shared between layers comes once."""
    return dict(model.named_parameters())


def save_checkpoint(
    folder: ModelFolder, saved: Saved, model: Mapping[str, Any], hypotheses: Sequence[str] | None
) -> None:
    """Saves the parameters and, unless a plateau made training go back, the state to go on from.

    Args:
        folder: where.
        saved: the state, with the checkpoint's row of metrics in it, the parameters that were validated, and the
            optimizer's tensors to go on with.
        model: see :meth:`econmt.tasks.protocol.Task.description`.
        hypotheses: translations of the validation text, if there are any.

    Raises:
        OSError: if the disk is full; the checkpoint before is untouched.
    """
    state = saved.state
    metadata = parameters_metadata(model, state.update, state.vocabulary)
    write_tensors(pending(folder.parameters(state.update)), saved.parameters, metadata)
    if hypotheses is not None:
        write_text(pending(folder.hypotheses(state.update)), "".join(line + "\n" for line in hypotheses))
    _commit(folder, Commit(state.update, True), saved, metadata)
    publish(folder, state.update)


def save_interrupted(folder: ModelFolder, saved: Saved, model: Mapping[str, Any]) -> None:
    """Saves the state between two checkpoints: parameters lie beside it, no parameter file and no metrics are added."""
    metadata = parameters_metadata(model, saved.state.update, saved.state.vocabulary)
    _commit(folder, Commit(saved.state.update, False), saved, metadata)


def _commit(folder: ModelFolder, commit: Commit, saved: Saved, metadata: dict[str, str]) -> None:
    final = folder.state(commit)
    temporary = final.with_name(final.name + ".tmp")
    remove(temporary)
    temporary.mkdir(parents=True)
    own = {**metadata, "optimizer": saved.optimizer_name}
    carried = {f"{_CARRIED}{name}": value for name, value in saved.carried.items()}
    write_tensors(temporary / "optimizer.safetensors", {**saved.optimizer, **carried}, own)
    if not commit.is_checkpoint:
        write_tensors(temporary / "params.safetensors", saved.parameters, metadata)
    text = saved.state.to_json()
    write_text(temporary / "state.json", text)
    write_text(temporary / _SUMS, f"{_sha256(text.encode())}  state.json\n")
    sync_folder(temporary)
    temporary.rename(final)
    sync_folder(folder.states)


def publish(folder: ModelFolder, update: int) -> None:
    """Gives the files of a committed checkpoint their names."""
    for path in folder.pending().get(update, []):
        path.replace(path.with_suffix(""))
    sync_folder(folder.path)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def load_state(folder: ModelFolder, commit: Commit) -> TrainingState:
    """The training state of a commit, without parameters and optimizer.

    Raises:
        InputError: if it is broken, or has not the checksum that it was written with.
    """
    path = folder.state(commit) / "state.json"
    sums = path.with_name(_SUMS)
    try:
        content = path.read_bytes()
        state = TrainingState.from_json(content.decode("utf-8"), str(path))
        damaged = sums.exists() and sums.read_bytes() != f"{_sha256(content)}  state.json\n".encode()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({error}); start anew with --overwrite-output") from error
    if damaged:
        raise InputError(
            f"{path}: damaged, it does not have the checksum that it was written with; start anew with "
            "--overwrite-output"
        )
    return state


def prove(folder: ModelFolder, commit: Commit) -> None:
    """Reads all that going on from a commit needs, a block at a time.

    Raises:
        InputError: as :func:`load_saved`.
    """
    state = load_state(folder, commit)
    for path in _tensor_files(folder, commit, state):
        check_vocabulary(check_tensors(path), state.vocabulary, path)


def _tensor_files(folder: ModelFolder, commit: Commit, state: TrainingState) -> tuple[Path, Path]:
    """The parameters and the optimizer's tensors of a commit."""
    home = folder.state(commit)
    beside = home / "params.safetensors"
    parameters = folder.parameters(state.parameters_from) if commit.is_checkpoint else beside
    return parameters, home / "optimizer.safetensors"


def load_saved(folder: ModelFolder, commit: Commit) -> Saved:
    """Everything of a commit.

    Raises:
        InputError: if a file is absent, broken, or of another model's vocabulary.
    """
    state = load_state(folder, commit)
    parameters_path, optimizer_path = _tensor_files(folder, commit, state)
    parameters, metadata = read_tensors(parameters_path)
    optimizer, optimizer_metadata = read_tensors(optimizer_path)
    for found, path in ((metadata, parameters_path), (optimizer_metadata, optimizer_path)):
        check_vocabulary(found, state.vocabulary, path)
    carried = {
        name.removeprefix(_CARRIED): optimizer.pop(name)
        for name in list(optimizer)
        if name.startswith(_CARRIED)
    }
    return Saved(state, parameters, optimizer, optimizer_metadata.get("optimizer", ""), carried)


def check_vocabulary(metadata: Mapping[str, str], expected: str, path: Path) -> None:
    """Raises InputError if a file's parameters were learnt with another vocabulary."""
    if metadata.get("vocabulary") != expected:
        raise InputError(
            f"{path}: its vocabulary is another one (fingerprint {metadata.get('vocabulary', 'none')[:12]}, here "
            f"{expected[:12]}); put back the vocabulary files that it was trained with"
        )


def load_parameters(model: torch.nn.Module, tensors: Mapping[str, Tensor], where: Path | str) -> None:
    """Copies tensors into a model's parameters.

    Raises:
        InputError: naming the file and the first parameter that is missing, unknown, or of another shape or type.
    """
    parameters = named_parameters(model)
    for name in [*parameters, *tensors]:
        if name not in tensors or name not in parameters:
            state = "has no parameter" if name not in tensors else "has a parameter unknown to the model,"
            raise InputError(
                f"{where}: {state} '{name}'; it belongs to another model than the recipe describes"
            )
        if tensors[name].shape != parameters[name].shape:
            raise InputError(
                f"{where}: parameter '{name}' has shape {tuple(tensors[name].shape)}, the recipe's model "
                f"{tuple(parameters[name].shape)}; it belongs to another model than the recipe describes"
            )
        if tensors[name].dtype != parameters[name].dtype:
            raise InputError(
                f"{where}: parameter '{name}' has type {_type_name(tensors[name])}, the recipe's model "
                f"{_type_name(parameters[name])}; the file is damaged or of another program: use another checkpoint"
            )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])


def load_model(
    folder: Path | str, which: str | int | Path = "best", device: torch.device | str = "cpu"
) -> LoadedModel:
    """A trained translation model from its folder.

    Args: as for :func:`load_task`.

    Raises:
        InputError: as :func:`load_task`, or the folder holds a language model.
    """
    model, vocabularies, task, stored = load_task(folder, which, device)
    if not isinstance(model, TranslationModel):
        raise InputError(
            f"{folder}: holds a language model, which does not translate; give it to econmt score or econmt generate"
        )
    return LoadedModel(model, vocabularies, task.recipe, stored)


def load_task(
    folder: Path | str, which: str | int | Path = "best", device: torch.device | str = "cpu"
) -> LoadedTask:
    """A trained model of any task from its folder.

    Args:
        folder: a model folder, or a lean export of one.
        which: "best", "last", the update of a checkpoint, or the path of a parameter file.
        device: where the parameters go.

    Raises:
        InputError: naming the file, if something is absent, broken, or does not belong together.
    """
    home = ModelFolder(folder)
    if not home.path.is_dir():
        raise InputError(f"{home.path}: no such model folder; give the folder that econmt train wrote")
    if not home.recipe.is_file():
        raise InputError(f"{home.path}: no recipe.yaml, so not a model folder; give what econmt train wrote")
    recipe = read_recipe(home.recipe)
    path = parameter_file(home, which)
    kept, metadata = read_tensors(path)
    tensors = restored(kept, path)
    check_vocabulary(metadata, fingerprint(home.path), path)
    check_model(metadata, recipe.model, path)
    vocabularies = load_vocabularies(home.path)
    with _Undrawn():
        task = TASKS[recipe.task](recipe, vocabularies)
        model = task.build_model()
    load_parameters(model, tensors, path)
    return LoadedTask(model.to(device).eval(), vocabularies, task, metadata.get("quantized", ""))


class _Undrawn(TorchFunctionMode):
    """Leaves parameters without first values while a model is made that gets other values at once.

    Drawing them takes half of the time of loading. A model without memory (device "meta") would need none either, but
    its first operation makes torch import half of its compiler, which takes seconds.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        drawing = func in (torch.Tensor.uniform_, torch.Tensor.normal_)
        if drawing or getattr(func, "__module__", "") == "torch.nn.init":
            return args[0] if args else named["tensor"]
        if func is torch.linalg.qr:  # what an orthogonal matrix is made of
            return args[0], args[0]
        return func(*args, **named)


def parameter_file(folder: ModelFolder, which: str | int | Path) -> Path:
    """The parameter file that "best", "last", an update or a path means.

    Raises:
        InputError: if there is none.
    """
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
        raise InputError(f"checkpoint '{str(which)[:40]}': give best, last or the number of an update")
    if path is None or not path.exists():
        held = ", ".join(str(update) for update in sorted(numbered)) or "none"
        raise InputError(f"{folder.path}: no checkpoint '{which}' (checkpoints of updates: {held})")
    return path


def check_model(
    metadata: Mapping[str, str],
    model: Model | LanguageModelSection,
    path: Path,
    advice: str = "put back the recipe.yaml that it was trained with",
    may_differ: Collection[str] = ("dropout", "initialization"),
) -> None:
    """Raises InputError if a file's parameters belong to another kind of model; some keys may differ."""
    theirs = _description(type(model), metadata, path)
    ours = model.model_dump(mode="json")
    for key in sorted(set(ours) & set(theirs) - set(may_differ)):
        if ours[key] != theirs[key]:
            raise InputError(
                f"{path}: was trained with model.{key} {_short(theirs[key])}, the recipe says {_short(ours[key])}; "
                f"{advice}"
            )


def _description(
    kind: type[Model | LanguageModelSection], metadata: Mapping[str, str], path: Path
) -> dict[str, Any]:
    """The model that a file describes; what recipes did not know yet when it was written has its default."""
    found = model_description(metadata, path)
    known = {key: value for key, value in found.items() if key in kind.model_fields}
    try:
        whole = kind.model_validate(known).model_dump(mode="json")
    except ValidationError:  # of a model that this version does not know: compared as it is
        return found
    return {key: whole[key] for key in known}


@contextlib.contextmanager
def saving(folder: ModelFolder, update: int, last: int) -> Iterator[None]:
    """Turns a failure to write into one line that says what is whole.

    Raises:
        TrainingError: naming the update and the last good checkpoint.
    """
    try:
        yield
    except (OSError, SafetensorError, InputError) as error:
        good = f"the checkpoint of update {last} is whole" if last else "there is no earlier one"
        if isinstance(error, InputError):
            raise TrainingError(
                f"{folder.path}: the checkpoint of update {update} cannot be read back ({error}); {good}: look to the "
                "disk, and run the same command again to go on"
            ) from error
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise TrainingError(
            f"{folder.path}: cannot save the checkpoint of update {update} ({reason}); {good}: free some space and run "
            "the same command again to go on"
        ) from error


def _type_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _short(value: Any) -> str:
    return json.dumps(value) if not isinstance(value, str) else value
