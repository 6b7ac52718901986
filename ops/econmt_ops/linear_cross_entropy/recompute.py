"""The output layer and its loss in chunks of rows: logits never exist for more than a chunk.

The forward pass makes the gradients too, chunk by chunk while a chunk's logits are there, so that no product is
done twice; the backward pass scales them by the gradient of the loss. Only for reduction "none", whose backward
pass has a factor a row, the logits are made again. Rows that do not count are left out beforehand on the CPU; on
other devices, where leaving out would wait for the device, they are masked.

With l = W h + b, p = softmax(l) and smoothing s: loss = (1 - s)(lse - l_y) + s (lse - mean l) and
dl = p - (1 - s) 1_y - s / V. N rows, H hidden, V vocabulary.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor

from econmt_ops.backends import c as native
from econmt_ops.backends import triton
from econmt_ops.backends.steps import EAGER, Steps, steps
from econmt_ops.core.chunks import add_outer
from econmt_ops.core.gemm import Product
from econmt_ops.core.precision import accumulate_dtype
from econmt_ops.dispatch.registration import custom_op
from econmt_ops.dispatch.traits import Traits

TRAITS = Traits(recomputes=True)

CHUNK_BYTES = 32 << 20
"""The workspace for the logits of one chunk, in the accumulate type."""

_CACHED_BYTES = 8 << 20
"""Rows of this many bytes go through all pointwise passes one after the other, while a CPU's cache holds them. The same
on a GPU, where it costs some launches and saves workspace."""


def _chunks(
    hidden: Tensor, targets: Tensor, ignore_index: int, vocabulary: int
) -> Iterator[tuple[Tensor | slice, Tensor, Tensor, Tensor | None]]:
    """Yields of each chunk its rows, their hidden (C, H), their targets (C,) and which count (C,) (None: all)."""
    size = max(1, CHUNK_BYTES // (vocabulary * accumulate_dtype(hidden.dtype).itemsize))
    if hidden.device.type == "cpu":
        kept = (targets != ignore_index).nonzero().squeeze(1)
        for begin in range(0, len(kept), size):
            rows = kept[begin : begin + size]
            yield rows, hidden.index_select(0, rows), targets.index_select(0, rows), None
        return
    for begin in range(0, len(targets), size):
        part = slice(begin, begin + size)
        counts = targets[part] != ignore_index
        yield part, hidden[part], targets[part].where(counts, 0), counts


class _Layer:
    """The products with the weight (V, H), which is cast to the type of ``hidden`` once."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        weight = weight.to(hidden.dtype)
        bias = None if bias is None else bias.to(hidden.dtype)
        self.logits = Product(weight, bias, "packed", calls=1)
        """(C, H) to (C, V)."""
        self.to_hidden = Product(weight.t(), None, "packed", calls=1)
        """(C, V) to (C, H)."""


