"""The ``econmt`` program: runs a command, and turns errors into one line on standard error and an exit code.

A command is a module of this package, imported only when it is called, so that ``econmt --help`` does not load torch.
The module holds a function of its own name, declared as in :mod:`econmt.options.option_groups`, or a ``typer.Typer``
named ``app`` with subcommands.
"""

from __future__ import annotations

import difflib
import errno
import gc
import importlib
import os
import re
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer

import econmt
from econmt import elsewhere, errors
from econmt.cli.standard_streams import open_standard_streams
from econmt.errors import REMEDIES, EconmtError, InputError, printable, talk
from econmt.parallel.orphans import end_with_launcher

COMMANDS = {
    "train": "Train a model from a recipe, or resume its run.",
    "translate": "Translate text with one or several trained models.",
    "serve": "Translate over HTTP, with a page in the browser.",
    "score": "Print the log-probability of given translations or text.",
    "generate": "Write text with a trained language model.",
    "rerank": "Sort n-best lists by references or by other models.",
    "evaluate": "Compute BLEU, chrF and TER of translations; compare systems.",
    "profile": "Measure or predict bytes and milliseconds of a training step.",
    "bench": "Measure layouts, candidates of auto, and training steps.",
    "prepare": "Write the token store of a recipe's text without training.",
    "average": "Average the parameters of several checkpoints.",
    "distill": "Train a small, fast student on a teacher's translations.",
    "quantize": "Convert the matrices of a trained model to 8 or 16 bits.",
    "lexicon": "Learn the possible translations of each source word.",
    "info": "Describe a model folder.",
    "export": "Write a model without its training state.",
    "recipes": "List, copy, show and validate recipes.",
    "doctor": "Say what this machine has for econmt, and what is missing.",
}
"""Commands with their summaries."""
LEAST_ADDRESS_SPACE = 1_300_000_000
"""Address space, in bytes, of a process that trains a small model, mostly for libraries."""
EXIT_INTERRUPTED = 130
EXIT_INTERNAL = 70
EXIT_HELP = -2
"""Marks exit code 2 after help instead of an error."""
WITHOUT_TORCH = frozenset({"recipes", "doctor"})
"""Commands that do not load torch, or say why it cannot be loaded."""
COMMON_OPTIONS = (
    "Every command takes -q, --quiet (only warnings and results) and --debug (traceback of an error)."
)
AGAIN = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Error numbers after which the same command may succeed."""
UNUSABLE = frozenset({errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR})
"""Error numbers of paths that cannot exist."""
UNMAPPED = re.compile("failed to map segment|cannot map zero-fill pages|annot allocate memory")
"""Messages of the system's loader about a library for which a process has too little memory."""
_PYTHONS_FORMAT = warnings.formatwarning
# typer does not export the base class of its parser's errors.
_UsageError: type[Any] = typer.BadParameter.__bases__[0]


def main(
    arguments: Sequence[str] | None = None,
    *,
    application: Callable[[Sequence[str]], typer.Typer] | None = None,
    program: str = "econmt",
) -> NoReturn:
    """Runs the command line and exits with its exit code.

    The codes are 0 for success, 1 for a failure, 2 for unusable input, 70 for a bug, and 130 after an interruption.
    ``application`` makes the typer application for the words of the command line, by default that of ``econmt``.
    """
    end_with_launcher()
    # OpenMP reads this when torch is loaded. By default its threads spin while they wait for one another, at every step
    # of a recurrent network. If other programs use the cores, they spin in place of the thread that is waited for, and
    # two threads reach a twentieth of the speed of one.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # A broken connection is reported in one line by the process that notices it, not by torch's C++ traces.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    open_standard_streams()
    warnings.formatwarning = _format_warning
    words = list(sys.argv[1:] if arguments is None else arguments)
    end = words.index("--") if "--" in words else len(words)
    debug = "--debug" in words[:end]
    errors.quiet = not {"-q", "--quiet"}.isdisjoint(words[:end])
    words = [word for word in words[:end] if word not in ("--debug", "-q", "--quiet")] + words[end:]
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    try:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            _handle_interrupts(_interrupt)
        code = _run(words, debug, application or _application, program)
        # An interruption while libraries shut down would look like a crash.
        _handle_interrupts(signal.SIG_IGN)
    except KeyboardInterrupt:
        _handle_interrupts(signal.SIG_IGN)
        code = EXIT_INTERRUPTED
    code = _flushed(code)
    if "RANK" in os.environ and "torch.distributed" in sys.modules:
        os._exit(code)  # the shutdown of torch.distributed may wait without limit for ranks that have ended
    sys.exit(code)


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Returns a warning as Python prints it, but one for users, which econmt_ops gives, in one line."""
    text = str(message)
    if text.startswith("econmt_ops: "):
        return f"econmt: warning: {printable(text.removeprefix('econmt_ops: '))}\n"
    return _PYTHONS_FORMAT(message, category, filename, lineno, line)


def _handle_interrupts(handler: Any) -> None:
    """Sets the handler of Ctrl-C, which only the main thread may do."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, handler)


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    """Handles the first Ctrl-C by ending the command; further ones are ignored."""
    _handle_interrupts(signal.SIG_IGN)
    raise KeyboardInterrupt


