"""C library for the pointwise work of a step on the CPU, one call per kernel; it is built with the package.

It supports float32, and bfloat16 with float32 sums. Without the library (no C compiler at installation), on other
devices, for other types, or under a torch dispatch mode, callers use tensor operations instead; results differ by
rounding. library.py loads it.
"""

from __future__ import annotations

import functools
import importlib.machinery
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from econmt_ops.backends.c.library import STRUCTURES, Library

_TYPES = (torch.float32, torch.bfloat16)

_FEW = 1 << 14
"""Number of values below which a kernel finishes before a second thread has started."""

_OUT_OF_RANGE = 2
"""Return value of a kernel for an index out of range."""

off = False
"""True if the library is disabled, set by :func:`without`."""


def _path() -> Path | None:
    """Returns the path of the library, if the package was installed with it."""
    candidates = [
        Path(__file__).parent / f"_kernels{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES
    ]
    return next((candidate for candidate in candidates if candidate.is_file()), None)


_PATH = _path()


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


@functools.cache
def _strides(name: str) -> dict[str, str]:
    """Maps a kernel's tensor fields to the fields of their row strides."""
    fields = [str(field[0]) for field in STRUCTURES[name]._fields_]
    return {field: f"{field}_stride" for field in fields if f"{field}_stride" in fields}


def call(name: str, work: int, sizes: tuple[int, ...], /, **given: Tensor | float | None) -> None:
    """Calls a kernel.

    Args:
        name: name of its structure.
        work: number of values that it processes.
        sizes: the first fields of the structure.
        given: the other fields. Omitted fields and None are zero; strides are taken from the tensors.
    """
    library = _library()
    assert library is not None
    structure, strides = STRUCTURES[name](*sizes), _strides(name)
    for field, value in given.items():
        if isinstance(value, Tensor):
            setattr(structure, field, value.data_ptr())
            if field in strides:
                setattr(structure, strides[field], value.stride(0))
        elif value is not None:
            setattr(structure, field, value)
    threads = 1 if work < _FEW else torch.get_num_threads()
    failed = library.functions[name](structure, threads)
    if failed == _OUT_OF_RANGE:
        raise IndexError(f"econmt_ops: {name}: index out of range")
    if failed:
        raise MemoryError(f"econmt_ops: out of memory for the workspace of {name}")


def _narrow(*tensors: Tensor) -> bool:
    """Returns True for bfloat16 tensors, False for float32; all must have one type."""
    dtype = tensors[0].dtype
    assert dtype in _TYPES
    assert all(tensor.dtype == dtype for tensor in tensors)
    return dtype == torch.bfloat16


def _are_float32(*tensors: Tensor | None) -> bool:
    return all(tensor is None or tensor.dtype == torch.float32 for tensor in tensors)


def _has_rows(tensor: Tensor) -> bool:
    """Returns True if the last axis is contiguous."""
    return tensor.stride(-1) == 1 or tensor.shape[-1] <= 1


def rows_of(tensor: Tensor) -> Tensor:
    """Returns the tensor with a contiguous last axis, for reading."""
    return tensor if _has_rows(tensor) else tensor.contiguous()


def lstm_forward(
    gates: Tensor, recurrent: Tensor | None, before: Tensor, h: Tensor, after: Tensor, kept: Tensor | None
) -> None:
    """Runs one step of an LSTM.

    Args:
        gates: (B, 4H) before their nonlinearities; with ``recurrent`` overwritten by the sum.
        recurrent: (B, 4H), added to them, of their type; or None.
        before: (B, H) float32, the cell state. h: (B, H), is written, of the gates' type.
        after: (B, H) float32, is written; may be ``before``.
        kept: (B, 4H) float32, receives the gates after their nonlinearities; may be ``gates``; or None.
    """
    narrow = _narrow(gates, h, *(() if recurrent is None else (recurrent,)))
    rows, hidden = before.shape
    before = rows_of(before)
    recurrent = None if recurrent is None else rows_of(recurrent)
    if recurrent is None:
        gates = rows_of(gates)
    assert all(_has_rows(written) for written in (gates, h, after))
    assert kept is None or _has_rows(kept)
    assert _are_float32(before, after, kept)
    call(
        "lstm_forward",
        4 * rows * hidden,
        (rows, hidden, narrow),
        gates=gates,
        recurrent=recurrent,
        before=before,
        h=h,
        after=after,
        kept=kept,
    )