def _in_cache(logits: Tensor, accumulate: torch.dtype) -> list[slice]:
    """The rows of a chunk in parts that stay in the cache from pass to pass."""
    size = max(1, _CACHED_BYTES // (logits.shape[1] * accumulate.itemsize))
    return [slice(begin, begin + size) for begin in range(0, len(logits), size)]


class _Sums:
    """The gradients of hidden, weight and bias, summed in the accumulate type."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        accumulate = accumulate_dtype(hidden.dtype)
        self.hidden = torch.zeros_like(hidden, memory_format=torch.contiguous_format)
        self.weight = torch.empty_like(weight, dtype=accumulate, memory_format=torch.contiguous_format)
        self._fresh = True
        self.bias = None if bias is None else torch.zeros_like(bias, dtype=accumulate)

    def take(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """The tensors, for somebody who writes all of them."""
        self._fresh = False
        return self.hidden, self.weight, self.bias

    def add_bias(self, gradient: Tensor) -> None:
        """Adds the share of some rows whose logits have this gradient (R, V), in the accumulate type."""
        if self.bias is not None:
            # A product: on a GPU, a sum over the rows takes a workspace twice as large as the gradient.
            self.bias.addmv_(gradient.t(), gradient.new_ones(len(gradient)))

    def add(self, rows: Tensor | slice, hidden: Tensor, layer: _Layer, gradient: Tensor) -> None:
        """Adds the share of a chunk whose logits have this gradient (C, V), in the compute type."""
        self.hidden[rows] = layer.to_hidden(gradient)
        add_outer(self.weight, gradient.unsqueeze(0), hidden.unsqueeze(0), self._fresh)
        self._fresh = False

    def results(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The three gradients, an empty one for no bias."""
        if self._fresh:
            self.weight.zero_()
        bias = hidden.new_empty(0, dtype=self.weight.dtype) if self.bias is None else self.bias
        return self.hidden, self.weight, bias


def _walk(
    run: Steps,
    logits: Tensor,
    targets: Tensor,
    smoothing: float,
    factors: Tensor | None,
    sums: _Sums | None,
) -> Tensor:
    """The losses (C,) of a chunk, in the accumulate type.

    Args:
        run: the step functions.
        logits: (C, V) in the compute type; if there are ``sums``, their gradient takes their place.
        targets: (C,).
        smoothing: of the labels.
        factors: (C,) of each row's gradient, or None: all are 1.
        sums: gets the bias's share of the gradient; None: no gradient is wanted.
    """
    if run is EAGER and native.serves(logits):
        return native.losses(
            logits, targets, smoothing, factors, sums is not None, None if sums is None else sums.bias
        )
    accumulate = accumulate_dtype(logits.dtype)
    losses = logits.new_empty(len(logits), dtype=accumulate)
    for part in _in_cache(logits, accumulate):
        values = logits[part].to(accumulate)
        losses[part] = run.losses(values, targets[part], smoothing)
        if sums is None:
            continue
        gradient = run.logit_gradient(values, targets[part], smoothing)
        if factors is not None:
            gradient *= factors[part].unsqueeze(1)
        sums.add_bias(gradient)
        logits[part] = gradient
    return losses


def _walk_chunks(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    smoothing: float,
    ignore_index: int,
    backend: str,
    factors: Tensor | None,
    sums: _Sums | None,
) -> Tensor:
    """The losses (N,) in the accumulate type; ``sums`` gets the gradients of their sum, each row's times its factor."""
    if backend == "triton" and triton.serves(hidden):
        kernels = importlib.import_module("econmt_ops.backends.triton.cross_entropy")
        gradients = None if sums is None else sums.take()
        of_rows: Tensor = kernels.walk(
            hidden, weight, targets, bias, smoothing, ignore_index, factors, gradients
        )
        return of_rows
    run = steps(backend == "compiled")
    losses = hidden.new_zeros(len(targets), dtype=accumulate_dtype(hidden.dtype))
    layer = _Layer(hidden, weight, bias)
    for rows, part, wanted, counts in _chunks(hidden, targets, ignore_index, len(weight)):
        logits = layer.logits(part)
        scales = counts if factors is None else factors[rows]
        if factors is not None and counts is not None:
            scales = factors[rows] * counts
        loss = _walk(run, logits, wanted, smoothing, scales, sums)
        losses[rows] = loss if counts is None else loss * counts
        if sums is not None:
            sums.add(rows, part, layer, logits)
        del logits  # or the next chunk's would be made beside them
    return losses


@custom_op(
    "econmt_ops::linear_cross_entropy",
    schema="(Tensor hidden, Tensor weight, Tensor targets, Tensor? bias, float smoothing, int ignore_index, "
    "str backend, str reduction, bool keep, bool alone=False) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _forward(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    smoothing: float,
    ignore_index: int,
    backend: str,
    reduction: str,
    keep: bool,
    alone: bool = False,  # noqa: ARG001
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    sums = _Sums(hidden, weight, bias) if keep and reduction != "none" else None
    losses = _walk_chunks(hidden, weight, targets, bias, smoothing, ignore_index, backend, None, sums)
    count = (targets != ignore_index).sum().to(losses.dtype)
    if reduction == "none":
        loss = losses
    else:
        loss = losses.sum() / count if reduction == "mean" else losses.sum()
    kept = _no_gradients(hidden) if sums is None else sums.results(hidden)
    return loss, *kept, count


def _no_gradients(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    accumulate = accumulate_dtype(hidden.dtype)
    return (
        hidden.new_empty(0),
        hidden.new_empty(0, dtype=accumulate),
        hidden.new_empty(0, dtype=accumulate),
    )


@_forward.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    smoothing: float,  # noqa: ARG001
    ignore_index: int,  # noqa: ARG001
    backend: str,  # noqa: ARG001
    reduction: str,
    keep: bool,
    alone: bool = False,  # noqa: ARG001
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    accumulate = accumulate_dtype(hidden.dtype)
    loss = hidden.new_empty(targets.shape if reduction == "none" else (), dtype=accumulate)
    kept = _no_gradients(hidden)
    if keep and reduction != "none":
        kept = _Sums(hidden, weight, bias).results(hidden)
    return loss, *kept, hidden.new_empty((), dtype=accumulate)


@custom_op(
    "econmt_ops::linear_cross_entropy_backward",
    schema="(Tensor dlosses, Tensor hidden, Tensor weight, Tensor targets, Tensor? bias, float smoothing, "
    "int ignore_index, str backend) -> (Tensor, Tensor, Tensor)",
)
def _backward_by_row(
    dlosses: Tensor,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    smoothing: float,
    ignore_index: int,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    sums = _Sums(hidden, weight, bias)
    _walk_chunks(hidden, weight, targets, bias, smoothing, ignore_index, backend, dlosses, sums)
    return sums.results(hidden)


@_backward_by_row.register_fake
def _(
    dlosses: Tensor,  # noqa: ARG001
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,  # noqa: ARG001
    bias: Tensor | None,
    smoothing: float,  # noqa: ARG001
    ignore_index: int,  # noqa: ARG001
    backend: str,  # noqa: ARG001
) -> tuple[Tensor, Tensor, Tensor]:
    return _Sums(hidden, weight, bias).results(hidden)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, targets, bias, smoothing, ignore_index, backend, reduction, _, alone = inputs
    ctx.set_materialize_grads(False)
    ctx.options = (smoothing, ignore_index, backend)
    ctx.reduction, ctx.alone = reduction, alone
    ctx.types = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
    if reduction == "none":
        ctx.save_for_backward(hidden, weight, targets, bias)
    else:
        ctx.save_for_backward(*output[1:])


def _are_needed_again(ctx: Any, gradients: list[Tensor]) -> bool:
    """Whether something may still ask for the gradients that a forward pass made, as they are.

    Its caller, if it has not let go of them; a graph that is kept, since it can be walked again. And one that is being
    traced for torch.compile may not change what it saved.
    """
    keeps = torch._C._autograd._get_current_graph_task_keep_graph()
    return not ctx.alone or keeps or any(isinstance(gradient, FunctionalTensor) for gradient in gradients)


def _differentiate(ctx: Any, dloss: Tensor | None, *_: Tensor | None) -> tuple[Any, ...]:
    if dloss is None:
        return (None,) * 10
    if ctx.reduction == "none":
        gradients = _backward_by_row(dloss, *ctx.saved_tensors, *ctx.options)
    else:
        *gradients, count = ctx.saved_tensors
        factor = dloss / count if ctx.reduction == "mean" else dloss
        in_place = not _are_needed_again(ctx, gradients)
        gradients = [gradient.mul_(factor) if in_place else gradient * factor for gradient in gradients]
    dhidden, dweight, dbias = (
        None if dtype is None else gradient.to(dtype)
        for gradient, dtype in zip(gradients, ctx.types, strict=True)
    )
    return dhidden, dweight, None, dbias, *(None for _ in range(6))


_forward.register_autograd(_differentiate, setup_context=_setup_context)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None,
    label_smoothing: float,
    ignore_index: int,
    reduction: str,
    backend: str = "eager",
) -> Tensor:
    """See `econmt_ops.linear_cross_entropy`; all arguments are given and checked, and ``hidden`` is cast.

    The weight and the bias may have another type: they are cast where they are used, so that no copy is kept, and
    their gradients are never rounded to the compute type.
    """
    tensors = (hidden, weight) if bias is None else (hidden, weight, bias)
    keep = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    loss: Tensor = _forward(
        hidden, weight, targets, bias, label_smoothing, ignore_index, backend, reduction, keep, True
    )[0]
    return loss
