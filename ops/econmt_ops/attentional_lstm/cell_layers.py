"""Layers of the attentional decoder of any `StepCell` but the LSTM: a step computes two products and one cell.

The products, of the layer's input and of the h before the step, are one batched product on a GPU; between them the cell
of `econmt_ops.cells` computes everything else. `ForwardCells` runs the steps of a forward pass, `RebuiltCells`
recomputes those of a block by large products, and `BackwardCells` runs them backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from econmt_ops.attentional_lstm.problem import AttentionalProblem, BlockTensors, CellWeights, Result
from econmt_ops.attentional_lstm.stack import BackwardLayers, ForwardLayers
from econmt_ops.backends.protocol import CellStep, Read, StepGradients
from econmt_ops.cells.protocol import StepCell
from econmt_ops.cells.table import KINDS
from econmt_ops.core.loops import steps_of
from econmt_ops.dispatch.rule import device_of
from econmt_ops.products.gemm import multiply
from econmt_ops.products.low_rank import AnyProduct


class _Pair:
    """Products of a layer's input and of its h, which every step computes once.

    Args:
        problem: Call.
        input, hidden: Weights (N, K) each, applied transposed if ``back``.
    """

    def __init__(self, problem: AttentionalProblem, input: Tensor, hidden: Tensor, back: bool) -> None:  # noqa: A002
        self._both = input
        self._each: list[AnyProduct] = []
        if device_of(problem.inputs) == "cuda":
            both = torch.stack([input, hidden])
            self._both = both if back else both.transpose(1, 2)
        else:
            self._each = [problem.product(part.t() if back else part) for part in (input, hidden)]

    def into(self, out: Tensor, rows: Tensor, start: Tensor | None = None) -> None:
        """Writes the products of rows (2, B, K) plus ``start`` (2, B, N) to ``out`` (2, B, N), which may be it."""
        if self._each:
            for number, product in enumerate(self._each):
                product.into(out[number], rows[number], None if start is None else start[number])
        elif start is None:
            torch.bmm(rows, self._both, out=out)
        else:
            torch.baddbmm(start, rows, self._both, out=out)


def _cell(problem: AttentionalProblem) -> StepCell:
    return cast(StepCell, KINDS[problem.call.cell])


def _read(problem: AttentionalProblem, layer: int) -> Tensor:
    """Returns the weight of a layer's input; at the bottom of o, because that of its inputs is multiplied before."""
    read = problem.from_output if layer == 0 else problem.layers[layer].input
    assert isinstance(read, Tensor)
    return read


def _start(weights: CellWeights, shape: Sequence[int], shares: Tensor | None = None) -> Tensor:
    """Returns what is added to the products of steps, (2, ..., G H): shares or the bias, and the recurrent bias."""
    start = weights.input.new_zeros(2, *shape, len(weights.input)) if shares is None else shares
    if weights.bias is not None and shares is None:
        start[0] = weights.bias
    if weights.recurrent_bias is not None:
        start[1] = weights.recurrent_bias
    elif shares is not None:
        start[1].zero_()
    return start


class ForwardCells(ForwardLayers):
    """Layers of a forward pass."""

    def __init__(self, problem: AttentionalProblem, result: Result, keep: bool, top: Tensor) -> None:
        space, batch, hidden = problem.inputs.new_empty, problem.batch, problem.hidden
        # Inputs of the layers' products: the layer's input, and h of the previous step.
        self.rows = [space(2, batch, hidden) for _ in problem.layers]
        super().__init__(problem, result, keep, top, [[row[part] for row in self.rows] for part in range(2)])
        self._kind = _cell(problem)
        self._products, self._starts = [], []
        for layer, weights in enumerate(problem.layers):
            self._products.append(_Pair(problem, _read(problem, layer), weights.hidden, back=False))
            self._starts.append(_start(weights, (batch,)) if layer else None)
        width = len(problem.layers[0].input)
        self._sums = space(2, batch, width)
        longest = max(end - begin for begin, end in problem.blocks)
        self._workspace = space(2, longest, batch, width)
        self._unkept = space(batch, hidden)

    def begin(self, begin: int, end: int) -> None:
        """Prepares the steps begin to end."""
        self._shares = self._workspace[:, : end - begin]
        self.problem.bottom_gates(self.problem.read(begin, end), self._shares[0])
        _start(self.problem.layers[0], (), self._shares)

    def _cell(self, layer: int, number: int, position: int, destination: Tensor, read: Read | None) -> None:
        problem, row, each = self.problem, self.rows[layer], len(self.others) // len(self.rows)
        sums = self._sums if layer else self._shares[:, number]
        self._products[layer].into(sums, row, self._starts[layer] if layer else sums)
        states = self.states[layer], *self.others[layer * each : (layer + 1) * each]
        step = CellStep(self._kind, sums[0], sums[1], states, problem.layers[layer].extra, None)
        output = self.result.h[layer, position] if self.keep else self._unkept
        if read is None and not self.keep:
            output = destination
        elif read is None:
            read = Read((destination,))
        problem.run.step_forward_into(step, states, output, read)


