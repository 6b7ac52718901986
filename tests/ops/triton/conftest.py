"""Kernels run on the GPU if there is one, and else in Triton's interpreter, which has to be on when they are imported."""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.ops.triton.kernel_device import DEVICE


def _let_numbers_be_indices() -> None:
    """Loop bounds that a kernel is given: the interpreter has arrays of one, of which numpy 2.4 makes no int."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


def _keep_comparisons_boolean() -> None:
    """Makes a comparison of numbers a mask: Triton 3.9's interpreter spreads it as integers and refuses them."""
    from triton.runtime import interpreter

    def create_splat(builder: Any, block: Any, number: Any) -> Any:
        values = np.full(block.shape, number.data, number.data.dtype)
        return interpreter.TensorHandle(values, number.dtype.scalar)

    interpreter.InterpreterBuilder.create_splat = create_splat


def _patch_the_language_once() -> None:
    """Lets the first function of a launch make Triton's language interpreted, not each again that a kernel calls.

    The interpreter spends a third of its time on that.
    """
    from triton import language
    from triton.runtime import interpreter

    def call(function: Any, *arguments: Any, **named: Any) -> Any:
        modules = [
            each for each in function.fn.__globals__.values() if each is language or each is language.core
        ]
        if any(language.core.is_builtin(each.load) for each in modules):
            interpreter._patch_lang(function.fn)
        return function.rewrite()(*arguments, **named)

    interpreter.InterpretedFunction.__call__ = call


def _import_interpreted() -> None:
    assert sys.modules.get("triton") is None, "triton was imported before its interpreter could be turned on"
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        _let_numbers_be_indices()
        _keep_comparisons_boolean()
        _patch_the_language_once()
        package = importlib.import_module("econmt_ops.backends.triton")
        for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
            importlib.import_module(module.name)
    finally:
        del os.environ["TRITON_INTERPRET"]


if DEVICE == "cpu":
    _import_interpreted()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where kernels run on a GPU their tests are among those marked ``cuda``."""
    here = Path(__file__).parent
    for item in items:
        if DEVICE == "cuda" and here in item.path.parents and "device" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.cuda)


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the tests here the kernels are available; to all others in the same process they are not."""
    if DEVICE == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture
def device() -> str:
    """Where the kernels run."""
    return DEVICE


@pytest.fixture
def implementation() -> str:
    """To the tests of all implementations that a module here imports."""
    return "triton"


@pytest.fixture
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory holds NaN, so that what nobody has written is seen."""

    def poison(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        made = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, made=made, **k: poison(made(*a, **k)))
