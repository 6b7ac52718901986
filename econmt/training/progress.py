"""Reports the progress of a run: a live line on a terminal or plain lines, the log file, and TensorBoard."""

from __future__ import annotations

import importlib
import io
import math
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from econmt import errors
from econmt.data.progress_bars import Heartbeat
from econmt.decoding.text_reader import perplexity_of
from econmt.errors import printable, talk
from econmt_memory.report.tables import WIDTH, print_table

BAR = range(4, 31)
"""Columns that the progress bar of a live line may take."""


class Figures(NamedTuple):
    """Figures of a progress line.

    Attributes:
        updates: Number of updates of the whole run, if known.
        loss: Loss in nats per target token.
        memory: Peak memory in bytes of the process on a CPU, of PyTorch's allocator on a GPU; see `peak_memory`.
        left: Remaining seconds, if known.
        device: "cpu" or "cuda", the type of device whose memory is shown.
        outside: Bytes of a GPU outside of PyTorch's allocator; 0 on a CPU.
        loss_scale: Loss scale of the last update; None in precisions other than float16.
        skipped: Number of updates so far that were skipped because gradients overflowed.
    """

    update: int
    epoch: int
    loss: float
    learning_rate: float
    gradient_norm: float
    tokens_per_second: float
    memory: int
    left: float | None
    updates: int | None = None
    device: str = "cpu"
    outside: int = 0
    loss_scale: float | None = None
    skipped: int = 0

    @property
    def memory_name(self) -> str:
        """Kind of memory, "process" or "GPU"; both differ from the ledger, which counts the tensors of a step."""
        return "process" if self.device == "cpu" else "GPU"

    def line(self, width: int | None = None) -> str:
        """Returns the figures as one line of at most ``width`` columns, if necessary without the least important."""
        left = [] if self.left is None else [f"{duration(self.left)} left"]
        first = [
            f"update {self.update}",
            f"loss {self.loss:.4f}",
            f"{self.tokens_per_second:,.0f} target tokens/s",
            f"{self.memory_name} peak {self._memory()}{' outside PyTorch' if self.outside else ''}",
            *left,
        ]
        if width is not None and len("  ".join(first)) > width:
            first[2:4] = self._short()
        return _filled(first, self._rest(), width)

    def live(self, width: int) -> Text:
        """Returns the figures as one line for a terminal, with a progress bar if the run's length is known."""
        done = f"{self.update:,}" if self.updates is None else f"{self.update:,}/{self.updates:,}"
        left = [] if self.left is None else [f"{duration(self.left)} left"]
        figures = [f"loss {self.loss:.3f}", *self._short(), *left]
        used = len("  ".join([done, *figures])) + 2
        if self.updates is None or width - used < BAR[0]:
            return Text(_filled([done, *figures], self._rest(), width), overflow="ellipsis", no_wrap=True)
        rest = _filled(figures, self._rest(), width - len(done) - BAR[0] - 4)
        size = min(BAR[-1], width - len(done) - len(rest) - 4)
        full = round(size * self.update / max(self.updates, 1))
        bar = [
            ("\N{BOX DRAWINGS HEAVY HORIZONTAL}" * full, "green"),
            ("\N{BOX DRAWINGS LIGHT HORIZONTAL}" * (size - full), "dim"),
        ]
        return Text.assemble(f"{done}  ", *bar, f"  {rest}", overflow="ellipsis", no_wrap=True)

    def _short(self) -> list[str]:
        return [f"{self.tokens_per_second:,.0f} tokens/s", f"{self.memory_name} {self._memory()}"]

    def _memory(self) -> str:
        """Returns the peak of the tensors in megabytes, and what is outside of PyTorch's allocator: 535 + 623 MB."""
        sizes = [self.memory, self.outside] if self.outside else [self.memory]
        return " + ".join(f"{size / 1e6:,.0f}" for size in sizes) + " MB"

    def _rest(self) -> list[str]:
        """Returns the figures that are shown if there is space, the most important first."""
        scale = "" if self.loss_scale is None else f"loss scale {self.loss_scale:g}, {self.skipped} skipped"
        return [
            *([scale] if scale else []),
            f"epoch {self.epoch + 1}",
            f"perplexity {perplexity_of(-self.loss):.2f}",
            f"learning rate {self.learning_rate:.3g}",
            f"gradient norm {self.gradient_norm:.3g}",
        ]


