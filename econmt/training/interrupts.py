"""Handles SIGTERM and Ctrl-C: training finishes the current update, saves and stops."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from econmt.errors import EconmtError

_EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


class Interrupted(EconmtError):  # noqa: N818  not an error
    """Training stopped on request; everything is saved, and the message says how to resume."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Interrupts:
    """Records the first SIGTERM or Ctrl-C while active; a second one interrupts at once."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():  # Python requires the main thread
            for number in _EXIT_CODES:
                self._before[number] = signal.signal(number, self._receive)

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            # Otherwise the previous handler, called by ours, has set another one.
            if signal.getsignal(number) == self._receive:
                signal.signal(number, handler)
        self._before.clear()

    @property
    def pending(self) -> bool:
        """True if training should stop."""
        return self.received is not None

    @property
    def name(self) -> str:
        """Name of the signal in messages."""
        return "Ctrl-C" if self.received == signal.SIGINT else "SIGTERM"

    @property
    def exit_code(self) -> int:
        """Exit code that shells expect after the signal."""
        assert self.received is not None
        return _EXIT_CODES[self.received]

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            before = self._before[signal.SIGINT]
            if callable(before):
                before(number, frame)
            raise KeyboardInterrupt
        self.received = signal.Signals(number)
