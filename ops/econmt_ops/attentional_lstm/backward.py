"""The backward pass of the recomputing attentional LSTM.

Block by block from the end: what the block's steps need is made again by large products, the loop runs over its
steps with only the gradients of h, c and o in sequence, and the gradients of the weights follow by large products.
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
    """The gradients of inputs and weights, summed over the blocks where they are returned.

    Products are in the compute type, sums in the accumulate type; the gradient of the inputs is no sum, but with
    places (see `Problem`) those of the bottom layer's gates are summed for each distinct row in ``table`` (N, 4H).
    """

    def __init__(self, problem: AttentionalProblem) -> None:
        accumulate, places = problem.accumulate, problem.places
        inputs = problem.given.inputs
        # Of distinct rows after the loop, from the table.
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
    """What the steps begin to end need, made again.

    Attributes:
        inputs: as `Problem.read` gives them. fed: (K, B, H) o of the step before.
        before: (K, B, H) h of the step before, a layer. reads: what layer l > 0 reads, (K, B, H).
        gates: (K, B, 4H) a layer, as the backend's cell reads them. dgates: memory for the gradients of their sums: if
            the gates were made again, where their sums were.
        cells: K + 1 of (B, H) a layer, from the step before on.
        top: (K, B, H) the output of the stack. query: (K, B, A).
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
    """The backward pass of one call.

    Attributes:
        doutputs: (T, B, H) and dweights: (T, B, S), gradients of what the forward pass returned; or None.
        weights: (T, B, S), of the attention. da: (T, B, H), the gradient of what tanh reads to give o, and dscores:
            (T, B, S), that of the scores, of all steps.
        rows: (B, 2H) a layer, the gradient of what its product has read, [what it reads ; h of the step before].
        dtop: (B, H), of the stack's output.
        dc: (B, H) a layer.
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
        # Transposed views: making a weight ready for products of this kind takes longer than it saves.
        self.to_rows = [problem.product(problem.joint(layer).t()) for layer in range(layers)]
        self.to_top = problem.product(problem.both().t())

    def run(self) -> Gradients:
        """All blocks, from the last to the first; the gradients by the names of the operator's arguments."""
        for number in steps_of(range(len(self.problem.blocks))[::-1]):
            self._block(Block(self.problem, self.stash, number))
        sums, hidden = self.sums, self.problem.hidden
        if sums.table is not None:
            self._sum_rows(sums.table.to(self.problem.dtype).unsqueeze(0))
        # In this order, what is done with is freed first.
        dprojected = self.attention.projected_gradient(self.weights, self.da).to(self.problem.dtype)
        del self.to_rows, self.to_top, self.projected, self.da
        values = self._values(dprojected)
        del dprojected
        _, top = self.problem.stack(self.stash.h, 0, self.problem.steps)
        found = self.attention.gradients(self.problem.queries(top), self.dscores)
        gain, shift = (None, None) if found.norm is None else found.norm
        inputs, hiddens, biases = zip(*sums.layers, strict=True)
        return {
            "inputs": sums.inputs,
            "keys": found.keys,
            "values": values,
            "input_weights": tensors_of_matrices(inputs),
            "hidden_weights": tensors_of_matrices(hiddens),
            "biases": biases,
            "query": sums.query,
            "score": found.score,
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
        """From the gradient of o to ``dtop``; ``dboth`` (B, A + H) is written."""
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
        """Through the stack, top layer first: the gates' gradients and those of the step before."""
        problem, position, hidden = self.problem, block.begin + step, self.problem.hidden
        scale = 1.0 / (1.0 - problem.given.dropout)
        # Of the layer's output, or with ``keep`` of what dropout left of it.
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
        """Adds the block's share of the gradients that nothing waits for; dboth (K, B, A + H)."""
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
            given = input_gradient(problem.from_input, dgates, thin)
            assert sums.inputs is not None
            sums.inputs[:, block.begin : block.end] = given.transpose(0, 1)
            add_gradient(columns(dinput, 0, width), problem.from_input, dgates, block.inputs, thin, fresh)

    def _sum_rows(self, table: Tensor) -> None:
        """The gradients that distinct rows leave, from those of their shares in the gates: table (1, N, 4H)."""
        problem, sums = self.problem, self.sums
        thin = thin_of(problem.from_input, table)
        sums.inputs = input_gradient(problem.from_input, table, thin).squeeze(0)
        part = columns(sums.layers[0][0], 0, problem.width)
        add_gradient(part, problem.from_input, table, problem.inputs.unsqueeze(0), thin, fresh=True)

    def _values(self, projected: Tensor) -> Tensor:
        """The gradient of the values (B, S, E) and of their part of the combination, from that of their product."""
        problem, values = self.problem, self.problem.given.values
        positions, width = values.shape[1:]
        total = self.sums.combine[:, problem.hidden :]
        # In parts, because zeros for what lies in the padding, NaN perhaps, take a copy of the values.
        for rows in split_rows(len(values), positions, width * values.itemsize):
            padding = None if problem.padding is None else problem.padding[rows]
            add_outer(total, projected[rows], zero_padding(values[rows], padding), fresh=rows.start == 0)
        return projected @ problem.from_values
