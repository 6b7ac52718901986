"""What a run says while it runs: a live line on a terminal, plain lines elsewhere, the log file and TensorBoard."""

from __future__ import annotations

import io
import math
import time
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text
from torch.utils.tensorboard import SummaryWriter

LOG_WIDTH = 160
"""Columns that a table may take in the log file."""


class Figures(NamedTuple):
    """What a progress line shows. Loss in nats a target token, memory in bytes, time left in seconds if known."""

    update: int
    epoch: int
    loss: float
    learning_rate: float
    gradient_norm: float
    tokens_per_second: float
    memory: int
    left: float | None

    def line(self) -> str:
        """The figures as one line."""
        parts = [
            f"update {self.update}",
            f"epoch {self.epoch + 1}",
            f"loss {self.loss:.4f}",
            f"perplexity {perplexity(self.loss):.2f}",
            f"learning rate {self.learning_rate:.3g}",
            f"gradient norm {self.gradient_norm:.3g}",
            f"{self.tokens_per_second:,.0f} target tokens/s",
            f"memory {self.memory / 1e6:,.0f} MB",
        ]
        if self.left is not None:
            parts.append(f"time left {duration(self.left)}")
        return "  ".join(parts)


def perplexity(loss: float) -> float:
    """exp of a loss in nats a token; infinite where that is more than a float holds."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def duration(seconds: float) -> str:
    """h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


class Progress:
    """Tells the terminal, the log file and TensorBoard how training goes.

    Args:
        log: file to which lines are appended, each with its time.
        tensorboard: folder of event files.
        console: where a person reads; a live line if it is a terminal, else lines.
        update: where the run begins; events of a killed run past it are hidden.
    """

    def __init__(self, log: Path, tensorboard: Path, console: Console, update: int) -> None:
        self._log = log
        self._folder = tensorboard
        self._console = console
        self._update = update
        self._live: Live | None = None

    def __enter__(self) -> None:
        self._writer = SummaryWriter(str(self._folder), purge_step=self._update + 1)
        if self._console.is_terminal:
            self._live = Live(console=self._console, transient=True, refresh_per_second=4)
            self._live.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        self._writer.close()

    def note(self, text: str) -> None:
        """One line for the person and the log file."""
        self._console.print(Text(text), soft_wrap=True)
        self.record(text)

    def show(self, table: Table) -> None:
        """A table for the person, and line by line for the log file."""
        self._console.print(table)
        plain = Console(width=LOG_WIDTH, file=io.StringIO())
        with plain.capture() as captured:
            plain.print(table)
        for line in captured.get().splitlines():
            self.record(line.rstrip())

    def record(self, text: str) -> None:
        """One line for the log file alone."""
        with self._log.open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")

    @property
    def is_live(self) -> bool:
        """Whether there is a terminal on which a line can live."""
        return self._live is not None

    def live(self, figures: Figures) -> None:
        """Shows how it stands, on a terminal."""
        if self._live is not None:
            self._live.update(Text(figures.line(), overflow="ellipsis", no_wrap=True))

    def updates(self, figures: Figures) -> None:
        """Logs a stretch of updates."""
        if self._live is not None:
            self.live(figures)
            self.record(figures.line())
        else:
            self.note(figures.line())
        scalars = {
            "train/loss": figures.loss,
            "train/learning_rate": figures.learning_rate,
            "train/gradient_norm": figures.gradient_norm,
            "train/target_tokens_per_second": figures.tokens_per_second,
            "train/memory_bytes": float(figures.memory),
        }
        self.scalars(scalars, figures.update)

    def scalars(self, values: dict[str, float], update: int) -> None:
        """Values for TensorBoard."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, update)
        self._writer.flush()
