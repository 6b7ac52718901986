"""Steps compiled by torch.compile, which fuses the equations of a cell into one pass over memory."""

from __future__ import annotations

import functools
import os
import shutil
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from econmt_ops.backends.eager import EagerSteps
from econmt_ops.core.caches import use_private_compiler_folder

_VARIANTS = 64
"""Maximum number of times that torch.compile may recompile a step."""


def has_compiler() -> bool:
    """Returns True if this machine has the C++ compiler that torch.compile calls."""
    names = (os.environ.get("CXX", ""), "g++", "clang++", "c++", "cl")
    return any(shutil.which(name) for name in names if name)


@functools.cache
def is_available() -> bool:
    """Returns :func:`has_compiler`; warns, once, if there is no compiler."""
    if not has_compiler():
        warnings.warn(
            "econmt_ops: no C++ compiler found, so 'compiled' runs as 'recompute'; install g++ or set CXX",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return True


def allow_variants() -> None:
    """Raises the number of variants of a function at which torch.compile gives up and runs it uncompiled."""
    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, _VARIANTS)


@functools.cache
def compile_step(function: Callable[..., Any], *, dynamic: bool | None = None) -> Callable[..., Any]:
    """Compiles a function by torch.compile for tensors that are slices of others.

    A step receives slices of tensors that hold all steps. torch.compile would specialise the code on the shapes and
    strides of the base tensors, so they are hidden from it. It also recompiles for slices that begin where their base
    does, for sizes of one and for other types, and gives up after eight variants, which the types and shapes of one
    process can exceed; its limit is therefore raised.

    Under a torch dispatch mode, such as a memory estimate, the function runs uncompiled: compiled code would hide its
    operators, and fake tensors have no values for it. It takes tensors, tuples of them and numbers, and runs without
    autograd.
    """
    allow_variants()
    use_private_compiler_folder()
    compiled = torch.compile(function, dynamic=dynamic)

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        if torch._C._len_torch_dispatch_stack() > 0:
            return function(*arguments)
        # A tensor passed twice remains one object: torch.compile has to know which arguments share memory.
        seen: dict[int, Tensor] = {}

        def alone(part: Any) -> Any:
            if isinstance(part, Tensor):
                return seen.setdefault(id(part), part.data)
            return tuple(map(alone, part)) if isinstance(part, (tuple, list)) else part

        return compiled(*map(alone, arguments))

    return call


class CompiledSteps(EagerSteps):
    """`EagerSteps` with each function of a cell's step compiled."""

    def _run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return compile_step(function)(*arguments)
