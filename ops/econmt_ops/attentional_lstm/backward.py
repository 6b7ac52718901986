"""The backward pass of the recomputing attentional LSTM.

Block by block from the end: what the block's steps need is made again by large products, the loop runs over its
steps with only the gradients of h, c and o in sequence, and the gradients of the weights follow by large products.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from econmt_ops.attentional_lstm.problem import Problem
from econmt_ops.blocks import add_outer, add_product, previous, reaches, scan_cells
from econmt_ops.scores import ScoreGradients
from econmt_ops.steps import activate


class Stash(NamedTuple):
    """What the forward pass kept; see ``forward.Result``. ``attention`` may be None: it is made again."""

    outputs: Tensor
    attention: Tensor | None
    h: Tensor
    c: Tensor
    gates: Tensor
    first_h: list[Tensor]
    first_c: list[Tensor]
    first_output: Tensor


class Incoming(NamedTuple):
    """Gradients of what the forward pass returned, None where nothing depends on it.

    Attributes:
        outputs: (T, B, H). attention: (T, B, S). last_h, last_c: (L, B, H). last_output: (B, H).
    """

    outputs: Tensor | None
    attention: Tensor | None
    last_h: Tensor | None
    last_c: Tensor | None


class Gradients:
    """The gradients, accumulated over the blocks; products in the compute type, sums in the accumulate type."""

    def __init__(self, problem: Problem) -> None:
        def zeros(like: Tensor) -> Tensor:
            return torch.zeros(like.shape, dtype=problem.accumulate, device=like.device)

        self.inputs = torch.empty_like(problem.inputs, memory_format=torch.contiguous_format)
        self.scores = ScoreGradients(problem.scores)
        self.projected = zeros(problem.projected)
        self.input_weight = zeros(problem.input_weight)
        self.recurrent = zeros(problem.recurrent)
        self.upper = [zeros(torch.cat([layer.input, layer.hidden], 1)) for layer in problem.layers[1:]]
        self.biases = [zeros(layer.bias) for layer in problem.layers]
        self.after = zeros(problem.after)
        self.combine_bias = zeros(problem.from_top[:, 0])


class Block:
    """What the steps begin to end need, made again.

    Attributes:
        before: o and bottom h of the step before, joined (K, B, 2H).
        reads: what layer l > 0 reads joined with its own h of the step before (K, B, 2H).
        gates: (K, B, 4H) a layer, after their nonlinearities. cells: (K + 1, B, H) a layer, from the step before on.
        top: (K, B, H) the output of the stack. query: (K, B, A).
    """

    def __init__(self, problem: Problem, stash: Stash, number: int) -> None:
        self.begin, self.end = problem.blocks[number]
        self.every_cell = reaches(problem.options.stash, "cells")
        begin, end = self.begin, self.end
        self.before = torch.cat(
            [
                previous(stash.outputs, stash.first_output, begin, end),
                previous(stash.h[0], stash.first_h[0], begin, end),
            ],
            2,
        )
        self.reads: list[Tensor] = []
        self.gates: list[Tensor] = []
        self.cells: list[Tensor] = []
        top = stash.h[0, begin:end]
        for layer, weights in enumerate(problem.layers):
            if layer > 0:
                read = problem.drop(layer, top, begin, end)
                own = previous(stash.h[layer], stash.first_h[layer], begin, end)
                self.reads.append(torch.cat([read, own], 2))
                top = stash.h[layer, begin:end]
                if problem.options.residual:
                    top = top + read
            if stash.gates.shape[1]:
                gates = stash.gates[layer, begin:end]
            elif layer == 0:
                gates = functional.linear(
                    problem.inputs[begin:end].contiguous(), problem.input_weight, weights.bias
                )
                gates = activate(add_product(gates, self.before, problem.recurrent), problem.accumulate)
            else:
                joined = torch.cat([weights.input, weights.hidden], 1)
                gates = activate(functional.linear(self.reads[-1], joined, weights.bias), problem.accumulate)
            self.gates.append(gates)
            self.cells.append(self._cells(stash, layer, number, gates))
        self.top = top
        self.query, _ = problem.split_after(functional.linear(top, problem.after), top)

    def _cells(self, stash: Stash, layer: int, number: int, gates: Tensor) -> Tensor:
        if self.every_cell:
            before = previous(stash.c[layer], stash.first_c[layer], self.begin, self.begin + 1)
            return torch.cat([before, stash.c[layer, self.begin : self.end]], 0)
        return scan_cells(gates, stash.c[layer, number])


class Backward:
    """The backward pass of one call."""

    def __init__(self, problem: Problem, stash: Stash, incoming: Incoming) -> None:
        self.problem = problem
        self.stash = stash
        self.incoming = incoming
        self.sums = Gradients(problem)
        layers = len(problem.layers)
        zero = problem.inputs.new_zeros(problem.batch, problem.hidden)
        last_h, last_c = incoming.last_h, incoming.last_c
        self.dh = [zero if last_h is None else last_h[layer] for layer in range(layers)]
        self.dc = [
            zero.to(problem.accumulate) if last_c is None else last_c[layer].to(problem.accumulate)
            for layer in range(layers)
        ]
        self.dfed = zero
        self.upper = [torch.cat([w.input, w.hidden], 1) for w in problem.layers[1:]]

    def run(self) -> Gradients:
        """All blocks, from the last to the first."""
        for number in reversed(range(len(self.problem.blocks))):
            self._block(Block(self.problem, self.stash, number))
        return self.sums

    def _block(self, block: Block) -> None:
        problem, sums = self.problem, self.sums
        steps = block.end - block.begin
        shape = (steps, problem.batch)
        like = problem.inputs
        dz = [like.new_empty(*shape, 4 * problem.hidden) for _ in problem.layers]
        dafter = like.new_empty(*shape, problem.after.shape[0])
        attention = like.new_empty(*shape, problem.values.shape[1])
        for step in reversed(range(steps)):
            dtop = self._attention(block, step, dafter[step], attention[step])
            self._layers(block, step, dtop, dz)
        left = dafter[..., -problem.hidden :]
        sums.projected.baddbmm_(
            attention.permute(1, 2, 0).to(problem.accumulate), left.transpose(0, 1).to(problem.accumulate)
        )
        add_outer(sums.after, dafter, block.top)
        sums.combine_bias += left.sum((0, 1), dtype=problem.accumulate)
        for layer, gradient in enumerate(dz):
            sums.biases[layer] += gradient.sum((0, 1), dtype=problem.accumulate)
            if layer > 0:
                add_outer(sums.upper[layer - 1], gradient, block.reads[layer - 1])
        add_outer(sums.recurrent, dz[0], block.before)
        add_outer(sums.input_weight, dz[0], problem.inputs[block.begin : block.end])
        sums.inputs[block.begin : block.end] = dz[0] @ problem.input_weight

    def _attention(self, block: Block, step: int, dafter: Tensor, attention: Tensor) -> Tensor:
        """From the gradient of o to that of the stack's output (B, H).

        Writes the gradients of the query and of the top layer's share of o to ``dafter`` (B, A + H), and the
        attention weights to ``attention`` (B, S).
        """
        problem, position = self.problem, block.begin + step
        query, kept = block.query[step], self.stash.attention
        weights = problem.scores.weights(query) if kept is None else kept[position].to(problem.accumulate)
        attention.copy_(weights)
        output, do = self.stash.outputs[position], self.dfed
        if self.incoming.outputs is not None:
            do = do + self.incoming.outputs[position]
        da = do * (1 - output * output)
        dweights = torch.bmm(problem.projected, da.unsqueeze(2)).squeeze(2).to(problem.accumulate)
        if self.incoming.attention is not None:
            dweights = dweights + self.incoming.attention[position]
        dquery = self.sums.scores.step(query, weights, dweights)
        dafter[:, -problem.hidden :] = da
        if problem.query is None:
            return torch.mm(da, problem.after) + dquery
        dafter[:, : -problem.hidden] = dquery
        return torch.mm(dafter, problem.after)

    def _layers(self, block: Block, step: int, dtop: Tensor, dz: list[Tensor]) -> None:
        """Through the stack, top layer first: writes the gates' gradients and those of the step before."""
        problem = self.problem
        position = block.begin + step
        for layer in reversed(range(len(problem.layers))):
            dgates, self.dc[layer] = problem.run.cell_backward(
                block.gates[layer][step],
                block.cells[layer][step],
                block.cells[layer][step + 1],
                (self.dh[layer] + dtop).to(problem.accumulate),
                self.dc[layer],
            )
            dz[layer][step] = dgates
            if layer == 0:
                joined = torch.mm(dz[0][step], problem.recurrent)
                self.dfed, self.dh[0] = joined[:, : problem.hidden], joined[:, problem.hidden :]
            else:
                joined = torch.mm(dz[layer][step], self.upper[layer - 1])
                dread, self.dh[layer] = joined[:, : problem.hidden], joined[:, problem.hidden :]
                if problem.options.residual:
                    dread = dread + dtop
                dtop = problem.drop(layer, dread.unsqueeze(0), position, position + 1).squeeze(0)
