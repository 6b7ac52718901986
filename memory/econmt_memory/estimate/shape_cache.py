"""Cache of operators' results on fake tensors, by the shapes of their arguments.

A step calls the same operators on the same shapes hundreds of times. PyTorch takes about a hundred microseconds to
compute the result of a fake operator; a cached one takes a tenth of that.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

_CPU = torch.device("cpu")
_NEAR_VIEWS = {torch.ops.aten._unsafe_view.default}
"""Operators whose result shares its argument's memory without being declared as views."""
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)

_KNOWN: dict[Any, Any] = {}
"""Forms of results by operator and arguments, shared by all estimates of the process."""


class _UnknownError(Exception):
    """An argument or a result has a type whose form cannot be described."""


class _New(NamedTuple):
    """Form of a tensor with its own memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class ShapeCache:
    """Runs operators on fake tensors, with cached results."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        # All fake tensors of a mode share their attributes besides the shape.
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():  # modes may be active
            self._attributes = vars(FakeTensor(mode, torch.empty(0, device="meta"), _CPU))

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the result of an operator."""
        tensors: list[FakeTensor] = []
        values = (*args, *kwargs.items()) if kwargs else args
        try:
            # By id: operators live as long as the program, and their hashes are slow.
            key = id(func), _describe(values, tensors)
        except _UnknownError:
            return func(*args, **kwargs)
        if func.is_view or func in _NEAR_VIEWS:  # depend on the storage's offset, too, and are fast
            with in_kernel_invocation_manager(self._mode):
                views = func(*args, **kwargs)
            return self._wrap(views) if isinstance(views, Tensor) else [self._wrap(view) for view in views]
        form = _KNOWN.get(key)
        if form is None:
            result = func(*args, **kwargs)
            is_changed = _describe(values, []) != key[1] or torch.Tag.inplace_view in func.tags
            _KNOWN[key] = _UnknownError if is_changed else _form(result, tensors)
            return result
        return func(*args, **kwargs) if form is _UnknownError else self._create(form, tensors)

    def _create(self, form: Any, tensors: list[FakeTensor]) -> Any:
        """Creates a result of a form; appends new tensors to ``tensors``, whose indices occur in forms."""
        if isinstance(form, int):
            return tensors[form]
        if isinstance(form, _New):
            shape, stride, dtype = form
            with torch._C._DisableTorchDispatch():
                plain = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            tensors.append(self._wrap(plain))
            return tensors[-1]
        return None if form is None else tuple(self._create(part, tensors) for part in form)

    def _wrap(self, plain: Tensor) -> FakeTensor:
        fake: FakeTensor = Tensor._make_subclass(
            FakeTensor, plain, dispatch_device=True, device_for_backend_keys=_CPU
        )
        vars(fake).update(self._attributes)
        return fake


def _describe(values: Iterable[Any], tensors: list[FakeTensor]) -> tuple[Any, ...]:
    """Describes the properties of arguments that a result depends on; appends the tensors among them to ``tensors``.

    Raises:
        _UnknownError: An argument has another type.
    """
    properties: list[Any] = []
    for value in values:
        if isinstance(value, FakeTensor):
            if value.layout is not torch.strided or value.constant is not None:
                raise _UnknownError
            tensors.append(value)
            properties.append((value.shape, value.stride(), value.dtype))
        elif isinstance(value, _PLAIN):
            properties.append((type(value), value))
        elif isinstance(value, list | tuple):
            properties.append(_describe(value, tensors))
        else:
            raise _UnknownError
    return tuple(properties)


def _form(result: Any, tensors: list[FakeTensor]) -> Any:
    """Returns the form of a result, from which it can be created again; _UnknownError if that is not possible."""
    try:
        return _part(result, [*tensors], {tensor.untyped_storage()._cdata for tensor in tensors})
    except _UnknownError:
        return _UnknownError


def _part(part: Any, known: list[FakeTensor], storages: set[int]) -> Any:
    """Returns the form of a part of a result: a new tensor's, or the index of a known one; appends new ones."""
    if part is None:
        return None
    if isinstance(part, list | tuple):
        return tuple(_part(each, known, storages) for each in part)
    for number, tensor in enumerate(known):
        if part is tensor:
            return number
    if type(part) is not FakeTensor or part.layout is not torch.strided or part.constant is not None:
        raise _UnknownError
    if part.untyped_storage()._cdata in storages or part.storage_offset():
        raise _UnknownError
    storages.add(part.untyped_storage()._cdata)
    known.append(part)
    return _New(tuple(part.shape), part.stride(), part.dtype)
