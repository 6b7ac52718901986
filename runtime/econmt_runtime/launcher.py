"""Translates standard input, one sentence per line: python FOLDER < text, or python FILE.pyz < text.

``econmt export --runtime`` writes this file as the ``__main__.py`` of a folder or zip file, with the checksums of the
modules in its ``econmt_runtime``. They are verified before any of these modules is imported.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import os
import stat
import sys
import zipimport
import zlib
from pathlib import Path

MODULES: dict[str, str] = {}
_LARGEST = 1 << 20


class Loader(importlib.machinery.SourceFileLoader):
    """Loader of modules whose sources are in memory; it ignores cached bytecode, which has no checksum."""

    def __init__(self, name: str, path: str, source: bytes) -> None:
        super().__init__(name, path)
        self._source = source

    def get_data(self, path: str) -> bytes:  # noqa: ARG002  there is only one source
        """Returns the verified source."""
        return self._source

    def path_stats(self, path: str) -> dict[str, float]:
        """Raises OSError, which keeps importlib from reading and writing bytecode."""
        raise OSError(path)


class Finder:
    """Finder of the modules of a folder or zip file.

    Args:
        package: Its ``econmt_runtime``. sources: Sources by file name.
    """

    def __init__(self, package: Path, sources: dict[str, bytes]) -> None:
        self._package, self._sources = package, sources

    def find_spec(
        self,
        name: str,
        path: object = None,  # noqa: ARG002  of importlib's protocol
        target: object = None,  # noqa: ARG002
    ) -> importlib.machinery.ModuleSpec | None:
        """Returns the spec of ``econmt_runtime`` and its modules; None for any other module."""
        package, _, module = name.partition(".")
        file = f"{module or '__init__'}.py"
        if package != "econmt_runtime" or file not in self._sources:
            return None
        source_path = str(self._package / file)
        return importlib.util.spec_from_file_location(
            name, source_path, loader=Loader(name, source_path, self._sources[file])
        )


def read_sources(package: Path) -> dict[str, bytes]:
    """Reads the modules; exits with a message and code 2 if one has changed since it was exported."""
    sources, read = {}, _read if package.parent.is_dir() else _read_member
    for name, checksum in MODULES.items():
        sources[name] = read(package / name)
        if hashlib.sha256(sources[name]).hexdigest() != checksum:
            sys.stderr.write(
                f"econmt_runtime: error: {package / name}: absent or changed since it was exported; export the model "
                "again\n"
            )
            sys.exit(2)
    return sources


def _read(path: Path) -> bytes:
    """Reads a regular file, at most ``_LARGEST`` bytes; returns nothing if there is no such file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        with os.fdopen(descriptor, "rb") as file:
            return file.read(_LARGEST) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""
    except OSError:
        return b""


def _read_member(path: Path) -> bytes:
    """Reads a module from the zip file that runs; returns nothing if it is absent or damaged."""
    try:
        return zipimport.zipimporter(str(path.parents[1])).get_data(str(path))
    except (OSError, ImportError, EOFError, zlib.error):
        return b""


def run(folder: Path) -> int:
    """Runs the command line for a folder or zip file and returns the exit code."""
    package = folder / "econmt_runtime"
    sys.meta_path.insert(0, Finder(package, read_sources(package)))
    sys.path[:] = [entry for entry in sys.path if Path(entry) != folder]  # import nothing else from it
    from econmt_runtime.__main__ import main

    return main(str(folder))


if __name__ == "__main__":
    sys.exit(run(Path(__file__).parent))
