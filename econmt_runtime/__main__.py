"""``python -m econmt_runtime FOLDER``: translates standard input, a sentence a line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from econmt_runtime.errors import RuntimeInputError

if TYPE_CHECKING:
    from econmt_runtime.translator import Translator

_READ = 1 << 17
"""Bytes that are read at a time."""


def main(folder: str | None = None) -> int:
    """Runs the command line, of a ``folder`` or of the one that it names; returns the exit code."""
    # Read when numpy is loaded: batches take the threads, and a pool of its own would take memory.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    parser = argparse.ArgumentParser(description="Translate text, a sentence a line, without PyTorch.")
    if folder is None:
        parser.add_argument("folder", help="what econmt export --runtime wrote")
    parser.add_argument("-i", "--input", help="text file (default: standard input)")
    parser.add_argument("-b", "--beam-size", type=int, help="hypotheses kept (default: the recipe's)")
    parser.add_argument(
        "--shortlist",
        type=int,
        help="translations of a word from the lexicon; 0: none (default: all that it has)",
    )
    parser.add_argument("--threads", type=int, default=1, help="batches at the same time (default: 1)")
    parser.add_argument("--score", action="store_true", help="print score, tab, translation")
    given = parser.parse_args()
    from econmt_runtime.translator import load

    try:
        translator = load(
            folder or given.folder,
            beam_size=given.beam_size,
            shortlist=given.shortlist,
            threads=given.threads,
        )
        if given.input:
            with Path(given.input).open("rb") as stream:
                _translate(translator, stream.fileno(), given.score)
        else:
            _translate(translator, sys.stdin.fileno(), given.score)
    except BrokenPipeError:
        sys.stderr.close()
        return 0
    except (RuntimeInputError, OSError) as error:
        print(f"econmt_runtime: error: {error}", file=sys.stderr)
        return 2
    return 0


def _chunks(descriptor: int) -> Iterator[list[bytes]]:
    """The lines that are there whenever one is waited for, so that who writes one by one is answered at once."""
    rest = b""
    while data := os.read(descriptor, _READ):
        *lines, rest = (rest + data).split(b"\n")
        if lines:
            yield lines
    if rest:
        yield [rest]


def _translate(translator: Translator, descriptor: int, score: bool) -> None:
    number = 0
    for chunk in _chunks(descriptor):
        lines = []
        for raw in chunk:
            number += 1
            try:
                lines.append(raw.decode("utf-8").rstrip("\r"))
            except UnicodeDecodeError:
                raise RuntimeInputError(f"line {number}: not valid UTF-8; convert the text") from None
        for found in translator.translate(lines, number - len(lines) + 1):
            print(f"{found.score:.6f}\t{found.text}" if score else found.text)
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
