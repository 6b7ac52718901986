"""The steps compiled by torch.compile: the mathematics of `econmt_ops.cells.lstm`, fused into one pass over memory."""

from __future__ import annotations

import functools
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
from econmt_ops.backends.eager import EagerSteps, through_dropout
from econmt_ops.backends.protocol import AttentionKernels
from econmt_ops.cells import lstm
from econmt_ops.cells.attention import additive_backward, additive_forward
from econmt_ops.cells.protocol import StepCell

_VARIANTS = 64
"""How often a step may be compiled anew."""


def has_compiler() -> bool:
    """Whether this machine has the C++ compiler that torch.compile calls."""
    names = (os.environ.get("CXX", ""), "g++", "clang++", "c++", "cl")
    return any(shutil.which(name) for name in names if name)


@functools.cache
def is_available() -> bool:
    """As :func:`has_compiler`; says so, once, if there is none."""
    if not has_compiler():
        warnings.warn(
            "econmt_ops: no C++ compiler found, so 'compiled' runs as 'recompute'; install g++ or set CXX",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return True


@functools.cache
def compile_step(function: Callable[..., Any], *, dynamic: bool | None = None) -> Callable[..., Any]:
    """The function compiled by torch.compile, for tensors that are slices of others.

    A step is given slices of what is kept for all steps. Compiled code would be bound to the shapes and strides of the
    tensors that they are slices of, so it does not see them. It is also made anew for slices that begin where their
    tensor does, for sizes of one and for other types; torch.compile gives up after eight such variants, which the types
    and shapes of one process can exceed, so its limit is raised.

    Where somebody follows the operators, as an estimate does, they run one by one: compiled code would not show them,
    and fake tensors have no values for it.

    Args:
        function: of tensors and numbers, run where autograd does not look.
        dynamic: as torch.compile takes it; by default sizes are constants until one of them changes.
    """
    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, _VARIANTS)
    made = torch.compile(function, dynamic=dynamic)

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        if torch._C._len_torch_dispatch_stack() > 0:
            return function(*arguments)
        # An argument that is given twice stays one: torch.compile has to know what shares memory.
        seen: dict[int, Tensor] = {}
        return made(
            *(
                seen.setdefault(id(part), part.data) if isinstance(part, Tensor) else part
                for part in arguments
            )
        )

    return call


def tanh(values: Tensor) -> Tensor:
    """tanh; on a CPU the sigmoid costs a third of it."""
    return 2.0 * torch.sigmoid(2.0 * values) - 1.0


def fill_quarters(whole: Tensor, quarters: Sequence[Tensor]) -> None:
    """Writes the quarters of (B, 4H), for a compiler: a joined copy of them would be written and read again."""
    for place, quarter in zip(whole.chunk(4, 1), quarters, strict=True):
        place.copy_(quarter)


def _advance(
    gates: Tensor, recurrent: Tensor | None, before: Tensor, after: Tensor, h: Tensor, keep: bool
) -> None:
    sums = gates.to(before.dtype)
    if recurrent is not None:
        sums = sums + recurrent.to(before.dtype)
    activated = lstm.activate(sums, tanh)
    made, c = lstm.update_state(activated, before, tanh)
    if keep:
        fill_quarters(gates, activated if gates.dtype == before.dtype else sums.chunk(4, 1))
    after.copy_(c)
    h.copy_(made)


def _advance_back(
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
    given = dh.to(exact) if other is None else dh.to(exact) + other.to(exact)
    parts, dbefore = lstm.update_state_backward(activated, before, after, given, dc, tanh)
    fill_quarters(dgates, parts)
    dc.copy_(dbefore)


def _step(function: Callable[..., Any], sizes: tuple[int, ...], *tensors: Tensor) -> Any:
    """Calls a method of a `StepCell` with its tensors, which come one by one; the last group is what is left."""
    first, *groups = sizes
    given: list[Any] = [*tensors[:first]]
    place = first
    for size in groups:
        given.append(tensors[place : place + size])
        place += size
    return function(*given, tensors[place:])


class CompiledSteps(EagerSteps):
    """As `EagerSteps`, a step's pointwise work in one compiled function."""

    def _advance(
        self,
        gates: Tensor,
        recurrent: Tensor | None,
        before: Tensor,
        after: Tensor,
        h: Tensor,
        keep: bool,
    ) -> None:
        after = before if after.is_set_to(before) else after
        compile_step(_advance)(gates, recurrent, before, after, h, keep)

    def cell_backward(
        self,
        gates: Tensor,
        before: Tensor,
        after: Tensor,
        dh: Sequence[Tensor],
        dc: Tensor,
        dgates: Tensor,
        *,
        keep: Tensor | None = None,
        scale: float = 1.0,
    ) -> None:
        """See `StepKernels`."""
        dh = through_dropout(dh, keep, scale)
        dgates = gates if dgates.is_set_to(gates) else dgates
        compile_step(_advance_back)(gates, before, after, dh[0], dh[1] if len(dh) > 1 else None, dc, dgates)

    def step_forward(
        self,
        cell: StepCell,
        read: Tensor,
        recurrent: Tensor,
        state: Sequence[Tensor],
        extra: Sequence[Tensor],
    ) -> tuple[Tensor, ...]:
        """See `StepCell.forward`."""
        made: tuple[Tensor, ...] = compile_step(_step)(
            cell.forward, (2, len(state)), read, recurrent, *state, *extra
        )
        return made

    def step_backward(
        self,
        cell: StepCell,
        read: Tensor,
        recurrent: Tensor,
        state: Sequence[Tensor],
        after: Sequence[Tensor],
        dafter: Sequence[Tensor],
        extra: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
        """See `StepCell.backward`."""
        sizes = (2, len(state), len(after), len(dafter))
        made: tuple[Tensor, Tensor, tuple[Tensor, ...], tuple[Tensor, ...]] = compile_step(_step)(
            cell.backward, sizes, read, recurrent, *state, *after, *dafter, *extra
        )
        return made

    def attention(
        self,
        keys: Tensor,
        projected: Tensor,
        score: Tensor | None,
        norm: tuple[Tensor, Tensor] | None,
        scale: float,
        lengths: Tensor | None,
    ) -> AttentionKernels:
        """See `StepKernels`; where the C library serves, only the scores are compiled."""
        made = CAttention if library.serves(keys) else EagerAttention
        functions = (compile_step(additive_forward), compile_step(additive_backward))
        return made(keys, projected, score, norm, scale, lengths, *functions)
