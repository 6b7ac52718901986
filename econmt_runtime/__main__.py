"""``python -m econmt_runtime FOLDER``: translates standard input, a sentence a line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from econmt_runtime.errors import RuntimeInputError

if TYPE_CHECKING:
    from econmt_runtime.translator import Translation, Translator

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
    parser.add_argument(
        "--nbest-size", type=int, default=1, help="translations of a line, as Moses lists them (default: 1)"
    )
    parser.add_argument("--score", action="store_true", help="print score, tab, translation")
    given = parser.parse_args()
    if given.score and given.nbest_size > 1:
        parser.error("--score is for one translation; lists of several have the scores")
    from econmt_runtime.translator import load

    try:
        translator = load(
            folder or given.folder,
            beam_size=given.beam_size,
            shortlist=given.shortlist,
            threads=given.threads,
            nbest_size=given.nbest_size,
            warn=lambda line: print(f"econmt_runtime: warning: {line}", file=sys.stderr),
        )
        show = _listed if given.nbest_size > 1 else _scored if given.score else _plain
        if given.input:
            with Path(given.input).open("rb") as stream:
                _translate(translator, stream.fileno(), show)
        else:
            _translate(translator, sys.stdin.fileno(), show)
    except BrokenPipeError:
        sys.stderr.close()
        return 0
    except KeyboardInterrupt:
        return 130
    except MemoryError:
        print("econmt_runtime: error: not enough memory; give a smaller --batch-size", file=sys.stderr)
        return 2
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


def _plain(found: Translation, _: int) -> str:
    return found.text


def _scored(found: Translation, _: int) -> str:
    return f"{found.score:.6f}\t{found.text}"


def _listed(found: Translation, number: int) -> str:
    """As econmt translate lists the n best: ``number ||| text ||| logprob= log-probability ||| score``, a line each."""
    return "\n".join(
        f"{number} ||| {each.text.replace('|||', '&#124;' * 3)} ||| logprob= {each.log_probability:.6f} ||| "
        f"{each.score:.6f}"
        for each in found.nbest or [found]
    )


def _translate(translator: Translator, descriptor: int, show: Callable[[Translation, int], str]) -> None:
    number = 0
    for chunk in _chunks(descriptor):
        lines = []
        for raw in chunk:
            number += 1
            try:
                lines.append(raw.decode("utf-8").rstrip("\r"))
            except UnicodeDecodeError:
                raise RuntimeInputError(f"line {number}: not valid UTF-8; convert the text") from None
        first = number - len(lines)
        for index, found in enumerate(translator.translate(lines, first + 1), first):
            print(show(found, index))
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
