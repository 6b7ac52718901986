"""The output layer and its loss in chunks of rows: logits never exist for more than a chunk.

The forward pass makes the gradients too, chunk by chunk while a chunk's logits are there, so that no product is
done twice; the backward pass scales them by the gradient of the loss. Only for reduction "none", whose backward
pass has a factor a row, the logits are made again. Rows that do not count are left out beforehand on the CPU; on
other devices, where leaving out would wait for the device, they are masked.

With l = W h + b, p = softmax(l) and smoothing s: loss = (1 - s)(lse - l_y) + s (lse - mean l) and
dl = p - (1 - s) 1_y - s / V. N rows, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from econmt_ops.precision import accumulate_dtype
from econmt_ops.steps import steps

CHUNK_BYTES = 32 << 20
"""The workspace for the logits of one chunk."""


def _chunks(
    hidden: Tensor, targets: Tensor, ignore_index: int, vocabulary: int
) -> Iterator[tuple[Tensor | slice, Tensor, Tensor, Tensor | None]]:
    """Yields of each chunk its rows, their hidden (C, H), their targets (C,) and which count (C, 1) (None: all)."""
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
        yield part, hidden[part], targets[part].where(counts, 0), counts.unsqueeze(1)


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product = torch.mm(hidden, weight.t()) if bias is None else torch.addmm(bias, hidden, weight.t())
    return product.to(accumulate_dtype(hidden.dtype))


class _Sums:
    """The gradients of hidden, weight and bias, summed in the accumulate type."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        accumulate = accumulate_dtype(hidden.dtype)
        self.hidden = torch.zeros_like(hidden, memory_format=torch.contiguous_format)
        self.weight = torch.zeros_like(weight, dtype=accumulate, memory_format=torch.contiguous_format)
        self.bias = None if bias is None else torch.zeros_like(bias, dtype=accumulate)

    def add(self, rows: Tensor | slice, hidden: Tensor, weight: Tensor, gradient: Tensor) -> None:
        """Adds the share of a chunk whose logits have this gradient (C, V)."""
        if self.bias is not None:
            # A product: on a GPU, a sum over the rows takes a workspace twice as large as the gradient.
            self.bias.addmv_(gradient.t(), gradient.new_ones(len(gradient)))
        gradient = gradient.to(hidden.dtype)
        self.hidden[rows] = torch.mm(gradient, weight)
        if self.weight.dtype == gradient.dtype:
            self.weight.addmm_(gradient.t(), hidden)
        else:
            self.weight += torch.mm(gradient.t(), hidden)

    def results(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The three gradients, an empty one for no bias."""
        bias = hidden.new_empty(0, dtype=self.weight.dtype) if self.bias is None else self.bias
        return self.hidden, self.weight, bias


@torch.library.custom_op(
    "econmt_ops::linear_cross_entropy",
    mutates_args=(),
    schema="(Tensor hidden, Tensor weight, Tensor targets, Tensor? bias, float smoothing, int ignore_index, "
    "bool compiled, str reduction, bool keep) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _forward(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    smoothing: float,
    ignore_index: int,
    compiled: bool,
    reduction: str,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    run, accumulate = steps(compiled), accumulate_dtype(hidden.dtype)
    losses = hidden.new_zeros(len(targets), dtype=accumulate)
    gradients_too = keep and reduction != "none"
    sums = _Sums(hidden, weight, bias) if gradients_too else None
    for rows, part, wanted, counts in _chunks(hidden, targets, ignore_index, len(weight)):
        logits = _logits(part, weight, bias)
        loss, total = run.losses(logits, wanted, smoothing)
        losses[rows] = loss if counts is None else loss * counts.squeeze(1)
        if sums is not None:
            gradient = run.logit_gradient(logits, total, wanted, smoothing)
            sums.add(rows, part, weight, gradient if counts is None else gradient.mul_(counts))
            del gradient
        del logits  # or the next chunk's would be made beside them
    count = (targets != ignore_index).sum().to(accumulate)
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
    compiled: bool,  # noqa: ARG001
    reduction: str,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    accumulate = accumulate_dtype(hidden.dtype)
    loss = hidden.new_empty(targets.shape if reduction == "none" else (), dtype=accumulate)
    kept = _no_gradients(hidden)
    if keep and reduction != "none":
        kept = _Sums(hidden, weight, bias).results(hidden)
    return loss, *kept, hidden.new_empty((), dtype=accumulate)


@torch.library.custom_op(
    "econmt_ops::linear_cross_entropy_backward",
    mutates_args=(),
    schema="(Tensor dlosses, Tensor hidden, Tensor weight, Tensor targets, Tensor? bias, float smoothing, "
    "int ignore_index, bool compiled) -> (Tensor, Tensor, Tensor)",
)
def _backward_by_row(
    dlosses: Tensor,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    smoothing: float,
    ignore_index: int,
    compiled: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    run = steps(compiled)
    sums = _Sums(hidden, weight, bias)
    for rows, part, wanted, counts in _chunks(hidden, targets, ignore_index, len(weight)):
        logits = _logits(part, weight, bias)
        _, total = run.losses(logits, wanted, smoothing)
        gradient = run.logit_gradient(logits, total, wanted, smoothing)
        gradient *= dlosses[rows].unsqueeze(1)
        sums.add(rows, part, weight, gradient if counts is None else gradient.mul_(counts))
        del logits, gradient  # or the next chunk's would be made beside them
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
    compiled: bool,  # noqa: ARG001
) -> tuple[Tensor, Tensor, Tensor]:
    return _Sums(hidden, weight, bias).results(hidden)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, targets, bias, smoothing, ignore_index, compiled, reduction, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.options = (smoothing, ignore_index, compiled)
    ctx.reduction = reduction
    ctx.types = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
    if reduction == "none":
        ctx.save_for_backward(hidden, weight, targets, bias)
    else:
        ctx.save_for_backward(*output[1:])


def _differentiate(ctx: Any, dloss: Tensor | None, *_: Tensor | None) -> tuple[Any, ...]:
    if dloss is None:
        return (None,) * 9
    if ctx.reduction == "none":
        gradients = _backward_by_row(dloss, *ctx.saved_tensors, *ctx.options)
    else:
        *gradients, count = ctx.saved_tensors
        factor = dloss / count if ctx.reduction == "mean" else dloss
        gradients = [gradient * factor for gradient in gradients]
    dhidden, dweight, dbias = (
        None if dtype is None else gradient.to(dtype)
        for gradient, dtype in zip(gradients, ctx.types, strict=True)
    )
    return dhidden, dweight, None, dbias, None, None, None, None, None


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
    compiled: bool = False,
) -> Tensor:
    """See `econmt_ops.linear_cross_entropy`; all arguments are given, checked and cast."""
    tensors = (hidden, weight) if bias is None else (hidden, weight, bias)
    keep = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    loss: Tensor = _forward(
        hidden, weight, targets, bias, label_smoothing, ignore_index, compiled, reduction, keep
    )[0]
    return loss
