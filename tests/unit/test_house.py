"""The house rules of docs/design.md: who may import whom, no circles, nothing too long to read."""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Callable, Iterator
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

import pytest

from econmt.config.recipe import Recipe
from econmt.config.yaml_reader import section_kinds
from scripts.make_recipe_reference import sections
from tests.conftest import ROOT

LONGEST_FUNCTION = 80
LONGEST_MODULE = 500
MOST_RECIPE_KEYS = 191
"""Number of keys of recipes, as docs/recipes.md lists them, keys of sections aside; it may only fall."""
MOST_LINES = {
    "econmt": 38277,
    "econmt_serve": 3799,
    "econmt_distill": 1928,
    "memory": 5579,
    "runtime": 2163,
    "ops": 23047,
    "scripts": 14726,
    "tests": 54987,
}
"""Lines of Python below each folder; they may only fall."""

STOREYS = {
    "ops.core": "",
    "ops.cells": "ops.core",
    "ops.dispatch": "ops.core",
    "ops.backends": "ops.dispatch ops.cells",
    "ops.products": "ops.backends",
    "ops.optimizers": "ops.backends",
    "ops.additive_attention": "ops.products",
    "ops.linear": "ops.products",
    "ops.linear_cross_entropy": "ops.products",
    "ops.linear_recurrence": "ops.products",
    "ops.lstm": "ops.products",
    "ops.layers": "ops.lstm ops.linear_recurrence",
    "ops.attentional_lstm": "ops.layers ops.additive_attention",
    "ops.modules": "ops.attentional_lstm ops.linear_cross_entropy",
    "econmt_ops": "ops.modules ops.linear ops.optimizers",
    "econmt_memory": "",
    "econmt_runtime": "",
    "base": "econmt_ops econmt_memory",
    "config": "base",
    "model": "config",
    "data": "config",
    "tasks": "model data",
    "engine": "tasks",
    "parallel": "engine",
    "estimate": "parallel",
    "budget": "estimate checkpoint evaluation",
    "decoding": "model data",
    "evaluation": "decoding",
    "checkpoint": "tasks",
    "training": "budget",
    "export": "checkpoint decoding",
    "bench": "training",
    "options": "decoding",
    "api": "training export options",
    "cli": "bench api",
    "econmt_serve": "api",
    "econmt_distill": "api econmt_runtime",
}
"""Packages, and those just below each; a package may import these and whatever lies below them.

The folders of econmt_ops are packages, too: ``ops.lstm`` is ``econmt_ops.lstm``.
"""
USERS_OF_API = {"econmt_distill", "econmt_serve"}
"""Packages that use the interface for programs, as packages of others do."""
BASE = {"econmt", "econmt.elsewhere", "econmt.errors", "econmt.factored_ids"}
OUTSIDE_OF_MODEL = {
    *("gzip", "io", "json", "os", "pathlib", "safetensors"),
    *("sentencepiece", "shutil", "tempfile", "yaml"),
}
OUTSIDE_OF_RUNTIME = set(sys.stdlib_module_names) | {"numpy", "sentencepiece", "econmt_runtime"}
OUTSIDE_OF_MEMORY = set(sys.stdlib_module_names) | {"torch", "numpy", "rich", "econmt_memory"}
OUTSIDE_OF_OPS = set(sys.stdlib_module_names) | {"torch", "triton"}


def modules() -> dict[str, Path]:
    """Every module of both packages, by name."""
    found = {}
    for folder in (ROOT, ROOT / "ops", ROOT / "memory", ROOT / "runtime"):
        for file in folder.glob("econmt*/**/*.py"):
            parts = file.relative_to(folder).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


MODULES = modules()


@functools.cache
def below(package: str) -> set[str]:
    """Returns all packages that a package may import."""
    direct = STOREYS[package].split()
    return {*direct}.union(*map(below, direct))


def room(module: str) -> str:
    """Returns the package of :data:`STOREYS` that a module belongs to."""
    package, _, rest = module.partition(".")
    if package == "econmt_ops" and rest:
        return f"ops.{rest.partition('.')[0]}"
    if package != "econmt":
        return package
    if module in BASE:
        return "base"
    return "cli" if module == "econmt.__main__" else module.split(".")[1]


@functools.cache
def tree_of(file: Path) -> ast.Module:
    """Returns the syntax tree of a file."""
    return ast.parse(file.read_text(encoding="utf-8"))


@functools.cache
def imported(module: str) -> tuple[str, ...]:
    """Returns the modules that a module imports, in functions and for type annotations too.

    ``econmt`` itself is left out: it hands on the names of ``econmt.api`` when they are used.
    """
    return () if module == "econmt" else tuple(_imported(module))


def _imported(module: str) -> Iterator[str]:
    for node in ast.walk(tree_of(MODULES[module])):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: a relative import"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in MODULES else str(node.module)


def test_the_house_has_its_packages() -> None:
    assert {"econmt.config.recipe", "econmt.cli.main", "econmt_ops", "econmt_runtime"} <= set(MODULES)
    assert len(MODULES) > 40


