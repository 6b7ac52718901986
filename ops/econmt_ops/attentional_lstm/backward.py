"""Backward pass of the recomputing attentional LSTM.

It runs block by block from the end: large matrix products recompute what the steps of a block need, a loop over the
steps propagates the gradients of h, c and o, and large products then give the gradients of the weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from econmt_ops.attentional_lstm.forward import Result
from econmt_ops.attentional_lstm.problem import AttentionalProblem
from econmt_ops.core.chunks import add_outer, previous, rows_of, split_rows
from econmt_ops.core.gemm import add_rows
from econmt_ops.core.lengths import zero_padding
from econmt_ops.core.loops import steps_of
from econmt_ops.core.low_rank import (
    add_gradient,
    add_linear,
    columns,
    gradient_of,
    input_gradient,
    linear_into,
    tensors_of_matrices,
    thin_of,
)
from econmt_ops.core.repeated import add_repeated
from econmt_ops.core.weights import Matrix
from econmt_ops.dispatch.registration import Gradients, Incoming


class Sums:
    """Gradients of inputs and weights, summed over the blocks.

    Products are in the compute type, sums in the accumulate type. The gradient of the inputs is written, not summed;
    with row indices (see `Problem`) ``table`` (N, 4H) sums the gate gradients of the bottom layer per distinct row.
    """

    def __init__(self, problem: AttentionalProblem) -> None:
        accumulate, places = problem.accumulate, problem.places
        inputs = problem.given.inputs
        # For distinct rows, the gradient of the inputs is computed from the table after the loop.
        self.inputs: Tensor | None = None
        self.table: Tensor | None = None
        if places is None:
            self.inputs = torch.empty_like(inputs, memory_format=torch.contiguous_format)
        else:
            self.table = inputs.new_zeros(len(inputs), 4 * problem.hidden, dtype=accumulate)
        self.layers: list[tuple[Matrix, Matrix, Tensor]] = [
            (
                gradient_of(layer.input, accumulate),
                gradient_of(layer.hidden, accumulate),
                torch.zeros_like(layer.bias, dtype=accumulate),
            )
            for layer in problem.layers
        ]
        query, bias = problem.query, problem.combine_bias
        self.query = None if query is None else torch.empty_like(query, dtype=accumulate)
        self.combine = torch.empty_like(problem.combine, dtype=accumulate)
        self.combine_bias = None if bias is None else torch.zeros_like(bias, dtype=accumulate)


class Block:
    """Recomputed tensors of the steps begin to end.

    Attributes:
        inputs: as returned by `Problem.read`. fed: (K, B, H), o of the previous step.
        before: per layer, (K, B, H), h of the previous step. reads: inputs of layers l > 0, (K, B, H).
        gates: per layer, (K, B, 4H), as the backend's cell reads them. dgates: memory for the gradients of the gates'
            sums; recomputed sums are stored there first.
        cells: per layer, K + 1 tensors (B, H), from c before the first step on.
        top: (K, B, H), output of the stack. query: (K, B, A).
    """

    def __init__(self, problem: AttentionalProblem, stash: Result, number: int) -> None:
        self.begin, self.end = begin, end = problem.blocks[number]
        given = problem.given
        self.inputs = problem.read(begin, end)
        self.fed = previous(stash.outputs, given.first_output, begin, end)
        self.before = [
            previous(h, first, begin, end) for h, first in zip(stash.h, given.first_h, strict=True)
        ]
        self.reads, self.top = problem.stack(stash.h, begin, end)
        self.query = problem.queries(self.top)
        self.gates: list[Tensor] = []
        self.dgates: list[Tensor] = []
        self.cells: list[list[Tensor]] = []
        for layer in range(len(problem.layers)):
            self.dgates.append(self.fed.new_empty(*self.fed.shape[:2], 4 * problem.hidden))
            if problem.keeps("gates"):
                self.gates.append(stash.gates[layer, begin:end])
            else:
                self.gates.append(self._gates(problem, layer))
            self.cells.append(self._cells(problem, stash, layer, number))

    def _gates(self, problem: AttentionalProblem, layer: int) -> Tensor:
        weights, gates = problem.layers[layer], self.dgates[layer]
        if layer == 0:
            problem.bottom_gates(self.inputs, gates)
            add_linear(gates, self.fed, problem.from_output)
        else:
            linear_into(gates, self.reads[layer - 1], weights.input, weights.bias)
        return problem.run.prepare_gates(add_linear(gates, self.before[layer], weights.hidden))

    def _cells(self, problem: AttentionalProblem, stash: Result, layer: int, number: int) -> list[Tensor]:
        if not problem.keeps("cells"):
            return list(problem.run.scan_cells(self.gates[layer], stash.c[layer, number]).unbind(0))
        first = stash.c[layer, self.begin - 1] if self.begin else problem.given.first_c[layer]
        return [first, *stash.c[layer, self.begin : self.end].unbind(0)]


class Backward:
    """Backward pass of one call.

    Attributes:
        doutputs: (T, B, H) and dweights: (T, B, S), gradients of the results of the forward pass; or None.
        weights: (T, B, S), attention weights. da: (T, B, H), gradients of the input of the output's tanh. dscores:
            (T, B, S), gradients of the scores.
        rows: per layer, (B, 2H), gradient of the input of its product, [layer input ; h of the previous step].
        dtop: (B, H), gradient of the stack's output.
        dc: per layer, (B, H).
    """

    def __init__(self, problem: AttentionalProblem, stash: Result, incoming: Incoming) -> None:
        self.problem, self.stash = problem, stash
        doutputs, dweights = incoming["outputs"], incoming["attention"]
        self.doutputs = None if doutputs is None else rows_of(doutputs)
        self.dweights = None if dweights is None else rows_of(dweights)
        self.sums = Sums(problem)
        self.projected = problem.projected()
        self.attention = problem.attention(self.projected)
        layers, hidden = len(problem.layers), problem.hidden
        self.rows = [problem.inputs.new_zeros(problem.batch, 2 * hidden) for _ in range(layers)]
        dh, dc = incoming["last_h"], incoming["last_c"]
        if dh is not None:
            for row, part in zip(self.rows, dh, strict=True):
                row[:, hidden:] = part
        self.dc = torch.zeros(
            layers, problem.batch, hidden, dtype=problem.accumulate, device=problem.inputs.device
        )
        if dc is not None:
            self.dc.copy_(dc)
        steps, positions = problem.steps, problem.given.keys.shape[1]
        space = problem.inputs.new_empty
        kept = problem.keeps("attention")
        self.weights = stash.attention if kept else space(steps, problem.batch, positions)
        self.da = space(steps, problem.batch, hidden)
        self.dscores = space(steps, problem.batch, positions, dtype=problem.accumulate)
        self.dtop = torch.empty_like(self.rows[0][:, :hidden])
        # Transposed views: packing a weight for products of this kind takes longer than it saves.
        self.to_rows = [problem.product(problem.joint(layer).t()) for layer in range(layers)]
        self.to_top = problem.product(problem.both().t())

    def run(self) -> Gradients:
        """Runs all blocks, last first; returns the gradients by the names of the operator's arguments."""
        for number in steps_of(range(len(self.problem.blocks))[::-1]):
            self._block(Block(self.problem, self.stash, number))
        sums, hidden = self.sums, self.problem.hidden
        if sums.table is not None:
            self._sum_rows(sums.table.to(self.problem.dtype).unsqueeze(0))
        # This order frees tensors as early as possible.
        dprojected = self.attention.projected_gradient(self.weights, self.da).to(self.problem.dtype)
        del self.to_rows, self.to_top, self.projected, self.da
        values = self._values(dprojected)
        del dprojected
        _, top = self.problem.stack(self.stash.h, 0, self.problem.steps)
        attention_gradients = self.attention.gradients(self.problem.queries(top), self.dscores)
        gain, shift = (None, None) if attention_gradients.norm is None else attention_gradients.norm
        inputs, hiddens, biases = zip(*sums.layers, strict=True)
        return {
            "inputs": sums.inputs,
            "keys": attention_gradients.keys,
            "values": values,
            "input_weights": tensors_of_matrices(inputs),
            "hidden_weights": tensors_of_matrices(hiddens),
            "biases": biases,
            "query": sums.query,
            "score": attention_gradients.score,
            "combine": sums.combine,
            "combine_bias": sums.combine_bias,
            "gain": gain,
            "shift": shift,
            "first_h": [row[:, hidden:] for row in self.rows],
            "first_c": list(self.dc.unbind(0)),
            "first_output": self.rows[0][:, :hidden],
        }

    def _block(self, block: Block) -> None:
        problem, steps = self.problem, slice(block.begin, block.end)
        if not problem.keeps("attention"):
            self.weights[steps] = self.attention.weights_of(block.query)
        contexts = torch.bmm(self.weights[steps].transpose(0, 1), self.projected).transpose(0, 1)
        dboth = self.da.new_empty(block.end - block.begin, problem.batch, problem.size + problem.hidden)
        for step in steps_of(range(len(dboth))[::-1]):
            self._attention(block, step, contexts[step], dboth[step])
            self._layers(block, step)
        self.da[steps] = dboth[..., problem.size :]
        self._sum(block, dboth)

    def _attention(self, block: Block, step: int, context: Tensor, dboth: Tensor) -> None:
        """Propagates the gradient of o to ``dtop``; writes ``dboth`` (B, A + H)."""
        position, size = block.begin + step, self.problem.size
        doutputs = [self.rows[0][:, : self.problem.hidden]]
        if self.doutputs is not None:
            doutputs.append(self.doutputs[position])
        self.attention.backward(
            block.query[step],
            context,
            self.weights[position],
            self.stash.outputs[position],
            doutputs,
            None if self.dweights is None else self.dweights[position],
            dboth,
            self.dscores[position],
        )
        if self.problem.query is None:
            self.to_top.into(self.dtop, dboth[:, size:], dboth[:, :size])
        else:
            self.to_top.into(self.dtop, dboth)

    def _layers(self, block: Block, step: int) -> None:
        """Propagates a step through the stack, top layer first: gradients of the gates and of the previous step."""
        problem, position, hidden = self.problem, block.begin + step, self.problem.hidden
        scale = 1.0 / (1.0 - problem.given.dropout)
        # Gradient of the layer's output, or, with a mask in ``keep``, of the output after dropout.
        above, keep = self.dtop, None
        for layer in reversed(range(len(problem.layers))):
            row, dgates = self.rows[layer], block.dgates[layer][step]
            problem.run.cell_backward(
                block.gates[layer][step],
                block.cells[layer][step],
                block.cells[layer][step + 1],
                (above, row[:, hidden:]),
                self.dc[layer],
                dgates,
                keep=keep,
                scale=scale,
            )
            self.to_rows[layer].into(row, dgates)
            if layer > 0 and problem.given.residual:
                dread = (row[:, :hidden] + above).unsqueeze(0)
                above = problem.drop(layer, dread, position, position + 1).squeeze(0)
            elif layer > 0:
                mask = problem.mask(layer, position, position + 1)
                above, keep = row[:, :hidden], None if mask is None else mask[0]

    def _sum(self, block: Block, dboth: Tensor) -> None:
        """Adds a block's gradients that no later step depends on; dboth is (K, B, A + H)."""
        problem, sums = self.problem, self.sums
        queries, shares = dboth[..., : problem.size], dboth[..., problem.size :]
        fresh = block.end == problem.steps
        add_outer(sums.combine[:, : problem.hidden], shares, block.top, fresh)
        if sums.combine_bias is not None:
            sums.combine_bias += add_rows(shares)
        if sums.query is not None:
            add_outer(sums.query, queries, block.top, fresh)
        for layer, (dgates, (dinput, dhidden, dbias)) in enumerate(
            zip(block.dgates, sums.layers, strict=True)
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
            dinputs = input_gradient(problem.from_input, dgates, thin)
            assert sums.inputs is not None
            sums.inputs[:, block.begin : block.end] = dinputs.transpose(0, 1)
            add_gradient(columns(dinput, 0, width), problem.from_input, dgates, block.inputs, thin, fresh)

    def _sum_rows(self, table: Tensor) -> None:
        """Computes the gradients of the distinct rows from the gate gradients summed per row, table (1, N, 4H)."""
        problem, sums = self.problem, self.sums
        thin = thin_of(problem.from_input, table)
        sums.inputs = input_gradient(problem.from_input, table, thin).squeeze(0)
        part = columns(sums.layers[0][0], 0, problem.width)
        add_gradient(part, problem.from_input, table, problem.inputs.unsqueeze(0), thin, fresh=True)

    def _values(self, projected: Tensor) -> Tensor:
        """Returns the gradient of the values (B, S, E) and adds that of their combination weights, given d(V Wcv^T)."""
        problem, values = self.problem, self.problem.given.values
        positions, width = values.shape[1:]
        total = self.sums.combine[:, problem.hidden :]
        # In parts: replacing padding, which may hold NaN, by zeros copies the values.
        for rows in split_rows(len(values), positions, width * values.itemsize):
            padding = None if problem.padding is None else problem.padding[rows]
            add_outer(total, projected[rows], zero_padding(values[rows], padding), fresh=rows.start == 0)
        return projected @ problem.from_values
