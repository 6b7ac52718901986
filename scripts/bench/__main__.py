"""Command line of the project's own benchmarks: ``python -m scripts.bench NAME``."""

from __future__ import annotations

import ast
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

import typer

from econmt.cli.main import main
from scripts.bench.language_model import language_model_command
from scripts.bench.lstm import lstm_command
from scripts.bench.memory import memory_command
from scripts.bench.memory_task import memory_task_command
from scripts.bench.parallel import parallel_command
from scripts.bench.scan import scan_command

PROGRAM = "python -m scripts.bench"
COMMANDS = {
    "language-model": language_model_command,
    "lstm": lstm_command,
    "memory": memory_command,
    "memory-task": memory_task_command,
    "parallel": parallel_command,
    "scan": scan_command,
}
"""Commands that share options for CSV files and plots."""
_HERE = Path(__file__).parent


def scripts() -> dict[str, str]:
    """Returns the modules that read their own arguments: the first lines of their docstrings by command.

    A command is the module's name with dashes, after ``gpu.`` or ``compare.`` if it is in such a folder.
    """
    first_lines = {}
    for file in sorted(_HERE.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        is_command = '\nif __name__ == "__main__":' in text and "launchers" not in file.parts
        if is_command and file != Path(__file__):
            name = ".".join(file.relative_to(_HERE).with_suffix("").parts).replace("_", "-")
            first_lines[name] = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    return first_lines


def application(words: Sequence[str]) -> typer.Typer:  # noqa: ARG001  main() passes the command line
    """Makes the application of all commands, which lists the other modules too."""
    others = "\n".join(f"  {name:<20} {text[:57]}" for name, text in scripts().items())
    examples = f"  {PROGRAM} lstm --ablation\n  {PROGRAM} gpu.step --help"
    app = typer.Typer(
        help="Measures the project itself; docs/results has the figures.",
        epilog=f"\b\nWith arguments of their own:\n{others}\n\n\b\nExample:\n{examples}",
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
    name = "".join(sys.argv[1:2]).replace("_", "-")
    if name in scripts():
        del sys.argv[1]
        runpy.run_module(f"scripts.bench.{name.replace('-', '_')}", run_name="__main__", alter_sys=True)
    else:
        main(application=application, program=PROGRAM)
