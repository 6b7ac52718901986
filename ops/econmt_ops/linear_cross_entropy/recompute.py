"""The output layer and its loss in chunks of rows: logits never exist for more than a chunk.

The forward pass makes the gradients too, chunk by chunk while a chunk's logits are there, so that no product is
done twice; the backward pass scales them by the gradient of the loss. Only for reduction "none", whose backward
pass has a factor a row, the logits are made again. Rows that do not count are left out beforehand on the CPU; on
other devices, where leaving out would wait for the device, they are masked.

The mathematics of a chunk is in `econmt_ops.backends.losses`. N rows, H hidden, V vocabulary.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor

from econmt_ops.backends import triton
from econmt_ops.backends.losses import losses_for
from econmt_ops.core.chunks import add_outer
from econmt_ops.core.gemm import Product
from econmt_ops.core.loops import steps_of
from econmt_ops.core.precision import accumulate_dtype
from econmt_ops.dispatch.registration import Gradients, Incoming, Operator
from econmt_ops.dispatch.traits import Traits

TRAITS = Traits(recomputes=True)

CHUNK_BYTES = 32 << 20
"""The workspace for the logits of one chunk, in the accumulate type."""

LARGE_VOCABULARY = 1 << 16
"""Words from which on kernels go through the vocabulary instead of the rows, `backends.triton.words_cross_entropy`: the
float32 sum of the weight's gradient, read and written once a chunk of rows, takes longer than making logits twice."""


class CrossEntropyArguments(NamedTuple):
    """Of the operator.

    Attributes:
        hidden: (N, H). weight: (V, H). targets: (N,). bias: (V,), or None.
        smoothing, ignore_index, reduction: as in `econmt_ops.linear_cross_entropy`.
        backend: "eager", "compiled" or "triton".
        alone: whether nobody but autograd will see the gradients that are kept.
    """

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    bias: Tensor | None
    smoothing: float
    ignore_index: int
    backend: str
    reduction: str
    alone: bool


class CrossEntropyResults(NamedTuple):
    """The loss and, for reductions to a number, the gradients of the sum and how many rows count.

    Attributes:
        loss: a number, or (N,).
        dhidden: (N, H). dweight: (V, H). dbias: (V,). Those that are not kept have no elements.
        counted: a number, of rows.
    """

    loss: Tensor
    dhidden: Tensor
    dweight: Tensor
    dbias: Tensor
    counted: Tensor


def _chunks(
    hidden: Tensor, targets: Tensor, ignore_index: int, vocabulary: int
) -> Iterator[tuple[Tensor | slice, Tensor, Tensor, Tensor | None]]:
    """Yields of each chunk its rows, their hidden (C, H), their targets (C,) and which count (C,) (None: all)."""
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


class _Layer:
    """The products with the weight (V, H), which is cast to the type of ``hidden`` once."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        weight = weight.to(hidden.dtype)
        bias = None if bias is None else bias.to(hidden.dtype)
        self.logits = Product(weight, bias, "packed", calls=1)
        """(C, H) to (C, V)."""
        self.to_hidden = Product(weight.t(), None, "packed", calls=1)
        """(C, V) to (C, H)."""


class _CrossEntropySums:
    """The gradients of hidden, weight and bias, summed in the accumulate type."""

    def __init__(self, call: CrossEntropyArguments) -> None:
        hidden, weight, bias = call.hidden, call.weight, call.bias
        accumulate = accumulate_dtype(hidden.dtype)
        self.hidden = torch.zeros_like(hidden, memory_format=torch.contiguous_format)
        of_weight = weight.dtype if _goes_by_words(call) else accumulate
        self.weight = torch.empty_like(weight, dtype=of_weight, memory_format=torch.contiguous_format)
        self._fresh = True
        self.bias = None if bias is None else torch.zeros_like(bias, dtype=accumulate)

    def take(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """The tensors, for somebody who writes all of them."""
        self._fresh = False
        return self.hidden, self.weight, self.bias

    def add(self, rows: Tensor | slice, hidden: Tensor, layer: _Layer, gradient: Tensor) -> None:
        """Adds the share of a chunk whose logits have this gradient (C, V), in the compute type."""
        self.hidden[rows] = layer.to_hidden(gradient)
        add_outer(self.weight, gradient.unsqueeze(0), hidden.unsqueeze(0), self._fresh)
        self._fresh = False

    def results(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """The three gradients."""
        if self._fresh:
            self.weight.zero_()
        return self.hidden, self.weight, self.bias


def _goes_by_words(call: CrossEntropyArguments) -> bool:
    """Whether kernels go through the vocabulary in slices: each part of the weight's gradient is then made at once."""
    rows, inner = call.hidden.shape
    suits = call.hidden.dtype == torch.bfloat16 and call.weight.dtype in (torch.bfloat16, torch.float32)
    large = len(call.weight) >= LARGE_VOCABULARY and rows > 0 and inner % 8 == 0
    return suits and large and call.backend == "triton" and triton.serves(call.hidden)


