"""Shared by commands that compute: loading the models that options name, and the number of threads."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from econmt.api import TrainedModel, load
from econmt.data.files import notice
from econmt.data.progress_bars import counting, seen, status_line
from econmt.data.text.corpus import count_lines
from econmt.decoding.streams import LineOutput
from econmt.engine.devices import give_back_library_pages
from econmt.engine.threads import crowded, missing_library


def load_models(
    models: Sequence[Path],
    checkpoints: Sequence[str] | None,
    device: str,
    precision: str,
    threads: int | None,
) -> TrainedModel:
    """The models that options name, as :func:`econmt.api.load` loads them, with as many threads as are fastest."""
    with status_line() as say:
        say(f"loading {', '.join(map(str, models))}")
        loaded = load(
            list(models),
            checkpoints or "best",
            device=device,
            precision=precision,
            threads=threads or "auto",
        )
    if loaded.device.type == "cpu":
        warn_of_slowness()
        give_back_library_pages()
    return loaded


@contextmanager
def counting_lines(
    title: str, path: Path | None, unit: str, output: LineOutput
) -> Iterator[Callable[[int], None]]:
    """A function that is told how many more lines of a file, or of standard input, are done.

    A bar on a terminal, but where the lines go to one themselves or somebody types them there.
    """
    typed = path is None and sys.stdin is not None and sys.stdin.isatty()
    show = seen() and not typed and not output.is_seen
    total = count_lines(path) if show and path is not None else None
    with counting(title, total, unit, show=show) as done:
        yield done


def use_threads(threads: int | None) -> None:
    """Computes with as many threads as an option says, if it says so."""
    if threads is not None:
        torch.set_num_threads(threads)
        warn_of_slowness()


def warn_of_slowness() -> None:
    """Says on standard error if the threads that compute will wait for cores, or if there is no C library."""
    line = crowded(torch.get_num_threads())
    if line is not None:
        notice(f"warning: {line}")
    _warn_of_library()


@functools.cache  # once in a process
def _warn_of_library() -> None:
    line = missing_library()
    if line is not None:
        notice(f"warning: {line}")
