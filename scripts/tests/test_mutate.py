"""Mutants of a tiny package: its tests kill some of them, and its files stay as they are."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from scripts.mutate import Calls, Copy, Mutant, mutants_of, sources
from tests.conftest import ROOT

CODE = '''"""A module."""


def least(a: int, b: int = 3) -> int:
    """Returns the least."""
    assert a < 100
    if not a < b:
        return b
    return max(a, 0 if a > 1 else 1, key=abs)


def unused(file):
    try:
        return [file.read(), {"a": True, "b": 2}]
    finally:
        file.close()
    return None
'''
C_CODE = """#define WIDE 4
/* 1 < 2 */
int least(int *a, int n) {
  for (int i = 0; i < n; i++) a[i] = a[i] + 12 * 0.5f; // 3
  return n && *a;
}
"""
TESTS = """import pytest

from tiny.code import least


def test_larger():
    assert least(5) == 3


def test_smaller():
    assert least(2) == 2


def test_that_fails():
    assert least(2) == 3
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository; pytest starts sooner without plugins."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    for name, text in {
        "tiny/__init__.py": "",
        "tiny/code.py": CODE,
        "tiny/code.c": C_CODE,
        "tests/test_code.py": TESTS,
        "tests/test_other.py": "def test_other():\n    import tiny.code\n    assert tiny.code.unused\n",
    }.items():
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_text(text, encoding="utf-8")
    return tmp_path / "root"


def described(mutants: Sequence[Mutant]) -> list[str]:
    return [f"{mutant.function} {mutant.line} {mutant.change.partition(':')[0]}" for mutant in mutants]


def test_each_change_is_one_mutant_that_compiles(root: Path) -> None:
    mutants = mutants_of(Path("tiny/code.py"), root)
    assert sorted(described(mutants)) == [
        "least 7 branch never taken",
        "least 7 comparison flipped",
        "least 7 not added",
        "least 7 not removed",
        "least 8 None returned",
        "least 9 None returned",
        "least 9 comparison flipped",
        *3 * ["least 9 constant + 1"],
        "least 9 keyword argument key removed",
        "unused 13 finally skipped after an error",
        "unused 14 None returned",
        "unused 14 constant + 1",
        "unused 14 constant negated",
        "unused 14 element 0 left out",
        "unused 14 element 1 left out",
        "unused 14 entry 0 left out",
        "unused 14 entry 1 left out",
        "unused 16 statement removed",
    ]
    for mutant in mutants:
        text = mutant.applied(CODE.encode()).decode()
        compile(text, "code.py", "exec")
        assert text != CODE
        assert text.splitlines()[:6] == CODE.splitlines()[:6]


def test_mutants_of_c_change_neither_comments_nor_the_preprocessor(root: Path) -> None:
    assert sources(root, ["tiny"], ["__init__"]) == [Path("tiny/code.c"), Path("tiny/code.py")]
    mutants = mutants_of(Path("tiny/code.c"), root)
    assert [mutant.change.partition(":")[0] for mutant in mutants] == [
        "0 to 1",
        "< to <=",
        "+ to -",
        "12 to 13",
        "* to +",
        "&& to ||",
    ]
    assert {mutant.line for mutant in mutants} == {4, 5}
    assert mutants[3].applied(C_CODE.encode()).decode() == C_CODE.replace("12", "13")


def mutant(path: str, function: str) -> Mutant:
    return Mutant(Path(path), function, 1, 1, "", 0, 0, b"")


def test_tests_that_call_the_function_come_first_the_most_special_before_the_others() -> None:
    tests = {
        "tiny/code.py least": ["t/b.py::general", "t/c.py::special"],
        "tiny/code.py unused": ["t/b.py::general"],
        "tiny/library.py call": ["t/b.py::general"],
    }
    seconds = {"t/a.py::other": 1.0, "t/b.py::general": 2.0, "t/c.py::special": 3.0}
    calls = Calls(tests, seconds, [])
    called = calls.callers(mutant("tiny/code.py", "least"))
    assert called == ["t/c.py::special", "t/b.py::general"]
    assert calls.quick(called, 5.0) == called
    assert calls.quick(called, 1.0) == called[:1]
    assert calls.callers(mutant("tiny/code.c", "")) == called
    assert calls.callers(mutant("tiny/code.py", "never")) == []


@pytest.mark.slow
def test_outcomes(root: Path, tmp_path: Path) -> None:
    mutants = {mutant.change: mutant for mutant in mutants_of(Path("tiny/code.py"), root)}
    copy = Copy(tmp_path / "copy", root)
    calls = copy.record(tmp_path / "calls", [])
    assert calls.failed == ["tests/test_code.py::test_that_fails"]
    assert calls.tests["tiny/code.py least"] == [
        f"tests/test_code.py::test_{name}" for name in ("larger", "smaller", "that_fails")
    ]
    killed = copy.outcome(mutants["None returned: return b"], calls, 60.0)
    assert killed == ("killed", "tests/test_code.py::test_larger")
    survivor = mutants["keyword argument key removed: max(a, 0 if a > 1 else 1, key=abs)"]
    assert copy.outcome(survivor, calls, 60.0) == ("survived", "")
    assert copy.run(["tests"], 0.001) == (None, "")
    for folder in (root, copy.root):
        assert (folder / "tiny/code.py").read_text(encoding="utf-8") == CODE


def test_the_script_prints_a_line_for_each_and_a_sum(root: Path, tmp_path: Path) -> None:
    words = [sys.executable, str(ROOT / "scripts/mutate.py"), "--root", str(root), "--packages", "tiny"]
    words += ["--number", "2", "--exclude", ".c", "--calls", str(tmp_path / "calls.json")]
    lines = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line.split()[1].partition(":")[0] for line in lines[:-1]] == 2 * ["tiny/code.py"]
    assert sum(int(part.split()[0]) for part in lines[-1].split(", ")) == 2
    assert (tmp_path / "calls.json").is_file()
