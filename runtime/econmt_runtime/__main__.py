"""Command ``python -m econmt_runtime FOLDER_OR_FILE``, which translates standard input, one sentence per line."""

from __future__ import annotations

import argparse
import io
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from econmt_runtime.errors import RuntimeInputError
from econmt_runtime.lines import file_chunks, input_chunks

if TYPE_CHECKING:
    from econmt_runtime.translator import RuntimeTranslation


def main(folder: str | None = None) -> int:
    """Runs the command line and returns the exit code; without a ``folder`` the command line names it."""
    # numpy reads this when it is imported: --threads runs batches in parallel, and a second thread pool takes memory.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    parser = argparse.ArgumentParser(description="Translate text, one sentence per line, without PyTorch.")
    if folder is None:
        parser.add_argument("folder", help="folder or file written by econmt export --runtime")
    parser.add_argument("-i", "--input", help="text file to translate (default: standard input)")
    parser.add_argument(
        "-b", "--beam-size", type=int, help="number of hypotheses per sentence (default: the recipe's)"
    )
    parser.add_argument(
        "--shortlist",
        type=int,
        help="lexicon translations per source word that a translation may use; 0: any word (default: all of them)",
    )
    parser.add_argument(
        "--threads", type=int, default=1, help="number of batches translated in parallel (default: 1)"
    )
    parser.add_argument(
        "--nbest-size", type=int, default=1, help="translations per line, in the format of Moses (default: 1)"
    )
    parser.add_argument(
        "--score", action="store_true", help="print the score and a tab before each translation"
    )
    arguments = parser.parse_args()
    if arguments.score and arguments.nbest_size > 1:
        parser.error("--score cannot be combined with --nbest-size above 1, whose output includes the scores")
    try:
        from econmt_runtime.translator import load

        _open_output()
        translator = load(
            folder or arguments.folder,
            beam_size=arguments.beam_size,
            shortlist=arguments.shortlist,
            threads=arguments.threads,
            nbest_size=arguments.nbest_size,
            warn=lambda line: _tell(f"warning: {arguments.input or 'standard input'}: {line}"),
        )
        number = 0
        for lines in file_chunks(Path(arguments.input)) if arguments.input else input_chunks():
            for index, translation in enumerate(translator.translate(lines, number + 1), number):
                print(_shown(translation, index, arguments.nbest_size, score=arguments.score))
            sys.stdout.flush()
            number += len(lines)
    except BrokenPipeError:
        _drop_output()
        return 0
    except KeyboardInterrupt:
        return 130
    except MemoryError:
        _tell("error: not enough memory; use fewer --threads or a smaller --beam-size")
        return 2
    except RuntimeInputError as error:
        _tell(f"error: {error}")
        return 2
    except ModuleNotFoundError as error:
        _tell(f"error: this Python has no {error.name}; install it, as with pip install numpy sentencepiece")
        return 2
    except OSError as error:
        _tell(f"error: {f'{error.filename}: ' if error.filename else ''}{error.strerror or error}")
        _drop_output()
        return 2
    return 0


def _tell(line: str) -> None:
    """Prints one line on standard error, with control characters escaped."""
    shown = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in line)
    print(f"econmt_runtime: {shown}", file=sys.stderr)


def _drop_output() -> None:
    """Sends what is left in standard output to the null device: Python flushes it at exit, and would end with 120."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _open_output() -> None:
    """Sets standard output to UTF-8 with plain newlines, whatever the locale.

    Raises:
        RuntimeInputError: If standard output is closed.
    """
    if sys.stdout is None:
        raise RuntimeInputError(
            "standard output is closed, so the translations cannot be printed; keep it open"
        )
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", newline="\n")


def _shown(translation: RuntimeTranslation, number: int, most: int, *, score: bool) -> str:
    """Returns the text of the best translation, after its score, or of ``most`` in the format of econmt translate."""
    if most == 1:
        return f"{translation.score:.6f}\t{translation.text}" if score else translation.text
    return "\n".join(
        f"{number} ||| {entry.text.replace('|||', '&#124;' * 3)} ||| logprob= {entry.log_probability:.6f} ||| "
        f"{entry.score:.6f}"
        for entry in translation.nbest or [translation]
    )


if __name__ == "__main__":
    sys.exit(main())