def _walk(call: CrossEntropyArguments, factors: Tensor | None, sums: _CrossEntropySums | None) -> Tensor:
    """The losses (N,) in the accumulate type; ``sums`` gets the gradients of their sum, each row's times its factor.

    ``factors``: (N,), or of kernels that go by words one for all.
    """
    hidden, weight = call.hidden, call.weight
    if _goes_by_words(call):
        kernels = importlib.import_module("econmt_ops.backends.triton.words_cross_entropy")
        if factors is None:
            factors = hidden.new_ones((), dtype=torch.float32)
        gradients = None if sums is None else sums.take()
        of_words: Tensor = kernels.walk(
            hidden, weight, call.targets, call.bias, call.smoothing, call.ignore_index, factors, gradients
        )
        return of_words
    if call.backend == "triton" and triton.serves(hidden):
        kernels = importlib.import_module("econmt_ops.backends.triton.cross_entropy")
        gradients = None if sums is None else sums.take()
        of_rows: Tensor = kernels.walk(
            hidden, weight, call.targets, call.bias, call.smoothing, call.ignore_index, factors, gradients
        )
        return of_rows
    kernel = losses_for(hidden, call.backend)
    losses = hidden.new_zeros(len(call.targets), dtype=accumulate_dtype(hidden.dtype))
    layer = _Layer(hidden, weight, call.bias)
    for rows, part, wanted, counts in _chunks(hidden, call.targets, call.ignore_index, len(weight)):
        logits = layer.logits(part)
        scales = counts if factors is None else factors[rows]
        if factors is not None and counts is not None:
            scales = factors[rows] * counts
        dbias = None if sums is None else sums.bias
        loss = kernel(logits, wanted, call.smoothing, scales, sums is not None, dbias)
        losses[rows] = loss if counts is None else loss * counts
        if sums is not None:
            sums.add(rows, part, layer, logits)
        del logits  # or the next chunk's would be made beside them
    return losses


def _forward(call: CrossEntropyArguments, keep: bool) -> CrossEntropyResults:
    sums = _CrossEntropySums(call) if keep and call.reduction != "none" else None
    counted = (call.targets != call.ignore_index).sum().to(accumulate_dtype(call.hidden.dtype))
    # What is rounded to the type of the weight is divided before, and then counts as one row's.
    divides = call.reduction == "mean" and _goes_by_words(call)
    losses = _walk(call, counted.reciprocal() if divides else None, sums)
    loss = losses if call.reduction == "none" else losses.sum()
    loss = loss / counted if call.reduction == "mean" else loss
    return _results(call, loss, sums, torch.ones_like(counted) if divides else counted)


def _empty_results(call: CrossEntropyArguments, keep: bool) -> CrossEntropyResults:
    accumulate = accumulate_dtype(call.hidden.dtype)
    loss = call.hidden.new_empty(call.targets.shape if call.reduction == "none" else (), dtype=accumulate)
    sums = _CrossEntropySums(call) if keep and call.reduction != "none" else None
    return _results(call, loss, sums, call.hidden.new_empty((), dtype=accumulate))


def _results(
    call: CrossEntropyArguments, loss: Tensor, sums: _CrossEntropySums | None, counted: Tensor
) -> CrossEntropyResults:
    """The results, of which there are no gradients without ``sums``."""
    nothing = loss.new_empty(0)
    if sums is None:
        return CrossEntropyResults(loss, call.hidden.new_empty(0), nothing, nothing.clone(), counted)
    dhidden, dweight, dbias = sums.results()
    return CrossEntropyResults(loss, dhidden, dweight, nothing if dbias is None else dbias, counted)


def _saves(call: CrossEntropyArguments) -> tuple[str, ...]:
    if call.reduction == "none":
        return ("hidden", "weight", "targets", "bias")
    return ("dhidden", "dweight", "dbias", "counted")


def _backward_by_row(
    call: CrossEntropyArguments, _results: CrossEntropyResults, incoming: Incoming
) -> Gradients:
    sums = _CrossEntropySums(call)
    _walk(call, incoming["loss"], sums)
    dhidden, dweight, dbias = sums.results()
    return {"hidden": dhidden, "weight": dweight, "bias": dbias}


def _scaled(
    call: CrossEntropyArguments, results: CrossEntropyResults, incoming: Incoming
) -> Gradients | None:
    """What the forward pass made, times the gradient of the loss; None for reduction "none"."""
    dloss = incoming["loss"]
    if call.reduction == "none" or dloss is None:
        return None
    gradients = {"hidden": results.dhidden, "weight": results.dweight, "bias": results.dbias}
    factor = dloss / results.counted if call.reduction == "mean" else dloss
    in_place = not _are_needed_again(call, list(gradients.values()))
    return {name: part.mul_(factor) if in_place else part * factor for name, part in gradients.items()}


def _are_needed_again(call: CrossEntropyArguments, gradients: list[Tensor]) -> bool:
    """Whether something may still ask for the gradients that a forward pass made, as they are.

    Its caller, if it has not let go of them; a graph that is kept, since it can be walked again. And one that is being
    traced for torch.compile may not change what it saved.
    """
    keeps = torch._C._autograd._get_current_graph_task_keep_graph()
    return not call.alone or keeps or any(isinstance(gradient, FunctionalTensor) for gradient in gradients)


_operator = Operator(
    "econmt_ops::linear_cross_entropy",
    CrossEntropyArguments,
    CrossEntropyResults,
    forward=_forward,
    fake=_empty_results,
    backward=_backward_by_row,
    saves=_saves,
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
    """See `econmt_ops.linear_cross_entropy`; all arguments are given and checked, and ``hidden`` is cast.

    The weight and the bias may have another type: they are cast where they are used, so that no copy is kept, and
    their gradients are never rounded to the compute type.
    """
    call = CrossEntropyArguments(
        hidden, weight, targets, bias, label_smoothing, ignore_index, backend, reduction, True
    )
    return _operator(call).loss
