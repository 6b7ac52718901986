"""Session of a benchmark: its device, threads and files, and the rows that it keeps, prints and draws."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from econmt.api.commands import warn_of_slowness
from econmt.bench.rows import Row, Say, append_csv, circumstances, csv_text, draw, read_csv, table
from econmt.config import limits
from econmt.data.progress_bars import status_line
from econmt.engine.devices import reproducible, resolve_device
from econmt.options.option_groups import option
from econmt.options.shared_options import AllCoresOption, DeviceOption, check_picture, check_writable
from econmt_memory.report.layout import print_table, table_console

Seconds = Annotated[float, Field(ge=0.0, le=limits.SECONDS)]


@dataclass
class BenchSession:
    """Device and threads of a benchmark, and the files that it writes; InputError names one that cannot be used."""

    device_name: DeviceOption = "auto"
    threads: AllCoresOption = None
    csv: Path | None = option(None, help="CSV file to append the rows to, with machine, versions and date.")
    plot: Path | None = option(None, help="Picture to draw the rows in.")

    def __post_init__(self) -> None:
        check_writable(self.csv)
        check_picture(self.plot)
        self.device = resolve_device(self.device_name)
        self.interrupted = False
        self.conditions: Row = {}

    @contextmanager
    def measuring(self) -> Iterator[Say]:
        """Context for measuring with reproducible settings; yields a function that shows the progress."""
        with reproducible(self.device, self.threads), status_line() as say:
            if self.device.type == "cpu":
                warn_of_slowness()
            yield say

    def kept(self, rows: Iterable[Row]) -> list[Row]:
        """Collects rows, and appends each to the CSV file; after Ctrl-C returns those measured so far."""
        self.conditions = fixed = circumstances(self.device)
        if self.csv is not None:
            read_csv(self.csv)
        kept: list[Row] = []
        try:
            for row in rows:
                kept.append(row)
                if self.csv is not None:
                    append_csv(self.csv, [row], fixed)
        except KeyboardInterrupt:
            if not kept:
                raise
            print("econmt bench: interrupted; the results so far follow", file=sys.stderr)
            self.interrupted = True
        return kept

    def results(self, rows: Sequence[Row], columns: Iterable[str], title: str) -> None:
        """Prints rows on standard output, on a terminal some columns as a table, else whole as CSV.

        Then raises KeyboardInterrupt if :meth:`kept` was interrupted.
        """
        if sys.stdout.isatty():
            print_table(table_console(), table(rows, columns, title))
        elif rows:
            sys.stdout.write(csv_text([{**row, **self.conditions} for row in rows]))
        if self.interrupted:
            raise KeyboardInterrupt

    def draw(self, rows: Sequence[Row], *, label: Sequence[str], value: str, title: str) -> None:
        """Draws rows by :func:`econmt.bench.rows.draw`, if a picture is given."""
        if self.plot is not None:
            draw(rows, self.plot, label=label, value=value, title=title)