def _flushed(code: int) -> int:
    """Flushes standard output; returns the exit code, or another one if that fails."""
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
    """Runs one command and returns the exit code; prints errors on standard error."""
    try:
        _check_words(words)
        _check_address_space(words)
        typed = words
        if "_ECONMT_COMPLETE" in os.environ:  # a shell asks to complete a line
            line = os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS", "")
            typed = line.split()[1:]
        own = [*(["-q"] if errors.quiet else []), *words]
        code = application(typed)(words, prog_name=program, obj=own, standalone_mode=False)
    except SystemExit as ending:
        return ending.code if isinstance(ending.code, int) else int(ending.code is not None)
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
    """Returns True if Ctrl-C caused an error: an interrupted import of a C module raises another one."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _check_words(words: Sequence[str]) -> None:
    """Raises InputError if an argument is empty, not valid UTF-8 or, from a program, has a NUL character."""
    for number, word in enumerate(words, 1):
        option, equals, value = word.partition("=")
        if not word or (option.startswith("--") and equals and not value):
            name = f" ({option})" if option else f" (after {words[number - 2]})" if number > 1 else ""
            raise InputError(f"argument {number}{name} is empty; give a value or leave it out")
        if "\0" in word:
            raise InputError(f"argument {number} '{word}' has a NUL character; remove it")
        if not word.isascii():
            _check_encoding(number, word)


def _check_encoding(number: int, word: str) -> None:
    """Raises InputError if an argument is not UTF-8, or is, but in a locale of another encoding."""
    try:
        text = os.fsencode(word).decode()
    except UnicodeError:
        raise InputError(
            f"argument {number} '{word}' is not valid UTF-8; give names and values in UTF-8"
        ) from None
    if text != word:
        raise InputError(
            f"argument {number} '{text}' is in UTF-8, but the locale's encoding is {sys.getfilesystemencoding()}; set "
            "PYTHONUTF8=1"
        )


def _tell(error: Exception, debug: bool = False) -> int:
    """Prints an error on standard error; returns the exit code."""
    lines, code = _explain(error, debug)
    for line in lines:
        if code == EXIT_HELP:
            print(line, file=sys.stderr)
        else:
            talk(f"econmt: error: {line}")
    return abs(code)


def _check_address_space(words: Sequence[str]) -> None:
    """Raises EconmtError if the limit of the address space is too low for torch, whose libraries would abort."""
    limit = _address_space()
    called = _called(words)
    if limit is not None and limit < LEAST_ADDRESS_SPACE and called in COMMANDS.keys() - WITHOUT_TORCH:
        raise EconmtError(
            f"this process may take {limit // 1024:,} kB (ulimit -v), too few to load PyTorch and compute; "
            f"allow at least {LEAST_ADDRESS_SPACE // 1024:,}"
        )


def _address_space() -> int | None:
    """Returns the limit of this process's address space in bytes; None if there is none or it is unknown."""
    if sys.platform == "win32":
        return None
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit


