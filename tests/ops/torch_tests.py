"""``python -m tests.ops.torch_tests FOLDER``: runs PyTorch's own tests of LSTM and GRU against those of econmt_ops.

FOLDER is the folder ``test`` of a checkout of PyTorch. Its tests that use `torch.nn.LSTM` or `torch.nn.GRU` run twice,
first as they are and then with the modules of `econmt_ops` in their place. A test that fails with PyTorch's modules as
well, because the checkout is of another version than the installed torch, says nothing. Needs expecttest (PyPI).

Each line of the output is the outcome with `econmt_ops`, the outcome with PyTorch and the name of a test. The exit
status is 0 if each test that passes with PyTorch's modules also passes with those of `econmt_ops`.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import os
import re
import sys
import unittest
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import econmt_ops

FILES = (
    "test_nn.py",
    "test_modules.py",
    "nn/test_packed_sequence.py",
    "nn/test_pruning.py",
    "nn/test_load_state_dict.py",
    "test_autocast.py",
)
"""Files with tests of recurrent modules that need neither a GPU nor other packages."""

_ABOUT = re.compile(r"\bnn\.(LSTM|GRU)\b|['\"](LSTM|GRU)['\"]|_test_rnn|nn_(LSTM|GRU)_")
_ELSE = re.compile(r"Cell|Transformer|nonlinearity", re.IGNORECASE)


class Missing(list[Any]):
    """Stands for a decorator or a list that the installed torch does not have: does nothing, or is empty."""

    def __call__(self, *arguments: Any, **_: Any) -> Any:
        """Returns a decorated function as it is."""
        return arguments[0] if arguments and inspect.isroutine(arguments[0]) else lambda function: function


def allow_other_versions() -> None:
    """Lets tests of another version import names that the installed torch does not have."""

    def missing(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing()

    for part in ("utils", "device_type", "cuda", "modules", "nn", "dtype", "mkldnn"):
        module: Any = importlib.import_module(f"torch.testing._internal.common_{part}")
        module.__getattr__ = missing


def load(file: Path) -> ModuleType:
    """Imports a test file."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module


def tests_of(module: ModuleType, everything: bool) -> Iterator[tuple[str, unittest.TestCase]]:
    """Yields the tests about recurrent modules, or all, with their names."""
    for kind in list(vars(module).values()):
        if not (
            inspect.isclass(kind)
            and issubclass(kind, unittest.TestCase)
            and kind.__module__ == module.__name__
        ):
            continue
        for name in unittest.TestLoader().getTestCaseNames(kind):
            function = inspect.unwrap(getattr(kind, name))
            about = _ABOUT.search(f"{name} {inspect.getsource(function)}")
            if everything or (about and not _ELSE.search(name)):
                yield f"{kind.__name__}.{name}", kind(name)


def outcome(test: unittest.TestCase) -> tuple[str, str]:
    """Runs a test; returns "passed", "skipped" or "failed", and the last line of the reason."""
    result = unittest.TestResult()
    test.run(result)
    problems = [text for _, text in [*result.failures, *result.errors]]
    if problems:
        return "failed", problems[0].strip().splitlines()[-1]
    if result.skipped:
        return "skipped", result.skipped[0][1]
    return "passed", ""


def replace_modules() -> None:
    """Puts the modules of econmt_ops in the place of those of `torch.nn`, also in PyTorch's list of modules to test."""
    from torch.testing._internal.common_modules import module_db

    theirs = {torch.nn.LSTM: econmt_ops.LSTM, torch.nn.GRU: econmt_ops.GRU}
    for entry in module_db:
        entry.module_cls = theirs.get(entry.module_cls, entry.module_cls)
    for kind, ours in theirs.items():
        setattr(torch.nn, kind.__name__, ours)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder test of a checkout of PyTorch")
    folder: Path = parser.parse_args().folder
    sys.argv[1:] = []  # which PyTorch's tests read
    sys.path.insert(0, str(folder))
    os.environ["PYTORCH_PRINT_REPRO_ON_FAILURE"] = "0"  # the last line of a failure is its reason
    allow_other_versions()
    selected = {}
    for name in FILES:
        if (folder / name).exists():
            everything = name == "nn/test_packed_sequence.py"
            selected |= dict(tests_of(load(folder / name), everything))
    before = {name: outcome(test)[0] for name, test in selected.items()}
    replace_modules()
    counts, worse = dict.fromkeys(("passed", "failed", "skipped"), 0), 0
    for name, test in selected.items():
        state, reason = outcome(type(test)(test._testMethodName))
        counts[state] += 1
        worse += state == "failed" and before[name] == "passed"
        print(f"{state:8} {before[name]:8} {name}  {reason}")
    print(", ".join(f"{count} {state}" for state, count in counts.items()))
    print(f"{worse} of the failed tests pass with torch.nn")
    sys.exit(worse > 0)


if __name__ == "__main__":
    main()