def test_a_room_imports_only_the_rooms_below() -> None:
    for module in sorted(MODULES):
        own = room(module)
        assert own in STOREYS, f"{module} is in no package of docs/design.md"
        for name in imported(module):
            if name.startswith("econmt"):
                assert name in MODULES, f"{module} imports {name}, which does not exist"
                assert room(name) == own or room(name) in below(own), f"{module} imports {name}"
            if own == "model":
                assert name.partition(".")[0] not in OUTSIDE_OF_MODEL, f"{module} knows of files: {name}"
            if module.partition(".")[0] == "econmt_ops":
                assert name.partition(".")[0] in OUTSIDE_OF_OPS | {"econmt_ops"}, f"{module} imports {name}"
            if own == "econmt_memory":
                assert name.partition(".")[0] in OUTSIDE_OF_MEMORY, f"{module} imports {name}"
            if own == "econmt_runtime":
                assert name.partition(".")[0] in OUTSIDE_OF_RUNTIME, f"{module} imports {name}"
            if own == "data":
                assert not name.startswith("torch.nn"), f"{module} knows of models: {name}"


def test_operations_import_nothing_by_a_string() -> None:
    found = [
        module
        for module, file in MODULES.items()
        for node in ast.walk(tree_of(file))
        if module.startswith("econmt_ops")
        and isinstance(node, ast.Call)
        and ast.unparse(node.func).rpartition(".")[2] in ("import_module", "__import__")
    ]
    assert found == ["econmt_ops.backends"]


def test_users_of_the_interface_import_nothing_else_of_econmt() -> None:
    for module in MODULES:
        if room(module) in USERS_OF_API:
            for name in imported(module):
                others = name == "econmt" or name.startswith(("econmt.", "econmt_ops", "econmt_memory"))
                assert not others or name == "econmt.api" or name.startswith("econmt.api."), (
                    f"{module} imports {name}"
                )


@pytest.mark.parametrize("place", [str, room])
def test_modules_and_rooms_import_in_no_circle(place: Callable[[str], str]) -> None:
    graph: dict[str, set[str]] = {place(module): set() for module in MODULES}
    why: dict[tuple[str, str], str] = {}
    for module in MODULES:
        for name in imported(module):
            if name in MODULES and place(name) != place(module):
                graph[place(module)].add(place(name))
                why[place(module), place(name)] = f"{module} imports {name}"
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        circle = error.args[1]
        pytest.fail("; ".join(why[user, used] for used, user in pairwise(circle)))


def test_nothing_is_too_long_to_read() -> None:
    for module in sorted(MODULES):
        text = MODULES[module].read_text(encoding="utf-8")
        assert len(text.splitlines()) <= LONGEST_MODULE, module
        for node in ast.walk(tree_of(MODULES[module])):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = lines(node) - (lines(node.body[0]) if ast.get_docstring(node) else 0)
                assert length <= LONGEST_FUNCTION, f"{module}.{node.name} has {length} lines"


def test_recipes_have_no_more_keys() -> None:
    fields = [field for kind, _ in sections(Recipe) for field in kind.model_fields.values()]
    assert sum(not section_kinds(field.annotation) for field in fields) <= MOST_RECIPE_KEYS


def test_packages_only_become_smaller() -> None:
    for folder, most in MOST_LINES.items():
        files = [file for file in (ROOT / folder).rglob("*.py") if "build" not in file.parts]
        count = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)
        assert count <= most, f"{folder} has {count:,} lines; take some out, or put what is new elsewhere"


def lines(node: ast.stmt) -> int:
    """The lines of a statement."""
    return (node.end_lineno or node.lineno) - node.lineno + 1


def test_nothing_loaded_from_disk_can_execute() -> None:
    loaders = ("pickle", "marshal", "shelve", "dill", "joblib", "cloudpickle")
    calls = {"torch.load", "torch.jit.load", "yaml.load", "yaml.unsafe_load", "eval", "exec"}
    for module, file in MODULES.items():
        tree = tree_of(file)
        used = {name.partition(".")[0] for name in imported(module)} & set(loaders)
        written = {
            f"pickle.{node.attr}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "pickle"
        }
        assert not used or (used == {"pickle"} and written == {"pickle.dumps"}), module
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                assert ast.unparse(node.func) not in calls, f"{module}:{node.lineno}"
                assert not any(
                    k.arg == "allow_pickle" and ast.unparse(k.value) != "False" for k in node.keywords
                )


def documented(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yields line and text of the docstrings of a module, those of attributes and constants included."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            value = getattr(statement, "value", None)
            if (
                isinstance(statement, ast.Expr)
                and isinstance(value, ast.Constant)
                and isinstance(value.value, str)
            ):
                yield statement.lineno, value.value.strip()


NO_SUBJECT = re.compile(r"(Of|That|Those|The same|What|Whether|How|Where|Who|Which|As)\b")


def test_docstrings_name_their_subject() -> None:
    scripts = [file for file in ROOT.glob("scripts/**/*.py") if "tests" not in file.parts[len(ROOT.parts) :]]
    for file in [*MODULES.values(), *scripts]:
        tree = tree_of(file)
        assert not [(line, text[:60]) for line, text in documented(tree) if NO_SUBJECT.match(text)], file


def test_no_two_classes_share_a_name() -> None:
    places: dict[str, list[str]] = {}
    for module, file in MODULES.items():
        for node in tree_of(file).body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(module)
    assert not {name: found for name, found in places.items() if len(found) > 1}
