"""Lines of the user's program that are running, found without the cost of a traceback."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import torch

LARGE = 1 << 16
"""Smallest storage, in bytes, whose line is found."""

_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), contextlib.__file__)

_is_library: dict[CodeType, bool] = {}
"""True for functions of PyTorch and of the account, by code."""


class UserLine(NamedTuple):
    """Line of a function."""

    file: str
    number: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.number} in {self.function}"


def user_line() -> UserLine | None:
    """Returns the innermost running line that is not PyTorch's; None if there is none, as in a thread of PyTorch."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        library = _is_library.get(code)
        if library is None:
            library = _is_library[code] = code.co_filename.startswith(("<", *_LIBRARIES))
        if not library:
            return UserLine(code.co_filename, frame.f_lineno, code.co_name)
        frame = frame.f_back
    return None
