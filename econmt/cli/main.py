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
import threading
import traceback
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer

import econmt
from econmt.cli.standard_streams import open_standard_streams
from econmt.errors import EconmtError, InputError, printable, talk
from econmt.parallel.orphans import end_with_launcher

VERBS = {
    "train": "Train a model from a recipe, or go on where it stopped.",
    "translate": "Translate text with one or several trained models.",
    "serve": "Answer over HTTP, with a page in the browser.",
    "score": "Print the log-probability of given translations or text.",
    "generate": "Write text with a trained language model.",
    "rerank": "Put n-best lists into another order, by references or models.",
    "evaluate": "BLEU, chrF and TER of translations, and their significance.",
    "profile": "Say where the bytes and milliseconds of a training step go.",
    "bench": "Measure layouts, what auto chooses, and training steps.",
    "prepare": "Write the token store of a recipe's text without training.",
    "average": "Average the parameters of several checkpoints.",
    "compress": "Replace the LSTM matrices of a trained model by thin factors.",
    "quantize": "Write a trained model's matrices in 8 or 16 bits.",
    "lexicon": "Learn which target words may translate a source word.",
    "info": "Say what a model folder holds.",
    "embeddings": "Print the tokens that a model takes for alike.",
    "extract": "Write parameters to a file for other programs.",
    "export": "Write a model without its training state.",
    "recipes": "List, copy, show and validate recipes.",
}
LEAST_ADDRESS_SPACE = 1_300_000_000
"""Bytes that a process maps which trains a small model; most of them are the libraries' and take no memory."""
EXIT_INTERRUPTED = 130
EXIT_INTERNAL = 70
EXIT_HELP = -2
"""Exit code 2 after help instead of an error."""
ADVICE = {
    errno.ENOSPC: "free some space and run the same command again",
    errno.EDQUOT: "free some space and run the same command again",
    errno.EACCES: "check the permissions",
    errno.EROFS: "choose a folder that can be written to",
    errno.ENAMETOOLONG: "give a shorter name",
    errno.ELOOP: "give a name whose links lead somewhere",
}
UNUSABLE = frozenset({errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR})
"""Error numbers of paths that cannot exist."""
# Typer brings the errors of its parser without naming their common kind.
_UsageError: type[Any] = typer.BadParameter.__bases__[0]


def main(
    arguments: Sequence[str] | None = None,
    *,
    application: Callable[[Sequence[str]], typer.Typer] | None = None,
    program: str = "econmt",
) -> NoReturn:
    """Runs the command line and leaves with its exit code.

    Args:
        arguments: Words of the command line; None: those of this process.
        application: Makes the typer application for these words; None: that of ``econmt``.
        program: Name of the program in its help.

    Codes: 0 done; 1 something failed on the way; 2 something given cannot be used; 70 a bug; 130 interrupted.
    """
    end_with_launcher()
    # Read when torch is loaded. By default OpenMP's threads spin while they wait for one another, at every step of a
    # recurrent network; where other programs want the cores, they spin in place of the thread that is waited for, and
    # two threads get a twentieth of what one does.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # A connection that breaks is told in one line by whoever notices it, not by torch's traces of C++.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    open_standard_streams()
    words = list(sys.argv[1:] if arguments is None else arguments)
    rest = words.index("--") if "--" in words else len(words)
    debug = "--debug" in words[:rest]
    words = [word for word in words[:rest] if word != "--debug"] + words[rest:]
    try:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            _handle_interrupts(_interrupt)
        code = _run(words, debug, application or _application, program)
        _handle_interrupts(signal.SIG_IGN)  # what libraries do when Python ends would make a crash of it
    except KeyboardInterrupt:
        _handle_interrupts(signal.SIG_IGN)
        code = EXIT_INTERRUPTED
    code = _flushed(code)
    if "RANK" in os.environ and "torch.distributed" in sys.modules:
        os._exit(code)  # tearing down what joins ranks may wait for ranks that are gone, without a limit
    sys.exit(code)


def _handle_interrupts(handler: Any) -> None:
    """Sets what Ctrl-C does; only the main thread may."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, handler)


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    """Handler of Ctrl-C: the command leaves, and pressing it again cannot turn that into a crash."""
    _handle_interrupts(signal.SIG_IGN)
    raise KeyboardInterrupt


def _flushed(code: int) -> int:
    """Sends what is left for standard output on its way; the exit code, another one if that fails."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        return _reader_left()
    except OSError as error:
        if code == 0:
            code = _tell(error)
        _reader_left()
    return code


