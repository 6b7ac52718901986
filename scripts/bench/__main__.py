"""``python -m scripts.bench``: the project's own benchmarks, one command each."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from econmt.cli.main import main
from scripts.bench.verbs.language_model import language_model_command
from scripts.bench.verbs.low_rank import low_rank_command
from scripts.bench.verbs.lstm import lstm_command
from scripts.bench.verbs.recurrences import memory_task_command, scan_command

PROGRAM = "python -m scripts.bench"
COMMANDS = {
    "language-model": language_model_command,
    "low-rank": low_rank_command,
    "lstm": lstm_command,
    "memory-task": memory_task_command,
    "scan": scan_command,
}


def application(words: Sequence[str]) -> typer.Typer:  # noqa: ARG001  what main() calls with the command line
    """Makes the application of all commands."""
    app = typer.Typer(
        help="Benchmarks of the project itself, each with the figures of a page of docs/results.",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    for name, command in COMMANDS.items():
        app.command(name)(command)
    return app


if __name__ == "__main__":
    main(application=application, program=PROGRAM)
