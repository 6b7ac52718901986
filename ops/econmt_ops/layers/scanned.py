"""Layers whose state is a linear recurrence: one product for all steps, a scan, and pointwise operations around it.

`reference` is plain PyTorch under autograd. `recompute` keeps the inputs and c of each recurrence, with the stash level
"gates" also the products, and recomputes the rest in the backward pass:

    products (B, T, K H) = sum of x W^T + b      u, f, ... (`econmt_ops.cells.scan`)      c = scan(a, b)      h = output

    dh -> dc, do        da, db = the scan's gradients        da, db -> dproducts        dW, db, dx: products

It works in blocks of some rows over all steps (of some steps if a single row is too long), so that the intermediate
results of a block stay in a CPU's cache and are freed before the next block. On a CPU the C library computes everything
between the products in one walk in each direction. With the backend "triton" a kernel does so for the whole call: it
adds the bias, walks through the steps and writes the outputs; backward one kernel writes the gradients of the products.

B batch, T steps, H hidden, K parts of the products, n rows and t steps of a block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from econmt_ops.backends import c as native
from econmt_ops.backends.c import scan_cells
from econmt_ops.backends.triton import with_kernels
from econmt_ops.cells.scan import CELLS, ScanInputs, ScanLayer, ScannedArguments
from econmt_ops.core.chunks import reaches
from econmt_ops.core.lengths import padding_mask, padding_of, zero_padding
from econmt_ops.dispatch.registration import Gradients, Incoming, RecurrentOperator
from econmt_ops.dispatch.rule import device_of, is_transformed, rule
from econmt_ops.dispatch.traits import FLOATS, Traits
from econmt_ops.linear_recurrence import linear_recurrence
from econmt_ops.linear_recurrence.reference import standing_still
from econmt_ops.products.gemm import Product, add_rows
from econmt_ops.products.outer import add_outer, outer
from econmt_ops.products.stack import last_of

_RECOMPUTE = Traits(recomputes=True, takes_stash=True, casts=True)

_BLOCK_BYTES = 8 << 20
"""Bytes of the products of a block, chosen for the caches of a CPU."""

_LARGE_BLOCK_BYTES = 128 << 20
"""Bytes of the products of a block on a GPU, where a small kernel takes as long to launch as to run."""


def scan(decay: Tensor, inputs: Tensor, initial: Tensor) -> Tensor:
    """Computes `linear_recurrence` by the rule; it is not measured, because it is a part of an op that is measured."""
    # Where autograd records the scan, by steps: the reference alone has second derivatives.
    has_gradient = torch.is_grad_enabled() and (inputs.requires_grad or decay.requires_grad)
    by_steps = is_transformed() or (has_gradient and not torch.compiler.is_compiling())
    name = "reference" if by_steps else _scan_by(inputs)
    return linear_recurrence(decay, inputs, initial=initial, implementation=name)


def _scan_by(like: Tensor) -> str:
    """Returns the implementation for a scan of (B, T, H), restricted to those that share one operator."""
    name = rule("linear_recurrence", device_of(like), like.dtype)
    return "chunk" if name == "reference" else name


def flat(tensor: Tensor) -> Tensor:
    """Returns the rows (B T, .) of a tensor (B, T, .)."""
    return tensor.reshape(-1, tensor.shape[2])


def late(source: Tensor, before: Tensor) -> Tensor:
    """Delays a source (B, T, .) by one step, with one copy of all rows; ``before`` (B, .) is its first value."""
    made = torch.empty_like(source, memory_format=torch.contiguous_format)
    flat(made)[1:] = flat(source)[:-1]
    made[:, 0] = before
    return made


def _reference_stage(call: ScannedArguments) -> tuple[Tensor, Tensor]:
    """Runs one recurrence in plain PyTorch."""
    cell, first = CELLS[call.cell], call.first
    padding = padding_of(call.sources[0], call.lengths)
    read = [zero_padding(source, padding) for source in call.sources]
    if call.before is not None:
        read[-1] = torch.cat([call.before.unsqueeze(1), read[-1][:, :-1]], 1)
    products = functional.linear(read[0], call.weights[0], call.bias)
    for source, weight in zip(read[1:], call.weights[1:], strict=True):
        products = products + functional.linear(source, weight)
    parts, decay, inputs = cell.start(products.to(first.dtype), first.shape[1])
    c = scan(decay, inputs, first)
    outputs = zero_padding(cell.finish(parts, c, read[0]).to(call.bias.dtype), padding)
    return outputs, last_of(c, first, call.lengths)


class ScannedResults(NamedTuple):
    """Results of a recurrence, and tensors kept if a backward pass follows.

    Attributes:
        outputs: (B, T, H). last: c after each row's last step, (B, H).
        cells: c of all steps, (B, T, H). products: (B, T, K H), if the stash level keeps them.
    """

    outputs: Tensor
    last: Tensor
    cells: Tensor
    products: Tensor


def _empty_results(call: ScannedArguments, keep: bool) -> ScannedResults:
    """Allocates the results; tensors that are not kept are empty."""
    like = call.sources[0]
    batch, steps = like.shape[:2]
    gates = keep and reaches(call.stash, "gates")
    return ScannedResults(
        like.new_empty(batch, steps, call.first.shape[1]),
        torch.empty_like(call.first, memory_format=torch.contiguous_format),
        call.first.new_empty(batch if keep else 0, steps, call.first.shape[1]),
        like.new_empty(batch if gates else 0, steps, call.bias.shape[0]),
    )


class _Blocks:
    """Call divided into blocks of some rows and some steps; of a GPU's kernels, into one, whose products lack the bias.

    ``clean`` False: values in the padding, and products of them, are arbitrary.
    """

    def __init__(self, call: ScannedArguments, clean: bool = True) -> None:
        self.call, by_kernels = call, call.backend == "triton"
        self.cell = CELLS[call.cell]
        self.dtype = call.sources[0].dtype
        self.batch, self.steps = call.sources[0].shape[:2]
        self.hidden = call.first.shape[1]
        self.all_lengths = None
        if call.lengths is not None:
            self.all_lengths = call.lengths.to(call.first.device, non_blocking=True)
        self.padding = padding_mask(call.lengths, self.steps, call.first.device) if clean else None
        space = _BLOCK_BYTES if device_of(call.first) == "cpu" else _LARGE_BLOCK_BYTES
        row = self.steps * call.bias.shape[0] * call.first.element_size()
        rows = max(1, space // max(1, row))
        size = self.steps if row <= space else max(1, self.steps * space // row)
        if by_kernels:
            rows, size = max(1, self.batch), max(1, self.steps)
        self.places = [
            (slice(begin, begin + rows), slice(start, min(self.steps, start + size)))
            for begin in range(0, max(1, self.batch), rows)  # at least one, so that all gradients are written
            for start in range(0, self.steps, size)
        ]
        self.weights = [weight.to(self.dtype) for weight in call.weights]
        self.bias = call.bias.to(self.dtype)  # rounded to the compute type, as all weights are
        self._products = [
            Product(weight, None if number or by_kernels else self.bias, calls=len(self.places))
            for number, weight in enumerate(self.weights)
        ]

    def mask(self, values: Tensor, rows: slice, steps: slice) -> Tensor:
        """Returns values (n, t, .) of a block with zeros at padded positions."""
        return values if self.padding is None else zero_padding(values, self.padding[rows, steps])

    def read(self, rows: slice, steps: slice) -> list[Tensor]:
        """Returns the sources of a block, (n, t, .) each."""
        block_sources = [
            self.mask(source[rows, steps].contiguous(), rows, steps) for source in self.call.sources
        ]
        if self.call.before is not None:
            source, begin = self.call.sources[-1], steps.start
            if begin == 0:
                first = self.call.before[rows]
            else:
                first = self.mask(source[rows, begin - 1 : begin], rows, slice(begin - 1, begin))[:, 0]
            block_sources[-1] = late(block_sources[-1], first.to(self.dtype))
        return block_sources

    def products(self, read: Sequence[Tensor]) -> Tensor:
        """Returns the products (n, t, K H) of a block's sources, a new tensor."""
        product_of_first: Tensor = self._products[0](read[0])
        total = flat(product_of_first)
        for source, product in zip(read[1:], self._products[1:], strict=True):
            total = product.plus(total, flat(source))
        return total.view(product_of_first.shape)

    def lengths(self, rows: slice, steps: slice) -> Tensor | None:
        """Returns the lengths of the rows within a block, (n,); None if there is no padding."""
        if self.all_lengths is None:
            return None
        remaining: Tensor = self.all_lengths[rows] - steps.start
        return remaining.clamp(0, steps.stop - steps.start)

    def inputs(self, products: Tensor) -> ScanInputs:
        """Returns the arguments of a GPU's kernels, given all products."""
        call = self.call
        return ScanInputs(
            self.cell, products, self.bias.contiguous(), call.sources[0], call.first, self.all_lengths
        )


