"""Steps compiled by torch.compile: the equations of `econmt_ops.cells.lstm`, fused into one pass over memory."""

from __future__ import annotations

import functools
import itertools
import os
import shutil
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from econmt_ops.backends import c as library
from econmt_ops.backends.attention import EagerAttention
from econmt_ops.backends.c.attention import CAttention
from econmt_ops.backends.eager import EagerSteps
from econmt_ops.backends.protocol import AttentionInputs
from econmt_ops.cells import lstm
from econmt_ops.cells.attention import additive_backward, additive_forward
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
    operators, and fake tensors have no values for it.

    Args:
        function: takes tensors and numbers, and runs without autograd.
        dynamic: as in torch.compile; by default sizes are constants until one of them changes.
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
        return compiled(
            *(
                seen.setdefault(id(part), part.data) if isinstance(part, Tensor) else part
                for part in arguments
            )
        )

    return call


def tanh(values: Tensor) -> Tensor:
    """Computes tanh by the sigmoid, which takes a CPU a third of the time."""
    return 2.0 * torch.sigmoid(2.0 * values) - 1.0


def fill_quarters(gates: Tensor, quarters: Sequence[Tensor]) -> None:
    """Writes the quarters of (B, 4H) separately, so that the compiler does not materialise their concatenation."""
    for destination, quarter in zip(gates.chunk(4, 1), quarters, strict=True):
        destination.copy_(quarter)


def _lstm_forward(
    gates: Tensor, recurrent: Tensor | None, before: Tensor, after: Tensor, h: Tensor, keep: bool
) -> None:
    sums = gates.to(before.dtype)
    if recurrent is not None:
        sums = sums + recurrent.to(before.dtype)
    activated = lstm.activate(sums, tanh)
    new_h, c = lstm.update_state(activated, before, tanh)
    if keep:
        fill_quarters(gates, activated if gates.dtype == before.dtype else sums.chunk(4, 1))
    after.copy_(c)
    h.copy_(new_h)


def _lstm_backward(
    gates: Tensor,
    before: Tensor,
    after: Tensor,
    dh: Tensor,
    other: Tensor | None,
    dc: Tensor,
    dgates: Tensor,
) -> None:
    exact = dc.dtype
    activated = gates.chunk(4, 1) if gates.dtype == exact else lstm.activate(gates.to(exact), tanh)
    total_dh = dh.to(exact) if other is None else dh.to(exact) + other.to(exact)
    parts, dbefore = lstm.update_state_backward(activated, before, after, total_dh, dc, tanh)
    fill_quarters(dgates, parts)
    dc.copy_(dbefore)


def _grouped(
    function: Callable[..., Any], sizes: tuple[int, ...], read: Tensor, recurrent: Tensor, *tensors: Tensor
) -> Any:
    """Calls a method of a `StepCell` with the products of a step and ``tensors`` in groups of the given sizes."""
    groups, begin = [], 0
    for size in sizes:
        groups.append(tensors[begin : begin + size])
        begin += size
    return function(read, recurrent, *groups)


class CompiledSteps(EagerSteps):
    """`EagerSteps` with the pointwise work of a step in one compiled function."""

    def _cell_forward(
        self,
        gates: Tensor,
        recurrent: Tensor | None,
        before: Tensor,
        after: Tensor,
        h: Tensor,
        keep: bool,
    ) -> None:
        after = before if after.is_set_to(before) else after
        compile_step(_lstm_forward)(gates, recurrent, before, after, h, keep)

    def _cell_backward(
        self,
        gates: Tensor,
        before: Tensor,
        after: Tensor,
        dh: Sequence[Tensor],
        dc: Tensor,
        dgates: Tensor,
    ) -> None:
        dgates = gates if dgates.is_set_to(gates) else dgates
        compile_step(_lstm_backward)(gates, before, after, dh[0], dh[1] if len(dh) > 1 else None, dc, dgates)

    def _run_cell(
        self, function: Callable[..., Any], read: Tensor, recurrent: Tensor, *groups: Sequence[Tensor]
    ) -> Any:
        sizes, tensors = tuple(map(len, groups)), itertools.chain(*groups)
        return compile_step(_grouped)(function, sizes, read, recurrent, *tensors)

    @staticmethod
    def _attention(inputs: AttentionInputs) -> EagerAttention:
        """Returns the attention kernels; where the C library serves, only the scores are compiled."""
        kernels = CAttention if library.serves(inputs.keys) else EagerAttention
        return kernels(inputs, compile_step(additive_forward), compile_step(additive_backward))
