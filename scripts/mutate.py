"""Breaks the code in many small ways, one at a time, and reports which of them the tests notice.

Each mutant changes one expression or statement of a function, in Python or C. The script works in copies of the
repository; the checkout is never changed. It first runs all tests once and records which functions each test calls
(`scripts/call_trace.py`). A mutant then runs against the tests that call its function, those that call the fewest
other functions first, as many as take --seconds. A mutant that makes a test fail, or run past the time limit, is
killed; one that survives shows a rule that no test holds, or a change that makes no difference.

Example: python scripts/mutate.py --number 100 --seed 1 --calls build/calls.json
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import queue
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

PACKAGES = (
    "econmt", "econmt_serve", "econmt_distill", "ops/econmt_ops", "memory/econmt_memory", "runtime/econmt_runtime",
)  # fmt: skip
FLIPPED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
SWAPPED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
}  # fmt: skip
C_OPERATORS = {
    b"<": b"<=", b"<=": b"<", b">": b">=", b">=": b">", b"==": b"!=", b"!=": b"==", b"&&": b"||", b"||": b"&&",
    b"+": b"-", b"-": b"+", b"*": b"+", b"/": b"*", b"+=": b"-=", b"-=": b"+=",
}  # fmt: skip
_C_COMMENT = re.compile(rb"/\*.*?\*/|//[^\n]*", re.DOTALL)
_C_TOKEN = re.compile(rb"(?<= )[-+*/<>=!&|]{1,2}(?= )|(?<![\w.\"])\d+(?![\w.\"])")


MARKS = "not slow and not thorough"
"""Tests that run."""
_NOT_FOUND, _NO_TESTS = 4, 5
"""Exit codes of pytest if it does not find a test that is named, or if no test has the markers."""


class Mutant(NamedTuple):
    """A change of a source file.

    Attributes:
        path: File, relative to the repository.
        function: Name of the changed function; empty in C.
        line, column: Position of the change, from 1.
        change: Description of the change.
        begin, end: Range of the bytes that are replaced.
        new: Bytes that replace them.
    """

    path: Path
    function: str
    line: int
    column: int
    change: str
    begin: int
    end: int
    new: bytes

    def applied(self, source: bytes) -> bytes:
        """Returns the changed file."""
        return source[: self.begin] + self.new + source[self.end :]


def _variants(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yields descriptions and changed copies of a node."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in FLIPPED:
        yield "comparison flipped", _with(node, ops=[FLIPPED[type(node.ops[0])](), *node.ops[1:]])
    elif isinstance(node, ast.BinOp) and type(node.op) in SWAPPED:
        yield "arithmetic swapped", _with(node, op=SWAPPED[type(node.op)]())
    elif isinstance(node, ast.BoolOp):
        yield "and/or swapped", _with(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield "constant negated", ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        yield "constant + 1", ast.Constant(node.value + 1)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "not removed", node.operand
    elif isinstance(node, ast.If):
        yield "not added", _with(node, test=ast.UnaryOp(ast.Not(), node.test))
        yield "branch never taken", _with(node, test=ast.Constant(False))
    elif isinstance(node, ast.Try) and node.finalbody:
        without = _with(node, orelse=[*node.orelse, *node.finalbody], finalbody=[])
        always = ast.If(ast.Constant(True), [*node.body, *node.orelse, *node.finalbody], [])
        yield "finally skipped after an error", without if node.handlers else always
    elif isinstance(node, (ast.List, ast.Set)) and len(node.elts) > 1:
        for number in range(len(node.elts)):
            yield f"element {number} left out", _with(node, elts=_without(node.elts, number))
    elif isinstance(node, ast.Dict):
        for number in range(len(node.keys)):
            keys, values = _without(node.keys, number), _without(node.values, number)
            yield f"entry {number} left out", _with(node, keys=keys, values=values)
    elif isinstance(node, ast.Return) and node.value is not None:
        if not (isinstance(node.value, ast.Constant) and node.value.value is None):
            yield "None returned", ast.Return(ast.Constant(None))
    elif isinstance(node, ast.Call):
        for number, keyword in enumerate(node.keywords):
            change = f"keyword argument {keyword.arg} removed"
            yield change, _with(node, keywords=_without(node.keywords, number))
    elif isinstance(node, (ast.AugAssign, ast.Raise)) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    ):
        yield "statement removed", ast.Pass()


def _with(node: ast.AST, **fields: object) -> ast.AST:
    """Returns a copy of a node with other values of some fields."""
    return type(node)(**{**{name: getattr(node, name) for name in node._fields}, **fields})


def _without(values: Sequence[object], number: int) -> list[object]:
    return [*values[:number], *values[number + 1 :]]


def _nodes(tree: ast.AST, function: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Yields the nodes inside functions and the names of these functions.

    Annotations, decorators, defaults and assertions are left out.
    """
    for field, value in ast.iter_fields(tree):
        if field in ("annotation", "returns", "decorator_list", "args") and not isinstance(tree, ast.Call):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.Assert):
                inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
                if function:
                    yield function, child
                yield from _nodes(child, child.name if inside else function)


