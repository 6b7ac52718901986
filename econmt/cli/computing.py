"""Shared by commands that compute: threads, language models, and lines of text that are read and written."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import torch

from econmt.api.commands import load_any, warn_of_slowness
from econmt.api.language_model import TrainedLanguageModel
from econmt.checkpoint.folder import ModelFolder
from econmt.data.progress_bars import counting, seen
from econmt.data.text.corpus import count_lines, read_lines
from econmt.decoding.streams import LineOutput, read_chunks, standard_input
from econmt.decoding.text_reader import TextReader
from econmt.errors import InputError
from econmt.export.model_folder import recipe_of
from econmt.options.shared_options import FloatComputing, check_not_of_model, check_writable


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


def holds_language_model(models: Sequence[Path]) -> bool:
    """Returns True if the model is a language model; raises InputError if it is one of several models."""
    tasks = [recipe_of(ModelFolder(folder)).task for folder in models]
    if "language_model" not in tasks:
        return False
    if len(models) > 1:
        raise InputError(f"{models[1]}: language models cannot form an ensemble; give one model")
    return True


def load_reader(folder: Path, checkpoint: str, computing: FloatComputing) -> TextReader:
    """Loads the language model in a folder, as a reader at the beginning of a text."""
    loaded = load_any([folder], computing, [checkpoint])
    if not isinstance(loaded, TrainedLanguageModel):
        raise InputError(f"{folder}: holds a translation model; this takes a language model")
    return loaded.reader()
