"""The table: one row a toolkit, with the middle of its rounds."""

from __future__ import annotations

import csv
import dataclasses
import os
import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .measure import Window


@dataclasses.dataclass
class Row:
    """What was measured of one toolkit; lists have one entry a round, peaks one more of the longer run before.

    Attributes:
        output_words: words in the translations, pieces put together, which says how long they are.
        failure: why there are no figures.
    """

    name: str
    version: str
    differs: str
    windows: list[Window] = dataclasses.field(default_factory=list)
    peaks: list[int] = dataclasses.field(default_factory=list)
    translations: list[float] = dataclasses.field(default_factory=list)
    output_words: int = 0
    failure: str | None = None

    @property
    def tokens_per_second(self) -> float:
        """Median over the rounds."""
        return statistics.median(window.tokens_per_second for window in self.windows)

    @property
    def seconds_to_translate(self) -> float:
        """Median over the rounds."""
        return statistics.median(self.translations)

    @property
    def peak_bytes(self) -> int:
        """The largest of all runs: which batches come in a short run is chance."""
        return max(self.peaks)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            **dataclasses.asdict(self),
            "windows": [window._asdict() for window in self.windows],
        }


def cells(row: Row) -> list[str]:
    """A row of the table as text."""
    if row.failure is not None:
        return [row.name, row.version, "failed", "", "", "", "", row.failure]
    speeds = sorted(round(window.tokens_per_second) for window in row.windows)
    spread = f" ({speeds[0]:,} to {speeds[-1]:,})" if len(speeds) > 1 else ""
    return [
        row.name,
        row.version,
        f"{row.tokens_per_second:,.0f}{spread}",
        f"{row.peak_bytes / 1e6:,.0f} MB",
        f"{row.seconds_to_translate:.1f}",
        f"{row.output_words:,}",
        f"{row.output_words / row.seconds_to_translate:,.0f}",
        row.differs,
    ]


HEAD = (
    "toolkit",
    "version",
    "target tokens/s",
    "peak memory",
    "200 sentences, s",
    "words out",
    "words/s",
    "what differs",
)


def markdown(rows: Sequence[Row], about: Mapping[str, Any], rounds: int, seconds: float) -> str:
    """The table and where its figures are from."""
    lines = [
        f"{about['cpu']}, {about['cores']} cores, {about['memory_gb']} GB, {about['threads']} threads a toolkit; "
        f"{about['date']}, commit {about['commit']}; {rounds} rounds of {seconds:.0f} s, load {about['load']} before.",
        "",
        "| " + " | ".join(HEAD) + " |",
        "|" + "---|" * len(HEAD),
    ]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in cells(row)) + " |" for row in rows]
    return "\n".join(lines)


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """The medians, one line a toolkit; empty where it failed."""
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(
            [
                "toolkit",
                "version",
                "target_tokens_per_second",
                "peak_memory_bytes",
                "translation_seconds",
                "translated_words",
                "failure",
            ]
        )
        for row in rows:
            figures: list[object] = ["", "", "", ""]
            if row.failure is None:
                figures = [
                    round(row.tokens_per_second, 1),
                    row.peak_bytes,
                    round(row.seconds_to_translate, 2),
                    row.output_words,
                ]
            writer.writerow([row.name, row.version, *figures, row.failure or ""])


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "cpu": _first_value(Path("/proc/cpuinfo"), "model name") or platform.machine(),
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "load": round(os.getloadavg()[0], 1),
        "date": time.strftime("%Y-%m-%d"),
    }


def _first_value(path: Path, key: str) -> str | None:
    if not path.is_file():
        return None
    for line in path.read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return None