def lstm_backward(
    gates: Tensor,
    sums: bool,
    before: Tensor,
    after: Tensor,
    incoming: Tensor,
    dh: Tensor,
    dc: Tensor,
    dgates: Tensor,
    dbefore: Tensor | None = None,
) -> Tensor:
    """Runs one step of an LSTM backward.

    Args:
        gates: (B, 4H); with ``sums`` before their nonlinearities, in the type of ``dgates``, else after them in
            float32.
        before, after: (B, H) float32, the cell states around the step.
        incoming, dh: (B, H), two gradients of h, of the type of ``dgates``. dc: (B, H) float32.
        dgates: (B, 4H), is written; may be ``gates``.
        dbefore: (B, H) float32, receives the result; may be ``dc``; None: a new tensor.

    Returns:
        The gradient of ``before``, (B, H).
    """
    narrow = _narrow(dgates, incoming, dh, *((gates,) if sums else ()))
    if dbefore is None:
        dbefore = torch.empty_like(dc, memory_format=torch.contiguous_format)
    assert _has_rows(dbefore)
    rows, hidden = dc.shape
    gates, before, after = rows_of(gates), rows_of(before), rows_of(after)
    incoming, dh, dc = rows_of(incoming), rows_of(dh), rows_of(dc)
    assert _has_rows(dgates)
    assert _are_float32(before, after, dc, None if sums else gates)
    call(
        "lstm_backward",
        4 * rows * hidden,
        (rows, hidden, narrow, sums),
        gates=gates,
        before=before,
        after=after,
        incoming=incoming,
        dh=dh,
        dc=dc,
        dgates=dgates,
        dbefore=dbefore,
    )
    return dbefore


def attention_forward(query: Tensor, keys: Tensor, score: Tensor, padding: Tensor | None) -> Tensor:
    """Returns the weights (B, S) float32 of additive attention, zero at padded positions.

    Args:
        query: (B, A). keys: (B, S, A), contiguous, of one type. score: (A,) float32.
        padding: (B, S) bool, or None.
    """
    rows, positions, size = keys.shape
    weights = torch.empty(rows, positions, dtype=torch.float32, device="cpu")
    query, score = rows_of(query), score.contiguous()
    padding = None if padding is None else padding.contiguous()
    assert keys.is_contiguous()
    assert _are_float32(score)
    call(
        "attention_forward",
        rows * positions * size,
        (rows, positions, size, _narrow(query, keys)),
        query=query,
        keys=keys,
        score=score,
        padding=padding,
        weights=weights,
    )
    return weights


def combine_forward(share: Tensor, attention: Tensor, projected: Tensor, output: Tensor) -> None:
    """Writes tanh(share + sum_s attention_s projected_s) to ``output`` (B, H).

    Args:
        share: (B, H). attention: (B, S). projected: (B, S, H), contiguous. All of one type.
    """
    rows, positions, size = projected.shape
    share, attention = rows_of(share), rows_of(attention)
    assert projected.is_contiguous()
    assert _has_rows(output)
    call(
        "combine_forward",
        rows * positions * size,
        (rows, positions, size, _narrow(share, attention, projected, output)),
        share=share,
        attention=attention,
        projected=projected,
        output=output,
    )


def product_int8(
    left: Tensor,
    weight: Tensor,
    sums: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    start: Tensor | None,
    output: Tensor,
) -> None:
    """Writes left weight^T + bias + start to ``output`` (R, N), with left rounded to 8 bits row by row.

    Args:
        left: (R, K) float32. weight: (N / 16, K / 4, 16, 4) int8. sums: (N / 16 * 16,) int32, sum of each output's
            weights.
        scales: (N,) float32, scale of each output's weights. bias: (N,). start: (R, N), may be ``output``. Both may be
            None.
    """
    left = rows_of(left)
    start = None if start is None else rows_of(start)
    rows, inputs = left.shape
    assert _has_rows(output)
    assert _are_float32(left, scales, bias, start, output)
    call(
        "product_int8",
        rows * inputs,
        (rows, inputs, len(scales)),
        left=left,
        weight=weight,
        sums=sums,
        scales=scales,
        bias=bias,
        start=start,
        output=output,
    )


