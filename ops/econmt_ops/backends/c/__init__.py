"""C library for the pointwise work of a step on the CPU, one call per kernel; it is built with the package.

It supports float32, and bfloat16 with float32 sums. Without the library (no C compiler at installation), on other
devices, for other types, or under a torch dispatch mode, callers use tensor operations instead; results differ by
rounding. library.py loads it.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from econmt_ops.backends.c.library import Library, Structure
from econmt_ops.backends.c.platforms import HERE
from econmt_ops.core.chunks import rows_of
from econmt_ops.dispatch.measurements import CPU_DETAILS

_TYPES = (torch.float32, torch.bfloat16)

_FEW = 1 << 14
"""Number of values below which a kernel finishes before a second thread has started."""

_OUT_OF_RANGE = 2
"""Return value of a kernel for an index out of range."""

off = False
"""True if the library is disabled, set by :func:`without`."""


_FILE = Path(__file__).with_name(f"_kernels.{HERE}.so")
_PATH = _FILE if _FILE.is_file() else None
"""Path of the library, if the package was installed with it."""


@functools.cache
def _library() -> Library | None:
    if _PATH is None:
        return None
    try:
        return Library(_PATH)
    except (ImportError, OSError) as error:
        warnings.warn(
            f"econmt_ops: {error}; reinstall econmt, until then the CPU uses slower tensor operations",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def is_built() -> bool:
    """Returns True if the package was installed with its C library and this can be loaded."""
    return _library() is not None


CPU_DETAILS.append(lambda: "" if is_built() else "no C library")


def is_installed() -> bool:
    """Returns True if the package was installed with its C library; does not load it, so torch.compile can trace it."""
    return _PATH is not None


def library_path() -> Path | None:
    """Returns the path of the library, for copying it; None if the package was installed without."""
    return _PATH


@contextmanager
def without() -> Iterator[None]:
    """Disables the library within a context."""
    global off
    before, off = off, True
    try:
        yield
    finally:
        off = before


def serves(like: Tensor) -> bool:
    """Returns True if the kernels currently support tensors of this device and type."""
    if (
        off
        or like.device.type != "cpu"
        or like.dtype not in _TYPES
        or torch._C._len_torch_dispatch_stack() > 0
    ):
        return False
    library = _library()
    return library is not None and (library.has_threads or torch.get_num_threads() == 1)


def multiplies(dtype: torch.dtype) -> bool:
    """Returns True if the loaded library multiplies matrices of this type by instructions of this processor."""
    library = _library()
    return library is not None and dtype in library.multiplies


def structure_of(name: str) -> Structure:
    """Returns a structure of kernels.h; the library has to be there, see :func:`serves`."""
    library = _library()
    assert library is not None
    return library.structures[name]


def call(name: str, work: int, /, **given: Tensor | float | None) -> None:
    """Calls a kernel.

    Args:
        name: Name of its structure in kernels.h.
        work: Number of values that it processes.
        given: Fields of the structure; omitted ones and None are zero. A tensor also fills the fields of its strides
            and of the type of the values; it is copied if it is only read and its memory layout does not fit.

    Raises:
        IndexError: An index is out of range.
        MemoryError: There is no memory for the kernel's workspace.
    """
    library = _library()
    assert library is not None
    kind, fields = library.structures[name]
    structure, value_type = kind(), None
    tensors = []  # keeps copies until the kernel returns
    for field, value in given.items():
        if isinstance(value, Tensor):
            about = fields[field]
            tensor = about.in_layout(value)
            tensors.append(tensor)
            setattr(structure, field, tensor.data_ptr())
            for axis, stride in enumerate(about.strides):
                setattr(structure, stride, tensor.stride(axis))
            if about.is_value:
                assert value_type in (None, tensor.dtype), f"{name}: {field} is {tensor.dtype}"
                value_type = tensor.dtype
        elif value is not None:
            setattr(structure, field, value)
    if value_type == torch.bfloat16:
        structure.narrow = 1
    threads = 1 if work < _FEW else torch.get_num_threads()
    failed = library.functions[name](structure, threads)
    if failed == _OUT_OF_RANGE:
        raise IndexError(f"econmt_ops: {name}: index out of range")
    if failed:
        raise MemoryError(f"econmt_ops: out of memory for the workspace of {name}")


def sizes(names: str, tensor: Tensor) -> dict[str, int]:
    """Returns the sizes of a tensor by the names of a structure's fields."""
    return dict(zip(names.split(), tensor.shape, strict=True))


