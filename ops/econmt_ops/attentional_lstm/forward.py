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


def forward(problem: AttentionalProblem, keep: bool) -> Result:
    """Runs all steps of a call; ``keep``: a backward pass will follow."""
    result = empty_result(problem.call, keep)
    sizes = persistent.sizes_of(problem)
    steps: ForwardSteps | persistent.ForwardBlocks
    if sizes is None:
        steps = ForwardSteps(problem, result, keep)
    else:
        steps = persistent.ForwardBlocks(problem, sizes, result)
    workspace = None
    if not (keep and problem.keeps("gates")):
        longest = max(end - begin for begin, end in problem.blocks)
        workspace = problem.inputs.new_empty(longest, problem.batch, 4 * problem.hidden)
    for number in steps_of(range(len(problem.blocks))):
        begin, end = problem.blocks[number]
        gates = result.gates[0, begin:end] if workspace is None else workspace[: end - begin]
        problem.bottom_gates(problem.read(begin, end), gates)
        if keep and not problem.keeps("cells"):
            for layer, c in enumerate(steps.c):
                result.c[layer, number] = c
        steps.run(begin, end, gates)
    steps.finish()
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
        call, hidden, space = problem.call, problem.hidden, problem.inputs.new_empty
        self.attention = problem.attention(problem.projected())
        self.products = [
            problem.product(problem.joint(layer), weights.bias if layer else None)
            for layer, weights in enumerate(problem.layers)
        ]
        # Input rows of the layers' products: [layer input ; h of the previous step].
        self.rows = [space(problem.batch, 2 * hidden) for _ in problem.layers]
        self.c = list(result.last_c.unbind(0))
        self.rows[0][:, :hidden] = call.first_output
        for row, c, first_h, first_c in zip(self.rows, self.c, call.first_h, call.first_c, strict=True):
            row[:, hidden:] = first_h
            c.copy_(first_c)
        self.gates = space(problem.batch, 4 * hidden)
        # One product gives query and stack's share of o; without query weights, that share alone.
        bias, size = problem.combine_bias, problem.size
        self.both = space(problem.batch, size + hidden)
        if problem.query is None:
            self.top, self.combined = self.both[:, :size], self.both[:, size:]
        else:
            self.top, self.combined = space(problem.batch, hidden), self.both
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
            read = Read((destination,), residual, None if mask is None else mask[0], problem.scale)
        before = self.c[layer]
        if self.every_cell:
            self.c[layer] = result.c[layer, step]
        problem.run.cell_forward(
            gates, before, self.c[layer], h, keep=self.every_gate, recurrent=recurrent, read=read
        )
