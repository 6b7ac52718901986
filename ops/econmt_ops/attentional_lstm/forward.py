"""Forward pass of the recomputing attentional LSTM.

In each step a layer computes one product, of its row [layer input ; h of the previous step] (B, 2H), and one cell
kernel, which writes h and the input of the next layer into the rows of the next products. One more product gives the
query and the stack's share of o, and one attention kernel computes o.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from econmt_ops.attentional_lstm.problem import AttentionalArguments, AttentionalProblem
from econmt_ops.backends.protocol import Read
from econmt_ops.core.chunks import reaches
from econmt_ops.core.loops import steps_of
from econmt_ops.core.precision import accumulate_dtype


class Result(NamedTuple):
    """Results of the forward pass; stashed tensors that the stash level omits have no elements.

    Attributes:
        outputs: (T, B, H), o. attention: (T, B, S).
        h: (L, T, B, H), stash. c: (L, T, B, H), stash, or (L, number of blocks, B, H): c before each block.
        gates: (L, T, B, 4H), stash, as the backend keeps them.
        last_h, last_c: (L, B, H), after the last step.
    """

    outputs: Tensor
    attention: Tensor
    h: Tensor
    c: Tensor
    gates: Tensor
    last_h: Tensor
    last_c: Tensor


def empty_result(given: AttentionalArguments, keep: bool) -> Result:
    """Allocates the tensors of the result.

    Args:
        given: arguments of the operator.
        keep: True if a backward pass will follow.
    """
    inputs, layers = given.inputs, len(given.biases)
    batch, steps = (inputs if given.places is None else given.places).shape[:2]
    hidden = len(given.biases[0]) // 4
    accumulate = accumulate_dtype(inputs.dtype)
    cells = (steps if reaches(given.stash, "cells") else len(given.blocks())) if keep else 0
    gates = steps if keep and reaches(given.stash, "gates") else 0
    return Result(
        inputs.new_empty(steps, batch, hidden),
        inputs.new_empty(steps, batch, given.keys.shape[1]),
        inputs.new_empty(layers, steps if keep else 0, batch, hidden),
        inputs.new_empty(layers, cells, batch, hidden, dtype=accumulate),
        inputs.new_empty(layers, gates, batch, 4 * hidden),
        inputs.new_empty(layers, batch, hidden),
        inputs.new_empty(layers, batch, hidden, dtype=accumulate),
    )


class Forward:
    """Forward pass of one call.

    Args:
        problem: tensors of the call.
        keep: True if a backward pass will follow.
    """

    def __init__(self, problem: AttentionalProblem, keep: bool) -> None:
        self.problem, self.keep = problem, keep
        self.every_cell = keep and problem.keeps("cells")
        self.every_gate = keep and problem.keeps("gates")
        given, hidden, count = problem.given, problem.hidden, len(problem.layers)
        self.result = empty_result(given, keep)
        self.attention = problem.attention(problem.projected())
        self.products = [
            problem.product(problem.joint(layer), weights.bias if layer else None)
            for layer, weights in enumerate(problem.layers)
        ]
        # Input rows of the layers' products: [layer input ; h of the previous step].
        self.rows = [problem.inputs.new_empty(problem.batch, 2 * hidden) for _ in range(count)]
        self.c = list(self.result.last_c.unbind(0))
        self.rows[0][:, :hidden] = given.first_output
        for layer in range(count):
            self.rows[layer][:, hidden:] = given.first_h[layer]
            self.c[layer].copy_(given.first_c[layer])
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

    def run(self) -> Result:
        """Runs all steps."""
        problem, result, hidden = self.problem, self.result, self.problem.hidden
        longest = max(end - begin for begin, end in problem.blocks)
        workspace = None if self.every_gate else self.gates.new_empty(longest, *self.gates.shape)
        for number in steps_of(range(len(problem.blocks))):
            begin, end = problem.blocks[number]
            gates = result.gates[0, begin:end] if workspace is None else workspace[: end - begin]
            problem.bottom_gates(problem.read(begin, end), gates)
            if self.keep and not self.every_cell:
                for layer, c in enumerate(self.c):
                    result.c[layer, number] = c
            for step in steps_of(range(begin, end)):
                for layer in range(len(problem.layers)):
                    self._cell(layer, step, gates[step - begin] if layer == 0 else None)
                self.combination.into(self.combined, self.top)
                outputs = (result.outputs[step], self.rows[0][:, :hidden])
                self.attention.forward(self.both, outputs, result.attention[step])
        for layer, row in enumerate(self.rows):
            result.last_h[layer] = row[:, hidden:]
            if self.every_cell:
                result.last_c[layer] = self.c[layer]
        return result

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
        residual = row[:, :hidden] if problem.given.residual and layer > 0 else None
        if mask is None and residual is None:
            h.append(destination)
        else:
            kept = None if mask is None else mask[0]
            read = Read((destination,), residual, kept, 1.0 / (1.0 - problem.given.dropout))
        before = self.c[layer]
        if self.every_cell:
            self.c[layer] = result.c[layer, step]
        problem.run.cell_forward(
            gates, before, self.c[layer], h, keep=self.every_gate, recurrent=recurrent, read=read
        )
