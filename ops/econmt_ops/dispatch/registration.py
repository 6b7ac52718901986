"""Registering operators of torch.library, without torch's compiler in a process that does not compile.

`torch.library.custom_op` hides every kernel from torch.compile by a decorator that imports the compiler at the first
call: 70 MB and two seconds, whether something is compiled or not. Kernels registered here are hidden in the same way
as soon as the compiler is there; before, nobody could look.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch._library.custom_ops import CustomOpDef


def custom_op(name: str, *, schema: str | None = None) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Registers a kernel for all devices, as `torch.library.custom_op` does; it changes none of its arguments.

    Args:
        name: with its namespace, "econmt_ops::lstm_layer".
        schema: of the arguments and results; None: that of the kernel's annotations.
    """

    def register(kernel: Callable[..., Any]) -> CustomOpDef:
        operator = torch.library.custom_op(name, kernel, mutates_args=(), schema=schema)
        # Where PyTorch keeps what it calls for all devices: the kernel, decorated.
        assert set(operator._backend_fns) == {None}
        operator._backend_fns[None] = _hidden_from_the_compiler(kernel)
        return operator

    return register


def _hidden_from_the_compiler(kernel: Callable[..., Any]) -> Callable[..., Any]:
    hidden: Callable[..., Any] | None = None

    @functools.wraps(kernel)
    def call(*arguments: Any, **options: Any) -> Any:
        nonlocal hidden
        if hidden is None:
            compiler = sys.modules.get("torch._dynamo")
            disable = getattr(compiler, "disable", None)  # missing while it is being imported
            if disable is None:
                return kernel(*arguments, **options)
            hidden = disable(kernel)
        return hidden(*arguments, **options)

    return call
