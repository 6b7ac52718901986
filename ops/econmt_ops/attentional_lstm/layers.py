"""Layers of the attentional decoder in the passes over its steps: of LSTMs, and of any other `StepCell`.

A step of an LSTM computes one product of [layer input ; h] and one cell. Other cells need two products, which are one
batched product on a GPU; between them the cell of `econmt_ops.cells` computes everything else. `ForwardLSTM` and
`ForwardCells` run the steps of a forward pass, `BackwardLSTM` and `BackwardCells` those of a backward pass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from econmt_ops.attentional_lstm.block import CellsBlock, LSTMBlock, bottom_or_input, cell_of_call
from econmt_ops.attentional_lstm.problem import AttentionalProblem, Result
from econmt_ops.backends.protocol import CellStep, Read, StepGradients
from econmt_ops.cells.protocol import Split
from econmt_ops.dispatch.rule import device_of
from econmt_ops.products.low_rank import AnyProduct


class ForwardLayers(ABC):
    """Layers of a forward pass.

    Args:
        problem, result, keep: Call, its result, and True if a backward pass will follow.
        top: (B, H), receives the stack's output at each step.
        rows: Memory of each layer's input, and of its h before the next step, (B, H) each.

    Attributes:
        others: The states beside h before the next step, (B, H) each, layer by layer.
        fed: (B, H), the output o of the step before, to be written before each step.
    """

    def __init__(
        self, problem: AttentionalProblem, result: Result, keep: bool, top: Tensor, rows: list[list[Tensor]]
    ) -> None:
        self.problem, self.result, self.keep, self.top = problem, result, keep, top
        self.reads, self.states = rows
        self.fed, self.others = self.reads[0], list(result.last_c.unbind(0))
        firsts = *problem.call.first_h, *problem.call.first_c
        for memory, first in zip((*self.states, *self.others), firsts, strict=True):
            memory.copy_(first)

    def step(self, number: int, position: int) -> None:
        """Runs a step, the ``number``-th of its block."""
        for layer, inputs in enumerate(self.reads):
            destination = self.top if layer + 1 == len(self.reads) else self.reads[layer + 1]
            read = self.problem.read_of(layer, position, inputs, destination)
            self._cell(layer, number, position, destination, read)

    @abstractmethod
    def _cell(self, layer: int, number: int, position: int, destination: Tensor, read: Read | None) -> None:
        """Runs a layer; its h goes to ``destination`` (B, H), unless ``read`` says what is written there."""

    def finish(self) -> None:
        """Writes the state after the last step."""
        for layer, h in enumerate(self.states):
            self.result.last_h[layer] = h


class BackwardLayers(ABC):
    """Layers of a backward pass, last step first.

    Args:
        problem: Call.
        dothers: (N, B, H), gradients of the last states beside h; overwritten by those of the states before the steps
            that have run.
        reads: Memory of the gradient of each layer's input, (B, H) each.

    Attributes:
        do: Gradient of o before the last step that has run, (B, H).
    """

    def __init__(self, problem: AttentionalProblem, dothers: Tensor, reads: list[Tensor]) -> None:
        self.problem, self.dothers, self.reads = problem, dothers, reads
        self.do = reads[0]

    @property
    def extra(self) -> Sequence[Tensor]:
        """Gradients of the layers' further weights, layer by layer, in the accumulate type."""
        return ()

    def step(self, block: Any, number: int, position: int, dtop: Tensor) -> None:
        """Propagates a step through the stack, given the gradient (B, H) of the stack's output."""
        above, keep = dtop, None
        for layer in reversed(range(len(self.reads))):
            self._cell(block, layer, number, above, keep)
            above, keep = self.problem.below(layer, position, self.reads[layer], above)

    @abstractmethod
    def _cell(self, block: Any, layer: int, number: int, above: Tensor, keep: Tensor | None) -> None:
        """Runs a layer backward, given the gradient of its output, to which dropout by ``keep`` is applied."""


class BottomGates:
    """Inputs' share and bias of the bottom layer's gates, a block of steps at a time, in the stash or a workspace."""

    def __init__(self, problem: AttentionalProblem, result: Result, keep: bool) -> None:
        self._problem, self._kept, self._workspace = problem, result.gates, None
        if not (keep and problem.keeps("gates")):
            longest = max(end - begin for begin, end in problem.blocks)
            self._workspace = problem.inputs.new_empty(longest, problem.batch, 4 * problem.hidden)

    def __call__(self, begin: int, end: int) -> Tensor:
        """Returns the gates (K, B, 4H) of a block."""
        workspace = self._workspace
        gates = self._kept[0, begin:end] if workspace is None else workspace[: end - begin]
        self._problem.bottom_gates(self._problem.read(begin, end), gates)
        return gates


