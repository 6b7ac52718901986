"""The fuzzing script finds what it is made for, and a little of it is run each time."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from econmt.errors import InputError
from tests.conftest import ROOT, run_python

NAMES = [
    "recipe",
    "overrides",
    "state",
    "results",
    "meta",
    "json",
    "parameters",
    "stream",
    "folder",
    "translate",
]


@pytest.fixture(scope="module")
def fuzz() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fuzz", ROOT / "scripts" / "fuzz.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def targets(fuzz: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return fuzz.targets_of(fuzz.TinyModel(tmp_path_factory.mktemp("fuzz")))


@pytest.mark.parametrize("name", [*NAMES, "words"])
def test_hostile_inputs_are_taken_or_refused(fuzz: ModuleType, targets: dict[str, Any], name: str) -> None:
    draws, run = targets[name]
    draw = random.Random(7)
    for _ in range(10):
        given = draws(draw)
        assert fuzz.attempt(run, given) is None, given


def test_what_is_no_error_of_ours_is_a_failure(fuzz: ModuleType, targets: dict[str, Any]) -> None:
    def fail(error: Exception) -> None:
        raise error

    assert fuzz.attempt(fail, InputError("a line")) is None
    assert fuzz.attempt(fail, KeyError("x")) == "KeyError: 'x'"
    assert "no line to print" in fuzz.attempt(fail, InputError(" "))
    for name, (draws, _) in targets.items():
        one, other = (repr([draws(random.Random(3)) for _ in range(5)]) for _ in range(2))
        assert one == other, name


@pytest.mark.slow
def test_some_fuzzing_finds_nothing(tmp_path: Path) -> None:
    done = run_python("scripts/fuzz.py", "--seconds", "6", "--failures", tmp_path / "failures", check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 kinds of failures" in done.stdout
