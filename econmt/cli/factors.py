"""Files of source factors of the text that is translated or scored."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from econmt.data.text.corpus import read_lines
from econmt.decoding.requests import Request
from econmt.errors import InputError

FactorsOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--input-factors",
        help="File of source factors, also .gz, for models that read them: a token for each word of each line; once "
        "for each stream.",
    ),
]
SourceFactorsOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--source-factors",
        help="File of source factors, also .gz, for models that read them; once for each stream.",
    ),
]


class FactorFiles:
    """Reader of source factors, line by line with the text.

    Args:
        files: a file for each stream; None: no files are given.
        streams: names of the streams in the model's recipe.
        option: option that names the files.
        json_input: True if the lines are JSON objects with their own factors.

    Raises:
        InputError: the number of files is not the number of streams.
    """

    def __init__(
        self,
        files: Sequence[Path] | None,
        streams: Sequence[str],
        *,
        option: str = "--input-factors",
        json_input: bool = False,
    ) -> None:
        files = files or ()
        if json_input and files:
            raise InputError(
                f'{option}: lines of --json-input have their own "factors"; leave out one of them'
            )
        if not json_input and len(files) != len(streams):
            wanted = f"source factors ({', '.join(streams)})" if streams else "no source factors"
            advice = f"give {option} FILE for each of them" if streams else f"leave {option} out"
            raise InputError(
                f"the model expects {wanted}, and the number of files given is {len(files)}; {advice}"
            )
        self.names = [str(path) for path in files]
        self._lines = [read_lines(path) for path in files]
        self._count = 0

    def add_to(self, requests: Sequence[Request], where: str) -> list[Request]:
        """Returns requests with their factors from the next lines of the files; ``where`` must have no more lines."""
        if not self._lines:
            return list(requests)
        columns = [list(islice(lines, len(requests))) for lines in self._lines]
        for name, column in zip(self.names, columns, strict=True):
            if len(column) < len(requests):
                raise InputError(
                    f"{name} has {self._count + len(column):,} lines, and {where} has more; line n of one must hold "
                    "the source factors of line n of the other"
                )
        self._count += len(requests)
        return [
            request._replace(factors=row)
            for request, row in zip(requests, zip(*columns, strict=True), strict=True)
        ]

    def finish(self, where: str) -> None:
        """Raises InputError if a file has more lines than the text ``where``."""
        for name, lines in zip(self.names, self._lines, strict=True):
            if next(lines, None) is not None:
                raise InputError(
                    f"{name} has more than the {self._count:,} lines of {where}; line n of one must hold the source "
                    "factors of line n of the other"
                )
