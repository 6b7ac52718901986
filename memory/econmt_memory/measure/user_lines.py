"""Lines of the user's program that are running, found without the cost of a traceback."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from types import CodeType, FrameType

import torch

LARGE = 1 << 16
"""Smallest storage, in bytes, whose line is found."""

_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), contextlib.__file__)

_is_library: dict[CodeType, bool] = {}
"""True for functions of PyTorch and of the account, by code."""


def user_line() -> str:
    """Returns the innermost running line that is not PyTorch's, "file:number in function"; empty if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        library = _is_library.get(code)
        if library is None:
            library = _is_library[code] = code.co_filename.startswith(("<", *_LIBRARIES))
        if not library:
            return f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"
        frame = frame.f_back
    return ""
