"""Backward pass of the recomputing attentional LSTM.

It runs block by block from the end: large matrix products recompute what the steps of a block need, a loop over the
steps propagates the gradients of h, c and o, and large products then give the gradients of the weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from econmt_ops.attentional_lstm import persistent
from econmt_ops.attentional_lstm.block import BackwardTensors, Block
from econmt_ops.attentional_lstm.problem import AttentionalProblem, Result
from econmt_ops.core.chunks import rows_of, split_rows
from econmt_ops.core.gemm import add_rows
from econmt_ops.core.lengths import zero_padding
from econmt_ops.core.loops import steps_of
from econmt_ops.core.low_rank import (
    add_gradient,
    columns,
    gradient_of,
    input_gradient,
    project,
    tensors_of_matrices,
    thin_of,
)
from econmt_ops.core.outer import add_outer
from econmt_ops.core.repeated import add_repeated
from econmt_ops.core.weights import Matrix
from econmt_ops.dispatch.registration import Gradients, Incoming


class Backward:
    """Backward pass of one call.

    The gradients of inputs and weights are summed over the blocks: products are in the compute type, sums in the
    accumulate type. The gradient of the inputs is written, not summed; with row indices (see `AttentionalProblem`)
    ``table`` (N, 4H) sums the gate gradients of the bottom layer per distinct row, from which it follows at the end.
    """

    def __init__(self, problem: AttentionalProblem, stash: Result, incoming: Incoming) -> None:
        self.problem, self.stash = problem, stash
        accumulate, inputs, space = problem.accumulate, problem.call.inputs, problem.inputs.new_empty
        self.dinputs: Tensor | None = None
        self.table: Tensor | None = None
        if problem.places is None:
            self.dinputs = torch.empty_like(inputs)
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
        projected = problem.projected()
        shape = problem.steps, problem.batch
        positions = problem.call.keys.shape[1]
        dc = inputs.new_zeros(len(problem.layers), problem.batch, problem.hidden, dtype=accumulate)
        if incoming["last_c"] is not None:
            dc.copy_(incoming["last_c"])
        self.tensors = tensors = BackwardTensors(
            problem,
            stash,
            projected,
            problem.attention(projected),
            stash.attention if problem.keeps("attention") else space(*shape, positions),
            space(*shape, positions, dtype=accumulate),
            None if incoming["outputs"] is None else rows_of(incoming["outputs"]),
            None if incoming["attention"] is None else rows_of(incoming["attention"]),
            incoming["last_h"],
            dc,
        )
        doutputs = tensors.doutputs
        # A step's gradient of the argument of tanh may replace that of the output, which no other step reads.
        reuses = problem.call.overwrites and doutputs is not None and doutputs.is_contiguous()
        self.da = doutputs if reuses and doutputs is not None else space(*shape, problem.hidden)
        sizes = persistent.sizes_of(problem) if tensors.dweights is None else None
        self.steps: BackwardSteps | persistent.BackwardBlocks
        self.steps = BackwardSteps(tensors) if sizes is None else persistent.BackwardBlocks(tensors, sizes)

    def run(self) -> Gradients:
        """Runs all blocks, last first; returns the gradients by the names of the operator's arguments."""
        problem, steps = self.problem, self.steps
        for number in steps_of(range(len(problem.blocks))[::-1]):
            block = Block(problem, self.stash, number)
            part = slice(block.begin, block.end)
            weights = self.tensors.weights
            if not problem.keeps("attention"):
                weights[part] = self.tensors.attention.weights_of(block.query)
            contexts = torch.bmm(weights[part].transpose(0, 1), self.tensors.projected).transpose(0, 1)
            self._sum(block, steps.run(block, contexts, self.da[part]))
            del block, weights, contexts
        if self.table is not None:
            self._sum_rows(self.table.to(problem.dtype).unsqueeze(0))
        dh, do, dbias = steps.dh, steps.do, steps.dbias
        if dbias is not None:
            if self.combine_bias is not None:
                self.combine_bias += add_rows(self.da)
            for (*_, total), part_of_layer in zip(self.layers, dbias.sum(0), strict=True):
                total += part_of_layer
        # This order frees tensors as early as possible.
        attention, dscores, dc = self.tensors.attention, self.tensors.dscores, self.tensors.dc
        dprojected = attention.projected_gradient(self.tensors.weights, self.da).to(problem.dtype)
        del steps, self.steps, self.tensors, self.da
        values = self._values(dprojected)
        del dprojected
        _, top = problem.stack(self.stash.h, 0, problem.steps)
        sums = attention.gradients(problem.queries(top), dscores)
        gain, shift = (None, None) if sums.norm is None else sums.norm
        inputs, hiddens, biases = zip(*self.layers, strict=True)
        return {
            "inputs": self.dinputs,
            "keys": sums.keys,
            "values": values,
            "input_weights": tensors_of_matrices(inputs),
            "hidden_weights": tensors_of_matrices(hiddens),
            "biases": biases,
            "query": self.query,
            "score": sums.score,
            "combine": self.combine,
            "combine_bias": self.combine_bias,
            "gain": gain,
            "shift": shift,
            "first_h": list(dh),
            "first_c": list(dc.unbind(0)),
            "first_output": do,
        }

    def _sum(self, block: Block, queries: Tensor) -> None:
        """Adds a block's gradients that no later step depends on; ``queries`` (K, B, A): those of the queries."""
        problem, sums_biases = self.problem, self.steps.dbias is None
        shares = self.da[block.begin : block.end]
        fresh = block.end == problem.steps
        add_outer(self.combine[:, : problem.hidden], shares, block.top, fresh)
        if self.combine_bias is not None and sums_biases:
            self.combine_bias += add_rows(shares)
        if self.query is not None:
            add_outer(self.query, queries, block.top, fresh)
        for layer, (dgates, (dinput, dhidden, dbias)) in enumerate(
            zip(block.dgates, self.layers, strict=True)
        ):
            weights, width = problem.layers[layer], problem.width
            if sums_biases:
                dbias += add_rows(dgates)
            add_gradient(dhidden, weights.hidden, dgates, block.before[layer], fresh=fresh)
            thin = thin_of(weights.input, dgates)
            if layer > 0:
                add_gradient(dinput, weights.input, dgates, block.reads[layer - 1], thin, fresh)
                continue
            fed = columns(dinput, width, dinput.shape[1])
            add_gradient(fed, problem.from_output, dgates, block.fed, thin, fresh)
            if self.table is not None:
                add_repeated(self.table, block.inputs, dgates)
                continue
            dinputs = input_gradient(problem.from_input, dgates, thin)
            assert self.dinputs is not None
            self.dinputs[:, block.begin : block.end] = dinputs.transpose(0, 1)
            add_gradient(columns(dinput, 0, width), problem.from_input, dgates, block.inputs, thin, fresh)

    def _sum_rows(self, table: Tensor) -> None:
        """Computes the gradients of the distinct rows from the gate gradients summed per row, table (1, N, 4H)."""
        problem = self.problem
        thin = thin_of(problem.from_input, table)
        self.dinputs = input_gradient(problem.from_input, table, thin).squeeze(0)
        part = columns(self.layers[0][0], 0, problem.width)
        add_gradient(part, problem.from_input, table, problem.inputs.unsqueeze(0), thin, fresh=True)

    def _values(self, projected: Tensor) -> Tensor:
        """Returns the gradient of the values (B, S, E) and adds that of their combination weights, from d(V Wcv^T)."""
        problem, values = self.problem, self.problem.call.values
        positions, width = values.shape[1:]
        total = self.combine[:, problem.hidden :]
        # In parts: replacing padding, which may hold NaN, by zeros copies the values.
        for rows in split_rows(len(values), positions, width * values.itemsize):
            padding = None if problem.padding is None else problem.padding[rows]
            add_outer(total, projected[rows], zero_padding(values[rows], padding), fresh=rows.start == 0)
        return project(projected, problem.from_values.t())


