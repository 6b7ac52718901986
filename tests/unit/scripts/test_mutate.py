"""Mutants of a tiny package: its tests kill some of them, and its files stay as they are."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from scripts.mutate import Importers, Mutant, mutants_of, outcome
from tests.conftest import ROOT

CODE = '''"""A module."""


def least(a: int, b: int = 3) -> int:
    """Returns the least."""
    assert a < 100
    if not a < b:
        return b
    return max(a, 0 if a > 1 else 1, key=abs)
'''
TEST = (
    "from tiny.code import least\n\n\ndef test_least():\n    assert least(5) == 3\n    assert least(2) == 2\n"
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in {
        "tiny/__init__.py": "",
        "tiny/code.py": CODE,
        "tiny/user.py": "from tiny import code\n",
        "tests/test_code.py": TEST,
        "tests/test_user.py": "import tiny.user\n",
        "tests/test_other.py": "import json\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def described(mutants: Sequence[Mutant]) -> list[str]:
    return [f"{mutant.line} {mutant.change.partition(':')[0]}" for mutant in mutants]


def test_each_change_is_one_mutant_that_compiles(root: Path) -> None:
    mutants = mutants_of(Path("tiny/code.py"), root)
    assert described(mutants) == [
        "7 branch never taken",
        "7 comparison flipped",
        "7 not added",
        "7 not removed",
        "8 None returned",
        "9 None returned",
        "9 comparison flipped",
        *3 * ["9 constant + 1"],
        "9 keyword argument key removed",
    ]
    for mutant in mutants:
        compile(mutant.text, "code.py", "exec")
        assert mutant.text != CODE
        assert mutant.text.splitlines()[:6] == CODE.splitlines()[:6]


def test_tests_are_those_that_reach_the_module_nearest_first(root: Path) -> None:
    importers = Importers(root, ["tiny"], "tests", 8)
    assert importers.tests(Path("tiny/code.py")) == ["tests/test_code.py", "tests/test_user.py"]
    assert importers.tests(Path("tiny/user.py")) == ["tests/test_user.py"]
    assert Importers(root, ["tiny"], "tests", 1).tests(Path("tiny/code.py")) == ["tests/test_code.py"]


def test_outcomes(root: Path) -> None:
    mutants = {mutant.change: mutant for mutant in mutants_of(Path("tiny/code.py"), root)}
    tests = ["tests/test_code.py"]
    assert outcome(mutants["None returned: return b"], root, tests, "not slow", 60) == "killed"
    survivor = mutants["keyword argument key removed: max(a, 0 if a > 1 else 1, key=abs)"]
    assert outcome(survivor, root, tests, "not slow", 60) == "survived"
    assert outcome(survivor, root, [], "not slow", 60) == "no tests"
    assert outcome(survivor, root, tests, "not slow", 0.001) == "timeout"
    assert (root / "tiny/code.py").read_text(encoding="utf-8") == CODE


def test_the_script_prints_a_line_for_each_and_a_sum(root: Path) -> None:
    words = [sys.executable, str(ROOT / "scripts/mutate.py"), "--root", str(root), "--packages", "tiny"]
    done = subprocess.run([*words, "--number", "2"], capture_output=True, text=True, check=True)
    *lines, counts = done.stdout.splitlines()
    assert [line.split()[1].partition(":")[0] for line in lines] == 2 * ["tiny/code.py"]
    assert sum(int(part.split()[0]) for part in counts.split(", ")) == 2
    assert (root / "tiny/code.py").read_text(encoding="utf-8") == CODE
