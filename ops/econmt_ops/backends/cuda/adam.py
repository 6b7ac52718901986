"""Adam and AdamW for many parameters on a GPU in one launch, clipping and the gradients' norm included.

An update reads and writes each value once, as torch's fused kernel does; that one needs a pass more to clip by value, a
pass more for the norm, and writes gradients that it divides.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from econmt_ops.backends.cuda.library import Kernel, compiled, is_available, structure
from econmt_ops.core.arguments import Update

_THREADS = 256
_TILE = 1024
"""Values of a block."""
_MOST = 64
"""Tensors of a launch, a power of two; their arguments fill most of the 4 KB that a launch can have."""
_SHARED_BYTES = 4 * _THREADS // 32
MACROS = {"MOST": _MOST, "THREADS": _THREADS, "TILE": _TILE}


class AdamSettings(NamedTuple):
    """Settings of an update.

    Attributes:
        betas, eps, decay: as in `torch.optim.Adam`. decoupled: True for AdamW.
        rate: learning rate, a scalar on the device.
        divisor: divisor of the gradients, a scalar on the device; or None.
        bound: largest absolute value of a gradient, to which others are clipped; infinity for none.
        skip: nonzero to change nothing, a float32 scalar on the device; or None.
    """

    betas: tuple[float, float]
    eps: float
    decay: float
    decoupled: bool
    rate: Tensor
    divisor: Tensor | None
    bound: float
    skip: Tensor | None = None


def serves(values: Tensor, gradient: Tensor | None, *moments: Tensor) -> bool:
    """Returns True if `run` accepts these tensors of an update."""
    return (
        gradient is not None
        and values.dtype == gradient.dtype
        and values.dtype in (torch.float32, torch.bfloat16)
        and all(moment.dtype == torch.float32 for moment in moments)
        and all(
            not isinstance(tensor, FakeTensor)
            and is_available(tensor.device)
            and tensor.layout == torch.strided
            and tensor.is_contiguous()
            for tensor in (values, gradient, *moments)
        )
    )


@functools.cache
def _kernel(device: int, narrow: bool) -> Kernel:
    with torch.cuda.device(device):
        return Kernel(compiled("adam.cu", MACROS | {"NARROW": int(narrow)}), "adam", _THREADS, _SHARED_BYTES)


def prepare(parameter: Tensor) -> None:
    """Compiles the kernel of a parameter, which is not possible while a CUDA graph is captured."""
    if is_available(parameter.device):
        _kernel(parameter.device.index or 0, parameter.dtype == torch.bfloat16)


def run(settings: AdamSettings, updates: Sequence[Update], *, norm: bool) -> list[Tensor]:
    """Updates parameters of one type whose tensors `serves` accepts, and their moments; the gradients are left.

    Returns:
        With ``norm``, for settings without ``skip``, of each gradient the sums of squares of its blocks, before it is
        divided and clipped, (blocks,) float32; otherwise nothing.
    """
    assert not (norm and settings.skip is not None)
    blocks = [-(-update.values.numel() // _TILE) for update in updates]
    device = settings.rate.device
    narrow = bool(updates) and updates[0].values.dtype == torch.bfloat16
    squares = torch.empty(sum(blocks), dtype=torch.float32, device=device) if norm else None
    filled = [pair for pair in zip(updates, blocks, strict=True) if pair[1]]
    begin = 0
    for number in range(0, len(filled), _MOST):
        part, counts = zip(*filled[number : number + _MOST], strict=True)
        sums = None if squares is None else squares[begin:]
        _kernel(device.index or 0, narrow).launch(
            sum(counts), _SHARED_BYTES, _arguments(settings, part, counts, sums)
        )
        begin += sum(counts)
    return [] if squares is None else list(torch.split(squares, blocks))


def _arguments(
    settings: AdamSettings, updates: Sequence[Update], blocks: Sequence[int], squares: Tensor | None
) -> Any:
    argument: Any = structure("adam.cu", "AdamArguments", _MOST)()
    end = 0
    for number, (update, count) in enumerate(zip(updates, blocks, strict=True)):
        argument.values[number] = update.values.data_ptr()
        argument.gradients[number] = update.gradient.data_ptr()
        argument.first[number], argument.second[number] = (part.data_ptr() for part in update.moments)
        argument.steps[number] = update.numbers["step"].data_ptr()
        argument.sizes[number] = update.values.numel()
        end += count
        argument.ends[number], argument.salts[number] = end, update.salt
    argument.count = len(updates)
    argument.rate = settings.rate.data_ptr()
    argument.divisor = None if settings.divisor is None else settings.divisor.data_ptr()
    argument.skip = None if settings.skip is None else settings.skip.data_ptr()
    argument.squares = None if squares is None else squares.data_ptr()
    argument.beta1, argument.beta2 = settings.betas
    argument.log_beta1, argument.log_beta2 = (
        math.log(beta) if beta else -math.inf for beta in settings.betas
    )
    argument.bound, argument.epsilon, argument.decay = settings.bound, settings.eps, settings.decay
    argument.decoupled = int(settings.decoupled)
    return argument