class ForwardLSTM(ForwardLayers):
    """Layers of a forward pass, with every c or gate in the result if the stash level includes them."""

    def __init__(self, problem: AttentionalProblem, result: Result, keep: bool, top: Tensor) -> None:
        hidden, space = problem.hidden, problem.inputs.new_empty
        # Input rows of the layers' products: [layer input ; h of the previous step].
        self.rows = [space(problem.batch, 2 * hidden) for _ in problem.layers]
        parts = slice(0, hidden), slice(hidden, None)
        super().__init__(problem, result, keep, top, [[row[:, part] for row in self.rows] for part in parts])
        self.every_cell = keep and problem.keeps("cells")
        self.every_gate = keep and problem.keeps("gates")
        self.products = [
            problem.product(problem.joint(layer), weights.read_bias if layer else None)
            for layer, weights in enumerate(problem.layers)
        ]
        self.gates = space(problem.batch, 4 * hidden)
        self._bottom, self._shares = BottomGates(problem, result, keep), self.gates

    def begin(self, begin: int, end: int) -> None:
        """Prepares the steps begin to end."""
        self._shares = self._bottom(begin, end)

    def finish(self) -> None:
        """Writes the state after the last step."""
        super().finish()
        for layer, c in enumerate(self.others if self.every_cell else ()):
            self.result.last_c[layer] = c

    def _cell(self, layer: int, number: int, position: int, destination: Tensor, read: Read | None) -> None:
        result, row = self.result, self.rows[layer]
        recurrent = None
        if layer:
            gates = result.gates[layer, position] if self.every_gate else self.gates
            self.products[layer].into(gates, row)
        else:
            gates = self._shares[number]
            recurrent = self.products[layer].share(gates, row)
        h = [self.states[layer]]
        if self.keep:
            h.append(result.h[layer, position])
        if read is None:
            h.append(destination)
        before = self.others[layer]
        if self.every_cell:
            self.others[layer] = result.c[layer, position]
        self.problem.run.cell_forward(
            gates, before, self.others[layer], h, keep=self.every_gate, recurrent=recurrent, read=read
        )


class BackwardLSTM(BackwardLayers):
    """Layers of a backward pass; ``last_dh`` (L, B, H) are gradients of the last h, or None."""

    def __init__(self, problem: AttentionalProblem, last_dh: Tensor | None, dothers: Tensor) -> None:
        hidden = problem.hidden
        # Gradients of the inputs of the layers' products, [layer input ; h of the previous step].
        self.rows = [problem.inputs.new_zeros(problem.batch, 2 * hidden) for _ in problem.layers]
        super().__init__(problem, dothers, [row[:, :hidden] for row in self.rows])
        if last_dh is not None:
            for dh, part in zip(self.dh, last_dh, strict=True):
                dh.copy_(part)
        # Transposed views: packing a weight for products of this kind takes longer than it saves.
        self.to_rows = [problem.product(problem.joint(layer).t()) for layer in range(len(problem.layers))]

    @property
    def dh(self) -> list[Tensor]:
        """Gradients of h before the last step that has run, per layer (B, H)."""
        return [row[:, self.problem.hidden :] for row in self.rows]

    def _cell(self, block: LSTMBlock, layer: int, number: int, above: Tensor, keep: Tensor | None) -> None:
        problem, row, dgates = self.problem, self.rows[layer], block.dreads[layer][number]
        problem.run.cell_backward(
            block.gates[layer][number],
            block.cells[layer][number],
            block.cells[layer][number + 1],
            (above, row[:, problem.hidden :]),
            self.dothers[layer],
            dgates,
            keep=keep,
            scale=problem.scale,
        )
        self.to_rows[layer].into(row, dgates)


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


def _start(weights: Split, shape: Sequence[int], shares: Tensor | None = None) -> Tensor:
    """Returns what is added to the products of steps, (2, ..., G H): shares or the bias, and the recurrent bias."""
    start = weights.input.new_zeros(2, *shape, len(weights.input)) if shares is None else shares
    if weights.read_bias is not None and shares is None:
        start[0] = weights.read_bias
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
        self._kind = cell_of_call(problem)
        self._products, self._starts = [], []
        for layer, weights in enumerate(problem.layers):
            self._products.append(_Pair(problem, bottom_or_input(problem, layer), weights.hidden, back=False))
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
            _Pair(problem, bottom_or_input(problem, layer), weights.hidden, back=True)
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

    def _cell(self, block: CellsBlock, layer: int, number: int, above: Tensor, keep: Tensor | None) -> None:
        problem, row, each = self.problem, self.rows[layer], block.each
        gradients = block.gradients[layer][:, number]
        step = block.step(layer, number)
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