def _forward(call: ScannedArguments, keep: bool) -> ScannedResults:
    by_kernels, keeps_products = call.backend == "triton", keep and reaches(call.stash, "gates")
    # The kernels' products may have any values in the padding.
    blocks = _Blocks(call, clean=not by_kernels)
    results = _empty_results(call._replace(stash="outputs"), keep)
    if by_kernels or keeps_products:
        products = blocks.products(blocks.read(slice(0, blocks.batch), slice(0, blocks.steps)))
        if keeps_products:
            results = results._replace(products=products)
        if by_kernels and results.outputs.numel():
            from econmt_ops.backends.triton import scan_cells as kernels

            cells = results.cells if keep else None
            kernels.forward(blocks.inputs(products), results.outputs, results.last, cells)
        if by_kernels:
            return results
    carried = call.first
    for rows, steps in blocks.places:
        read = blocks.read(rows, steps)
        products = results.products[rows, steps] if len(results.products) else blocks.products(read)
        initial = call.first[rows] if steps.start == 0 else carried
        if native.serves(products):
            lengths = blocks.lengths(rows, steps)
            arguments = ScanInputs(blocks.cell, products.contiguous(), None, read[0], initial, lengths)
            cells = results.cells[rows, steps] if keep else None
            carried = scan_cells.forward(arguments, results.outputs[rows, steps], cells)
        else:
            parts, decay, inputs = blocks.cell.start(products.to(call.first.dtype), blocks.hidden)
            padding = None if blocks.padding is None else blocks.padding[rows, steps]
            c = scan(*standing_still(decay, inputs, padding), initial)
            carried = c[:, -1]
            results.outputs[rows, steps] = blocks.mask(blocks.cell.finish(parts, c, read[0]), rows, steps)
            if keep:
                results.cells[rows, steps] = c
        results.last[rows] = carried
    return results