def mutants_of(path: Path, root: Path) -> list[Mutant]:
    """Returns all mutants of a source file; ``path`` is relative to ``root``."""
    source = (root / path).read_bytes()
    return list((_python_mutants if path.suffix == ".py" else _c_mutants)(path, source))


def _python_mutants(path: Path, source: bytes) -> Iterator[Mutant]:
    begins = [0]
    for line in source.splitlines(keepends=True):
        begins.append(begins[-1] + len(line))
    for function, node in _nodes(ast.parse(source)):
        for change, variant in _variants(node):
            assert isinstance(node, (ast.expr, ast.stmt))
            assert node.end_lineno is not None
            assert node.end_col_offset is not None
            begin = begins[node.lineno - 1] + node.col_offset
            end = begins[node.end_lineno - 1] + node.end_col_offset
            code = ast.unparse(variant)
            if isinstance(node, ast.stmt):
                code = code.replace("\n", "\n" + " " * node.col_offset)
            else:
                code = f"({code})"
            first_line = source[begin:end].decode().splitlines()[0]
            description = f"{change}: {first_line[:60]}"
            position = node.lineno, node.col_offset + 1
            yield Mutant(path, function, *position, description, begin, end, code.encode())


def _c_mutants(path: Path, source: bytes) -> Iterator[Mutant]:
    """Yields mutants of C code: other operators, and numbers plus 1; preprocessor lines and comments are left out."""
    code = _C_COMMENT.sub(lambda comment: re.sub(rb"[^\n]", b" ", comment.group()), source)
    for token in _C_TOKEN.finditer(code):
        old, begin = token.group(), code.rfind(b"\n", 0, token.start()) + 1
        line = code[begin : code.find(b"\n", token.start())].strip()
        new = b"%d" % (int(old) + 1) if old.isdigit() else C_OPERATORS.get(old)
        if new and not line.startswith(b"#"):
            change = f"{old.decode()} to {new.decode()}: {line.decode()[:60]}"
            position = code.count(b"\n", 0, begin) + 1, token.start() - begin + 1
            yield Mutant(path, "", *position, change, *token.span(), new)


