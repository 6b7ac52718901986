"""Forward pass of the recomputing attentional decoder.

In each step the layers write their output; one product gives the query and the output's share of o, and one attention
kernel computes o, or the context of which `EagerSteps.output_forward` makes o. A layer of an LSTM computes one product
of [layer input ; h] and one cell. Other cells need two products; between them the cell of `econmt_ops.cells` computes
everything else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from econmt_ops.attentional_lstm import persistent
from econmt_ops.attentional_lstm.block import BottomGates, ProductPair, bottom_or_input
from econmt_ops.attentional_lstm.problem import AttentionalProblem, Result, empty_result
from econmt_ops.backends.protocol import CellStep, CoverageStep, OutputStep, Read
from econmt_ops.core.loops import steps_of


def forward(problem: AttentionalProblem, keep: bool) -> Result:
    """Runs all steps of a call; ``keep``: a backward pass will follow."""
    result = empty_result(problem.call, keep)
    sizes = persistent.sizes_of(problem)
    steps: ForwardSteps | persistent.ForwardBlocks
    if sizes is None:
        steps = (ForwardLSTM if problem.is_lstm else ForwardCells)(problem, result, keep)
    else:
        steps = persistent.ForwardBlocks(problem, sizes, result, keep)
    for number in steps_of(range(len(problem.blocks))):
        begin, end = problem.blocks[number]
        if keep and not (problem.is_lstm and problem.keeps("cells")):
            for index, state in enumerate(steps.others):
                result.c[index, number] = state
        steps.run(begin, end)
    steps.finish()
    return result


class ForwardSteps(ABC):
    """Steps of a forward pass, one after the other.

    Args:
        problem, result, keep: Call, its result, and True if a backward pass will follow.
        rows: Memory of each layer's input, and of its h before the next step, (B, H) each.

    Attributes:
        others: The states beside h before the next step, (B, H) each, layer by layer.
        top: (B, H), the stack's output. fed: (B, H), the output o of the step before.
    """

    def __init__(
        self, problem: AttentionalProblem, result: Result, keep: bool, rows: list[list[Tensor]]
    ) -> None:
        self.problem, self.result, self.keep, call = problem, result, keep, problem.call
        self.reads, self.states = rows
        self.fed, self.others = self.reads[0], list(result.last_c.unbind(0))
        firsts = call.first_output, *call.first_h, *call.first_c
        for memory, first in zip((self.fed, *self.states, *self.others), firsts, strict=True):
            memory.copy_(first)
        space, batch = problem.inputs.new_empty, problem.batch
        self.attention = problem.attention(problem.projected())
        # One product gives query and stack's share of o; without query weights, that share alone.
        matrix = problem.both()
        self.combination = problem.product(matrix, problem.both_bias())
        asked = problem.size if problem.query is None else 0
        self.both = space(batch, asked + len(matrix))
        self.combined = self.both[:, asked:]
        self.top = self.both[:, :asked] if asked else space(batch, problem.hidden)
        self.context = None if problem.squashes else space(batch, problem.width_of_share)
        self.coverage = result.last_coverage
        if call.first_coverage is not None:
            self.coverage.copy_(call.first_coverage)
        # Kernels read the coverage before a step while they write that after it.
        self._spare = None if keep else self.coverage.clone()

    def run(self, begin: int, end: int) -> None:
        """Runs steps begin to end."""
        self._begin(begin, end)
        for position in steps_of(range(begin, end)):
            for layer, inputs in enumerate(self.reads):
                destination = self.top if layer + 1 == len(self.reads) else self.reads[layer + 1]
                read = self.problem.read_of(layer, position, inputs, destination)
                self._cell(layer, position - begin, position, destination, read)
            self.combination.into(self.combined, self.top)
            self._output(position)

    @abstractmethod
    def _begin(self, begin: int, end: int) -> None:
        """Prepares the steps begin to end."""

    @abstractmethod
    def _cell(self, layer: int, number: int, position: int, destination: Tensor, read: Read | None) -> None:
        """Runs a layer at a step, the ``number``-th of its block.

        Its h goes to ``destination`` (B, H), unless ``read`` says what is written there.
        """

    def _output(self, position: int) -> None:
        """Computes attention and o of a step, and the coverage after it."""
        problem, result = self.problem, self.result
        share, state = problem.parts_of_both(self.both, problem.size)
        covered = None
        if problem.call.first_coverage is not None:
            after = result.coverage[position] if self._spare is None else self._spare
            covered = CoverageStep(self.coverage, after, state)
            if self._spare is not None:
                self._spare = self.coverage
            self.coverage = after
        outputs, weights = (result.outputs[position], self.fed), result.attention[position]
        made = outputs if self.context is None else (self.context,)
        self.attention.forward(self.both[:, : problem.size + problem.width_of_share], made, weights, covered)
        if self.context is not None:
            step = OutputStep(share, self.context, outputs[0], problem.context_bias, problem.norm)
            problem.run.output_forward(step, outputs)

    def finish(self) -> None:
        """Writes the state after the last step."""
        for layer, h in enumerate(self.states):
            self.result.last_h[layer] = h
        if self.coverage is not self.result.last_coverage:
            self.result.last_coverage.copy_(self.coverage)


class ForwardLSTM(ForwardSteps):
    """Steps of LSTMs, with every c or gate in the result if the stash level includes them."""

    def __init__(self, problem: AttentionalProblem, result: Result, keep: bool) -> None:
        hidden, space = problem.hidden, problem.inputs.new_empty
        # Input rows of the layers' products: [layer input ; h of the previous step].
        self.rows = [space(problem.batch, 2 * hidden) for _ in problem.layers]
        parts = slice(0, hidden), slice(hidden, None)
        super().__init__(problem, result, keep, [[row[:, part] for row in self.rows] for part in parts])
        self.every_cell = keep and problem.keeps("cells")
        self.every_gate = keep and problem.keeps("gates")
        self.products = [
            problem.product(problem.joint(layer), weights.read_bias if layer else None)
            for layer, weights in enumerate(problem.layers)
        ]
        self.gates = space(problem.batch, 4 * hidden)
        self._bottom, self._shares = BottomGates(problem, result, keep), self.gates

    def _begin(self, begin: int, end: int) -> None:
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


def _spread(bias: Tensor | None, rows: Tensor) -> None:
    """Writes a bias (G H,) to rows (..., G H); zeros if there is none."""
    rows[...] = 0.0 if bias is None else bias


class ForwardCells(ForwardSteps):
    """Steps of any other cells."""

    def __init__(self, problem: AttentionalProblem, result: Result, keep: bool) -> None:
        space, batch, hidden = problem.inputs.new_empty, problem.batch, problem.hidden
        # Inputs of the layers' products: the layer's input, and h of the previous step.
        self.rows = [space(2, batch, hidden) for _ in problem.layers]
        super().__init__(problem, result, keep, [[row[part] for row in self.rows] for part in range(2)])
        self._products = [
            ProductPair(problem, bottom_or_input(problem, layer), weights.hidden, back=False)
            for layer, weights in enumerate(problem.layers)
        ]
        width = len(problem.layers[0].input)
        self._sums = space(2, batch, width)
        longest = max(end - begin for begin, end in problem.blocks)
        self._workspace = space(2, longest, batch, width)
        # What is added to the products of the upper layers.
        self._starts = [space(2, batch, width) for _ in problem.layers[1:]]
        for start, weights in zip(self._starts, problem.layers[1:], strict=True):
            _spread(weights.read_bias, start[0])
            _spread(weights.recurrent_bias, start[1])
        self._unkept = space(batch, hidden)

    def _begin(self, begin: int, end: int) -> None:
        self._shares = self._workspace[:, : end - begin]
        self.problem.bottom_gates(self.problem.read(begin, end), self._shares[0])
        _spread(self.problem.layers[0].recurrent_bias, self._shares[1])

    def _cell(self, layer: int, number: int, position: int, destination: Tensor, read: Read | None) -> None:
        problem, row, each = self.problem, self.rows[layer], len(self.others) // len(self.rows)
        sums = self._sums if layer else self._shares[:, number]
        self._products[layer].into(sums, row, self._starts[layer - 1] if layer else sums)
        states = self.states[layer], *self.others[layer * each : (layer + 1) * each]
        step = CellStep(problem.cell, sums[0], sums[1], states, problem.layers[layer].extra, None)
        output = self.result.h[layer, position] if self.keep else self._unkept
        if read is None and not self.keep:
            output = destination
        elif read is None:
            read = Read((destination,))
        problem.run.step_forward_into(step, states, output, read)