def attention_backward(
    query: Tensor,
    keys: Tensor,
    score: Tensor,
    padding: Tensor | None,
    weights: Tensor,
    dweights: Tensor,
    dkeys: Tensor,
    dscore: Tensor,
    dquery: Tensor,
) -> None:
    """Computes the backward pass of :func:`attention_forward`.

    Args:
        query, keys, score, padding: as there.
        weights, dweights: (B, S) float32.
        dkeys: (B, S, A) float32, contiguous, accumulates de_s (s - s^2); the caller multiplies by 4 score once.
        dscore: (A,) float32, contiguous, accumulates the gradient of ``score``.
        dquery: (B, A), is written, of the type of ``query``.
    """
    rows, positions, size = keys.shape
    query, score, weights, dweights = rows_of(query), *(x.contiguous() for x in (score, weights, dweights))
    padding = None if padding is None else padding.contiguous()
    assert keys.is_contiguous()
    assert dkeys.is_contiguous()
    assert dscore.is_contiguous()
    assert _are_float32(score, weights, dweights, dkeys, dscore)
    assert _has_rows(dquery)
    call(
        "attention_backward",
        rows * positions * size,
        (rows, positions, size, _narrow(query, keys, dquery)),
        query=query,
        keys=keys,
        score=score,
        padding=padding,
        weights=weights,
        dweights=dweights,
        dkeys=dkeys,
        dscore=dscore,
        dquery=dquery,
    )


def weight_gradient(
    values: Tensor, dcontext: Tensor, incoming: Tensor | None, padding: Tensor | None
) -> Tensor:
    """Returns values_s . dcontext + incoming_s, (B, S) float32, zero at padded positions.

    Args:
        values: (B, S, E). dcontext: (B, E). incoming: (B, S) or None. All of one type.
        padding: (B, S) bool, or None.
    """
    rows, positions, size = values.shape
    dweights = torch.empty(rows, positions, dtype=torch.float32, device="cpu")
    values, dcontext, incoming = (
        rows_of(values),
        rows_of(dcontext),
        None if incoming is None else rows_of(incoming),
    )
    padding = None if padding is None else padding.contiguous()
    call(
        "weight_gradient",
        rows * positions * size,
        (rows, positions, size, _narrow(values, dcontext, *(() if incoming is None else (incoming,)))),
        values=values,
        batch_stride=values.stride(0),
        position_stride=values.stride(1),
        dcontext=dcontext,
        incoming=incoming,
        padding=padding,
        dweights=dweights,
    )
    return dweights


def losses(
    logits: Tensor,
    targets: Tensor,
    smoothing: float,
    factors: Tensor | None,
    gradient: bool,
    dbias: Tensor | None,
) -> Tensor:
    """Computes cross entropies (C,) float32 of logits (C, V), which ``gradient`` overwrites with their gradient.

    Args:
        logits: (C, V). targets: (C,) int64.
        smoothing: label smoothing.
        factors: (C,) float32, factor of each row's gradient; None: all are 1.
        gradient: True to compute the gradient.
        dbias: (V,) float32, contiguous, to which the sum of the rows' gradients is added; or None.

    Raises:
        IndexError: a target is not in [0, V).
    """
    rows, vocabulary = logits.shape
    row_losses = torch.empty(rows, dtype=torch.float32, device="cpu")
    targets, factors = targets.contiguous(), None if factors is None else factors.contiguous()
    assert _has_rows(logits)
    assert dbias is None or dbias.is_contiguous()
    assert _are_float32(factors, dbias)
    call(
        "losses",
        rows * vocabulary,
        (rows, vocabulary, _narrow(logits)),
        logits=logits,
        targets=targets,
        smoothing=smoothing,
        gradient=gradient,
        factors=factors,
        losses=row_losses,
        dbias=dbias,
    )
    return row_losses


def add_rows(total: Tensor, values: Tensor, places: Tensor | None = None) -> None:
    """Adds rows to a vector, or each row to the row of a table given by its index.

    Args:
        total: (N,), or (M, N) with ``places``; float32.
        values: (R, N).
        places: (R,) int64, row indices in [0, M).
    """
    values, places = rows_of(values), None if places is None else places.contiguous()
    rows, size = values.shape
    assert _has_rows(total)
    assert _are_float32(total)
    call(
        "add_rows",
        rows * size,
        (rows, size, _narrow(values)),
        values=values,
        places=places,
        total=total,
    )