class Calls:
    """Functions that each test calls, and how long each test takes.

    Args:
        tests: Tests that call a function, by "file, space, name".
        seconds: Duration of every test.
        failed: Tests that fail without a change.
    """

    def __init__(self, tests: dict[str, list[str]], seconds: dict[str, float], failed: Sequence[str]) -> None:
        self.tests, self.seconds, self.failed = tests, seconds, failed
        self._functions = Counter(test for callers in tests.values() for test in callers)

    @classmethod
    def read(cls, folder: Path) -> Calls:
        """Reads what call_trace.py has written."""
        seconds: Counter[str] = Counter()
        for line in (folder / "seconds").read_text(encoding="utf-8").splitlines():
            test, _, duration = line.rpartition("\t")
            seconds[test] += float(duration)
        failures = folder / "failed"
        failed = failures.read_text(encoding="utf-8").splitlines() if failures.is_file() else []
        tests: dict[str, set[str]] = {}
        for line in (folder / "calls").read_text(encoding="utf-8").splitlines():
            test, file, name = line.rsplit("\t", 2)
            if test in seconds:
                tests.setdefault(f"{file} {name}", set()).add(test)
        return cls({function: sorted(callers) for function, callers in tests.items()}, dict(seconds), failed)

    def callers(self, mutant: Mutant) -> list[str]:
        """Returns the tests that call a mutant's function, those that call the fewest functions first.

        C code is called by the Python modules in its folder.
        """
        if mutant.function:
            tests = set(self.tests.get(f"{mutant.path} {mutant.function}", ()))
        else:
            folder = f"{mutant.path.parent}/"
            tests = {test for name, tests in self.tests.items() if name.startswith(folder) for test in tests}
        return sorted(tests, key=lambda test: (self._functions[test], test))

    def quick(self, tests: Sequence[str], seconds: float) -> list[str]:
        """Returns the first tests that take so many seconds in total, at least one and at most 300 tests."""
        total, chosen = 0.0, list[str]()
        for test in tests[:300]:
            total += self.seconds[test]
            if total <= seconds or not chosen:
                chosen.append(test)
        return chosen


