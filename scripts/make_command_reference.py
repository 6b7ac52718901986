"""Writes docs/commands.md and docs/commands/, the reference of the command line, from the commands' own help.

Example: python -m scripts.make_command_reference
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_origin

from typer.models import OptionInfo, ParameterInfo
from typer.utils import get_params_from_function

from econmt.cli import main as command_line
from scripts.make_recipe_reference import DOCS, NAMES, contents, plain, write

INTRODUCTION = """\
# Commands

Every command has a page with its arguments and options, made from the command's own help by `make reference`; a test
keeps them up to date. `econmt COMMAND --help` prints the same.

Results go to standard output, messages to standard error. `translate -o FILE` and `score -o FILE` write line by line,
so that an interrupted run keeps the lines that were done; every other file appears whole or not at all.

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | something failed while the command ran |
| 2 | an argument, a file or a recipe cannot be used |
| 70 | a bug in econmt |
| 130 | interrupted |

Every command takes `--debug`, which shows the traceback of an error, and `-q` (`--quiet`), which leaves warnings and
results. `econmt help COMMAND` is `econmt COMMAND --help`. `econmt --install-completion` completes commands, options and
names of recipes in your shell.
"""
VALUES = {**NAMES, Path: "path"}


def pages() -> dict[Path, str]:
    """Returns the overview and a page for each command, by their paths."""
    overview = ["", "| command | purpose |", "|---|---|"]
    texts: dict[Path, str] = {}
    for verb, summary in command_line.COMMANDS.items():
        overview.append(f"| [`econmt {verb}`](commands/{verb}.md) | {cell(summary)} |")
        application = command_line._application([verb])
        if application.registered_groups:
            (group,) = application.registered_groups
            text = "".join(group_text(group.typer_instance, f"econmt {verb}"))
        else:
            command = next(each for each in application.registered_commands if each.name == verb)
            text = command_text(command, f"econmt {verb}", "#")
        texts[DOCS / "commands" / f"{verb}.md"] = text.lstrip()
    return {DOCS / "commands.md": INTRODUCTION + "\n".join(overview) + "\n" + contents("commands")} | texts


def group_text(group: Any, name: str) -> Iterator[str]:
    """Yields the section of a command that has subcommands, then theirs."""
    yield f"\n# `{name}`\n\n{plain(group.info.help)}\n"
    for command in group.registered_commands:
        if not command.hidden:
            yield command_text(command, f"{name} {command.name or command.callback.__name__}", "##")


def command_text(command: Any, name: str, level: str) -> str:
    """Returns the section of a command that typer has registered, with a heading of ``level``, such as ``#``."""
    text, example = description(command.help or command.callback.__doc__ or "")
    section = f"\n{level} `{name}`\n\n{text}\n"
    if example:
        section += f"\n```text\n{example}\n```\n"
    parameters = get_params_from_function(command.callback).values()
    rows = [row(parameter) for parameter in parameters if isinstance(parameter.default, ParameterInfo)]
    if rows:
        section += "\n| argument or option | value | meaning |\n|---|---|---|\n" + "".join(rows)
    return section


def description(text: str) -> tuple[str, str]:
    """Returns the prose of a command's help, and the lines of its example."""
    prose, _, example = inspect.cleandoc(text).partition("\b")
    paragraphs = (" ".join(part.split()) for part in prose.split("\n\n") if part.strip())
    lines = [line.strip() for line in example.splitlines() if line.strip()]
    return plain("\n\n".join(paragraphs)), "\n".join(lines[1:])


def row(parameter: Any) -> str:
    """Returns the line of the table that describes an argument or option."""
    info = parameter.default
    option = isinstance(info, OptionInfo)
    named = sorted(info.param_decls or (), key=lambda name: not name.startswith("--"))
    named = [name for name in named if name.startswith("-")] or [f"--{parameter.name.replace('_', '-')}"]
    names = named if option else [info.metavar or parameter.name.upper()]
    name = ", ".join(f"`{name}`" for name in names)
    notes = []
    if isinstance(info.show_default, str):
        notes.append(f"default: {info.show_default}")
    elif info.default is ... and option:
        notes.append("required")
    elif info.default not in (None, ..., False):
        values = info.default if isinstance(info.default, (list, tuple)) else [info.default]
        notes.append("default: " + ", ".join(f"`{getattr(value, 'value', value)}`" for value in values))
    meaning = " ".join([plain(info.help or ""), *(f"({note})" for note in notes)])
    return f"| {name} | {cell(value_text(parameter.annotation, info))} | {cell(meaning.strip())} |\n"


def value_text(annotation: Any, info: Any) -> str:
    """Returns the values that a parameter accepts, in words; nothing for a switch."""
    kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
    if get_origin(annotation) in (list, tuple):
        return f"{value_text(kinds[0], info)}; may be repeated"
    if kinds:
        return value_text(kinds[0], info)
    if annotation is bool:
        return ""
    if issubclass(annotation, Enum):
        return ", ".join(f"`{member.value}`" for member in annotation)
    text = VALUES.get(annotation, "text")
    bounds = [f"at least {number(info.min)}"] if info.min is not None else []
    bounds += [f"at most {number(info.max)}"] if info.max is not None else []
    return f"{text}, {' and '.join(bounds)}" if bounds else text


def number(value: float) -> str:
    """Returns a bound as people write it."""
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def cell(text: str) -> str:
    """Returns text that fits a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    write(pages())
