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


def _remember_types() -> None:
    """Keeps what Triton makes anew for each of a million tensors: shapes, names of types, and types of numpy.

    Leaves out sums of integers in 64 bits, too, whose overflow nothing looks at unless kernels are debugged.
    """
    from triton.language import core
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    shapes: dict[tuple[int, ...], tuple[Any, ...]] = {(): (None, None, core.tuple([]), core.constexpr(1))}
    names: dict[tuple[tuple[int, ...], str], str] = {}
    types: dict[str, np.dtype[Any]] = {}
    make_block, find_type = core.block_type.__init__, interpreter._get_np_dtype
    broadcast = TritonSemantic.broadcast_impl_value

    def init_block(block: Any, element: Any, shape: Any) -> None:
        sizes = tuple(size.value if isinstance(size, core.constexpr) else size for size in shape)
        key = sizes, element.name
        if key not in names:
            make_block(block, element, shape)
            of_tensors = core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(block.numel)
            shapes.setdefault(sizes, (block.shape, block.numel, *of_tensors))
            names[key] = block.name
        block.element_ty, block.name = element, names[key]
        block.shape, block.numel = shapes[sizes][:2]

    def init_tensor(tensor: Any, handle: Any, kind: Any) -> None:
        tensor.handle, tensor.type, tensor.dtype = handle, kind, kind.scalar
        tensor.shape, tensor.numel = shapes[tuple(kind.shape) if kind.is_block() else ()][2:]

    def np_type(kind: Any) -> np.dtype[Any]:
        name = kind.scalar.name
        if name not in types:
            types[name] = find_type(kind.scalar)
        return types[name]

    def broadcast_unlike(semantic: Any, left: Any, right: Any) -> Any:
        alike = left.shape is right.shape
        return (left, right) if alike else broadcast(semantic, left, right)

    core.block_type.__init__ = init_block
    core.tensor.__init__ = init_tensor
    interpreter._get_np_dtype = np_type
    TritonSemantic.broadcast_impl_value = broadcast_unlike
    TritonSemantic.binary_op_sanitize_overflow_impl = lambda *_: None


def _import_interpreted() -> None:
    assert sys.modules.get("triton") is None, "triton was imported before its interpreter could be turned on"
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        _let_numbers_be_indices()
        _keep_comparisons_boolean()
        _patch_the_language_once()
        _remember_types()
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