# kernels.h describes the arguments of the following functions.


def lstm_forward(
    gates: Tensor, recurrent: Tensor | None, before: Tensor, after: Tensor, h: Tensor, keep: bool
) -> None:
    """Runs one step of an LSTM; the arguments are those of `EagerSteps.cell_forward`, states in float32."""
    kept = gates if keep and gates.dtype == torch.float32 else None
    read = rows_of(gates) if recurrent is None else gates
    call(
        "lstm_forward", gates.numel(), **sizes("rows hidden", before), gates=read, recurrent=recurrent, before=before,
        h=h, after=after, kept=kept,
    )  # fmt: skip


def lstm_backward(
    gates: Tensor, before: Tensor, after: Tensor, dh: Tensor, other: Tensor | None, dc: Tensor, dgates: Tensor
) -> None:
    """Runs one step of an LSTM backward; the arguments are those of `EagerSteps.cell_backward`, states in float32."""
    gates = rows_of(gates)
    # The gates by their address, because their type can differ from that of ``dgates``.
    call(
        "lstm_backward", gates.numel(), **sizes("rows hidden", dc), sums=gates.dtype != torch.float32,
        gates=gates.data_ptr(), gates_stride=gates.stride(0), before=before, after=after, incoming=other, dh=dh, dc=dc,
        dgates=dgates, dbefore=dc,
    )  # fmt: skip


def attention_forward(query: Tensor, keys: Tensor, score: Tensor | None, padding: Tensor | None) -> Tensor:
    """Returns the weights (B, S) float32 of additive attention, or of dot attention, zero at padded positions."""
    weights = keys.new_empty(keys.shape[:2], dtype=torch.float32)
    call(
        "attention_forward", keys.numel(), **sizes("rows positions size", keys), query=query, keys=keys, score=score,
        padding=padding, weights=weights,
    )  # fmt: skip
    return weights


def combine_forward(share: Tensor, attention: Tensor, projected: Tensor, output: Tensor) -> None:
    """Writes tanh(share + sum_s attention_s projected_s) to ``output`` (B, H)."""
    call(
        "combine_forward", projected.numel(), **sizes("rows positions size", projected), share=share,
        attention=attention, projected=projected, output=output,
    )  # fmt: skip


def weight_gradient(
    values: Tensor, dcontext: Tensor, incoming: Tensor | None, padding: Tensor | None
) -> Tensor:
    """Returns values_s . dcontext + incoming_s, (B, S) float32, zero at padded positions."""
    dweights = values.new_empty(values.shape[:2], dtype=torch.float32)
    call(
        "weight_gradient", values.numel(), **sizes("rows positions size", values), values=values, dcontext=dcontext,
        incoming=incoming, padding=padding, dweights=dweights,
    )  # fmt: skip
    return dweights


def losses(
    logits: Tensor,
    targets: Tensor,
    smoothing: float,
    factors: Tensor | None,
    gradient: bool,
    dbias: Tensor | None,
) -> Tensor:
    """Computes cross entropies, as any `econmt_ops.backends.losses.LossKernel`.

    Raises:
        IndexError: a target is not in [0, V).
    """
    row_losses = logits.new_empty(len(logits), dtype=torch.float32)
    call(
        "losses", logits.numel(), **sizes("rows vocabulary", logits), logits=logits, targets=targets,
        smoothing=smoothing, gradient=gradient, factors=factors, losses=row_losses, dbias=dbias,
    )  # fmt: skip
    return row_losses


def add_rows(total: Tensor, values: Tensor, places: Tensor | None = None) -> None:
    """Adds rows (R, N) to a vector (N,), or with ``places`` (R,) each to the row of a table (M, N) with that index."""
    call("add_rows", values.numel(), **sizes("rows size", values), values=values, places=places, total=total)