class Copy:
    """A copy of the repository in which tests run.

    Args:
        root: Folder of the copy; it does not exist yet.
        repository: Folder of the repository.
    """

    def __init__(self, root: Path, repository: Path) -> None:
        self.root = root
        ignored = shutil.ignore_patterns(".git", ".venv", "__pycache__", "build", ".*_cache")
        shutil.copytree(repository, root, ignore=ignored)
        shutil.copy(Path(__file__).with_name("call_trace.py"), root / "sitecustomize.py")

    def run(self, words: Sequence[str], timeout: float | None, **variables: str) -> tuple[int | None, str]:
        """Runs pytest; returns its exit code, None if it took too long, and its output."""
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", MARKS, *words]
        # A worker of pytest-xdist that runs this script names itself; runs below it are not its own.
        inherited = {name: value for name, value in os.environ.items() if "PYTEST_XDIST" not in name}
        environment = {
            **inherited,
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": ":".join(str(self.root / name) for name in ("", "ops", "memory", "runtime")),
            **variables,
        }
        try:
            ended = subprocess.run(
                command,
                cwd=self.root,
                env=environment,
                capture_output=True,
                text=True,
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return None, ""
        return ended.returncode, ended.stdout

    def record(self, folder: Path, words: Sequence[str]) -> Calls:
        """Runs all tests and returns what they call; ``folder`` keeps the records."""
        folder.mkdir()
        self.run(["-p", "sitecustomize", *words], None, CALL_TRACE=str(folder))
        calls = Calls.read(folder)
        for test in calls.failed:
            print(f"left out, as it fails without a change: {test}", file=sys.stderr)
        return calls

    def outcome(self, mutant: Mutant, calls: Calls, seconds: float) -> tuple[str, str]:
        """Returns "killed", "timeout", "survived" or "not built", and the name of the test that failed.

        Args:
            mutant: Change to try.
            calls: Functions that the tests call.
            seconds: Duration of the tests.
        """
        path = self.root / mutant.path
        before = path.read_bytes()
        path.write_bytes(mutant.applied(before))
        try:
            if path.suffix != ".py" and not self._build():
                return "not built", ""
            tests = calls.quick(calls.callers(mutant), seconds)
            limit = 60 + 10 * sum(calls.seconds[test] for test in tests)
            left_out = [f"--deselect={test}" for test in calls.failed]
            code, output = self.run(["-x", *left_out, *tests], limit) if tests else (0, "")
            if code == _NOT_FOUND:  # by their names, which the mutant may have changed
                files = {test.partition("::")[0] for test in tests}
                code, output = self.run(["-x", *left_out, *sorted(files)], limit)
            if code is None:
                return "timeout", ""
            if code in (0, _NO_TESTS):
                return "survived", ""
            failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
            return "killed", failed.group(1) if failed else ""
        finally:
            path.write_bytes(before)
            if path.suffix != ".py":
                self._build()

    def _build(self) -> bool:
        """Builds the C library; returns False if the compiler refuses."""
        for library in self.root.glob("ops/econmt_ops/backends/c/*.so"):
            library.unlink()
        subprocess.run(
            [sys.executable, "setup.py", "-q", "build_ext", "--inplace", "--force"],
            cwd=self.root,
            capture_output=True,
            check=False,
        )
        return any(self.root.glob("ops/econmt_ops/backends/c/*.so"))


def sources(root: Path, packages: Sequence[str], excluded: Sequence[str]) -> list[Path]:
    """Returns the source files of packages, relative to ``root``, without those whose path contains a given text."""
    return sorted(
        path.relative_to(root)
        for package in packages
        for pattern in ("*.py", "*.[ch]")
        for path in (root / package).rglob(pattern)
        if not any(text in str(path.relative_to(root)) for text in excluded)
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--number", type=int, default=100, help="number of mutants (default: %(default)s)")
    parser.add_argument(
        "--seed", type=int, default=1, help="seed of the choice of mutants (default: %(default)s)"
    )
    parser.add_argument("--calls", type=Path, help="file of recorded calls; written if it does not exist")
    parser.add_argument("--seconds", type=float, default=60.0, help="duration of the tests of a mutant")
    parser.add_argument("--workers", type=int, default=1, help="mutants that are tested at the same time")
    parser.add_argument(
        "--exclude", nargs="*", default=["gluon"], help="skip files whose path contains these"
    )
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1], help="repository")
    parser.add_argument(
        "--packages", nargs="+", default=PACKAGES, help="folders of the code, in the repository"
    )
    arguments = parser.parse_args()
    root = arguments.root
    everything = [
        mutant
        for path in sources(root, arguments.packages, arguments.exclude)
        for mutant in mutants_of(path, root)
    ]
    chosen = random.Random(arguments.seed).sample(everything, min(arguments.number, len(everything)))
    with tempfile.TemporaryDirectory() as folder:
        free: queue.Queue[Copy] = queue.Queue()
        for number in range(arguments.workers):
            free.put(Copy(Path(folder) / f"copy{number}", root))
        if arguments.calls and arguments.calls.is_file():
            calls = Calls(*json.loads(arguments.calls.read_text(encoding="utf-8")))
        else:
            processes = ["-n", str(arguments.workers)] if arguments.workers > 1 else []
            calls = free.queue[0].record(Path(folder) / "calls", processes)
            if arguments.calls:
                arguments.calls.parent.mkdir(parents=True, exist_ok=True)
                arguments.calls.write_text(
                    json.dumps([calls.tests, calls.seconds, calls.failed]), encoding="utf-8"
                )
        counts: Counter[str] = Counter()

        def test(mutant: Mutant) -> None:
            line = f"{mutant.path}:{mutant.line}:{mutant.column}  {mutant.change}"
            place = free.get()
            ended, failed = place.outcome(mutant, calls, arguments.seconds)
            free.put(place)
            counts[ended] += 1
            print(f"{ended:<9} {line}{failed and '  by '}{failed}", flush=True)

        with ThreadPoolExecutor(arguments.workers) as threads:
            list(threads.map(test, chosen))
    print(", ".join(f"{count} {ended}" for ended, count in sorted(counts.items())))


if __name__ == "__main__":
    main()