class RebuiltCells:
    """Recomputed tensors of the steps of a block.

    Attributes:
        sums: Per layer (2, K, B, G H), the products of inputs and of h.
        states: Per layer (K + 1, states beside h, B, H).
        dreads, drecurrents: Per layer (K, B, G H), memory for the gradients of the products.
    """

    def __init__(
        self, problem: AttentionalProblem, stash: Result, number: int, tensors: BlockTensors
    ) -> None:
        begin, end = problem.blocks[number]
        self.cell, steps = _cell(problem), end - begin
        self.each = len(stash.c) // len(problem.layers)
        self.before = tensors.before
        self.sums: list[Tensor] = []
        self.states: list[Tensor] = []
        self.gradients: list[Tensor] = []
        for layer, weights in enumerate(problem.layers):
            width = len(weights.input)
            sums = weights.input.new_empty(2, steps, problem.batch, width)
            rows = sums.view(2, -1, width)
            if layer == 0:
                problem.bottom_gates(tensors.inputs, sums[0])
                multiply(tensors.fed.reshape(-1, problem.hidden), _read(problem, 0), out=rows[0], adds=True)
            else:
                multiply(
                    tensors.reads[layer - 1].reshape(-1, problem.hidden), weights.input, weights.bias, rows[0]
                )
            before = tensors.before[layer]
            multiply(before.reshape(-1, problem.hidden), weights.hidden, weights.recurrent_bias, rows[1])
            self.sums.append(sums)
            self.gradients.append(torch.empty_like(sums))
            self._add_states(problem, layer, stash, number)
        self.dreads = [gradients[0] for gradients in self.gradients]
        self.drecurrents = [gradients[1] for gradients in self.gradients]

    def step(self, problem: AttentionalProblem, layer: int, number: int) -> CellStep:
        """Returns the arguments of a step of a layer."""
        sums, before = self.sums[layer][:, number], self.before[layer][number]
        states = before, *self.states[layer][number].unbind(0)
        return CellStep(self.cell, sums[0], sums[1], states, problem.layers[layer].extra, None)

    def _add_states(self, problem: AttentionalProblem, layer: int, stash: Result, number: int) -> None:
        """Recomputes the states beside h before and after the steps of a block."""
        before = self.before[layer]
        kept = stash.c[layer * self.each : (layer + 1) * self.each, number]
        states = kept.new_empty(len(before) + 1, *kept.shape)
        states[0] = kept
        self.states.append(states)
        if self.each:
            unseen = torch.empty_like(before[0]), torch.empty_like(before[0])
            for step in steps_of(range(len(before))):
                after = unseen[0], *states[step + 1].unbind(0)
                problem.run.step_forward_into(self.step(problem, layer, step), after, unseen[1])


class BackwardCells(BackwardLayers):
    """Layers of a backward pass; ``last_dh`` (L, B, H) are gradients of the last h, or None."""

    def __init__(self, problem: AttentionalProblem, last_dh: Tensor | None, dothers: Tensor) -> None:
        zeros, batch, hidden = problem.inputs.new_zeros, problem.batch, problem.hidden
        # Gradients of the inputs of the layers' products, and of h past them.
        self.rows = [zeros(2, batch, hidden) for _ in problem.layers]
        super().__init__(problem, dothers, [row[0] for row in self.rows])
        self._past = [zeros(batch, hidden) for _ in problem.layers]
        if last_dh is not None:
            for past, part in zip(self._past, last_dh, strict=True):
                past.copy_(part)
        self._to_rows = [
            _Pair(problem, _read(problem, layer), weights.hidden, back=True)
            for layer, weights in enumerate(problem.layers)
        ]
        count = problem.run.rows_of_sums(batch)
        self._extra = [
            [part.new_zeros(count, len(part)) for part in weights.extra] for weights in problem.layers
        ]

    @property
    def dh(self) -> list[Tensor]:
        """Gradients of h before the last step that has run, per layer (B, H)."""
        return [row[1] + past for row, past in zip(self.rows, self._past, strict=True)]

    @property
    def extra(self) -> list[Tensor]:
        """Gradients of the further weights, layer by layer, in the accumulate type."""
        return [total.sum(0) for totals in self._extra for total in totals]

    def _cell(self, block: RebuiltCells, layer: int, number: int, above: Tensor, keep: Tensor | None) -> None:
        problem, row, each = self.problem, self.rows[layer], block.each
        gradients = block.gradients[layer][:, number]
        step = block.step(problem, layer, number)
        problem.run.step_backward_into(
            step,
            (step.before[0], *block.states[layer][number + 1].unbind(0)),
            (self._past[layer], *self.dothers[layer * each : (layer + 1) * each].unbind(0)),
            above,
            StepGradients(gradients[0], gradients[1], self._extra[layer]),
            flow=row[1],
            keep=keep,
            scale=problem.scale,
        )
        self._to_rows[layer].into(row, gradients)
