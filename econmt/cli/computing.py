"""Shared by commands that compute: loading models, threads, and lines of text that are read and written."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import torch

from econmt.api import TrainedModel, load
from econmt.api.language_model import refuse_language_model
from econmt.cli.options import Computing, check_not_of_model, check_writable
from econmt.data.files import notice
from econmt.data.progress_bars import counting, seen, status_line
from econmt.data.text.corpus import count_lines, read_lines
from econmt.decoding.streams import LineOutput, read_chunks, standard_input
from econmt.engine.devices import give_back_library_pages
from econmt.engine.threads import crowded, missing_library
from econmt.errors import InputError


def load_models(
    models: Sequence[Path], computing: Computing, checkpoints: Sequence[str] | None = None
) -> TrainedModel:
    """Loads translation models as :func:`load_any` does.

    Raises:
        InputError: the model is a language model.
    """
    loaded = load_any(models, computing, checkpoints)
    refuse_language_model(loaded, models[0])
    return loaded


def load_any(
    models: Sequence[Path], computing: Computing, checkpoints: Sequence[str] | None = None
) -> TrainedModel:
    """Loads models as :func:`econmt.api.load` does, with the fastest number of threads unless one is given."""
    with status_line() as say:
        say(f"loading {', '.join(map(str, models))}")
        loaded = load(
            list(models),
            checkpoints or "best",
            device=computing.device,
            precision=computing.precision,
            threads=computing.threads or "auto",
        )
    if loaded.device.type == "cpu":
        warn_of_slowness()
        give_back_library_pages()
    return loaded


def line_output(output: Path | None, inputs: Sequence[Path | None], models: Sequence[Path]) -> LineOutput:
    """Opens a file, or standard output if it is None, for lines.

    Raises:
        InputError: the file cannot be written, is one of the inputs, belongs to one of the models, or ends in .gz.
    """
    if output is not None and output.suffix == ".gz":
        raise InputError(f"{output}: lines are written without compression; leave out .gz")
    check_writable(output)
    check_not_of_model(output, models)
    return LineOutput(output, inputs)


def line_chunks(path: Path | None, size: int) -> Iterator[list[str]]:
    """Yields lines of a file, or of standard input, which may pause; at most ``size`` at a time."""
    if path is None:
        yield from read_chunks(standard_input(), size)
        return
    lines = read_lines(path)
    while chunk := list(islice(lines, size)):
        yield chunk


@contextmanager
def counting_lines(
    title: str, path: Path | None, unit: str, output: LineOutput, *, at_end: bool = False
) -> Iterator[Callable[[int], None]]:
    """Yields a function to call with the number of further lines that are done, for a progress bar.

    The bar is shown on a terminal, unless the output or a person who types the input (``path`` is None) is there too.
    With ``at_end`` the output comes only at the end, so that it does not show how far the work is.
    """
    typed = path is None and sys.stdin is not None and sys.stdin.isatty()
    show = not typed and (at_end or (seen() and not output.is_seen))
    total = count_lines(path) if show and path is not None else None
    with counting(title, total, unit, show=show) as done:
        yield done


def use_threads(threads: int | None) -> None:
    """Sets the number of CPU threads, unless it is None."""
    if threads is not None:
        torch.set_num_threads(threads)
        warn_of_slowness()


def warn_of_slowness() -> None:
    """Warns if there are more threads than free cores, or if the C library is missing."""
    line = crowded(torch.get_num_threads())
    if line is not None:
        notice(f"warning: {line}")
    _warn_of_library()


@functools.cache  # once in a process
def _warn_of_library() -> None:
    line = missing_library()
    if line is not None:
        notice(f"warning: {line}")