class _BackwardPass:
    """Backward pass of a call, block by block, and the gradients that are summed over the blocks."""

    def __init__(self, call: ScannedArguments, results: ScannedResults, incoming: Incoming) -> None:
        self.blocks = blocks = _Blocks(call)
        self._results, self._doutputs, self._dlast = results, incoming["outputs"], incoming["last"]
        exact = call.first.dtype if len(blocks.places) > 1 else blocks.dtype
        self.weights = [torch.empty_like(weight, dtype=exact) for weight in blocks.weights]
        self.bias = torch.zeros_like(call.bias, dtype=exact)
        self.first = torch.empty_like(call.first, memory_format=torch.contiguous_format)
        self.sources = [torch.empty_like(source) for source in call.sources]
        self.before = None
        if call.before is not None:
            self.before = torch.empty_like(call.before)
            self.sources[-1][:, -1] = 0.0
        self._back = [Product(weight.t(), calls=len(blocks.places)) for weight in blocks.weights]
        self._fresh = True

    def run(self, rows: slice, steps: slice, after: Tensor | None) -> Tensor:
        """Runs a block, and returns the gradient of c before it, (n, H).

        ``after`` (n, H) is the gradient of c after the block from the steps behind it, None if there are none.
        """
        blocks, call, results = self.blocks, self.blocks.call, self._results
        read, cells = blocks.read(rows, steps), results.cells[rows, steps]
        products = target = results.products[rows, steps] if len(results.products) else blocks.products(read)
        if len(results.products):
            target = torch.empty_like(products)
        initial = call.first[rows] if steps.start == 0 else results.cells[rows, steps.start - 1]
        inputs = ScanInputs(blocks.cell, products, None, read[0], initial, blocks.lengths(rows, steps))
        doutputs = None if self._doutputs is None else self._doutputs[rows, steps]
        if after is None:  # the gradient of the state is carried through padding
            after = torch.zeros_like(initial) if self._dlast is None else self._dlast[rows]
        if native.serves(products):
            carried, dread = scan_cells.backward(inputs, cells, doutputs, after, target)
        else:
            padding = None if blocks.padding is None else blocks.padding[rows, steps]
            target, dread, carried = self._in_pytorch(inputs, cells, doutputs, after, target, padding)
        if steps.start == 0:
            self.first[rows] = carried
        self._add(target.to(blocks.dtype), dread, read, rows, steps)
        return carried

    def _in_pytorch(
        self,
        inputs: ScanInputs,
        cells: Tensor,
        doutputs: Tensor | None,
        after: Tensor,
        target: Tensor,
        padding: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Returns the gradients of a block's products, of the first source (or None), and of c before the block."""
        cell, initial = inputs.cell, inputs.first
        parts, decay, _ = cell.start(inputs.products.to(initial.dtype), self.blocks.hidden)
        dh = torch.zeros_like(cells)
        if doutputs is not None:
            dh = zero_padding(doutputs.to(initial.dtype, copy=True), padding)
        dc, dgate, dread = cell.finish_back(parts, cells, inputs.read, dh)
        dc[:, -1] += after
        if padding is not None:
            decay = decay.masked_fill(padding.unsqueeze(2), 1.0)
        ddecay, delta, carried = torch.ops.econmt_ops.linear_recurrence_backward(
            dc, cells, decay, cells, initial, None, False, _scan_by(cells)
        )
        ddecay, delta = zero_padding(ddecay, padding), zero_padding(delta, padding)
        rest = [part for part in (dgate,) if part is not None]
        if dread is not None and len(parts) > cell.gates:
            rest.append(dread)
            dread = None
        target = target if target.dtype == initial.dtype else torch.empty_like(target, dtype=initial.dtype)
        return cell.start_back(parts, ddecay, delta, rest, target), dread, carried

    def _add(
        self, dproducts: Tensor, dread: Tensor | None, read: Sequence[Tensor], rows: slice, steps: slice
    ) -> None:
        """Adds a block's contribution: dproducts (n, t, K H), and a further gradient (n, t, .) of the first source."""
        self.bias += add_rows(dproducts)
        for number, (source, back) in enumerate(zip(read, self._back, strict=True)):
            add_outer(self.weights[number], dproducts, source, fresh=self._fresh)
            dsource = back(dproducts)
            if number == 0 and dread is not None:
                dsource += dread
            target = self.sources[number]
            if self.before is None or number < len(read) - 1:
                target[rows, steps] = dsource
                continue
            target[rows, steps.start : steps.stop - 1] = dsource[:, 1:]
            if steps.start == 0:
                self.before[rows] = dsource[:, 0]
            else:
                target[rows, steps.start - 1] = dsource[:, 0]
        self._fresh = False


def _backward_by_kernels(call: ScannedArguments, results: ScannedResults, incoming: Incoming) -> Gradients:
    from econmt_ops.backends.triton import scan_cells as kernels

    blocks, kept = _Blocks(call), len(results.products) > 0
    read = blocks.read(*blocks.places[0])
    products = results.products if kept else blocks.products(read)
    dproducts = torch.empty_like(products) if kept else products
    dread = None
    if blocks.cell.output.name == "highway" and len(blocks.bias) == blocks.cell.gates * blocks.hidden:
        dread = torch.empty_like(read[0], memory_format=torch.contiguous_format)
    given = incoming["outputs"], incoming["last"]
    dfirst, dbias = kernels.backward(blocks.inputs(products), results.cells, *given, dproducts, dread)
    rows = flat(dproducts)
    sources = [] if dread is None else [flat(dread).addmm_(rows, blocks.weights[0]).view(read[0].shape)]
    for source, weight in list(zip(read, blocks.weights, strict=True))[len(sources) :]:
        sources.append((rows @ weight).view(source.shape))
    before = None
    if call.before is not None:  # the last source is read one step late
        late_gradient = sources[-1]
        sources[-1] = torch.empty_like(late_gradient)
        flat(sources[-1])[:-1] = flat(late_gradient)[1:]
        sources[-1][:, -1] = 0.0
        before = late_gradient[:, 0]
    pairs = zip(read, call.weights, strict=True)
    weights = [outer(rows, flat(source), weight.dtype) for source, weight in pairs]
    return {"sources": sources, "weights": weights, "bias": dbias, "first": dfirst, "before": before}


def _backward(call: ScannedArguments, results: ScannedResults, incoming: Incoming) -> Gradients:
    if call.backend == "triton":
        return _backward_by_kernels(call, results, incoming)
    back = _BackwardPass(call, results, incoming)
    after: Tensor | None = None
    for rows, steps in reversed(back.blocks.places):
        after = back.run(rows, steps, after if steps.stop < back.blocks.steps else None)
    return {name: getattr(back, name) for name in ("sources", "weights", "bias", "first", "before")}


_stage = RecurrentOperator(
    "econmt_ops::scanned_stage",
    ScannedArguments,
    ScannedResults,
    forward=_forward,
    fake=_empty_results,
    backward=_backward,
    saves=lambda _: (*ScannedArguments._fields, "cells", "products"),
)


def _run_layer(
    run_stage: Callable[[ScannedArguments], Sequence[Tensor]],
    backend: str,
    layer: ScanLayer,
    inputs: Tensor,
    weights: Any,
    state: Sequence[Tensor],
    lengths: Tensor | None,
    *,
    stash: str = "outputs",
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Runs one layer, whose recurrences ``run_stage`` runs; see `econmt_ops.products.stack.run_cells`."""

    def stage(call: ScannedArguments) -> tuple[Tensor, Tensor]:
        outputs, last, *_ = run_stage(call._replace(lengths=lengths, stash=stash, backend=backend))
        return outputs, last

    outputs, after = layer.run(stage, inputs, weights, state)
    if len(after) < len(state):  # a window's last input
        after = (*after, last_of(inputs, state[-1], lengths))
    return outputs, after


IMPLEMENTATIONS = {
    "reference": (functools.partial(_run_layer, _reference_stage, ""), Traits()),
    "recompute": (functools.partial(_run_layer, _stage, ""), _RECOMPUTE),
    "triton": (functools.partial(_run_layer, _stage, "triton"), with_kernels(_RECOMPUTE, dtypes=FLOATS)),
}
"""Functions that run one layer, which they take first, with the traits of stacks of them, by name; see the module."""
