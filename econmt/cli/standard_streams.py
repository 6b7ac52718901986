"""Standard input, output and error as every verb can rely on them, whatever the caller has closed or filled."""

from __future__ import annotations

import io
import os
import sys
from typing import Any

from econmt.errors import InputError


class _ClosedOutput(io.TextIOBase):
    """Stands for a standard output that the caller has closed."""

    encoding = "utf-8"

    def fileno(self) -> int:
        """Returns the file descriptor of the null device."""
        return 1

    def writable(self) -> bool:
        """Results may be tried."""
        return True

    def write(self, _: str) -> int:
        """Refuses.

        Raises:
            InputError: always.
        """
        raise InputError(
            "standard output is closed, so the results cannot be printed; leave it open, or give --output FILE where "
            "there is one"
        )


class _Results(io.FileIO):
    """Standard output, named in its errors."""

    def write(self, data: Any) -> int:
        """Writes what the system takes of it."""
        try:
            return super().write(data) or 0
        except OSError as error:
            error.filename = "standard output"
            raise


class _Talk(io.FileIO):
    """Standard error: a line that nobody can read (a full disk, a reader that left) must not end the work."""

    def write(self, data: Any) -> int:
        """Writes what can be written; the rest is lost."""
        try:
            return super().write(data) or 0
        except OSError:
            return len(memoryview(data))


def _number(stream: Any) -> int:
    number: int = stream.fileno()
    return number


def open_standard_streams() -> None:
    """Opens what is closed, and makes text go out as UTF-8 with plain newlines whatever the locale.

    Descriptors 0 to 2 that the caller has closed would be given to the next files that are opened, and talk or results
    would land in them: they are opened on the null device. Nothing may have been opened before.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
    if sys.stdout is None:
        sys.stdout = _ClosedOutput()
    elif sys.stdout is sys.__stdout__ and _number(sys.stdout) == 1:
        results = io.BufferedWriter(_Results(1, "wb", closefd=False))
        sys.stdout = io.TextIOWrapper(results, line_buffering=os.isatty(1))
    if sys.stderr is None or (sys.stderr is sys.__stderr__ and _number(sys.stderr) == 2):
        sys.stderr = io.TextIOWrapper(io.BufferedWriter(_Talk(2, "wb", closefd=False)), line_buffering=True)
    # Names of files go out as the bytes they are; nothing that is to be read can fail to be written.
    for stream, errors in ((sys.stdout, "surrogateescape"), (sys.stderr, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", newline="\n", errors=errors)
