"""Text, vocabulary and software that a run is trained with, which a resumed run compares with those it began with."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable

import torch

import econmt
from econmt.checkpoint.state import TrainingState
from econmt.data.batching.store import PreparedData
from econmt.data.files import whole_file
from econmt.data.text.subwords import vocabulary_files
from econmt.errors import InputError
from econmt.training.context import RunContext

_TEXT = (
    *(f"{split}.{kind}" for split in ("train", "valid") for kind in ("tokens", "index")),
    *("valid.source.txt", "valid.target.txt"),
)
"""Files of any prepared data that a run reads."""

_BESIDE = re.compile(r"train\.weights|(train|valid)_links\.(tokens|index)|valid\.factor\d+\.txt")
"""Files that it reads where the text has weights, alignments or factors; ids of training text include the factors."""


def environment_of(device: torch.device) -> dict[str, str]:
    """Returns versions, device and, if the CPU computes, the number of threads, all of which affect rounding."""
    environment = {"econmt": econmt.__version__, "torch": str(torch.__version__), "device": device.type}
    return {**environment, "threads": str(torch.get_num_threads())} if device.type == "cpu" else environment


def text_fingerprint(prepared: PreparedData) -> str:
    """Returns a fingerprint of all that training and validation read: ids, lengths, weights, alignments, raw lines."""
    return _checksum_of(prepared, (*_TEXT, *filter(_BESIDE.fullmatch, sorted(prepared.checksums))))


def _checksum_of(prepared: PreparedData, names: Iterable[str]) -> str:
    return hashlib.sha256("".join(prepared.checksums[name] for name in names).encode()).hexdigest()


def copy_vocabulary(context: RunContext) -> None:
    """Copies the vocabulary files into the model folder.

    Raises:
        InputError: A resumed run began with another vocabulary.
    """
    for source in vocabulary_files(context.prepared.folder):
        content, destination = source.read_bytes(), context.folder.path / source.name
        if destination.exists() and destination.read_bytes() == content:
            continue
        if context.start.commit is not None:
            raise InputError(
                f"{destination}: the run began with another vocabulary than the prepared text has ({source}); restore "
                "the text it began with, or start anew with --overwrite-output"
            )
        with whole_file(destination) as file:
            file.write(content)


def compare(context: RunContext, saved: TrainingState, current: TrainingState) -> list[str]:
    """Compares environment and text of a saved state with the current ones; returns messages about differences.

    Raises:
        InputError: The text has changed, and the user has not allowed changes.
    """
    notes = []
    before, now = saved.environment, current.environment
    changed = [
        f"{name} {now[name]} instead of {before[name]}"
        for name in now
        if before.get(name, now[name]) != now[name]
    ]
    if changed:
        notes.append(
            f"resuming with {', '.join(changed)}: parameters will differ by rounding from those of an unchanged run"
        )
    # Older states have the fingerprint of the text alone.
    if saved.text not in (current.text, _checksum_of(context.prepared, _TEXT)):
        if not context.start.with_changes:
            raise InputError(
                f"{context.folder.path}: the run began with other text (a training or validation file, or one beside "
                "it, has changed); restore it, resume nevertheless with --resume-with-changes, or start anew with "
                "--overwrite-output"
            )
        notes.append("resuming with changed text")
    return notes
