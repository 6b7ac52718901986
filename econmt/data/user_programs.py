"""Programs of the user, such as teachers and validation hooks: they get lines and write lines.

A program runs in a session of its own, which ends with the ``with`` block and with this process, for whatever reason:
SIGTERM, SIGHUP and SIGKILL included. Its end counts, not that of its standard output, which programs that it has
started may still hold. What it writes is bounded.
"""

from __future__ import annotations

import os
import selectors
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress

from econmt.config import limits
from econmt.data import program_supervisor
from econmt.errors import EconmtError, InputError

_POLL = 0.2
"""Seconds between two calls of a function that may stop a program."""
_BLOCK = 1 << 20
"""Bytes read at a time: no fewer than a pipe holds."""
_GROWTH = 16
"""Bytes that a program may write for each that it gets, beside one line of any length."""
_KEPT = 4096
"""Bytes kept of standard error."""


class ProgramError(EconmtError):
    """A program could not be started, or wrote too much; the message continues the program's name."""


def program_words(option: str, command: str) -> list[str]:
    """Divides the command line of a program as a shell does.

    Raises:
        InputError: There is no such program; the message names the ``option`` that gives it.
    """
    shown = f"{option} {command:.200}"
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise InputError(f"{shown}: {error}; quote its arguments as in a shell") from None
    if not words or shutil.which(words[0]) is None:
        raise InputError(f"{shown}: no such program; give one that can be executed, with its arguments")
    return words


@contextmanager
def start_program(
    words: Sequence[str],
    lines: Iterable[str],
    environment: Mapping[str, str] | None = None,
    *,
    keep_errors: bool = False,
) -> Iterator[UserProgram]:
    """Starts a program, without a shell, and ends it with the ``with`` block.

    Args:
        words: The program and its arguments. lines: Its standard input.
        environment: Variables of its environment beside those of this process.
        keep_errors: True to keep the end of what it writes on standard error.

    Raises:
        ProgramError: No process could be started.
    """
    with ExitStack() as resources:
        text = resources.enter_context(tempfile.TemporaryFile())
        size = sum(text.write(f"{line}\n".encode()) for line in lines)
        text.seek(0)
        (alive, ours), (told, status) = os.pipe(), os.pipe()
        resources.callback(os.close, ours)
        resources.callback(os.close, told)
        try:
            process = subprocess.Popen(  # noqa: S603  the user's own program
                [sys.executable, "-I", "-S", program_supervisor.__file__, str(alive), str(status), *words],
                stdin=text,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE if keep_errors else None,
                env={**os.environ, **(environment or {})},
                pass_fds=(alive, status),
                start_new_session=True,
            )
        except OSError as error:
            raise ProgramError(f"cannot be started: {error.strerror}") from None
        finally:
            os.close(alive)
            os.close(status)
        resources.enter_context(process)
        resources.callback(_kill_session, process)
        yield UserProgram(process, told, size)


def _kill_session(process: subprocess.Popen[bytes]) -> None:
    """Kills all processes of a session whose first one has not been waited for, so that its id is not used again."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


class UserProgram:
    """Running program of :func:`start_program`.

    Attributes:
        code: Exit code, once all of its output is read; negative: number of the signal that ended it.
    """

    def __init__(self, process: subprocess.Popen[bytes], status: int, input_bytes: int) -> None:
        self.code = 0
        self._process, self._status, self._input_bytes = process, status, input_bytes
        self._errors = b""

    @property
    def complaint(self) -> str:
        """Last line that the program wrote on standard error; empty if there is none or it is not kept."""
        lines = self._errors.decode("utf-8", "replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def output(self, stop: Callable[[], bool] | None = None) -> Iterator[bytes]:
        """Yields the lines that the program writes, without line ends, until it ends; then :attr:`code` is known.

        Args:
            stop: Called a few times a second; returns True to stop the program.

        Raises:
            ProgramError: The program could not be started, or writes more than any that does what it should.
            InterruptedError: ``stop`` has returned True.
        """
        rest, size = bytearray(), 0
        most = limits.LINE_BYTES + _GROWTH * self._input_bytes
        for piece in self._pieces(stop):
            size += len(piece)
            if size > most:
                raise ProgramError(f"wrote more than {most:,} bytes for {self._input_bytes:,}")
            whole, end, begun = piece.rpartition(b"\n")
            if end:
                yield from bytes(rest + whole).split(b"\n")
                rest.clear()
            rest += begun
            if len(rest) >= limits.LINE_BYTES:
                raise ProgramError(f"wrote a line of {len(rest):,} bytes or more")
        if rest:
            yield bytes(rest)

    def _pieces(self, stop: Callable[[], bool] | None) -> Iterator[bytes]:
        """Yields standard output as it comes; keeps the end of standard error."""
        output = self._process.stdout
        assert output is not None
        with selectors.DefaultSelector() as selector:
            for stream in filter(None, (output, self._process.stderr)):
                os.set_blocking(stream.fileno(), False)
                selector.register(stream.fileno(), selectors.EVENT_READ)
            selector.register(self._status, selectors.EVENT_READ)
            ended = False
            while not ended:
                ready = {key.fd for key, _ in selector.select(None if stop is None else _POLL)}
                if stop is not None and stop():
                    raise InterruptedError
                ended = self._status in ready
                if ended:
                    self._read_status()
                    _kill_session(self._process)
                    ready = {key.fd for key in selector.get_map().values()}  # what was written before the end
                # Standard error first: the caller may stop at a line of the output.
                for descriptor in sorted(ready - {self._status}, key=output.fileno().__eq__):
                    try:
                        piece = os.read(descriptor, _BLOCK)
                    except BlockingIOError:
                        continue
                    if not piece:
                        selector.unregister(descriptor)
                    elif descriptor == output.fileno():
                        yield piece
                    else:
                        self._errors = (self._errors + piece)[-_KEPT:]

    def _read_status(self) -> None:
        told = os.read(self._status, _KEPT).decode()
        if told and not told.removeprefix("-").isdecimal():
            raise ProgramError(told)
        self.code = int(told or -signal.SIGKILL)  # a supervisor that was killed itself tells nothing
