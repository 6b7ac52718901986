"""``python -m econmt_runtime FOLDER``: translates standard input, a sentence a line."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from econmt_runtime.errors import RuntimeInputError
from econmt_runtime.lines import file_chunks, input_chunks

if TYPE_CHECKING:
    from econmt_runtime.translator import Translation, Translator


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
        _open_output()
        translator = load(
            folder or given.folder,
            beam_size=given.beam_size,
            shortlist=given.shortlist,
            threads=given.threads,
            nbest_size=given.nbest_size,
            warn=lambda line: _tell(f"warning: {line}"),
        )
        show = _listed if given.nbest_size > 1 else _scored if given.score else _plain
        _translate(translator, file_chunks(Path(given.input)) if given.input else input_chunks(), show)
    except BrokenPipeError:
        sys.stderr.close()
        return 0
    except KeyboardInterrupt:
        return 130
    except MemoryError:
        _tell("error: not enough memory; give fewer --threads or a smaller --beam-size")
        return 2
    except RuntimeInputError as error:
        _tell(f"error: {error}")
        return 2
    except OSError as error:
        _tell(f"error: {f'{error.filename}: ' if error.filename else ''}{error.strerror or error}")
        return 2
    return 0


def _tell(line: str) -> None:
    """Prints one line on standard error, its control characters escaped."""
    shown = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in line)
    print(f"econmt_runtime: {shown}", file=sys.stderr)


def _open_output() -> None:
    """Makes results go out as UTF-8 with plain newlines, whatever the locale.

    Raises:
        RuntimeInputError: standard output is closed.
    """
    if sys.stdout is None:
        raise RuntimeInputError(
            "standard output is closed, so the translations cannot be printed; leave it open"
        )
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", newline="\n")


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


def _translate(
    translator: Translator, chunks: Iterable[list[str]], show: Callable[[Translation, int], str]
) -> None:
    number = 0
    for lines in chunks:
        for index, found in enumerate(translator.translate(lines, number + 1), number):
            print(show(found, index))
        sys.stdout.flush()
        number += len(lines)


if __name__ == "__main__":
    sys.exit(main())
