"""The backward pass of the recomputing attentional LSTM.

Block by block from the end: what the block's steps need is made again by large products, the loop runs over its
steps with only the gradients of h, c and o in sequence, and the gradients of the weights follow by large products.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from econmt_ops.additive_attention.scores import ScoreGradients
from econmt_ops.attentional_lstm.problem import Problem
from econmt_ops.backends import c as native
from econmt_ops.backends.steps import EAGER, Workspace, activate, activate_
from econmt_ops.core.chunks import add_outer, previous, reaches, scan_cells, split_rows
from econmt_ops.core.gemm import add_rows
from econmt_ops.core.low_rank import (
    add_gradient,
    add_linear,
    columns,
    gradient_of,
    input_gradient,
    linear,
    thin_of,
)
from econmt_ops.core.repeated import add_repeated
from econmt_ops.core.weights import Matrix


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
        outputs: (T, B, H). attention: (T, B, S). last_h, last_c: (L, B, H).
    """

    outputs: Tensor | None
    attention: Tensor | None
    last_h: Tensor | None
    last_c: Tensor | None


class LayerGradients(NamedTuple):
    """The gradients of one LSTM layer's weights, in the accumulate type."""

    input: Matrix
    hidden: Matrix
    bias: Tensor


class Gradients:
    """The gradients, summed over the blocks where they are returned.

    Products are in the compute type, sums in the accumulate type; the gradient of the inputs is no sum, but with
    places (see `Problem`) those of the bottom layer's gates are summed for each distinct row in ``table`` (N, 4H).
    """

    def __init__(self, problem: Problem) -> None:
        def zeros(like: Tensor) -> Tensor:
            return torch.zeros(like.shape, dtype=problem.accumulate, device=like.device)

        def empty(like: Tensor) -> Tensor:
            return torch.empty(like.shape, dtype=problem.accumulate, device=like.device)

        inputs = problem.inputs if problem.places is not None else problem.inputs.transpose(0, 1)
        self.inputs = torch.empty_like(inputs, memory_format=torch.contiguous_format)
        self.table = None
        if problem.places is not None:
            self.table = inputs.new_zeros(len(inputs), 4 * problem.hidden, dtype=problem.accumulate)
        self.scores = ScoreGradients(problem.scores)
        self.values = zeros(problem.values)
        self.layers = [
            LayerGradients(
                gradient_of(layer.input, problem.accumulate),
                gradient_of(layer.hidden, problem.accumulate),
                zeros(layer.bias),
            )
            for layer in problem.layers
        ]
        self.query = None if problem.query is None else empty(problem.query)
        self.combine = empty(problem.combine)
        self.combine_bias = None if problem.combine_bias is None else zeros(problem.combine_bias)


class Block:
    """What the steps begin to end need, made again.

    Attributes:
        inputs: as `Problem.read` gives them. fed: (K, B, H) o of the step before.
        before: (K, B, H) h of the step before, a layer. reads: what layer l > 0 reads, (K, B, H).
        gates: (K, B, 4H) a layer, after their nonlinearities; or, with ``sums``, before them.
        cells: (K + 1, B, H) a layer, from the step before on.
        top: (K, B, H) the output of the stack. query: (K, B, A).
    """

    def __init__(self, problem: Problem, stash: Stash, number: int) -> None:
        self.begin, self.end = begin, end = problem.blocks[number]
        self.every_cell = reaches(problem.options.stash, "cells")
        self.sums = stash.gates.shape[1] > 0 and not problem.keeps_activated
        self.inputs = problem.read(begin, end)
        self.fed = previous(stash.outputs, stash.first_output, begin, end)
        self.before = [
            previous(h, first, begin, end) for h, first in zip(stash.h, stash.first_h, strict=True)
        ]
        self.reads: list[Tensor] = []
        self.gates: list[Tensor] = []
        self.cells: list[Tensor] = []
        top = stash.h[0, begin:end]
        for layer, weights in enumerate(problem.layers):
            if layer > 0:
                self.reads.append(problem.drop(layer, top, begin, end))
                top = stash.h[layer, begin:end]
                if problem.options.residual:
                    top = top + self.reads[-1]
            if stash.gates.shape[1]:
                gates = stash.gates[layer, begin:end]
            else:
                if layer == 0:
                    gates = add_linear(problem.bottom_gates(self.inputs), self.fed, problem.from_output)
                else:
                    gates = linear(self.reads[-1], weights.input, weights.bias)
                add_linear(gates, self.before[layer], weights.hidden)
                gates = activate_(gates.to(problem.accumulate))
            self.gates.append(gates)
            self.cells.append(self._cells(stash, layer, number, gates))
        self.top = top
        self.query = top if problem.query is None else functional.linear(top, problem.query)

    def _cells(self, stash: Stash, layer: int, number: int, gates: Tensor) -> Tensor:
        if not self.every_cell:
            return scan_cells(gates, stash.c[layer, number])
        if self.begin > 0:
            return stash.c[layer, self.begin - 1 : self.end]
        return torch.cat([stash.first_c[layer].unsqueeze(0), stash.c[layer, : self.end]])


