"""Blocks of steps of the attentional LSTM in one launch each, forward and backward, on a Hopper GPU.

A launch keeps the weights of all layers in shared memory. Its blocks (of threads) exchange what each step makes through
the L2 cache and wait for each other at the barriers of `decoder.cuh`. The deferred products, before and after the
steps, are those of `econmt_ops.attentional_lstm`.

Sizes: B batch, K steps of a block, S source positions, H hidden size, A attention size, L layers.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from econmt_ops.backends.cuda.library import Kernel, compiled, is_hopper, structure

_THREADS = 512
_ROWS = 64
"""Rows of a group, and units of a chunk."""
_UNITS = 8
"""Units of a block."""
_MULTIPLIERS = 128
"""Threads of a block that multiply."""
_WARPS = 12
"""Warps of a block that compute attention."""
_SLOTS = 8
"""Chunks on their way to a block."""
_CLUSTER = 2
"""Blocks that load each chunk once for all. Larger clusters leave multiprocessors unused, on an H200 12 of 132."""
_MOST_STAGES = 3
"""Positions on their way to a warp, at most."""
_UNROLLED = {"forward": 2, "backward": 4}
"""Chunks in the body of the loops that multiply; more would not fit the registers."""
_CHUNK_BYTES = _ROWS * 128
_COUNTER = 32
"""Integers from one group's counter to the next."""
_SLOTS_OF_VECTOR = 256
"""Integers that a group's slots of a vector take; see Range in the sources."""
_MOST_SHARED = 227 << 10
"""Shared memory of a block on a Hopper GPU, in bytes."""
_MOST_LAYERS = 2


