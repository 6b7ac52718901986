"""Breaks the code in many small ways, one at a time, and reports which of them the tests notice.

Each mutant changes one expression or statement of a module. Tests whose files import that module, directly or through
helpers of the tests, run against it in a temporary copy of the repository; the checkout is never changed. A mutant that
makes them fail, or run past the time limit, is killed; one that survives shows a rule that no test holds, or a change
that makes no difference.

Example: python scripts/mutate.py --number 100 --seed 1 --timeout 60
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

PACKAGES = ("econmt", "ops/econmt_ops", "econmt_runtime")
FLIPPED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
SWAPPED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
}  # fmt: skip


class Mutant(NamedTuple):
    """A changed module: its file, the line and a description of the change, and the new text."""

    path: Path
    line: int
    change: str
    text: str


def _variants(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yields descriptions and changed copies of a node."""
    new = copy.deepcopy(node)
    if isinstance(new, ast.Compare) and type(new.ops[0]) in FLIPPED:
        new.ops[0] = FLIPPED[type(new.ops[0])]()
        yield "comparison flipped", new
    elif isinstance(new, ast.BinOp) and type(new.op) in SWAPPED:
        new.op = SWAPPED[type(new.op)]()
        yield "arithmetic swapped", new
    elif isinstance(new, ast.BoolOp):
        new.op = ast.Or() if isinstance(new.op, ast.And) else ast.And()
        yield "and/or swapped", new
    elif isinstance(new, ast.Constant) and type(new.value) in (int, float):
        yield "constant + 1", ast.Constant(new.value + 1)
    elif isinstance(new, ast.UnaryOp) and isinstance(new.op, ast.Not):
        yield "not removed", new.operand
    elif isinstance(new, ast.If):
        test = new.test
        new.test = ast.UnaryOp(ast.Not(), test)
        yield "not added", new
        other = copy.deepcopy(new)
        other.test = ast.Constant(False)
        yield "branch never taken", other
    elif isinstance(new, ast.Return) and new.value is not None:
        new.value = ast.Constant(None)
        yield "None returned", new
    elif isinstance(new, ast.Call):
        for number, keyword in enumerate(new.keywords):
            shorter = copy.deepcopy(new)
            del shorter.keywords[number]
            yield f"keyword argument {keyword.arg} removed", shorter
    elif isinstance(new, (ast.AugAssign, ast.Raise)) or (
        isinstance(new, ast.Expr) and isinstance(new.value, ast.Call)
    ):
        yield "statement removed", ast.Pass()


def _nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes inside functions; annotations, decorators, defaults and assertions are left out."""
    for field, value in ast.iter_fields(tree):
        if field in ("annotation", "returns", "decorator_list", "args") and not isinstance(tree, ast.Call):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.Assert):
                yield child
                yield from _nodes(child)


def mutants_of(path: Path, root: Path) -> list[Mutant]:
    """Returns all mutants of a module; ``path`` is relative to ``root``."""
    text = (root / path).read_text(encoding="utf-8")
    mutants = []
    for function in ast.walk(ast.parse(text)):
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        for statement in function.body:
            if not isinstance(statement, ast.Assert):
                for node in [statement, *_nodes(statement)]:
                    mutants += [_applied(path, text, node, *variant) for variant in _variants(node)]
    return sorted({(each.line, each.change, each.text): each for each in mutants}.values())


def _applied(path: Path, text: str, node: ast.AST, change: str, new: ast.AST) -> Mutant:
    """Replaces a node's characters in a text; all other lines stay as they are."""
    assert isinstance(node, (ast.expr, ast.stmt))
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    lines = text.encode().splitlines(keepends=True)
    begin, end = lines[node.lineno - 1][: node.col_offset], lines[node.end_lineno - 1][node.end_col_offset :]
    code = ast.unparse(new)
    if isinstance(node, ast.stmt):
        code = code.replace("\n", "\n" + " " * node.col_offset)
    else:
        code = f"({code})"
    middle = begin + code.encode() + end
    changed = b"".join([*lines[: node.lineno - 1], middle, *lines[node.end_lineno :]])
    return Mutant(path, node.lineno, f"{change}: {ast.unparse(node).splitlines()[0][:60]}", changed.decode())


