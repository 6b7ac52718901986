"""Command line of the project's own benchmarks: ``python -m scripts.bench NAME``."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from econmt.errors import EconmtError
from scripts.bench.frame import PROGRAM

_HERE = Path(__file__).parent


def commands() -> dict[str, str]:
    """Returns the first lines of the docstrings of all benchmarks, by command.

    A command is the module's name with dashes, after ``gpu.`` or ``compare.`` if it is in such a folder.
    """
    first_lines = {}
    for file in sorted(_HERE.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        if "\ndef main(" in text and file != Path(__file__) and "launchers" not in file.parts:
            name = ".".join(file.relative_to(_HERE).with_suffix("").parts).replace("_", "-")
            first_lines[name] = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    return first_lines


def main(words: Sequence[str]) -> int:
    """Runs a benchmark; returns the exit code."""
    known, name = commands(), words[0].replace("_", "-") if words else "--help"
    if name in ("-h", "--help"):
        print(
            f"usage: {PROGRAM} NAME [OPTIONS]\n\nMeasures the project itself; docs/results has the figures.\n"
        )
        print("\n".join(f"  {name:<22} {line}" for name, line in known.items()))
        return 0
    if name not in known:
        print(f"{PROGRAM}: no benchmark {name}; {PROGRAM} --help lists them", file=sys.stderr)
        return 2
    module = importlib.import_module(f"scripts.bench.{name.replace('-', '_')}")
    try:
        return module.main(words[1:]) or 0
    except EconmtError as error:
        print(*(f"{name}: {line}" for line in error.lines), sep="\n", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"{name}: interrupted; the results so far are above", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
