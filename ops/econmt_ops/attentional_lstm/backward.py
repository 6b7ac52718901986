"""Backward pass of the recomputing attentional LSTM.

It runs block by block from the end: large matrix products recompute what the steps of a block need, a loop over the
steps propagates the gradients of h, c and o, and large products then give the gradients of the weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from econmt_ops.attentional_lstm import persistent
from econmt_ops.attentional_lstm.block import Block
from econmt_ops.attentional_lstm.problem import AttentionalProblem, Result
from econmt_ops.core.chunks import add_outer, rows_of, split_rows
from econmt_ops.core.gemm import add_rows
from econmt_ops.core.lengths import zero_padding
from econmt_ops.core.loops import steps_of
from econmt_ops.core.low_rank import (
    add_gradient,
    columns,
    gradient_of,
    input_gradient,
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
        inputs = problem.call.inputs
        # For distinct rows, the gradient of the inputs is computed from the table after the loop.
        self.inputs: Tensor | None = None
        self.table: Tensor | None = None
        if places is None:
            self.inputs = torch.empty_like(inputs)
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


class Backward:
    """Backward pass of one call.

    Attributes:
        dweights: (T, B, S), gradient of the attention weights; or None.
        weights: (T, B, S), attention weights. da: (T, B, H), gradients of the input of the output's tanh. dscores:
            (T, B, S), gradients of the scores.
        dc: per layer, (B, H).
    """

    def __init__(self, problem: AttentionalProblem, stash: Result, incoming: Incoming) -> None:
        self.problem, self.stash = problem, stash
        doutputs = None if incoming["outputs"] is None else rows_of(incoming["outputs"])
        dweights = None if incoming["attention"] is None else rows_of(incoming["attention"])
        self.sums = Sums(problem)
        self.projected = problem.projected()
        self.attention = problem.attention(self.projected)
        layers, hidden = len(problem.layers), problem.hidden
        self.dc = torch.zeros(
            layers, problem.batch, hidden, dtype=problem.accumulate, device=problem.inputs.device
        )
        if incoming["last_c"] is not None:
            self.dc.copy_(incoming["last_c"])
        steps, positions = problem.steps, problem.call.keys.shape[1]
        space = problem.inputs.new_empty
        kept = problem.keeps("attention")
        self.weights = stash.attention if kept else space(steps, problem.batch, positions)
        self.da = space(steps, problem.batch, hidden)
        self.dscores = space(steps, problem.batch, positions, dtype=problem.accumulate)
        sizes = persistent.sizes_of(problem) if dweights is None else None
        self.steps: BackwardSteps | persistent.BackwardBlocks
        if sizes is None:
            self.steps = BackwardSteps(self, doutputs, dweights, incoming["last_h"])
        else:
            self.steps = persistent.BackwardBlocks(
                problem, sizes, self.projected, stash.outputs, self.weights, doutputs, self.dscores,
                incoming["last_h"], self.dc,
            )  # fmt: skip

    def run(self) -> Gradients:
        """Runs all blocks, last first; returns the gradients by the names of the operator's arguments."""
        for number in steps_of(range(len(self.problem.blocks))[::-1]):
            self._block(Block(self.problem, self.stash, number))
        sums = self.sums
        if sums.table is not None:
            self._sum_rows(sums.table.to(self.problem.dtype).unsqueeze(0))
        dh, do = self.steps.dh, self.steps.do
        if self.steps.dbias is not None:
            if sums.combine_bias is not None:
                sums.combine_bias += add_rows(self.da)
            for (*_, dbias), total in zip(sums.layers, self.steps.dbias.sum(0), strict=True):
                dbias += total
        # This order frees tensors as early as possible.
        dprojected = self.attention.projected_gradient(self.weights, self.da).to(self.problem.dtype)
        del self.steps, self.projected, self.da
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
            "first_h": list(dh),
            "first_c": list(self.dc.unbind(0)),
            "first_output": do,
        }

    def _block(self, block: Block) -> None:
        problem, steps = self.problem, slice(block.begin, block.end)
        if not problem.keeps("attention"):
            self.weights[steps] = self.attention.weights_of(block.query)
        contexts = torch.bmm(self.weights[steps].transpose(0, 1), self.projected).transpose(0, 1)
        queries = self.steps.run(block, contexts, self.da[steps])
        self._sum(block, queries)

    def _sum(self, block: Block, queries: Tensor) -> None:
        """Adds a block's gradients that no later step depends on; ``queries`` (K, B, A): those of the queries."""
        problem, sums = self.problem, self.sums
        shares = self.da[block.begin : block.end]
        fresh = block.end == problem.steps
        add_outer(sums.combine[:, : problem.hidden], shares, block.top, fresh)
        if sums.combine_bias is not None and self.steps.dbias is None:
            sums.combine_bias += add_rows(shares)
        if sums.query is not None:
            add_outer(sums.query, queries, block.top, fresh)
        for layer, (dgates, (dinput, dhidden, dbias)) in enumerate(
            zip(block.dgates, sums.layers, strict=True)
        ):
            weights, width = problem.layers[layer], problem.width
            if self.steps.dbias is None:
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
        """Returns the gradient of the values (B, S, E) and adds that of their combination weights, from d(V Wcv^T)."""
        problem, values = self.problem, self.problem.call.values
        positions, width = values.shape[1:]
        total = self.sums.combine[:, problem.hidden :]
        # In parts: replacing padding, which may hold NaN, by zeros copies the values.
        for rows in split_rows(len(values), positions, width * values.itemsize):
            padding = None if problem.padding is None else problem.padding[rows]
            add_outer(total, projected[rows], zero_padding(values[rows], padding), fresh=rows.start == 0)
        return projected @ problem.from_values