class BackwardSteps:
    """Steps of a backward pass, one after the other, last one first.

    Attributes:
        rows: per layer, (B, 2H), gradient of the input of its product, [layer input ; h of the previous step].
        dtop: (B, H), gradient of the stack's output.
        dbias: None; the sums of the gates' gradients are left to the caller.
    """

    dbias = None

    def __init__(self, tensors: BackwardTensors) -> None:
        self.tensors, self.problem = tensors, tensors.problem
        problem, layers, hidden = self.problem, range(len(self.problem.layers)), self.problem.hidden
        self.rows = [problem.inputs.new_zeros(problem.batch, 2 * hidden) for _ in layers]
        if tensors.last_dh is not None:
            for row, part in zip(self.rows, tensors.last_dh, strict=True):
                row[:, hidden:] = part
        self.dtop = torch.empty_like(self.rows[0][:, :hidden])
        # Transposed views: packing a weight for products of this kind takes longer than it saves.
        self.to_rows = [problem.product(problem.joint(layer).t()) for layer in layers]
        self.to_top = problem.product(problem.both().t())

    @property
    def dh(self) -> list[Tensor]:
        """Gradients of h before the last step that has run, per layer (B, H)."""
        return [row[:, self.problem.hidden :] for row in self.rows]

    @property
    def do(self) -> Tensor:
        """Gradient of o before that step, (B, H)."""
        return self.rows[0][:, : self.problem.hidden]

    def run(self, block: Block, contexts: Tensor, da: Tensor) -> Tensor:
        """Runs the steps of a block, whose ``dgates`` are written; returns the gradients of the queries, (K, B, A).

        The contexts are (K, B, H); ``da`` (K, B, H) is written, the gradient of the input of the output's tanh.
        """
        size = self.problem.size
        dboth = da.new_empty(*da.shape[:2], size + self.problem.hidden)
        for step in steps_of(range(len(dboth))[::-1]):
            self._attention(block, step, contexts[step], dboth[step])
            self._layers(block, step)
        da.copy_(dboth[..., size:])
        return dboth[..., :size]

    def _attention(self, block: Block, step: int, context: Tensor, dboth: Tensor) -> None:
        """Propagates the gradient of o to ``dtop``; writes ``dboth`` (B, A + H)."""
        tensors, position, size = self.tensors, block.begin + step, self.problem.size
        doutputs = [self.do]
        if tensors.doutputs is not None:
            doutputs.append(tensors.doutputs[position])
        tensors.attention.backward(
            block.query[step],
            context,
            tensors.weights[position],
            tensors.stash.outputs[position],
            doutputs,
            None if tensors.dweights is None else tensors.dweights[position],
            dboth,
            tensors.dscores[position],
        )
        if self.problem.query is None:
            self.to_top.into(self.dtop, dboth[:, size:], dboth[:, :size])
        else:
            self.to_top.into(self.dtop, dboth)

    def _layers(self, block: Block, step: int) -> None:
        """Propagates a step through the stack, top layer first: gradients of the gates and of the previous step."""
        problem, position, hidden = self.problem, block.begin + step, self.problem.hidden
        # Gradient of the layer's output, or, with a mask in ``keep``, of the output after dropout.
        above, keep = self.dtop, None
        for layer in reversed(range(len(problem.layers))):
            row, dgates = self.rows[layer], block.dgates[layer][step]
            problem.run.cell_backward(
                block.gates[layer][step],
                block.cells[layer][step],
                block.cells[layer][step + 1],
                (above, row[:, hidden:]),
                self.tensors.dc[layer],
                dgates,
                keep=keep,
                scale=problem.scale,
            )
            self.to_rows[layer].into(row, dgates)
            if layer > 0 and problem.call.residual:
                dread = (row[:, :hidden] + above).unsqueeze(0)
                above = problem.drop(layer, dread, position, position + 1).squeeze(0)
            elif layer > 0:
                mask = problem.mask(layer, position, position + 1)
                above, keep = row[:, :hidden], None if mask is None else mask[0]
