"""Output layer and cross entropy in chunks of rows: logits exist for one chunk at a time.

The forward pass also computes the gradients, chunk by chunk while the logits of a chunk exist, so that no product is
computed twice; the backward pass multiplies them by the gradient of the loss. For reduction "none" the gradient has one
factor per row, so the backward pass recomputes the logits. On the CPU ignored rows are removed first; on other devices
they are masked, because removing them would wait for the device.

The equations of a chunk are in `econmt_ops.backends.losses`. Sizes: N rows, H hidden, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from econmt_ops.backends import triton
from econmt_ops.backends.losses import losses_for
from econmt_ops.core.arguments import CrossEntropyArguments, RowGradients
from econmt_ops.core.loops import steps_of
from econmt_ops.core.precision import accumulate_dtype
from econmt_ops.dispatch.registration import Gradients, Incoming, Operator
from econmt_ops.dispatch.traits import Traits
from econmt_ops.products.gemm import Product
from econmt_ops.products.outer import add_outer

TRAITS = Traits(recomputes=True)

CHUNK_BYTES = 32 << 20
"""Bytes of workspace for the logits of one chunk, in the accumulate type."""

LARGE_VOCABULARY = 1 << 16
"""Vocabulary size from which the kernels loop over slices of the vocabulary instead of chunks of rows
(`word_slices`). There, reading and writing the float32 gradient of the weight once per chunk
takes longer than computing the logits twice."""

_FLOAT16_FACTOR = 256.0
"""Factor of the gradients that the forward pass saves in float16: the smallest probability that they hold is then 2e-10
instead of 6e-8, and they overflow only if a weight is larger than 128. The backward pass divides by it."""


class CrossEntropyResults(NamedTuple):
    """Loss and, unless reduction is "none", the gradients of the summed loss.

    Attributes:
        loss: scalar, or (N,).
        dhidden: (N, H). dweight: (V, H). dbias: (V,). Gradients that are not saved have no elements.
        divisor: scalar by which the gradients still have to be divided: for reduction "mean" the number of rows that
            are not ignored, at least 1, unless they have been divided by it; times `_FLOAT16_FACTOR` in float16.
    """

    loss: Tensor
    dhidden: Tensor
    dweight: Tensor
    dbias: Tensor
    divisor: Tensor


def _gradients_for(call: CrossEntropyArguments) -> RowGradients:
    """Allocates the gradients of hidden, and in the type of their sum of weight and bias; no value is set."""
    hidden, weight, bias = call.hidden, call.weight, call.bias
    exact = accumulate_dtype(hidden.dtype)
    sums = weight.dtype if _slices_vocabulary(call) else exact
    return (
        torch.empty_like(hidden, memory_format=torch.contiguous_format),
        torch.empty_like(weight, dtype=sums, memory_format=torch.contiguous_format),
        None if bias is None else torch.empty_like(bias, dtype=exact),
    )


def _slices_vocabulary(call: CrossEntropyArguments) -> bool:
    """Returns True if the kernels loop over slices of the vocabulary, each with its part of dweight."""
    rows, inner = call.hidden.shape
    suits = call.hidden.dtype == torch.bfloat16 and call.weight.dtype in (torch.bfloat16, torch.float32)
    large = len(call.weight) >= LARGE_VOCABULARY and rows > 0 and inner % 8 == 0
    return suits and large and call.backend == "triton" and triton.serves(call.hidden)


def _losses(call: CrossEntropyArguments, factors: Tensor | None, gradients: RowGradients | None) -> Tensor:
    """Returns the losses (N,) in the accumulate type, and overwrites the gradients with those of their sum, if any.

    ``factors`` weights the rows in the gradients: (N,), or a scalar for kernels that slice the vocabulary; None: 1.
    """
    if call.backend == "triton" and triton.serves(call.hidden):
        from econmt_ops.linear_cross_entropy import row_chunks, word_slices  # import triton

        if _slices_vocabulary(call):
            return word_slices.losses_by_slices(call, factors, gradients)
        return row_chunks.losses_by_chunks(call, factors, gradients)
    return _losses_by_chunks(call, factors, gradients)


def _losses_by_chunks(
    call: CrossEntropyArguments, factors: Tensor | None, gradients: RowGradients | None
) -> Tensor:
    """Computes `_losses` without the kernels of a GPU; on a CPU ignored rows are left out, elsewhere masked."""
    hidden, weight, targets = call.hidden, call.weight, call.targets
    counts, rows = targets != call.ignore_index, None
    if hidden.device.type == "cpu":
        rows = counts.nonzero().squeeze(1)
    kernel, exact = losses_for(hidden, call.backend), accumulate_dtype(hidden.dtype)
    losses = hidden.new_zeros(len(targets), dtype=exact)
    dhidden, dweight, dbias = gradients or (None, None, None)
    for gradient in gradients or ():
        if gradient is not None and gradient is not dweight:
            gradient.zero_()
    to_logits = Product(weight, call.bias, calls=1, like=hidden)
    to_hidden = Product(weight.t(), calls=1, like=hidden)
    size, fresh = max(1, CHUNK_BYTES // (len(weight) * exact.itemsize)), True
    for begin in steps_of(range(0, len(targets if rows is None else rows), size)):
        part = slice(begin, begin + size)
        at = part if rows is None else rows[part]
        read = hidden[part] if rows is None else hidden.index_select(0, rows[part])
        wanted, scales = targets[at], None if factors is None else factors[at]
        if rows is None:
            wanted = wanted.where(counts[at], 0)
            scales = counts[at] if scales is None else scales * counts[at]
        logits = to_logits(read)
        loss = kernel(logits, wanted, call.smoothing, scales, gradients is not None, dbias)
        losses[at] = loss if rows is not None else loss * counts[at]
        if dhidden is not None and dweight is not None:
            dhidden[at] = to_hidden(logits)
            add_outer(dweight, logits.unsqueeze(0), read.unsqueeze(0), fresh)
            fresh = False
        del logits  # otherwise it would coexist with the logits of the next chunk
    if dweight is not None and fresh:
        dweight.zero_()
    return losses


def _forward(call: CrossEntropyArguments, keep: bool) -> CrossEntropyResults:
    gradients = _gradients_for(call) if keep and call.reduction != "none" else None
    counted = (call.targets != call.ignore_index).sum().to(accumulate_dtype(call.hidden.dtype))
    divisor, factors = torch.ones_like(counted), None
    if call.reduction == "mean":
        divisor = counted.clamp(min=1)  # the mean over no rows is NaN, its gradient is zero
    if call.reduction == "mean" and _slices_vocabulary(call):
        # Gradients that are rounded to the type of the weight are divided by the count first.
        divisor, factors = torch.ones_like(counted), divisor.reciprocal()
    if call.hidden.dtype == torch.float16 and gradients is not None:
        divisor = divisor * _FLOAT16_FACTOR
        factors = counted.new_full(call.targets.shape, _FLOAT16_FACTOR)
    losses = _losses(call, factors, gradients)
    loss = losses if call.reduction == "none" else losses.sum()
    loss = loss / counted if call.reduction == "mean" else loss
    return _results(call, loss, gradients, divisor)


def _empty_results(call: CrossEntropyArguments, keep: bool) -> CrossEntropyResults:
    accumulate = accumulate_dtype(call.hidden.dtype)
    loss = call.hidden.new_empty(call.targets.shape if call.reduction == "none" else (), dtype=accumulate)
    gradients = _gradients_for(call) if keep and call.reduction != "none" else None
    return _results(call, loss, gradients, call.hidden.new_empty((), dtype=accumulate))


def _results(
    call: CrossEntropyArguments, loss: Tensor, gradients: RowGradients | None, divisor: Tensor
) -> CrossEntropyResults:
    """Assembles the results; gradients that there are not are empty."""
    dhidden, dweight, dbias = gradients or (call.hidden.new_empty(0), loss.new_empty(0), None)
    return CrossEntropyResults(loss, dhidden, dweight, loss.new_empty(0) if dbias is None else dbias, divisor)


def _backward_by_row(
    call: CrossEntropyArguments, _results: CrossEntropyResults, incoming: Incoming
) -> Gradients:
    gradients = _gradients_for(call)
    _losses(call, incoming["loss"], gradients)
    return dict(zip(("hidden", "weight", "bias"), gradients, strict=True))


def _scaled(
    call: CrossEntropyArguments, results: CrossEntropyResults, incoming: Incoming
) -> Gradients | None:
    """Returns the gradients of the forward pass times the gradient of the loss; None for reduction "none"."""
    dloss = incoming["loss"]
    if any(gradient is not None for name, gradient in incoming.items() if name != "loss"):
        _operator.refuse_second_derivative()  # a gradient of this function's results
    if call.reduction == "none" or dloss is None:
        return None
    gradients = {"hidden": results.dhidden, "weight": results.dweight, "bias": results.dbias}
    factor = dloss / results.divisor
    # They are read again if autograd keeps its graph; torch.compile cannot change saved tensors.
    retained = torch._C._autograd._get_current_graph_task_keep_graph()
    in_place = not (retained or any(isinstance(part, FunctionalTensor) for part in gradients.values()))
    return {name: _times(part, factor, in_place) for name, part in gradients.items()}


def _times(gradient: Tensor, factor: Tensor, in_place: bool) -> Tensor:
    """Multiplies a gradient by a float32 scalar, which may be out of float16's range."""
    if in_place and triton.serves(gradient) and not isinstance(gradient, FakeTensor):
        from econmt_ops.backends.triton.cross_entropy import scale  # imports triton

        scale(gradient, factor)
        return gradient
    if gradient.dtype == torch.float16:
        factor = factor.unsqueeze(0)  # on a GPU, PyTorch casts a scalar to float16
    return gradient.mul_(factor) if in_place else (gradient * factor).to(gradient.dtype)


_operator = Operator(
    "econmt_ops::linear_cross_entropy",
    CrossEntropyArguments,
    CrossEntropyResults,
    forward=_forward,
    fake=_empty_results,
    backward=_backward_by_row,
    saves=lambda call: (
        ("hidden", "weight", "targets", "bias")
        if call.reduction == "none"
        else ("dhidden", "dweight", "dbias", "divisor")
    ),
    in_place=_scaled,
)


def linear_cross_entropy(call: CrossEntropyArguments, *, backend: str = "eager") -> Tensor:
    """Implements `econmt_ops.linear_cross_entropy`."""
    return _operator(call._replace(backend=backend)).loss
