"""Table of the comparison: one row a toolkit, with medians over the rounds."""

from __future__ import annotations

import csv
import dataclasses
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from econmt_ops.dispatch.measurements import processor

from .measure import Mark, Window

BLOCKS = 4
"""Parts of a round that tell how much a ratio scatters."""


class Ratio(NamedTuple):
    """Speed relative to the fastest peer of the same precision: over all rounds, least and most of their parts."""

    peer: str
    value: float
    least: float
    most: float


@dataclasses.dataclass
class Row:
    """Figures of one toolkit; lists have one entry a round, and peaks one more of the longer run before.

    Attributes:
        translations: seconds of each, several a round.
        output_words: words in the translations, pieces put together, which says how long they are.
        ratio: to the fastest peer of the same precision, once all are measured.
        failure: why there are no figures.
        peer: whether it is not econmt itself.
        courses: the lines of training that took turns; none if it did not.
        precision: of its products in training; "auto" if it chooses.
    """

    name: str
    version: str
    differs: str
    windows: list[Window] = dataclasses.field(default_factory=list)
    peaks: list[int] = dataclasses.field(default_factory=list)
    translations: list[float] = dataclasses.field(default_factory=list)
    output_words: int = 0
    ratio: Ratio | None = None
    failure: str | None = None
    peer: bool = True
    courses: list[list[Mark]] = dataclasses.field(default_factory=list)
    precision: str = "float32"

    @property
    def tokens_per_second(self) -> float:
        """Median tokens a second over the rounds."""
        return statistics.median(window.tokens_per_second for window in self.windows)

    @property
    def seconds_to_translate(self) -> float:
        """Median seconds over all translations."""
        return statistics.median(self.translations)

    @property
    def peak_bytes(self) -> int:
        """Largest peak of all runs, since short runs meet different batches."""
        return max(self.peaks)

    def as_dict(self) -> dict[str, Any]:
        """Returns the row for JSON."""
        return {
            **dataclasses.asdict(self),
            "windows": [window._asdict() for window in self.windows],
            "courses": [[mark._asdict() for mark in course] for course in self.courses],
            "ratio": None if self.ratio is None else self.ratio._asdict(),
        }


def set_ratios(rows: Sequence[Row]) -> None:
    """Sets the ratio of every row to the fastest peer of its precision.

    Without such a peer, and for a row that chooses its precision, it is the fastest of all peers, or of all rows.
    """
    measured = [row for row in rows if row.failure is None]
    peers = [row for row in measured if row.peer] or measured
    for row in measured:
        alike = [peer for peer in peers if peer.precision == row.precision] or peers
        fastest = max(alike, key=lambda peer: peer.tokens_per_second)
        rounds = [
            mine.tokens_per_second / other.tokens_per_second
            for mine, other in zip(row.windows, fastest.windows, strict=True)
        ]
        pairs = zip(row.courses, fastest.courses, strict=True)
        parts = [part for mine, other in pairs for part in block_ratios(mine, other)] or rounds
        row.ratio = Ratio(fastest.name, statistics.median(rounds), min(parts), max(parts))


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


def cells(row: Row) -> list[str]:
    """Returns a row of the table as text."""
    if row.failure is not None:
        return [row.name, row.version, row.precision, "failed", "", "", "", "", "", row.failure]
    speeds = sorted(round(window.tokens_per_second) for window in row.windows)
    ratio = "" if row.ratio is None else f"{row.ratio.value:.2f}"
    if row.ratio is not None and row.ratio.peer != row.name:
        ratio += f" ({row.ratio.least:.2f} to {row.ratio.most:.2f}) of {row.ratio.peer}"
    spread = f" ({speeds[0]:,} to {speeds[-1]:,})" if len(speeds) > 1 else ""
    return [
        row.name, row.version, row.precision, f"{row.tokens_per_second:,.0f}{spread}", ratio,
        f"{row.peak_bytes / 1e6:,.0f} MB", f"{row.seconds_to_translate:.1f}", f"{row.output_words:,}",
        f"{row.output_words / row.seconds_to_translate:,.0f}", row.differs,
    ]  # fmt: skip


HEAD = (
    "toolkit | version | precision | target tokens/s | to the fastest peer of this precision | peak memory | "
    "{pairs:,} sentences, s | words out | words/s | what differs"
)


def markdown(rows: Sequence[Row], about: Mapping[str, Any], measured: str) -> str:
    """Returns the table and a line about its conditions; ``measured`` says how it was measured."""
    lines = [
        f"{about['cpu']}, {about['cores']} cores, {about['memory_gb']} GB, {about['threads']} threads a toolkit; "
        f"{about['date']}, commit {about['commit']}; {measured}, load {about['load']} before.",
        "",
        f"| {HEAD.format(pairs=about['data']['test_pairs'])} |",
        "|" + "---|" * (HEAD.count("|") + 1),
    ]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in cells(row)) + " |" for row in rows]
    return "\n".join(lines)


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Writes the medians, a line for each toolkit; figures are empty where it failed."""
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream)
        figures = "target_tokens_per_second peak_memory_bytes translation_seconds translated_words"
        after = "failure", "ratio_to_fastest_peer", "fastest_peer"
        writer.writerow(["toolkit", "version", "precision", *figures.split(), *after])
        for row in rows:
            measured: list[object] = [""] * 4
            if row.failure is None:
                measured = [round(row.tokens_per_second, 1), row.peak_bytes]
                measured += [round(row.seconds_to_translate, 2), row.output_words]
            ratio = ("", "") if row.ratio is None else (round(row.ratio.value, 3), row.ratio.peer)
            writer.writerow([row.name, row.version, row.precision, *measured, row.failure or "", *ratio])


def machine() -> dict[str, Any]:
    """Describes the machine and its load."""
    return {
        "cpu": processor(),
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "load": round(os.getloadavg()[0], 1),
        "date": time.strftime("%Y-%m-%d"),
    }
