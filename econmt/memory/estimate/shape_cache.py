"""Cache of operators' results on fake tensors, by the shapes of their arguments.

A step repeats the same operators on the same shapes hundreds of times. PyTorch's fake tensors find each result anew, in
about a hundred microseconds; what is remembered takes a tenth of that.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

_CPU = torch.device("cpu")
_NEAR_VIEWS = {torch.ops.aten._unsafe_view.default}
"""Operators whose result shares its argument's memory though they are not declared to be views."""
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


_KNOWN: dict[Any, Any] = {}
"""Forms of results by operator and arguments. They depend on nothing else, so that one estimate uses what another one
has found."""


class _UnknownError(Exception):
    """Arguments of an operator are none of the kinds whose results can be remembered."""


class _New(NamedTuple):
    """A tensor with memory of its own."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class RememberedShapes:
    """Runs operators on the fake tensors of a mode.

    Args:
        mode: that made the tensors.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        # What a fake tensor knows beside its shape is the same for all of a mode.
        with torch._C._DisableTorchDispatch():  # the mode may be active
            plain = torch.empty(0, device="meta")
        self._attributes = vars(FakeTensor(mode, plain, _CPU))

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of an operator."""
        tensors: list[FakeTensor] = []
        try:
            # Operators live as long as the program, and their own hashes are slow.
            key = id(func), _describe(args, tensors), _describe(kwargs.items(), tensors) if kwargs else ()
        except _UnknownError:
            return func(*args, **kwargs)
        if func.is_view or func in _NEAR_VIEWS:
            # Views differ in where they begin, and are quickly made.
            with in_kernel_invocation_manager(self._mode):
                found = func(*args, **kwargs)
            return self._wrap(found) if isinstance(found, Tensor) else [self._wrap(part) for part in found]
        form = _KNOWN.get(key)
        if form is None:
            result = func(*args, **kwargs)
            _KNOWN[key] = _form(func, result, tensors, key[1:], (args, kwargs))
            return result
        return func(*args, **kwargs) if form is _UnknownError else self._made(form, tensors)

    def _made(self, form: Any, tensors: list[FakeTensor]) -> Any:
        """A result, or a part of it, of this form; new tensors are added to those that the form names by number."""
        if isinstance(form, int):
            return tensors[form]
        if isinstance(form, _New):
            shape, stride, dtype = form
            with torch._C._DisableTorchDispatch():
                plain = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            tensors.append(self._wrap(plain))
            return tensors[-1]
        if form is None:
            return None
        return tuple(self._made(part, tensors) for part in form)

    def _wrap(self, plain: Tensor) -> FakeTensor:
        made: FakeTensor = Tensor._make_subclass(
            FakeTensor, plain, dispatch_device=True, device_for_backend_keys=_CPU
        )
        vars(made).update(self._attributes)
        return made


def _describe(values: Iterable[Any], tensors: list[FakeTensor]) -> tuple[Any, ...]:
    """Describes the properties of arguments that a result depends on; tensors among them are added to a list.

    Raises:
        _UnknownError: they are of another kind.
    """
    found: list[Any] = []
    for value in values:
        if isinstance(value, FakeTensor):
            if value.layout is not torch.strided or value.constant is not None:
                raise _UnknownError
            tensors.append(value)
            found.append((value.shape, value.stride(), value.dtype))
        elif isinstance(value, _PLAIN):
            found.append((type(value), value))
        elif isinstance(value, list | tuple):
            found.append(_describe(value, tensors))
        else:
            raise _UnknownError
    return tuple(found)


def _form(func: Any, result: Any, tensors: list[FakeTensor], key: Any, arguments: Any) -> Any:
    """Returns instructions for making a result again: the index of an argument, or the form of a new tensor."""
    args, kwargs = arguments
    after = _describe(args, []), _describe(kwargs.items(), []) if kwargs else ()
    if after != key or torch.Tag.inplace_view in func.tags:
        return _UnknownError
    known = list(tensors)
    try:
        return _part(result, known, {tensor.untyped_storage()._cdata for tensor in tensors})
    except _UnknownError:
        return _UnknownError


def _part(part: Any, known: list[FakeTensor], memory: set[int]) -> Any:
    """The form of a part of a result; a new tensor is added to those known, by whose number it may come again."""
    if part is None:
        return None
    if isinstance(part, list | tuple):
        return tuple(_part(each, known, memory) for each in part)
    for number, tensor in enumerate(known):
        if part is tensor:
            return number
    if type(part) is not FakeTensor or part.layout is not torch.strided or part.constant is not None:
        raise _UnknownError
    if part.untyped_storage()._cdata in memory or part.storage_offset():
        raise _UnknownError
    memory.add(part.untyped_storage()._cdata)
    known.append(part)
    return _New(tuple(part.shape), part.stride(), part.dtype)