class DecoderSizes(NamedTuple):
    """Sizes and options of a call, on which its kernels depend.

    Attributes:
        dtype: compute type; float32 is multiplied as float16, with the range of float32.
        hidden, attention, layers, positions, batch: H, A, L, S, B.
        masked: True if there is dropout between the layers.
        residual: True if a layer's input is added to its output.
    """

    dtype: torch.dtype
    hidden: int
    attention: int
    layers: int
    positions: int
    batch: int
    masked: bool
    residual: bool

    @property
    def blocks(self) -> int:
        """Blocks of a launch."""
        return self.hidden // _UNITS * self.groups

    @property
    def groups(self) -> int:
        """Groups of rows."""
        return -(-self.batch // _ROWS)

    def shared_bytes(self, kernel: str, stages: int) -> int:
        """Returns the shared memory of a block, as divided by ForwardMemory and BackwardMemory in the sources."""
        hidden, attention, layers = self.hidden, self.attention, self.layers
        if kernel == "forward":
            both = -(-attention * _UNITS // (hidden * _UNITS)) * _UNITS + _UNITS
            weights = hidden // _ROWS * (layers * 8 * _UNITS + both) * 128
        else:
            weights = (4 * hidden * layers * 2 + attention + hidden) // _ROWS * _UNITS * 128
        coming = max(_SLOTS * _CHUNK_BYTES, _WARPS * stages * 2 * (attention + hidden))
        sums = 0 if kernel == "forward" else 32 * _MULTIPLIERS + 512 * layers
        return (
            weights
            + coming
            + sums
            + 8 * (2 * _SLOTS + _WARPS * stages + 1)
            + 4 * (3 * _WARPS + self.positions)
        )

    def stages(self, kernel: str) -> int:
        """Returns the number of positions on their way to a warp; 0 if the kernel does not fit."""
        fitting = (n for n in range(_MOST_STAGES, 1, -1) if self.shared_bytes(kernel, n) <= _MOST_SHARED)
        return next(fitting, 0)

    def are_served(self) -> bool:
        """Returns True if the kernels can be compiled for these sizes."""
        parts = self.hidden // _UNITS
        return (
            self.dtype in (torch.float32, torch.bfloat16, torch.float16)
            and self.hidden % _ROWS == self.attention % _ROWS == 0
            and 0 < self.hidden <= _SLOTS * _ROWS
            and self.attention % (2 * parts) == 0
            and (self.attention + self.hidden) % (2 * _ROWS) == 0
            and 0 < self.layers <= _MOST_LAYERS
            and self.batch > 0
            and all(self.stages(kernel) for kernel in _UNROLLED)
        )


def macros(name: str, sizes: DecoderSizes) -> dict[str, int]:
    """Returns the compile-time parameters of a kernel; batch and positions matter only to how many stages fit."""
    return {
        "BFLOAT16": int(sizes.dtype == torch.bfloat16),
        "FLOAT32": int(sizes.dtype == torch.float32),
        "HIDDEN": sizes.hidden,
        "ATTENTION": sizes.attention,
        "LAYERS": sizes.layers,
        "MASKED": int(sizes.masked),
        "RESIDUAL": int(sizes.residual),
        "CLUSTER": _CLUSTER,
        "SLOTS": _SLOTS,
        "STAGES": sizes.stages(name),
        "UNROLL": _UNROLLED[name],
    }


@functools.cache
def _codes(parameters: tuple[tuple[str, Any], ...], capability: tuple[int, int]) -> dict[str, bytes]:
    """Returns the machine code of kernels by name, which are compiled at the same time."""
    with ThreadPoolExecutor() as threads:
        compiling = {
            name: threads.submit(compiled, f"decoder_{name}.cu", dict(each), capability)
            for name, each in parameters
        }
    return {name: code.result() for name, code in compiling.items()}


@functools.cache
def _launch_of(name: str, sizes: DecoderSizes, device: int) -> tuple[Kernel, int] | None:
    """Returns the kernel for these sizes, and a block's shared memory; None if not all blocks run at the same time."""
    parameters = tuple((each, tuple(macros(each, sizes).items())) for each in _UNROLLED)
    kernel = _kernel(name, parameters, device)
    shared_bytes = sizes.shared_bytes(name, sizes.stages(name))
    with torch.cuda.device(device):
        fits = sizes.blocks <= kernel.most_blocks(shared_bytes)
    return (kernel, shared_bytes) if fits else None


@functools.cache
def _kernel(name: str, parameters: tuple[tuple[str, Any], ...], device: int) -> Kernel:
    with torch.cuda.device(device):
        code = _codes(parameters, torch.cuda.get_device_capability(device))[name]
        return Kernel(code, f"decoder_{name}", _THREADS, _MOST_SHARED, _CLUSTER)


def serves(sizes: DecoderSizes, device: torch.device) -> bool:
    """Returns True if both kernels can run on a device; compiles them if they have not been."""
    if not (sizes.are_served() and is_hopper(device)):
        return False
    index = torch.cuda.current_device() if device.index is None else device.index
    if torch.cuda.is_current_stream_capturing():  # modules cannot be loaded meanwhile
        return (sizes, index) in _READY
    if all(_launch_of(name, sizes, index) is not None for name in _UNROLLED):
        _READY.add((sizes, index))
    return (sizes, index) in _READY


_READY: set[tuple[DecoderSizes, int]] = set()
"""Sizes and devices for which both kernels are there."""


def aligned(rows: Tensor | None) -> Any:
    """Returns a tensor whose rows (along the last axis) begin at multiples of 16 bytes; the same one if possible."""
    if rows is None:
        return None
    strides = [rows.stride(axis) * rows.element_size() for axis in range(rows.dim() - 1)]
    fits = rows.stride(-1) == 1 and not any(number % 16 for number in (rows.data_ptr(), *strides))
    return rows if fits else rows.contiguous().clone()


_AXES = {"row": -2, "step": -3}
"""Axes of a tensor by what its strides are called in the structures of arguments."""


def _set(argument: Any, name: str, value: Any) -> None:
    """Sets a field of a kernel's arguments, and fields of strides where there are some; tensors are not kept alive."""
    assert hasattr(argument, name), name
    apart = {axis: f"{name}_{axis}" for axis in _AXES if hasattr(argument, f"{name}_{axis}")}
    if isinstance(value, Tensor):
        assert value.stride(-1) == 1 if apart else value.is_contiguous(), (name, value.stride())
        setattr(argument, name, value.data_ptr())
        for axis, field in apart.items():
            setattr(argument, field, value.stride(_AXES[axis]))
    elif isinstance(value, Sequence):
        for layer, part in enumerate(value):
            getattr(argument, name)[layer] = part.data_ptr()
            for axis, field in apart.items():
                getattr(argument, field)[layer] = part.stride(_AXES[axis])
    elif value is not None:
        setattr(argument, name, value)


def _workspace(like: Tensor, sizes: DecoderSizes, kernel: str) -> tuple[Tensor, Tensor, Tensor]:
    """Allocates what the blocks exchange for a block of steps of outputs ``like``, the groups' counters, and slots."""
    hidden, both = sizes.hidden, sizes.attention + sizes.hidden
    width = (1 + (3 if kernel == "forward" else 4) * sizes.layers) * hidden + both
    exchange = like.new_empty(sizes.groups * _ROWS * width)
    slots = (len(like) + 1) * (sizes.layers + 1) * _SLOTS_OF_VECTOR if like.dtype == torch.float32 else 0
    counters = sizes.groups * _COUNTER
    zeros = torch.zeros(counters + sizes.groups * slots, dtype=torch.int32, device=like.device)
    return exchange, zeros[:counters], zeros[counters:]


def run(kernel: str, sizes: DecoderSizes, **fields: Any) -> None:
    """Runs the steps of a block, "forward", or "backward" from the last one; `serves` has returned True for the sizes.

    ``fields`` are tensors by the names of the structure of the kernel's arguments, whose source describes them, or
    lists of a tensor for each layer; numbers; None for what may be null.
    """
    outputs, attention = fields["outputs"], fields["attention"]
    found = _launch_of(kernel, sizes, outputs.device.index or 0)
    assert found is not None
    launched, shared_bytes = found
    argument: Any = structure(f"decoder_{kernel}.cu", f"{kernel.capitalize()}Arguments")()
    step, row, _ = attention.stride()
    assert step == row * attention.shape[1] or len(attention) == 1
    fields |= zip(("exchange", "counters", "slots"), _workspace(outputs, sizes, kernel), strict=True)
    fields |= zip(("steps", "batch", "positions"), attention.shape, strict=True)
    for name, value in fields.items():
        _set(argument, name, value)
    launched.launch(sizes.blocks, shared_bytes, argument)