def _filled(parts: list[str], more: list[str], width: int | None) -> str:
    """Joins the parts of a line, and appends further ones as long as they fit."""
    line = "  ".join(parts)
    for part in more:
        if width is None or len(line) + 2 + len(part) <= width:
            line += f"  {part}"
    return line


def duration(seconds: float) -> str:
    """Formats seconds as h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


class Progress:
    """Reports progress on the terminal, in the log file and in TensorBoard.

    Args:
        log: File to which lines are appended, each with its time.
        tensorboard: Folder of event files; None: no events.
        console: Output for the user; a live line if it is a terminal, else plain lines.
        update: Update at which the run begins; later events of a killed run are hidden.
        heartbeat: Heartbeat that reports the current activity if nothing else is printed; need not beat.
    """

    def __init__(
        self,
        log: Path,
        tensorboard: Path | None,
        console: Console,
        update: int,
        heartbeat: Heartbeat | None = None,
    ) -> None:
        self._log = log
        self._folder = tensorboard
        self._console = console
        self._update = update
        self._heartbeat = Heartbeat(math.inf) if heartbeat is None else heartbeat
        self._live: Live | None = None
        self._writer: Any = None

    @classmethod
    def silent(cls) -> Progress:
        """Returns the progress of ranks other than rank 0, which report nothing."""
        return cls(Path(os.devnull), None, Console(file=io.StringIO(), quiet=True), 0)

    def __enter__(self) -> None:
        if self._folder is not None:
            # Imported here, since commands other than train do not need its five megabytes.
            tensorboard = importlib.import_module("torch.utils.tensorboard")
            self._writer = tensorboard.SummaryWriter(str(self._folder), purge_step=self._update + 1)
        if self._console.is_terminal:
            self._live = Live(console=self._console, transient=True, refresh_per_second=4)
            self._live.start()

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        if self._writer is not None:
            self._writer.close()

    def note(self, text: str) -> None:
        """Writes a line to the console and the log file."""
        self._console.print(Text(printable(text)), soft_wrap=not self._console.is_terminal)
        if errors.quiet and text.startswith("warning: "):
            talk(f"econmt: {printable(text)}")
        self._heartbeat.spoke()
        self.record(text)

    def doing(self, text: str) -> None:
        """Shows the current activity in the live line; without one, it is printed if it takes long."""
        if self._live is not None:
            self._live.update(Text(printable(text), overflow="ellipsis", no_wrap=True))
        self._heartbeat.say(text)

    def show(self, table: Table) -> None:
        """Prints a table on the console, and writes it line by line to the log file."""
        print_table(self._console, table)
        plain = io.StringIO()
        print_table(Console(width=WIDTH, file=plain), table)
        for line in plain.getvalue().splitlines():
            self.record(line.rstrip())

    def record(self, text: str) -> None:
        """Writes a line to the log file only."""
        with self._log.open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {printable(text)}\n")

    @property
    def is_live(self) -> bool:
        """True if a live line is shown on a terminal."""
        return self._live is not None

    def live(self, figures: Figures) -> None:
        """Updates the live line on a terminal."""
        if self._live is not None:
            self._live.update(figures.live(self._console.width))

    def updates(self, figures: Figures) -> None:
        """Reports the figures of the updates since the last report."""
        if self._live is not None:
            self.live(figures)
        else:
            self._console.print(Text(figures.line(WIDTH)), soft_wrap=True)
            self._heartbeat.spoke()
        self.record(figures.line())
        scalars = {
            "train/loss": figures.loss,
            "train/learning_rate": figures.learning_rate,
            "train/gradient_norm": figures.gradient_norm,
            "train/target_tokens_per_second": figures.tokens_per_second,
            f"train/{figures.memory_name.lower()}_peak_bytes": float(figures.memory),
        }
        if figures.outside:
            scalars["train/gpu_outside_bytes"] = float(figures.outside)
        if figures.loss_scale is not None:
            scalars |= {
                "train/loss_scale": figures.loss_scale,
                "train/skipped_updates": float(figures.skipped),
            }
        self.scalars(scalars, figures.update)

    def scalars(self, values: dict[str, float], update: int) -> None:
        """Writes values to TensorBoard."""
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(name, value, update)
            self._writer.flush()
