"""The ``econmt`` command: finds the verb, runs it, and turns what goes wrong into one clear line and an exit code.

A verb is a module beside this one, imported only when it is called for, so that ``econmt --help`` does not wait for
torch. It holds a function of its own name, or several behind a ``typer.Typer`` called ``app``.
"""

from __future__ import annotations

import errno
import gc
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NoReturn, TextIO

import typer

import econmt
from econmt.errors import EconmtError

VERBS = {
    "train": "Train a model from a recipe, or go on where it stopped.",
    "translate": "Translate text with one or several trained models.",
    "score": "Print the log-probability of given translations.",
    "evaluate": "BLEU, chrF and TER of translations, and their significance.",
    "profile": "Say where the bytes and milliseconds of a training step go.",
    "bench": "Measure layouts, what auto chooses, and training steps.",
    "prepare": "Write the token store of a recipe's text without training.",
    "average": "Average the parameters of several checkpoints.",
    "compress": "Replace the LSTM matrices of a trained model by thin factors.",
    "info": "Say what a model folder holds.",
    "export": "Write a model without its training state.",
    "recipes": "List, copy, show and validate recipes.",
}
EXIT_INTERRUPTED = 130
EXIT_INTERNAL = 70
ADVICE = {
    errno.ENOSPC: "free some space and run the same command again",
    errno.EDQUOT: "free some space and run the same command again",
    errno.EACCES: "check the permissions",
    errno.EROFS: "choose a folder that can be written to",
}


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs the command line and leaves with its exit code.

    Codes: 0 done; 1 something failed on the way; 2 something given cannot be used; 70 a bug; 130 interrupted.
    """
    # Before torch is imported: oneDNN keeps what it has made for a product's shape, by default for 1,024 shapes, and
    # batches are of many lengths. That is memory for time: 256 shapes take 70 MB more and train 0 to 6 % faster, on a
    # processor with AMX some 20 %.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16")
    words = list(sys.argv[1:] if arguments is None else arguments)
    rest = words.index("--") if "--" in words else len(words)
    debug = "--debug" in words[:rest]
    words = [word for word in words[:rest] if word != "--debug"] + words[rest:]
    for stream in (sys.stdout, sys.stderr):
        _write_utf8(stream)
    try:
        code = _run(words, debug)
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    if code == EXIT_INTERRUPTED:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # one more Ctrl-C must not turn leaving into a crash
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        code = _reader_left()
    sys.exit(code)


def _run(words: list[str], debug: bool) -> int:
    """Runs one verb and returns the exit code; what goes wrong is told on standard error."""
    try:
        _application(words)(words, prog_name="econmt", obj=words)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BrokenPipeError:
        return _reader_left()
    except Exception as error:  # noqa: BLE001  the one place where every failure becomes a line and an exit code
        if debug:
            traceback.print_exc()
        lines, code = _explain(error)
        for line in lines:
            print(f"econmt: error: {line}", file=sys.stderr)
        return code
    return 0


def _explain(error: Exception) -> tuple[list[str], int]:
    """The lines that tell a user of an error, and the exit code."""
    if isinstance(error, EconmtError):
        return str(error).splitlines(), error.exit_code
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        advice = f"; {ADVICE[error.errno]}" if error.errno in ADVICE else ""
        return [f"{where}{error.strerror}{advice}"], 1
    devices = sys.modules.get("econmt.engine.devices")  # there, if a device can have been full
    if isinstance(error, MemoryError) or (devices is not None and devices.is_out_of_memory(error)):
        return ["out of memory; use smaller batches or a smaller model"], 1
    message = " ".join(str(error).split())
    kind = f"{type(error).__name__}: {message}" if message else type(error).__name__
    return [
        f"this is a bug in econmt: {kind} (run the command again with --debug for the traceback)"
    ], EXIT_INTERNAL


def _reader_left() -> int:
    """Standard output's reader has closed it (``econmt ... | head``): leave quietly, also at the last flush."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


def _write_utf8(stream: TextIO | Any) -> None:
    """Text goes out as UTF-8 with plain newlines whatever the locale: translations are data."""
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(encoding="utf-8", newline="\n")


def _application(words: Sequence[str]) -> typer.Typer:
    """The typer application: the verb that is called for is imported, the others are only names with a line of help."""
    app = typer.Typer(
        name="econmt",
        help=econmt.__doc__,
        epilog="Example: econmt train quickstart. More help: econmt train --help",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    called = next((word for word in words if not word.startswith("-")), None)
    for verb, summary in VERBS.items():
        if verb != called:
            app.command(verb, help=summary)(_nothing)
            continue
        # Nothing that imports make is garbage; looking for it takes a tenth of their time.
        gc.disable()
        try:
            module = importlib.import_module(f"econmt.cli.{verb}")
            gc.freeze()
        finally:
            gc.enable()
        if hasattr(module, "app"):
            app.add_typer(module.app, name=verb, short_help=summary)
        else:
            function: Callable[..., None] = getattr(module, verb)
            app.command(verb, short_help=summary)(function)
    return app


def _nothing() -> None:
    """Stands for a verb that is not called for."""


def _version(wanted: bool) -> None:
    if wanted:
        print(f"econmt {econmt.__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """What every verb takes; :func:`main` has read ``--debug`` before."""