def _imports(path: Path) -> set[str]:
    """Returns the dotted names that a file imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
    return names


class Importers:
    """Tests that concern each module.

    Args:
        root: folder of the repository.
        packages: folders of its code, relative to it.
        tests: folder of its tests, relative to it.
        most: maximum number of test files of a module; those with the fewest imports come first.
    """

    def __init__(self, root: Path, packages: Sequence[str], tests: str, most: int) -> None:
        self._most = most
        files = [path for package in (*packages, tests) for path in (root / package).rglob("*.py")]
        self._reads = {path.relative_to(root): _imports(path) for path in files}
        self._tests = {path for path in self._reads if path.name.startswith("test_")}

    def tests(self, module: Path) -> list[str]:
        """Returns the test files that reach a module by the fewest imports; empty if none does."""
        reached, front = {module}, {module}
        chosen: list[Path] = []
        while front and len(chosen) < self._most:
            names = {self._name(path) for path in front}
            front = {path for path, read in self._reads.items() if path not in reached and names & read}
            reached |= front
            chosen += sorted(front & self._tests, key=lambda path: (len(self._reads[path]), path))
        return [str(path) for path in chosen[: self._most]]

    def _name(self, path: Path) -> str:
        parts = path.with_suffix("").parts
        parts = parts[1:] if parts[0] == "ops" else parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def outcome(mutant: Mutant, root: Path, tests: Sequence[str], marks: str, timeout: float) -> str:
    """Returns "killed", "survived", "timeout" or "no tests"; the copy in ``root`` is changed and changed back."""
    if not tests:
        return "no tests"
    path = root / mutant.path
    before = path.read_bytes()
    path.write_text(mutant.text, encoding="utf-8")
    words = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", marks, *tests]
    separate = {
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{root}:{root / 'ops'}",
    }
    try:
        ended = subprocess.run(
            words, cwd=root, env={**os.environ, **separate}, capture_output=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        return "timeout"
    finally:
        path.write_bytes(before)
    return "survived" if ended.returncode in (0, 5) else "killed"  # 5: no test has these marks


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--number", type=int, default=100, help="number of mutants (default: %(default)s)")
    parser.add_argument(
        "--seed", type=int, default=1, help="seed of the choice of mutants (default: %(default)s)"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=120.0,
        help="seconds after which the tests of a mutant are ended (default: %(default)s)",
    )
    parser.add_argument(
        "--files",
        type=int,
        default=8,
        help="maximum number of test files run for a mutant (default: %(default)s)",
    )
    parser.add_argument("--marks", default="not slow and not thorough", help="pytest markers of the tests")
    parser.add_argument("--exclude", default="triton", help="skip modules whose path contains this")
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1], help="repository")
    parser.add_argument(
        "--packages", nargs="+", default=PACKAGES, help="folders of the code, in the repository"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "copy"
        shutil.copytree(
            arguments.root, root, ignore=shutil.ignore_patterns(".git", ".venv", "__pycache__", "build")
        )
        modules = sorted(
            path.relative_to(root)
            for package in arguments.packages
            for path in (root / package).rglob("*.py")
        )
        everything = [
            mutant
            for path in modules
            if arguments.exclude not in str(path)
            for mutant in mutants_of(path, root)
        ]
        chosen = random.Random(arguments.seed).sample(everything, min(arguments.number, len(everything)))
        importers = Importers(root, arguments.packages, "tests", arguments.files)
        counts: Counter[str] = Counter()
        for mutant in chosen:
            ended = outcome(mutant, root, importers.tests(mutant.path), arguments.marks, arguments.timeout)
            counts[ended] += 1
            print(f"{ended:<9} {mutant.path}:{mutant.line}  {mutant.change}", flush=True)
    print(", ".join(f"{count} {ended}" for ended, count in sorted(counts.items())))


if __name__ == "__main__":
    main()
