"""Output layer and cross entropy in chunks of rows: logits exist for one chunk at a time.

The forward pass also computes the gradients, chunk by chunk while the logits of a chunk exist, so that no product is
computed twice; the backward pass multiplies them by the gradient of the loss. For reduction "none" the gradient has one
factor per row, so the backward pass recomputes the logits. On the CPU ignored rows are removed first; on other devices
they are masked, because removing them would wait for the device.

The equations of a chunk are in `econmt_ops.backends.losses`. Sizes: N rows, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor

from econmt_ops.backends import triton
from econmt_ops.backends.losses import losses_for
from econmt_ops.core.arguments import CrossEntropyArguments
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


def _chunks(
    hidden: Tensor, targets: Tensor, ignore_index: int, vocabulary: int
) -> Iterator[tuple[Tensor | slice, Tensor, Tensor, Tensor | None]]:
    """Yields for each chunk its rows, hidden (C, H), targets (C,), and a mask of counted rows (None: all count)."""
    size = max(1, CHUNK_BYTES // (vocabulary * accumulate_dtype(hidden.dtype).itemsize))
    if hidden.device.type == "cpu":
        kept = (targets != ignore_index).nonzero().squeeze(1)
        for begin in steps_of(range(0, len(kept), size)):
            rows = kept[begin : begin + size]
            yield rows, hidden.index_select(0, rows), targets.index_select(0, rows), None
        return
    for begin in steps_of(range(0, len(targets), size)):
        part = slice(begin, begin + size)
        counts = targets[part] != ignore_index
        yield part, hidden[part], targets[part].where(counts, 0), counts


class _CrossEntropySums:
    """Gradients of hidden, weight and bias, summed in the accumulate type."""

    def __init__(self, call: CrossEntropyArguments) -> None:
        hidden, weight, bias = call.hidden, call.weight, call.bias
        accumulate = accumulate_dtype(hidden.dtype)
        self.hidden = torch.zeros_like(hidden, memory_format=torch.contiguous_format)
        weight_dtype = weight.dtype if _slices_vocabulary(call) else accumulate
        self.weight = torch.empty_like(weight, dtype=weight_dtype, memory_format=torch.contiguous_format)
        self._fresh = True
        self.bias = None if bias is None else torch.zeros_like(bias, dtype=accumulate)

    def take(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns the three tensors to a caller that overwrites all of them."""
        self._fresh = False
        return self.hidden, self.weight, self.bias

    def add(self, rows: Tensor | slice, hidden: Tensor, dhidden: Tensor, gradient: Tensor) -> None:
        """Adds the gradients of a chunk, given those of its hidden (C, H) and logits (C, V) in the compute type."""
        self.hidden[rows] = dhidden
        add_outer(self.weight, gradient.unsqueeze(0), hidden.unsqueeze(0), self._fresh)
        self._fresh = False

    def results(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns the gradients of hidden, weight and bias."""
        if self._fresh:
            self.weight.zero_()
        return self.hidden, self.weight, self.bias


def _slices_vocabulary(call: CrossEntropyArguments) -> bool:
    """Returns True if the kernels loop over slices of the vocabulary, each with its part of dweight."""
    rows, inner = call.hidden.shape
    suits = call.hidden.dtype == torch.bfloat16 and call.weight.dtype in (torch.bfloat16, torch.float32)
    large = len(call.weight) >= LARGE_VOCABULARY and rows > 0 and inner % 8 == 0
    return suits and large and call.backend == "triton" and triton.serves(call.hidden)


def _losses(call: CrossEntropyArguments, factors: Tensor | None, sums: _CrossEntropySums | None) -> Tensor:
    """Computes the losses (N,) in the accumulate type, and adds the gradients of their sum to ``sums`` if given.

    ``factors`` weights the rows in the gradients: (N,), or a scalar for kernels that slice the vocabulary; None: 1.
    """
    hidden, weight = call.hidden, call.weight
    if call.backend == "triton" and triton.serves(hidden):
        from econmt_ops.linear_cross_entropy import row_chunks, word_slices  # import triton

        gradients = None if sums is None else sums.take()
        if _slices_vocabulary(call):
            return word_slices.losses_by_slices(call, factors, gradients)
        return row_chunks.losses_by_chunks(call, factors, gradients)
    kernel = losses_for(hidden, call.backend)
    losses = hidden.new_zeros(len(call.targets), dtype=accumulate_dtype(hidden.dtype))
    to_logits = Product(weight, call.bias, calls=1, like=hidden)
    to_hidden = Product(weight.t(), calls=1, like=hidden)
    for rows, part, chunk_targets, counts in _chunks(hidden, call.targets, call.ignore_index, len(weight)):
        logits = to_logits(part)
        scales = counts if factors is None else factors[rows]
        if factors is not None and counts is not None:
            scales = factors[rows] * counts
        dbias = None if sums is None else sums.bias
        loss = kernel(logits, chunk_targets, call.smoothing, scales, sums is not None, dbias)
        losses[rows] = loss if counts is None else loss * counts
        if sums is not None:
            sums.add(rows, part, to_hidden(logits), logits)
        del logits  # otherwise it would coexist with the logits of the next chunk
    return losses


def _forward(call: CrossEntropyArguments, keep: bool) -> CrossEntropyResults:
    sums = _CrossEntropySums(call) if keep and call.reduction != "none" else None
    counted = (call.targets != call.ignore_index).sum().to(accumulate_dtype(call.hidden.dtype))
    divisor, factors = torch.ones_like(counted), None
    if call.reduction == "mean":
        divisor = counted.clamp(min=1)  # the mean over no rows is NaN, its gradient is zero
    if call.reduction == "mean" and _slices_vocabulary(call):
        # Gradients that are rounded to the type of the weight are divided by the count first.
        divisor, factors = torch.ones_like(counted), divisor.reciprocal()
    if call.hidden.dtype == torch.float16 and sums is not None:
        divisor = divisor * _FLOAT16_FACTOR
        factors = counted.new_full(call.targets.shape, _FLOAT16_FACTOR)
    losses = _losses(call, factors, sums)
    loss = losses if call.reduction == "none" else losses.sum()
    loss = loss / counted if call.reduction == "mean" else loss
    return _results(call, loss, sums, divisor)


def _empty_results(call: CrossEntropyArguments, keep: bool) -> CrossEntropyResults:
    accumulate = accumulate_dtype(call.hidden.dtype)
    loss = call.hidden.new_empty(call.targets.shape if call.reduction == "none" else (), dtype=accumulate)
    sums = _CrossEntropySums(call) if keep and call.reduction != "none" else None
    return _results(call, loss, sums, call.hidden.new_empty((), dtype=accumulate))


def _results(
    call: CrossEntropyArguments, loss: Tensor, sums: _CrossEntropySums | None, divisor: Tensor
) -> CrossEntropyResults:
    """Assembles the results; without ``sums`` the gradients are empty."""
    empty = loss.new_empty(0)
    if sums is None:
        return CrossEntropyResults(loss, call.hidden.new_empty(0), empty, empty.clone(), divisor)
    dhidden, dweight, dbias = sums.results()
    return CrossEntropyResults(loss, dhidden, dweight, empty if dbias is None else dbias, divisor)


def _backward_by_row(
    call: CrossEntropyArguments, _results: CrossEntropyResults, incoming: Incoming
) -> Gradients:
    sums = _CrossEntropySums(call)
    _losses(call, incoming["loss"], sums)
    dhidden, dweight, dbias = sums.results()
    return {"hidden": dhidden, "weight": dweight, "bias": dbias}


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
    in_place = not _are_needed_again(call, list(gradients.values()))
    return {name: _times(part, factor, in_place) for name, part in gradients.items()}


def _times(gradient: Tensor, factor: Tensor, in_place: bool) -> Tensor:
    """Multiplies a gradient by a float32 scalar, which may be out of float16's range."""
    if gradient.dtype == torch.float16:
        factor = factor.unsqueeze(0)  # on a GPU, PyTorch casts a scalar to float16
    return gradient.mul_(factor) if in_place else (gradient * factor).to(gradient.dtype)


def _are_needed_again(call: CrossEntropyArguments, gradients: list[Tensor]) -> bool:
    """Returns True if the saved gradients may be read again and so cannot be scaled in place.

    This is the case if the caller still holds them, if the autograd graph is retained for another backward pass, or if
    torch.compile traces the call, where saved tensors cannot be changed.
    """
    retained = torch._C._autograd._get_current_graph_task_keep_graph()
    return not call.alone or retained or any(isinstance(gradient, FunctionalTensor) for gradient in gradients)


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
    """Implements `econmt_ops.linear_cross_entropy` for checked arguments and a cast ``hidden``.

    Weight and bias may have another type: they are cast where they are used, so that no copy is saved and their
    gradients are never rounded to the compute type.
    """
    call = CrossEntropyArguments(
        hidden, weight, targets, bias, label_smoothing, ignore_index, backend, reduction, True
    )
    return _operator(call).loss
