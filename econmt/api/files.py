"""Text that is read line by line, and files and folders that are written whole or not at all.

A program that is started again learns by :func:`describe` and :func:`is_as_described` which of its inputs have changed
since.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from econmt.checkpoint.folder import ModelFolder
from econmt.data.files import describe as describe
from econmt.data.files import is_as_described as is_as_described
from econmt.data.files import whole_folder as whole_folder
from econmt.data.files import write_atomically as write_atomically
from econmt.data.files import writing
from econmt.data.text.corpus import count_lines as count_lines
from econmt.data.text.corpus import decode_line as decode_line
from econmt.data.text.corpus import read_lines as read_lines


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Creates a folder if there is none, and locks it for this process until the ``with`` block or the process ends.

    Raises:
        InputError: if it cannot be created, or another process has locked it.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with ModelFolder(folder).locked():
        yield
