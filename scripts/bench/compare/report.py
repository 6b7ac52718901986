"""Figures of the comparison: one row a toolkit, and its speed beside the fastest peer's."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from econmt.bench.rows import Row
from scripts.bench.frame import Ratio

from .measure import Mark, Window

BLOCKS = 4
"""Parts of a window that tell how much a ratio scatters."""


@dataclasses.dataclass
class Measured:
    """Figures of one toolkit.

    Attributes:
        name, version, precision: Toolkit, and precision of its products in training; "auto" if it chooses.
        peer: True if it is not econmt itself.
        window: Measured stretch of training.
        course: Lines of training that took turns; empty if it did not.
        peaks: Peaks of the measured run and of the longer run before, in bytes.
        translations: Seconds of each translation of the test text.
        output_words: Words in the translations, pieces put together, which says how long they are.
        rival, ratio: Fastest peer of the same precision, and the speed relative to it, once all are measured.
        failure: Reason for which there are no figures.
    """

    name: str
    version: str
    precision: str = "float32"
    peer: bool = True
    window: Window | None = None
    course: Sequence[Mark] = ()
    peaks: list[int] = dataclasses.field(default_factory=list)
    translations: list[float] = dataclasses.field(default_factory=list)
    output_words: int = 0
    rival: str = ""
    ratio: Ratio | None = None
    failure: str | None = None

    @property
    def speed(self) -> float:
        """Target tokens a second of training."""
        assert self.window is not None
        return self.window.tokens_per_second

    def row(self) -> Row:
        """Returns the row of the table."""
        row: dict[str, Any] = {"toolkit": self.name, "version": self.version, "precision": self.precision}
        if self.failure is not None:
            return row | {"failure": self.failure}
        seconds = statistics.median(self.translations)
        row |= {"target tokens/s": round(self.speed), "to the fastest peer": "", "peak MB": ""}
        if self.ratio is not None:
            row["to the fastest peer"] = f"{self.ratio} of {self.rival}"
        row["peak MB"] = round(max(self.peaks) / 1e6)  # of all runs, since short ones meet different batches
        words = {"words out": self.output_words, "words/s": round(self.output_words / seconds)}
        return row | {"sentences, s": f"{seconds:.2f}", **words}


def set_ratios(rows: Sequence[Measured]) -> None:
    """Sets the ratio of every row to the fastest peer of its precision.

    Without such a peer, and for a row that chooses its precision, it is the fastest of all peers, or of all rows.
    """
    measured = [row for row in rows if row.failure is None]
    peers = [row for row in measured if row.peer] or measured
    for row in measured:
        alike = [peer for peer in peers if peer.precision == row.precision] or peers
        fastest = max(alike, key=lambda peer: peer.speed)
        value = row.speed / fastest.speed
        parts = block_ratios(row.course, fastest.course) if row.course and fastest.course else [value]
        row.rival, row.ratio = fastest.name, Ratio(value, min(parts), max(parts))


def block_ratios(mine: Sequence[Mark], other: Sequence[Mark]) -> list[float]:
    """Returns the ratio of speeds in each of up to ``BLOCKS`` equal parts of the running time that both have.

    Both took turns of the same length, so the same seconds of running lie in the same cycles. Tokens between two lines
    are spread evenly; so there are no more parts than either has lines.
    """
    blocks = min(BLOCKS, len(mine) - 1, len(other) - 1)
    length = min(mine[-1].seconds, other[-1].seconds)
    edges = [length * number / blocks for number in range(blocks + 1)]
    tokens = [
        np.diff(np.interp(edges, [mark.seconds for mark in marks], [mark.tokens for mark in marks]))
        for marks in (mine, other)
    ]
    return [float(ratio) for ratio in tokens[0] / tokens[1]]
