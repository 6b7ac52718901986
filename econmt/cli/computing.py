"""What verbs that compute have in common: the models that options name, and how many threads compute."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from econmt.api import TrainedModel, load
from econmt.cli.options import ProductPrecision
from econmt.data.files import notice
from econmt.engine.devices import give_back_library_pages
from econmt.engine.threads import crowded


def load_models(
    models: Sequence[Path],
    checkpoints: Sequence[str] | None,
    device: str,
    precision: ProductPrecision,
    threads: int | None,
) -> TrainedModel:
    """The models that options name, as :func:`econmt.api.load` loads them, with as many threads as are fastest."""
    loaded = load(
        list(models),
        checkpoints or "best",
        device=device,
        precision=precision.value,
        threads=threads or "auto",
    )
    if loaded.device.type == "cpu":
        warn_of_crowd()
        give_back_library_pages()
    return loaded


def use_threads(threads: int | None) -> None:
    """Computes with as many threads as an option says, if it says so."""
    if threads is not None:
        torch.set_num_threads(threads)
        warn_of_crowd()


def warn_of_crowd() -> None:
    """Says on standard error if the threads that compute will wait for cores."""
    line = crowded(torch.get_num_threads())
    if line is not None:
        notice(f"warning: {line}")
