"""Standard input, output and error in a known state, even if the caller has closed them."""

from __future__ import annotations

import io
import os
import sys
from typing import Any

from econmt.errors import InputError


class _ClosedOutput(io.TextIOBase):
    """Replacement of a standard output that the caller has closed; writing to it is an error."""

    encoding = "utf-8"

    def fileno(self) -> int:
        """Returns the file descriptor of the null device."""
        return 1

    def writable(self) -> bool:
        """Returns True; :meth:`write` raises the error."""
        return True

    def write(self, _: str) -> int:
        """Raises InputError."""
        raise InputError(
            "standard output is closed, so the results cannot be printed; leave it open, or give --output FILE where "
            "there is one"
        )


class _Results(io.FileIO):
    """Standard output, whose errors name it."""

    def write(self, data: Any) -> int:
        """Writes data; returns the number of bytes written."""
        try:
            return super().write(data) or 0
        except OSError as error:
            error.filename = "standard output"
            raise


class _Talk(io.FileIO):
    """Standard error, whose errors are ignored: messages that cannot be written must not end the command."""

    def write(self, data: Any) -> int:
        """Writes data; drops it if that fails."""
        try:
            return super().write(data) or 0
        except OSError:
            return len(memoryview(data))


def _is_descriptor(stream: Any, original: Any, number: int) -> bool:
    return stream is original and number == stream.fileno()


def open_standard_streams() -> None:
    """Opens closed standard streams, and sets their encoding to UTF-8 with plain newlines whatever the locale.

    The next files opened would get the descriptors 0 to 2 that the caller has closed, and messages or results would be
    written into them. Therefore these descriptors are opened on the null device, before any other file is opened.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
    if sys.stdout is None:
        sys.stdout = _ClosedOutput()
    elif _is_descriptor(sys.stdout, sys.__stdout__, 1):
        results = io.BufferedWriter(_Results(1, "wb", closefd=False))
        sys.stdout = io.TextIOWrapper(results, line_buffering=os.isatty(1))
    if sys.stderr is None or _is_descriptor(sys.stderr, sys.__stderr__, 2):
        sys.stderr = io.TextIOWrapper(io.BufferedWriter(_Talk(2, "wb", closefd=False)), line_buffering=True)
    # File names are written as the bytes they are, and no message fails because of its characters.
    for stream, errors in ((sys.stdout, "surrogateescape"), (sys.stderr, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", newline="\n", errors=errors)