class _Deferred(NamedTuple):
    """What the loop over a block's steps leaves to the products after it.

    Attributes:
        gates: gradients of the gates before their nonlinearities (K, B, 4H) a layer.
        query: (K, B, A). shares: of what tanh reads to give o (K, B, H).
        read: of what the combination reads, [top ; context], (K, B, H + E). attention: the weights (K, B, S).
    """

    gates: list[Tensor]
    query: Tensor
    shares: Tensor
    read: Tensor
    attention: Tensor


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
            torch.zeros_like(zero, dtype=problem.accumulate)
            if last_c is None
            else last_c[layer].to(problem.accumulate)
            for layer in range(layers)
        ]
        self.dfed = zero
        self.room = Workspace(self.dc[0])
        self.values = problem.values
        batch, positions, width = self.values.shape
        # What fits a workspace is cast once and not multiplied in 16 bits, which takes a CPU five times as long.
        self.by_native = native.serves(self.values)
        if not self.by_native and len(split_rows(batch, positions, width * problem.accumulate.itemsize)) == 1:
            self.values = self.values.to(problem.accumulate)
        # Transposed views: making a weight ready for products of this kind takes longer than it saves.
        self.to_before = [problem.product(problem.joint(layer).t()) for layer in range(layers)]
        self.to_read = problem.product(problem.combine.t())
        self.to_top = None if problem.query is None else problem.product(problem.query.t())

    def run(self) -> Gradients:
        """All blocks, from the last to the first."""
        for number in reversed(range(len(self.problem.blocks))):
            self._block(Block(self.problem, self.stash, number))
        if self.sums.table is not None:
            self._sum_rows(self.sums.table.to(self.problem.dtype).unsqueeze(0))
        return self.sums

    def _block(self, block: Block) -> None:
        problem = self.problem
        steps = block.end - block.begin
        # The gradients of gates that were made again take their place, if they have the type.
        in_place = problem.dtype == problem.accumulate and not self.stash.gates.shape[1]

        def room(*size: int) -> Tensor:
            return problem.inputs.new_empty(steps, problem.batch, *size)

        deferred = _Deferred(
            block.gates if in_place else [room(4 * problem.hidden) for _ in problem.layers],
            room(block.query.shape[2]),
            room(problem.hidden),
            room(problem.combine.shape[1]),
            room(problem.values.shape[1]),
        )
        for step in reversed(range(steps)):
            self._layers(block, step, self._attention(block, step, deferred), deferred)
        self._sum(block, deferred)

    def _attention(self, block: Block, step: int, deferred: _Deferred) -> Tensor:
        """From the gradient of o to that of the stack's output (B, H)."""
        problem, position = self.problem, block.begin + step
        query, kept = block.query[step], self.stash.attention
        weights = problem.scores.weights(query) if kept is None else kept[position].to(problem.accumulate)
        deferred.attention[step] = weights
        output = self.stash.outputs[position]
        do = self.dfed if self.incoming.outputs is None else self.dfed + self.incoming.outputs[position]
        share, read = deferred.shares[step], deferred.read[step]
        torch.addcmul(do, do * output, output, value=-1, out=share)
        read.copy_(self.to_read(share))
        given = None if self.incoming.attention is None else self.incoming.attention[position]
        dweights = self._weight_gradient(read[:, problem.hidden :], given)
        dquery = self.sums.scores.step(query, weights, dweights)
        deferred.query[step] = dquery
        dtop = read[:, : problem.hidden]
        through_query = deferred.query[step] if self.to_top is None else self.to_top(deferred.query[step])
        return dtop + through_query

    def _weight_gradient(self, dcontext: Tensor, given: Tensor | None) -> Tensor:
        """The gradient of the attention weights (B, S), in the accumulate type.

        Args:
            dcontext: (B, E), the gradient of the context. given: (B, S), another one of the weights, or None.
        """
        problem = self.problem
        if self.by_native:
            return native.weight_gradient(self.values, dcontext, given, problem.padding)
        if self.values.dtype == problem.accumulate:
            # A product of rows: as one of columns it takes a CPU five times as long.
            row = dcontext.to(self.values.dtype).unsqueeze(1)
            dweights = torch.bmm(row, self.values.transpose(1, 2)).squeeze(1)
        else:
            dweights = torch.bmm(self.values, dcontext.unsqueeze(2)).squeeze(2).to(problem.accumulate)
        if given is not None:
            dweights += given
        return dweights if problem.padding is None else dweights.masked_fill_(problem.padding, 0.0)

    def _layers(self, block: Block, step: int, dtop: Tensor, deferred: _Deferred) -> None:
        """Through the stack, top layer first: the gates' gradients and those of the step before."""
        problem = self.problem
        position = block.begin + step
        for layer in reversed(range(len(problem.layers))):
            dgates = deferred.gates[layer][step]
            gates, cells = block.gates[layer][step], block.cells[layer]
            states = cells[step], cells[step + 1]
            if problem.run is EAGER and native.serves(dgates):
                dc = native.lstm_backward(
                    gates, block.sums, *states, dtop, self.dh[layer], self.dc[layer], dgates
                )
            elif problem.run is EAGER:
                if block.sums:
                    self.room.gates.copy_(gates)
                    self.room.activate()
                given = None if block.sums else gates
                dc = self.room.retreat(*states, dtop, self.dh[layer], self.dc[layer], dgates, given)
            else:
                gates = activate(gates, problem.accumulate) if block.sums else gates
                dh = (self.dh[layer] + dtop).to(problem.accumulate)
                made, dc = problem.run.cell_backward(gates, *states, dh, self.dc[layer])
                dgates.copy_(made)
            self.dc[layer] = dc
            dread, self.dh[layer] = self.to_before[layer](dgates).chunk(2, 1)
            if layer == 0:
                self.dfed = dread
            else:
                if problem.options.residual:
                    dread = dread + dtop
                dtop = problem.drop(layer, dread.unsqueeze(0), position, position + 1).squeeze(0)

    def _sum(self, block: Block, deferred: _Deferred) -> None:
        """Add the block's share of the gradients that nothing waits for."""
        problem, sums = self.problem, self.sums
        shares, hidden = deferred.shares, problem.hidden
        fresh = block.end == problem.steps
        sums.values.baddbmm_(
            deferred.attention.permute(1, 2, 0).to(problem.accumulate),
            deferred.read[..., hidden:].transpose(0, 1).to(problem.accumulate),
        )
        add_outer(sums.combine[:, :hidden], shares, block.top, fresh)
        add_outer(sums.combine[:, hidden:], shares, problem.contexts(deferred.attention), fresh)
        if sums.combine_bias is not None:
            sums.combine_bias += add_rows(shares)
        if sums.query is not None:
            add_outer(sums.query, deferred.query, block.top, fresh)
        for layer, (dgates, (dinput, dhidden, dbias)) in enumerate(
            zip(deferred.gates, sums.layers, strict=True)
        ):
            weights, width = problem.layers[layer], problem.width
            dbias += add_rows(dgates)
            add_gradient(dhidden, weights.hidden, dgates, block.before[layer], fresh=fresh)
            thin = thin_of(weights.input, dgates)
            if layer > 0:
                add_gradient(dinput, weights.input, dgates, block.reads[layer - 1], thin, fresh)
                continue
            fed = columns(dinput, width, dinput.shape[1])
            add_gradient(fed, problem.from_output, dgates, block.fed, thin, fresh)
            if sums.table is not None:
                add_repeated(sums.table, block.inputs, dgates)
                continue
            given = input_gradient(problem.from_input, dgates, thin)
            sums.inputs[:, block.begin : block.end] = given.transpose(0, 1)
            add_gradient(columns(dinput, 0, width), problem.from_input, dgates, block.inputs, thin, fresh)

    def _sum_rows(self, table: Tensor) -> None:
        """The gradients that distinct rows leave, from those of their shares in the gates: table (1, N, 4H)."""
        problem, sums = self.problem, self.sums
        thin = thin_of(problem.from_input, table)
        sums.inputs.copy_(input_gradient(problem.from_input, table, thin).squeeze(0))
        part = columns(sums.layers[0].input, 0, problem.width)
        add_gradient(part, problem.from_input, table, problem.inputs.unsqueeze(0), thin, fresh=True)