def _explain(error: Exception, debug: bool = False) -> tuple[list[str], int]:
    """Returns the lines that describe an error to a user, and the exit code; with ``debug`` none names --debug."""
    if isinstance(error, EconmtError):
        return error.lines, error.exit_code
    if isinstance(error, _UsageError):
        if "\n" in error.message:  # the help of a command that needs arguments and got none
            return [error.message], EXIT_HELP
        command = error.ctx.command_path if error.ctx is not None else "econmt"
        what = _key_instead_of_option(error) or error.format_message().rstrip(".")
        return [f"{printable(what)}; see {command} --help"], error.exit_code
    if isinstance(error, OSError) and error.strerror:
        where = f"{printable(error.filename)}: " if error.filename else ""
        advice = f"; {REMEDIES[error.errno]}" if error.errno in REMEDIES else ""
        advice += " and run the same command again" if error.errno in AGAIN else ""
        return [f"{where}{error.strerror}{advice}"], 2 if error.errno in UNUSABLE else 1
    devices = sys.modules.get("econmt.engine.devices")  # loaded, if a device can have run out of memory
    limit = _address_space()
    bound = "" if limit is None else f" (this process may take {limit // 1024:,} kB: ulimit -v)"
    if isinstance(error, MemoryError) or (devices is not None and devices.is_out_of_memory(error)):
        return [
            f"out of memory{bound}: lower training.batch.size, --batch-size or decoding.batch_size, give "
            "training.memory_budget, or take a smaller model"
        ], 1
    if isinstance(error, ImportError | OSError) and UNMAPPED.search(str(error)):
        return [
            f"out of memory{bound} while a library is loaded: allow more memory, or end other programs"
        ], 1
    message = printable(" ".join(str(error).split()))
    kind = f"{type(error).__name__}: {message}" if message else type(error).__name__
    advice = "" if debug else " (run the command again with --debug for the traceback)"
    return [f"this is a bug in econmt: {kind}{advice}"], EXIT_INTERNAL


def _key_instead_of_option(error: Any) -> str:
    """Returns a message that names the recipe keys meant by an unknown option; empty if there are none."""
    option = getattr(error, "option_name", "")
    parameters = [] if error.ctx is None else error.ctx.command.params
    if not option.startswith("--") or all(parameter.name != "overrides" for parameter in parameters):
        return ""
    if difflib.get_close_matches(option, [name for each in parameters for name in each.opts], cutoff=0.8):
        return ""  # a misspelt option
    from econmt.config.recipe import Recipe
    from econmt.config.suggestions import meant_keys
    from econmt.config.yaml_reader import walk

    meant = meant_keys([option.lstrip("-")], dict.fromkeys(key for key, _, _ in walk(Recipe)))
    keys = " or ".join(f"{key}=VALUE" for key in meant)
    return f"No such option: {option}; keys of the recipe are set without dashes: {keys}" if meant else ""


def _reader_left() -> int:
    """Returns the exit code after standard output was closed by its reader, as in ``econmt ... | head``.

    Redirects it to the null device, since Python flushes it once more at exit.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


def _application(words: Sequence[str]) -> typer.Typer:
    """Makes the typer application: imports the command that is called; the others have only their summaries."""
    app = typer.Typer(
        name="econmt",
        help=econmt.__doc__,
        epilog="Example: econmt train quickstart. More help: econmt help train",
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    called = _called(words)
    for name, summary in COMMANDS.items():
        if name != called:
            app.command(name, help=summary)(_not_called)
            continue
        # Imports leave no garbage, and looking for it would take a tenth of their time.
        gc.disable()
        try:
            module = importlib.import_module(elsewhere.COMMANDS.get(name, f"econmt.cli.{name}"))
            gc.freeze()
        finally:
            gc.enable()
        if hasattr(module, "app"):
            app.add_typer(module.app, name=name, short_help=summary)
        else:
            from econmt.options import option_groups  # what commands import anyway

            settings: dict[str, Any] = {"short_help": summary, "epilog": COMMON_OPTIONS}
            declare = app.command(name, cls=option_groups.GroupedCommand, **settings)
            declare(option_groups.with_option_groups(getattr(module, name)))
    return app


def _called(words: Sequence[str]) -> str | None:
    """Returns the command in the words of a command line; None if there is none."""
    return next((word for word in words if not word.startswith("-")), None)


def _not_called() -> None:
    """Takes the place of a command that is not called."""


def _version(wanted: bool) -> None:
    if wanted:
        print(f"econmt {econmt.__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only warnings and results.")] = False,
) -> None:
    """Declares the options of all commands; :func:`main` has already read all but ``--version``."""
