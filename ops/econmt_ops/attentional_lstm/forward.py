"""Forward pass of the recomputing attentional LSTM.

In each step a layer computes one product, of its row [layer input ; h of the previous step] (B, 2H), and one cell
kernel, which writes h and the input of the next layer into the rows of the next products. One more product gives the
query and the stack's share of o, and one attention kernel computes o.
"""

from __future__ import annotations

import torch
from torch import Tensor

from econmt_ops.attentional_lstm import persistent
from econmt_ops.attentional_lstm.problem import AttentionalProblem, Result, empty_result
from econmt_ops.backends.protocol import Read
from econmt_ops.core.loops import steps_of


class Forward:
    """Forward pass of one call.

    Args:
        problem: tensors of the call.
        keep: True if a backward pass will follow.
    """

    def __init__(self, problem: AttentionalProblem, keep: bool) -> None:
        self.problem, self.keep = problem, keep
        self.result = result = empty_result(problem.call, keep)
        sizes = persistent.sizes_of(problem)
        self.steps: ForwardSteps | persistent.ForwardBlocks
        if sizes is None:
            self.steps = ForwardSteps(problem, result, keep)
        else:
            self.steps = persistent.ForwardBlocks(problem, sizes, result)

    def run(self) -> Result:
        """Runs all steps."""
        problem, result = self.problem, self.result
        longest = max(end - begin for begin, end in problem.blocks)
        every_gate = self.keep and problem.keeps("gates")
        workspace = None
        if not every_gate:
            workspace = problem.inputs.new_empty(longest, problem.batch, 4 * problem.hidden)
        for number in steps_of(range(len(problem.blocks))):
            begin, end = problem.blocks[number]
            gates = result.gates[0, begin:end] if workspace is None else workspace[: end - begin]
            problem.bottom_gates(problem.read(begin, end), gates)
            if self.keep and not problem.keeps("cells"):
                for layer, c in enumerate(self.steps.c):
                    result.c[layer, number] = c
            self.steps.run(begin, end, gates)
        self.steps.finish()
        return result


class ForwardSteps:
    """Steps of a forward pass, one after the other.

    Attributes:
        c: per layer (B, H), before the next step.
    """

    def __init__(self, problem: AttentionalProblem, result: Result, keep: bool) -> None:
        self.problem, self.result, self.keep = problem, result, keep
        self.every_cell = keep and problem.keeps("cells")
        self.every_gate = keep and problem.keeps("gates")
        call, hidden, count = problem.call, problem.hidden, len(problem.layers)
        self.attention = problem.attention(problem.projected())
        self.products = [
            problem.product(problem.joint(layer), weights.bias if layer else None)
            for layer, weights in enumerate(problem.layers)
        ]
        # Input rows of the layers' products: [layer input ; h of the previous step].
        self.rows = [problem.inputs.new_empty(problem.batch, 2 * hidden) for _ in range(count)]
        self.c = list(result.last_c.unbind(0))
        self.rows[0][:, :hidden] = call.first_output
        for layer in range(count):
            self.rows[layer][:, hidden:] = call.first_h[layer]
            self.c[layer].copy_(call.first_c[layer])
        self.gates = problem.inputs.new_empty(problem.batch, 4 * hidden)
        self._prepare_combination()

    def _prepare_combination(self) -> None:
        """Prepares the product for query and stack's share of o; without query weights, for that share alone."""
        problem = self.problem
        bias, size = problem.combine_bias, problem.size
        self.both = problem.inputs.new_empty(problem.batch, size + problem.hidden)
        if problem.query is None:
            self.top, self.combined = self.both[:, :size], self.both[:, size:]
        else:
            self.top, self.combined = problem.inputs.new_empty(problem.batch, problem.hidden), self.both
            bias = None if bias is None else torch.cat([bias.new_zeros(size), bias])
        self.combination = problem.product(problem.both(), bias)

    def run(self, begin: int, end: int, gates: Tensor) -> None:
        """Runs steps begin to end; ``gates`` (K, B, 4H): the inputs' share and the bias of the bottom gates."""
        hidden = self.problem.hidden
        for step in steps_of(range(begin, end)):
            for layer in range(len(self.problem.layers)):
                self._cell(layer, step, gates[step - begin] if layer == 0 else None)
            self.combination.into(self.combined, self.top)
            outputs = (self.result.outputs[step], self.rows[0][:, :hidden])
            self.attention.forward(self.both, outputs, self.result.attention[step])

    def finish(self) -> None:
        """Writes the state after the last step."""
        for layer, row in enumerate(self.rows):
            self.result.last_h[layer] = row[:, self.problem.hidden :]
            if self.every_cell:
                self.result.last_c[layer] = self.c[layer]

    def _cell(self, layer: int, step: int, start: Tensor | None) -> None:
        """Runs one step of a layer; ``start`` (B, 4H), the inputs' share of the bottom gates, is overwritten."""
        problem, result, row, hidden = self.problem, self.result, self.rows[layer], self.problem.hidden
        recurrent = None
        if start is None:
            gates = result.gates[layer, step] if self.every_gate else self.gates
            self.products[layer].into(gates, row)
        else:
            gates, recurrent = start, self.products[layer].share(start, row)
        h, read = [row[:, hidden:]], None
        if self.keep:
            h.append(result.h[layer, step])
        above = layer + 1
        is_top = above == len(problem.layers)
        destination = self.top if is_top else self.rows[above][:, :hidden]
        mask = None if is_top else problem.mask(above, step, step + 1)
        residual = row[:, :hidden] if problem.call.residual and layer > 0 else None
        if mask is None and residual is None:
            h.append(destination)
        else:
            kept = None if mask is None else mask[0]
            read = Read((destination,), residual, kept, 1.0 / (1.0 - problem.call.dropout))
        before = self.c[layer]
        if self.every_cell:
            self.c[layer] = result.c[layer, step]
        problem.run.cell_forward(
            gates, before, self.c[layer], h, keep=self.every_gate, recurrent=recurrent, read=read
        )