def _run(
    words: list[str], debug: bool, application: Callable[[Sequence[str]], typer.Typer], program: str
) -> int:
    """Runs one verb and returns the exit code; what goes wrong is told on standard error."""
    try:
        _check_words(words)
        _check_address_space(words)
        code = application(words)(words, prog_name=program, obj=words, standalone_mode=False)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BrokenPipeError:
        return _reader_left()
    except Exception as error:  # noqa: BLE001  the one place where every failure becomes a line and an exit code
        if _is_interrupt(error):
            return EXIT_INTERRUPTED
        if debug:
            traceback.print_exc()
        return _tell(error, debug)
    return code if isinstance(code, int) else 0


def _is_interrupt(error: BaseException | None) -> bool:
    """True if an error came of Ctrl-C: a module written in C that is being imported turns it into another error."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _check_words(words: Sequence[str]) -> None:
    """Refuses what no option or argument can mean.

    Raises:
        InputError: a word is empty, or no text.
    """
    for number, word in enumerate(words, 1):
        option, equals, value = word.partition("=")
        if not word or (option.startswith("--") and equals and not value):
            name = f" ({option})" if option else f" (after {words[number - 2]})" if number > 1 else ""
            raise InputError(f"argument {number}{name} is empty; give a value or leave it out")
        try:
            word.encode()
        except UnicodeEncodeError:
            raise InputError(
                f"argument {number} '{word}' is not valid UTF-8; give names and values in UTF-8"
            ) from None


def _tell(error: Exception, debug: bool = False) -> int:
    """Tells of an error on standard error; returns the exit code."""
    lines, code = _explain(error, debug)
    for line in lines:
        if code == EXIT_HELP:
            print(line, file=sys.stderr)
        else:
            talk(f"econmt: error: {line}")
    return abs(code)


def _check_address_space(words: Sequence[str]) -> None:
    """Refuses to load torch where it cannot be: its libraries abort where they find no room.

    Raises:
        EconmtError: the process has a limit, and it is too low.
    """
    limit = _address_space()
    called = next((word for word in words if not word.startswith("-")), None)
    if limit is not None and limit < LEAST_ADDRESS_SPACE and called in VERBS and called != "recipes":
        raise EconmtError(
            f"this process may take {limit // 1024:,} kB (ulimit -v), too few to load PyTorch and compute; "
            f"allow at least {LEAST_ADDRESS_SPACE // 1024:,}"
        )


def _address_space() -> int | None:
    """Bytes that this process may map; None: any number, or the system does not say."""
    if sys.platform == "win32":
        return None
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit


def _explain(error: Exception, debug: bool = False) -> tuple[list[str], int]:
    """Returns the lines that tell a user of an error, and the exit code.

    Args:
        error: what went wrong.
        debug: True if the traceback has been printed.
    """
    if isinstance(error, EconmtError):
        return error.lines, error.exit_code
    if isinstance(error, _UsageError):
        if "\n" in error.message:  # the help of a command that needs arguments and got none
            return [error.message], EXIT_HELP
        command = error.ctx.command_path if error.ctx is not None else "econmt"
        return [f"{printable(error.format_message().rstrip('.'))}; see {command} --help"], error.exit_code
    if isinstance(error, OSError) and error.strerror:
        where = f"{printable(error.filename)}: " if error.filename else ""
        advice = f"; {ADVICE[error.errno]}" if error.errno in ADVICE else ""
        return [f"{where}{error.strerror}{advice}"], 2 if error.errno in UNUSABLE else 1
    devices = sys.modules.get("econmt.engine.devices")  # there, if a device can have been full
    if isinstance(error, MemoryError) or (devices is not None and devices.is_out_of_memory(error)):
        limit = _address_space()
        room = "" if limit is None else f" (this process may take {limit // 1024:,} kB: ulimit -v)"
        return [
            f"out of memory{room}: lower training.batch.size, --batch-size or decoding.batch_size, give "
            "training.memory_budget, or take a smaller model"
        ], 1
    message = printable(" ".join(str(error).split()))
    kind = f"{type(error).__name__}: {message}" if message else type(error).__name__
    advice = "" if debug else " (run the command again with --debug for the traceback)"
    return [f"this is a bug in econmt: {kind}{advice}"], EXIT_INTERNAL


def _reader_left() -> int:
    """Standard output cannot be written, mostly because its reader has closed it (``econmt ... | head``).

    Leave quietly, also when Python flushes it once more.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


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
    """Options of all commands; :func:`main` has already read ``--debug``."""
