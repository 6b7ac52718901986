"""What the verbs that measure share: options, devices and files, rows kept and printed, and what is being done."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NamedTuple, Optional

import torch
import typer
from rich.console import Console

from econmt.bench.sheet import Row, Say, append_csv, circumstances, draw, read_csv, table
from econmt.engine.devices import reproducible, resolve_device
from econmt.errors import InputError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Place(NamedTuple):
    """Where a command measures, with how many threads (None: as many as there are), and the files that it writes."""

    device: torch.device
    threads: int | None
    csv: Path | None
    plot: Path | None

    @contextmanager
    def measuring(self) -> Iterator[Say]:
        """The settings under which times count, and something that says on a terminal what is being done."""
        status = Console(stderr=True, highlight=False).status("")
        with reproducible(self.device, self.threads), status:
            yield lambda text: status.update(text)

    def kept(self, rows: Iterable[Row]) -> list[Row]:
        """The rows; each is in the file as soon as it is measured. After Ctrl-C, those that there are by then."""
        fixed = circumstances(self.device)
        if self.csv is not None:
            read_csv(self.csv)
        kept = _Kept()
        try:
            for row in rows:
                kept.append(row)
                if self.csv is not None:
                    append_csv(self.csv, [row], fixed)
        except KeyboardInterrupt:
            if not kept:
                raise
            print("econmt bench: interrupted; this is what was measured until then", file=sys.stderr)
            kept.interrupted = True
        return kept

    def rows_before(self, fixed: Row) -> list[dict[str, str]]:
        """Rows that the file has already, of this machine and these libraries, in which ``fixed`` holds."""
        if self.csv is None:
            return []
        same = ("processor", "gpu", "threads", "torch", "econmt_ops")
        here = circumstances(self.device)
        fixed = {**fixed, **{name: here[name] for name in same}}
        return [
            row
            for row in read_csv(self.csv)[1]
            if all(row.get(name, "") == str(value) for name, value in fixed.items())
        ]

    def draw(self, rows: Sequence[Row], *, label: Sequence[str], value: str, title: str) -> None:
        """See :func:`econmt.bench.sheet.draw`; nothing if no picture is wanted."""
        if self.plot is not None:
            draw(rows, self.plot, label=label, value=value, title=title)


class _Kept(list[Row]):
    """Rows, and whether measuring was interrupted after them."""

    interrupted = False


def measures(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command whose first parameter is a :class:`Place` the options --device, --threads, --csv and --plot.

    Files that cannot be written are refused before anything is measured.
    """

    def run(
        *,
        device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")] = "auto",
        threads: Annotated[
            Optional[int],  # noqa: UP045  typer reads it at run time, on Python 3.10 too
            typer.Option(
                "--threads", min=1, help="CPU threads; else as many as there are cores.", show_default=False
            ),
        ] = None,
        csv: Annotated[
            Optional[Path],  # noqa: UP045
            typer.Option(
                "--csv",
                help="Add the rows to this file, with machine, versions and date.",
                show_default=False,
            ),
        ] = None,
        plot: Annotated[
            Optional[Path],  # noqa: UP045
            typer.Option("--plot", help="Draw the rows into this PNG.", show_default=False),
        ] = None,
        **options: object,
    ) -> None:
        for path in (csv, plot):
            if path is not None and path.is_dir():
                raise InputError(f"{path}: a folder; give the name of a file")
            if path is not None and not path.parent.is_dir():
                raise InputError(f"{path.parent}: no such folder")
        command(Place(resolve_device(device), threads, csv, plot), **options)

    # typer makes the options from the signature: the command's own, then those above.
    _, *own = inspect.signature(command, eval_str=True).parameters.values()
    *added, _ = inspect.signature(run, eval_str=True).parameters.values()
    named = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in (*own, *added)]
    functools.update_wrapper(run, command)
    run.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in named}
    return run


def dtype(name: str) -> torch.dtype:
    """The type of this name; InputError if it is none."""
    if name not in _DTYPES:
        raise InputError(f"--dtype '{name}': give float32 or bfloat16")
    return _DTYPES[name]


def print_rows(rows: Sequence[Row], columns: Iterable[str], title: str) -> None:
    """Prints some columns of rows as a table; an interruption of :meth:`Place.kept` goes on after it."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=180)
    console.print(table(rows, columns, title))
    if isinstance(rows, _Kept) and rows.interrupted:
        raise KeyboardInterrupt
