"""Layers of the attentional decoder that are LSTMs: a step computes one product of [layer input ; h] and one cell.

`ForwardLSTM` runs the steps of a forward pass, `RebuiltLSTM` recomputes those of a block by large products, and
`BackwardLSTM` runs them backward.
"""

from __future__ import annotations

from torch import Tensor

from econmt_ops.attentional_lstm.problem import AttentionalProblem, BlockTensors, Result
from econmt_ops.products.low_rank import add_linear, linear_into


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


class ForwardLSTM:
    """Layers of a forward pass.

    Args:
        problem, result, keep: Call, its result, and True if a backward pass will follow.
        top: (B, H), receives the stack's output at each step.

    Attributes:
        others: Per layer c (B, H) before the next step.
        fed: (B, H), the output o of the step before, to be written before each step.
    """

    def __init__(self, problem: AttentionalProblem, result: Result, keep: bool, top: Tensor) -> None:
        self.problem, self.result, self.keep, self.top = problem, result, keep, top
        self.every_cell = keep and problem.keeps("cells")
        self.every_gate = keep and problem.keeps("gates")
        call, hidden, space = problem.call, problem.hidden, problem.inputs.new_empty
        self.products = [
            problem.product(problem.joint(layer), weights.bias if layer else None)
            for layer, weights in enumerate(problem.layers)
        ]
        # Input rows of the layers' products: [layer input ; h of the previous step].
        self.rows = [space(problem.batch, 2 * hidden) for _ in problem.layers]
        self.others = list(result.last_c.unbind(0))
        self.fed = self.rows[0][:, :hidden]
        for row, c, first_h, first_c in zip(self.rows, self.others, call.first_h, call.first_c, strict=True):
            row[:, hidden:] = first_h
            c.copy_(first_c)
        self.gates = space(problem.batch, 4 * hidden)
        self._bottom, self._shares = BottomGates(problem, result, keep), self.gates

    def begin(self, begin: int, end: int) -> None:
        """Prepares the steps begin to end."""
        self._shares = self._bottom(begin, end)

    def step(self, number: int, position: int) -> None:
        """Runs a step, the ``number``-th of its block."""
        for layer in range(len(self.problem.layers)):
            self._cell(layer, position, self._shares[number] if layer == 0 else None)

    def finish(self) -> None:
        """Writes the state after the last step."""
        for layer, row in enumerate(self.rows):
            self.result.last_h[layer] = row[:, self.problem.hidden :]
            if self.every_cell:
                self.result.last_c[layer] = self.others[layer]

    def _cell(self, layer: int, step: int, start: Tensor | None) -> None:
        """Runs one step of a layer; ``start`` (B, 4H), the inputs' share of the bottom gates, is overwritten."""
        problem, result, row, hidden = self.problem, self.result, self.rows[layer], self.problem.hidden
        recurrent = None
        if start is None:
            gates = result.gates[layer, step] if self.every_gate else self.gates
            self.products[layer].into(gates, row)
        else:
            gates, recurrent = start, self.products[layer].share(start, row)
        h = [row[:, hidden:]]
        if self.keep:
            h.append(result.h[layer, step])
        is_top = layer + 1 == len(problem.layers)
        destination = self.top if is_top else self.rows[layer + 1][:, :hidden]
        read = problem.read_of(layer, step, row[:, :hidden], destination)
        if read is None:
            h.append(destination)
        before = self.others[layer]
        if self.every_cell:
            self.others[layer] = result.c[layer, step]
        problem.run.cell_forward(
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
            add_linear(gates, tensors.fed, problem.from_output)
        else:
            linear_into(gates, tensors.reads[layer - 1], weights.input, weights.bias)
        return problem.run.prepare_gates(add_linear(gates, tensors.before[layer], weights.hidden))


class BackwardLSTM:
    """Layers of a backward pass, last step first.

    Args:
        problem: Call.
        last_dh: (L, B, H), gradients of the last h; or None.
        dothers: (L, B, H), gradients of the last c; overwritten by those of the c before the steps that have run.

    Attributes:
        extra: Nothing: the cell has no further weights.
    """

    extra: tuple[Tensor, ...] = ()

    def __init__(self, problem: AttentionalProblem, last_dh: Tensor | None, dothers: Tensor) -> None:
        self.problem, self.dothers, hidden = problem, dothers, problem.hidden
        # Gradients of the inputs of the layers' products, [layer input ; h of the previous step].
        self.rows = [problem.inputs.new_zeros(problem.batch, 2 * hidden) for _ in problem.layers]
        if last_dh is not None:
            for row, part in zip(self.rows, last_dh, strict=True):
                row[:, hidden:] = part
        # Transposed views: packing a weight for products of this kind takes longer than it saves.
        self.to_rows = [problem.product(problem.joint(layer).t()) for layer in range(len(problem.layers))]

    @property
    def dh(self) -> list[Tensor]:
        """Gradients of h before the last step that has run, per layer (B, H)."""
        return [row[:, self.problem.hidden :] for row in self.rows]

    @property
    def do(self) -> Tensor:
        """Gradient of o before that step, (B, H)."""
        return self.rows[0][:, : self.problem.hidden]

    def step(self, block: RebuiltLSTM, number: int, position: int, dtop: Tensor) -> None:
        """Propagates a step through the stack, given the gradient (B, H) of the stack's output."""
        problem, hidden = self.problem, self.problem.hidden
        above: Tensor = dtop
        keep: Tensor | None = None
        for layer in reversed(range(len(problem.layers))):
            row, dgates = self.rows[layer], block.dreads[layer][number]
            problem.run.cell_backward(
                block.gates[layer][number],
                block.cells[layer][number],
                block.cells[layer][number + 1],
                (above, row[:, hidden:]),
                self.dothers[layer],
                dgates,
                keep=keep,
                scale=problem.scale,
            )
            self.to_rows[layer].into(row, dgates)
            above, keep = problem.below(layer, position, row[:, :hidden], above)
