"""GPU version of `econmt_ops.layers.scanned`: one kernel forward and one backward between the matrix products.

A recurrence is a product for all steps, and a kernel that reads it, walks through the steps and writes the outputs.
Sources and c are kept, with the stash level "gates" also the products. The backward kernel recomputes the
nonlinearities from the products; the products for the gradients of weights and sources follow it.

B batch, T steps, H hidden, K parts of the products.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from econmt_ops.backends.triton import with_kernels
from econmt_ops.cells.scan import CELLS, ScanInputs, ScannedArguments
from econmt_ops.core.chunks import reaches
from econmt_ops.core.lengths import padding_mask, zero_padding
from econmt_ops.dispatch.registration import Gradients, Incoming, RecurrentOperator
from econmt_ops.dispatch.traits import FLOATS
from econmt_ops.layers.scanned import RECOMPUTE, ScannedResults, empty_results, flat, late, staged
from econmt_ops.products.outer import outer

TRITON = with_kernels(RECOMPUTE, dtypes=FLOATS)


class _Call:
    """Values of a call that both passes need."""

    def __init__(self, call: ScannedArguments) -> None:
        self.call, self.cell = call, CELLS[call.cell]
        self.dtype = call.sources[0].dtype
        self.weights = [weight.to(self.dtype) for weight in call.weights]
        # Rounded to the compute type, as all weights are.
        self.bias = call.bias.to(self.dtype).contiguous()
        self.lengths = None
        if call.lengths is not None:
            self.lengths = call.lengths.to(call.first.device, non_blocking=True)

    def read(self, clean: bool) -> list[Tensor]:
        """Returns the sources (B, T, .) as the products read them; with zeros in the padding if ``clean``."""
        sources = [*self.call.sources]
        if clean and self.lengths is not None:
            padding = padding_mask(self.lengths, sources[0].shape[1], self.lengths.device)
            sources = [zero_padding(source, padding) for source in sources]
        if self.call.before is not None:
            sources[-1] = late(sources[-1], self.call.before)
        return sources

    def products(self, read: Sequence[Tensor]) -> Tensor:
        """Returns the products without bias, a new tensor (B, T, K H); values in the padding are arbitrary."""
        first, *others = (flat(source) for source in read)
        made = first @ self.weights[0].t()
        for source, weight in zip(others, self.weights[1:], strict=True):
            made.addmm_(source, weight.t())
        return made.view(*read[0].shape[:2], len(self.weights[0]))

    def inputs(self, products: Tensor) -> ScanInputs:
        """Returns the arguments of both kernels."""
        call = self.call
        return ScanInputs(self.cell, products, self.bias, call.sources[0], call.first, self.lengths)


def _forward(call: ScannedArguments, keep: bool) -> ScannedResults:
    problem, results = _Call(call), empty_results(call._replace(stash="outputs"), keep)
    products = problem.products(problem.read(clean=False))
    if keep and reaches(call.stash, "gates"):
        results = results._replace(products=products)
    if results.outputs.numel():
        from econmt_ops.backends.triton import scan_cells

        cells = results.cells if keep else None
        scan_cells.forward(problem.inputs(products), results.outputs, results.last, cells)
    return results


def _backward(call: ScannedArguments, results: ScannedResults, incoming: Incoming) -> Gradients:
    from econmt_ops.backends.triton import scan_cells

    problem = _Call(call)
    read = problem.read(clean=True)
    kept = len(results.products) > 0
    products = results.products if kept else problem.products(read)
    dproducts = torch.empty_like(products) if kept else products
    dread = None
    is_highway = problem.cell.output.name == "highway"
    if is_highway and len(problem.bias) == problem.cell.gates * call.first.shape[1]:
        dread = torch.empty_like(read[0], memory_format=torch.contiguous_format)
    dfirst, dbias = scan_cells.backward(
        problem.inputs(products),
        results.cells,
        incoming["outputs"],
        incoming["last"],
        dproducts,
        dread,
    )
    rows = flat(dproducts)
    sources: list[Tensor] = []
    for source, weight in zip(read, problem.weights, strict=True):
        if dread is not None and not sources:
            flat(dread).addmm_(rows, weight)
            sources.append(dread)
        else:
            sources.append((rows @ weight).view(source.shape))
    before = None
    if call.before is not None:
        before = sources[-1][:, 0]
        sources[-1] = _late_back(sources[-1])
    return {
        "sources": sources,
        "weights": [
            outer(rows, flat(source), to.dtype) for source, to in zip(read, call.weights, strict=True)
        ],
        "bias": dbias,
        "first": dfirst,
        "before": before,
    }


def _late_back(gradient: Tensor) -> Tensor:
    """Returns the gradient of a source from the gradient of the delayed source."""
    made = torch.empty_like(gradient)
    flat(made)[:-1] = flat(gradient)[1:]
    made[:, -1] = 0.0
    return made


_stage = RecurrentOperator(
    "econmt_ops::fused_stage",
    ScannedArguments,
    ScannedResults,
    forward=_forward,
    fake=empty_results,
    backward=_backward,
    saves=lambda _: (*ScannedArguments._fields, "cells", "products"),
)

fused = staged(_stage)
"""Runs a stack of layers with the kernels; see the module."""
