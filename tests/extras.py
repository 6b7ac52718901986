"""Tests of extras: what imports a package of an extra that is not installed is skipped, modules and whole folders."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@functools.cache
def optional_packages() -> set[str]:
    """Returns the packages, by their names for `import`, that only an extra of pyproject.toml installs."""
    text = (Path(__file__).resolve().parent.parent / "pyproject.toml").read_text(encoding="utf-8")
    extras = tomllib.loads(text)["project"]["optional-dependencies"].values()
    names = {re.split(r"[^\w-]", need)[0] for extra in extras for need in extra}
    return {name.replace("-", "_") for name in names} - {"econmt"}


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Makes a failed import of an optional package by a test module, or by the conftest.py of a folder, a skip."""
    report = yield
    call: pytest.CallInfo[object] | None = getattr(report, "call", None)
    error = None if call is None or call.excinfo is None else call.excinfo.value
    while error is not None and not isinstance(error, ModuleNotFoundError):
        error = error.__cause__
    package = "" if error is None else str(error.name).partition(".")[0]
    if package in optional_packages():
        report.outcome = "skipped"
        report.longrepr = (str(collector.path), 1, f"Skipped: {package} is not installed")
        del report.call  # type: ignore[attr-defined] # by which pytest would tell a debugger
    return report