class BackwardSteps:
    """Steps of a backward pass, one after the other, last one first.

    Args:
        backward: the pass. doutputs: (T, B, H), dweights: (T, B, S), gradients of the forward pass's results; or None.
        dh: (L, B, H), gradients of the last h; or None.

    Attributes:
        rows: per layer, (B, 2H), gradient of the input of its product, [layer input ; h of the previous step].
        dtop: (B, H), gradient of the stack's output.
        dbias: None; the sums of the gates' gradients are left to the caller.
    """

    dbias = None

    def __init__(
        self,
        backward: Backward,
        doutputs: Tensor | None,
        dweights: Tensor | None,
        dh: Tensor | None,
    ) -> None:
        self.problem, self.stash, self.attention = backward.problem, backward.stash, backward.attention
        self.weights, self.dscores, self.dc = backward.weights, backward.dscores, backward.dc
        self.doutputs, self.dweights = doutputs, dweights
        problem, layers, hidden = backward.problem, len(backward.problem.layers), backward.problem.hidden
        self.rows = [problem.inputs.new_zeros(problem.batch, 2 * hidden) for _ in range(layers)]
        if dh is not None:
            for row, part in zip(self.rows, dh, strict=True):
                row[:, hidden:] = part
        self.dtop = torch.empty_like(self.rows[0][:, :hidden])
        # Transposed views: packing a weight for products of this kind takes longer than it saves.
        self.to_rows = [problem.product(problem.joint(layer).t()) for layer in range(layers)]
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
        """Runs the steps of a block.

        Args:
            block: its ``dgates`` are written.
            contexts: (K, B, H).
            da: (K, B, H) is written, the gradient of the input of the output's tanh.

        Returns:
            The gradients of the queries, (K, B, A).
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
        position, size = block.begin + step, self.problem.size
        doutputs = [self.do]
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
        scale = 1.0 / (1.0 - problem.call.dropout)
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
            if layer > 0 and problem.call.residual:
                dread = (row[:, :hidden] + above).unsqueeze(0)
                above = problem.drop(layer, dread, position, position + 1).squeeze(0)
            elif layer > 0:
                mask = problem.mask(layer, position, position + 1)
                above, keep = row[:, :hidden], None if mask is None else mask[0]
