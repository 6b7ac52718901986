"""Layers of the attentional decoder that are LSTMs: a step computes one product of [layer input ; h] and one cell.

`ForwardLSTM` runs the steps of a forward pass, `RebuiltLSTM` recomputes those of a block by large products, and
`BackwardLSTM` runs them backward.
"""

from __future__ import annotations

from torch import Tensor

from econmt_ops.attentional_lstm.problem import AttentionalProblem, BlockTensors, Result
from econmt_ops.attentional_lstm.stack import BackwardLayers, ForwardLayers
from econmt_ops.backends.protocol import Read
from econmt_ops.products.low_rank import project


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


class RebuiltLSTM:
    """Recomputed tensors of the steps of a block.

    Attributes:
        gates: Per layer (K, B, 4H), as the backend's cell reads them.
        dreads, drecurrents: Per layer (K, B, 4H), memory for the gradients of the gates' sums, one tensor for both;
            recomputed sums are stored there first.
        cells: Per layer, K + 1 states (B, H), from c before the first step on; one tensor if they were recomputed.
    """

    def __init__(
        self, problem: AttentionalProblem, stash: Result, number: int, tensors: BlockTensors
    ) -> None:
        begin, end = problem.blocks[number]
        self.gates: list[Tensor] = []
        self.dreads: list[Tensor] = []
        self.cells: list[Tensor | list[Tensor]] = []
        for layer in range(len(problem.layers)):
            self.dreads.append(tensors.fed.new_empty(*tensors.fed.shape[:2], 4 * problem.hidden))
            if problem.keeps("gates"):
                self.gates.append(stash.gates[layer, begin:end])
            else:
                self.gates.append(self._gates(problem, layer, tensors))
            if problem.keeps("cells"):
                first = stash.c[layer, begin - 1] if begin else problem.call.first_c[layer]
                self.cells.append([first, *stash.c[layer, begin:end].unbind(0)])
            else:
                self.cells.append(problem.run.scan_cells(self.gates[layer], stash.c[layer, number]))
        self.drecurrents = self.dreads

    def _gates(self, problem: AttentionalProblem, layer: int, tensors: BlockTensors) -> Tensor:
        weights, gates = problem.layers[layer], self.dreads[layer]
        if layer == 0:
            problem.bottom_gates(tensors.inputs, gates)
            project(tensors.fed, problem.from_output, out=gates, adds=True)
        else:
            project(tensors.reads[layer - 1], weights.input, weights.read_bias, gates)
        project(tensors.before[layer], weights.hidden, out=gates, adds=True)
        return problem.run.prepare_gates(gates)


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

    def _cell(self, block: RebuiltLSTM, layer: int, number: int, above: Tensor, keep: Tensor | None) -> None:
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
