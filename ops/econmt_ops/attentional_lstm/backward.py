"""Backward pass of the recomputing attentional decoder.

It runs block by block from the end: large matrix products recompute what the steps of a block need, a loop over the
steps propagates the gradients of the states and of o, and large products then give the gradients of the weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from econmt_ops.attentional_lstm import persistent
from econmt_ops.attentional_lstm.block import (
    BackwardTensors,
    Block,
    CellsBlock,
    LSTMBlock,
    ProductPair,
    ShareGradients,
    bottom_or_input,
)
from econmt_ops.attentional_lstm.problem import AttentionalProblem, Result
from econmt_ops.backends.protocol import AttentionBackward, CoverageStep, OutputStep, StepGradients
from econmt_ops.core.chunks import split_rows
from econmt_ops.core.lengths import zero_padding
from econmt_ops.core.loops import steps_of
from econmt_ops.dispatch.registration import Gradients, Incoming
from econmt_ops.products.gemm import add_rows
from econmt_ops.products.low_rank import (
    add_gradient,
    columns,
    gradient_of,
    input_gradient,
    project,
    tensors_of_matrices,
    thin_of,
)
from econmt_ops.products.outer import add_outer
from econmt_ops.products.repeated import add_repeated


class Backward:
    """Backward pass of one call.

    The gradients of inputs and weights are summed over the blocks: products are in the compute type, sums in the
    accumulate type. The gradient of the inputs is written, not summed; with row indices (see `AttentionalProblem`)
    ``table`` (N, G H) sums the gradients of the bottom layer's product per distinct row, from which it follows.
    """

    def __init__(self, problem: AttentionalProblem, stash: Result, incoming: Incoming) -> None:
        self.problem, self.stash = problem, stash
        call = problem.call
        accumulate, inputs, space = problem.accumulate, call.inputs, problem.inputs.new_empty
        self.dinputs: Tensor | None = None
        self.table: Tensor | None = None
        if problem.places is None:
            self.dinputs = torch.empty_like(inputs)
        else:
            self.table = inputs.new_zeros(len(inputs), problem.layers[0].input.shape[0], dtype=accumulate)

        def zeros(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else torch.zeros_like(tensor, dtype=accumulate)

        self.layers = [
            (
                gradient_of(layer.input, accumulate),
                gradient_of(layer.hidden, accumulate),
                zeros(layer.read_bias),
                zeros(layer.recurrent_bias),
            )
            for layer in problem.layers
        ]
        self.query = None if problem.query is None else torch.empty_like(problem.query, dtype=accumulate)
        self.combine = torch.empty_like(problem.combine, dtype=accumulate)
        self.combine_bias, self.state = zeros(problem.combine_bias), zeros(call.coverage_state)
        self.tensors = tensors = BackwardTensors(problem, stash, incoming)
        doutputs = tensors.doutputs
        # A step's gradient of the context's share may replace that of the output, which no other step reads.
        fits = call.overwrites and problem.width_of_share == problem.hidden
        if fits and doutputs is not None and doutputs.is_contiguous():
            self.dcontexts = doutputs
        else:
            self.dcontexts = space(problem.steps, problem.batch, problem.width_of_share)
        sizes = persistent.sizes_of(problem) if tensors.dweights is None else None
        self.steps: BackwardSteps | persistent.BackwardBlocks
        if sizes is None:
            self.steps = (BackwardLSTM if problem.is_lstm else BackwardCells)(tensors)
        else:
            self.steps = persistent.BackwardBlocks(tensors, sizes)

    def run(self) -> Gradients:
        """Runs all blocks, last first; returns the gradients by the names of the operator's arguments."""
        problem, steps = self.problem, self.steps
        for number in steps_of(range(len(problem.blocks))[::-1]):
            block = (LSTMBlock if problem.is_lstm else CellsBlock)(problem, self.stash, number)
            part = slice(block.begin, block.end)
            weights = self.tensors.weights
            if not problem.keeps("attention"):
                weights[part] = self.tensors.attention.weights_of(block.query, block.coverage)
            contexts = torch.bmm(weights[part].transpose(0, 1), self.tensors.projected).transpose(0, 1)
            gradients = steps.run(block, contexts, self.dcontexts[part])
            del contexts
            block.release()
            self._sum(block, gradients)
            del block, weights, gradients
        if self.table is not None:
            self._sum_rows(self.table.to(problem.dtype).unsqueeze(0))
        dh, do, dbias = steps.dh, steps.do, steps.dbias
        if dbias is not None:
            if self.combine_bias is not None:
                self.combine_bias += add_rows(self.dcontexts)
            for (_, _, total, _), part_of_layer in zip(self.layers, dbias.sum(0), strict=True):
                assert total is not None
                total += part_of_layer
        extra, covered = steps.extra, self.tensors.attention.coverage_gradients()
        output_norm = [total.sum(0) for total in steps.dnorm]
        context_bias = None
        if problem.context_bias is not None:
            context_bias = add_rows(self.dcontexts[..., problem.hidden :])
        # This order frees tensors as early as possible.
        attention, dscores, dothers = self.tensors.attention, self.tensors.dscores, self.tensors.dothers
        dcoverage = self.tensors.dcoverage
        dprojected = attention.projected_gradient(self.tensors.weights, self.dcontexts).to(problem.dtype)
        del steps, self.steps, self.tensors, self.dcontexts
        values = self._values(dprojected)
        del dprojected
        _, top = problem.stack(self.stash.h, 0, problem.steps)
        sums = attention.gradients(problem.queries(top), dscores)
        inputs, hiddens, biases, recurrent_biases = zip(*self.layers, strict=True)
        return {
            "inputs": self.dinputs,
            "keys": sums.keys,
            "values": values,
            "input_weights": tensors_of_matrices(inputs),
            "hidden_weights": tensors_of_matrices(hiddens),
            "biases": [part for part in biases if part is not None],
            "recurrent_biases": [part for part in recurrent_biases if part is not None],
            "extra": list(extra),
            "query": self.query,
            "score": sums.score,
            "combine": self.combine,
            "combine_bias": self.combine_bias,
            "context_bias": context_bias,
            "norm": sums.norm or (),
            "output_norm": output_norm,
            "coverage_state": self.state,
            **covered,
            "first_h": list(dh),
            "first_c": list(dothers.unbind(0)),
            "first_output": do,
            "first_coverage": dcoverage,
        }

    def _sum(self, block: Block, gradients: ShareGradients) -> None:
        """Adds a block's gradients that no later step depends on."""
        problem, sums_biases = self.problem, self.steps.dbias is None
        shares, fresh = gradients.share, block.end == problem.steps
        add_outer(self.combine[:, : problem.hidden], shares, block.top, fresh)
        if self.combine_bias is not None and sums_biases:
            self.combine_bias += add_rows(shares)
        if self.query is not None:
            add_outer(self.query, gradients.query, block.top, fresh)
        if self.state is not None and gradients.state is not None:
            add_outer(self.state, gradients.state, block.top)
        for layer, totals in enumerate(self.layers):
            dreads, drecurrents = block.dreads[layer], block.drecurrents[layer]
            dinput, dhidden, *dbiases = totals
            weights, width = problem.layers[layer], problem.width
            if sums_biases:
                for total, rows_of_bias in zip(dbiases, (dreads, drecurrents), strict=True):
                    if total is not None:
                        total += add_rows(rows_of_bias)
            add_gradient(dhidden, weights.hidden, drecurrents, block.before[layer], fresh=fresh)
            thin = thin_of(weights.input, dreads)
            if layer > 0:
                add_gradient(dinput, weights.input, dreads, block.reads[layer - 1], thin, fresh)
                continue
            fed = columns(dinput, width, dinput.shape[1])
            add_gradient(fed, problem.from_output, dreads, block.fed, thin, fresh)
            if self.table is not None:
                add_repeated(self.table, block.inputs, dreads)
                continue
            dinputs = input_gradient(problem.from_input, dreads, thin)
            assert self.dinputs is not None
            self.dinputs[:, block.begin : block.end] = dinputs.transpose(0, 1)
            add_gradient(columns(dinput, 0, width), problem.from_input, dreads, block.inputs, thin, fresh)

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


class BackwardSteps(ABC):
    """Steps of a backward pass, one after the other, last one first.

    Args:
        tensors: Tensors of the pass. reads: Memory of the gradient of each layer's input, (B, H) each.

    Attributes:
        dtop: (B, H), gradient of the stack's output. do: (B, H), that of o before the last step that has run.
        dbias: None; the sums of the gates' gradients are left to the caller.
        dnorm: gradients of gain and shift of the output's layer normalisation, (R, H) each; empty without one.
    """

    dbias = None

    def __init__(self, tensors: BackwardTensors, reads: list[Tensor]) -> None:
        self.tensors, self.problem, self.reads = tensors, tensors.problem, reads
        problem, self.do = self.problem, reads[0]
        self.dtop = problem.inputs.new_empty(problem.batch, problem.hidden)
        # A transposed view: packing a weight for products of this kind takes longer than it saves.
        self.matrix = problem.both()
        self.to_top = problem.product(self.matrix.t())
        rows = 0 if problem.norm is None else problem.run.rows_of_sums(problem.batch)
        self.dnorm = [part.new_zeros(rows, len(part)) for part in problem.norm or ()]

    @property
    @abstractmethod
    def dh(self) -> list[Tensor]:
        """Gradients of h before the last step that has run, per layer (B, H)."""

    @property
    def extra(self) -> Sequence[Tensor]:
        """Gradients of the layers' further weights, layer by layer, in the accumulate type."""
        return ()

    @abstractmethod
    def _cell(self, block: Any, layer: int, number: int, above: Tensor, keep: Tensor | None) -> None:
        """Runs a layer backward, given the gradient of its output, to which dropout by ``keep`` is applied."""

    def run(self, block: Block, contexts: Tensor, dcontexts: Tensor) -> ShareGradients:
        """Runs the steps of a block, in which the gradients of the layers' products are written.

        The contexts are (K, B, P); ``dcontexts`` (K, B, P), their gradients, is written.
        """
        problem, (steps, batch) = self.problem, contexts.shape[:2]
        asked = problem.size if problem.query is None else 0
        dboth = contexts.new_empty(steps, batch, asked + len(self.matrix))
        dshare, dstate = problem.parts_of_both(dboth, problem.size)
        if dstate is not None:
            dboth[..., problem.size + problem.width_of_share + dstate.shape[2] :] = 0
        for step in steps_of(range(steps)[::-1]):
            self._output(block, step, contexts[step], dcontexts[step], dboth[step])
            above, keep = self.dtop, None
            for layer in reversed(range(len(self.reads))):
                self._cell(block, layer, step, above, keep)
                above, keep = problem.below(layer, block.begin + step, self.reads[layer], above)
        if problem.squashes:
            dcontexts.copy_(dshare)
        return ShareGradients(dboth[..., : problem.size], dshare, dstate)

    def _output(self, block: Block, step: int, context: Tensor, dcontext: Tensor, dboth: Tensor) -> None:
        """Propagates the gradient of o to ``dtop``; writes ``dboth`` (B, A + P + P') and ``dcontext`` (B, P)."""
        tensors, problem, position = self.tensors, self.problem, block.begin + step
        size, output = problem.size, tensors.stash.outputs[position]
        doutputs = [self.do]
        if tensors.doutputs is not None:
            doutputs.append(tensors.doutputs[position])
        dshare, dstate = problem.parts_of_both(dboth, problem.size)
        if not problem.squashes:
            assert block.share is not None
            problem.run.output_backward(
                OutputStep(block.share[step], context, output, problem.context_bias, problem.norm),
                doutputs,
                dshare,
                dcontext,
                self.dnorm,
            )
            doutputs = [dcontext]
        covered = None
        if block.coverage is not None:
            state = None if block.state is None else block.state[step]
            covered = CoverageStep(block.coverage[step], block.coverage[step + 1], state)
        back = AttentionBackward(
            block.query[step],
            context,
            tensors.weights[position],
            output,
            doutputs,
            None if tensors.dweights is None else tensors.dweights[position],
            dboth[:, : size + problem.width_of_share],
            tensors.dscores[position],
            covered,
            tensors.dcoverage,
            dstate,
        )
        tensors.attention.backward(back)
        if problem.query is None:
            self.to_top.into(self.dtop, dboth[:, size:], dboth[:, :size])
        else:
            self.to_top.into(self.dtop, dboth)


class BackwardLSTM(BackwardSteps):
    """Steps of LSTMs."""

    def __init__(self, tensors: BackwardTensors) -> None:
        problem, hidden = tensors.problem, tensors.problem.hidden
        # Gradients of the inputs of the layers' products, [layer input ; h of the previous step].
        self.rows = [problem.inputs.new_zeros(problem.batch, 2 * hidden) for _ in problem.layers]
        super().__init__(tensors, [row[:, :hidden] for row in self.rows])
        if tensors.last_dh is not None:
            for dh, part in zip(self.dh, tensors.last_dh, strict=True):
                dh.copy_(part)
        # Transposed views: packing a weight for products of this kind takes longer than it saves.
        self.to_rows = [problem.product(problem.joint(layer).t()) for layer in range(len(problem.layers))]

    @property
    def dh(self) -> list[Tensor]:
        """See `BackwardSteps`."""
        return [row[:, self.problem.hidden :] for row in self.rows]

    def _cell(self, block: LSTMBlock, layer: int, number: int, above: Tensor, keep: Tensor | None) -> None:
        problem, row, dgates = self.problem, self.rows[layer], block.dreads[layer][number]
        problem.run.cell_backward(
            block.gates[layer][number],
            block.cells[layer][number],
            block.cells[layer][number + 1],
            (above, row[:, problem.hidden :]),
            self.tensors.dothers[layer],
            dgates,
            keep=keep,
            scale=problem.scale,
        )
        self.to_rows[layer].into(row, dgates)


class BackwardCells(BackwardSteps):
    """Steps of any other cells."""

    def __init__(self, tensors: BackwardTensors) -> None:
        problem = tensors.problem
        zeros, batch, hidden = problem.inputs.new_zeros, problem.batch, problem.hidden
        # Gradients of the inputs of the layers' products, and of h past them.
        self.rows = [zeros(2, batch, hidden) for _ in problem.layers]
        super().__init__(tensors, [row[0] for row in self.rows])
        self._past = [zeros(batch, hidden) for _ in problem.layers]
        if tensors.last_dh is not None:
            for past, part in zip(self._past, tensors.last_dh, strict=True):
                past.copy_(part)
        self._to_rows = [
            ProductPair(problem, bottom_or_input(problem, layer), weights.hidden, back=True)
            for layer, weights in enumerate(problem.layers)
        ]
        count = problem.run.rows_of_sums(batch)
        self._extra = [
            [part.new_zeros(count, len(part)) for part in weights.extra] for weights in problem.layers
        ]

    @property
    def dh(self) -> list[Tensor]:
        """See `BackwardSteps`."""
        return [row[1] + past for row, past in zip(self.rows, self._past, strict=True)]

    @property
    def extra(self) -> list[Tensor]:
        """See `BackwardSteps`."""
        return [total.sum(0) for totals in self._extra for total in totals]

    def _cell(self, block: CellsBlock, layer: int, number: int, above: Tensor, keep: Tensor | None) -> None:
        problem, row, each = self.problem, self.rows[layer], block.each
        gradients = block.gradients[layer][:, number]
        step = block.step(layer, number, block.states[layer][number])
        problem.run.step_backward_into(
            step,
            (step.before[0], *block.states[layer][number + 1].unbind(0)),
            (self._past[layer], *self.tensors.dothers[layer * each : (layer + 1) * each].unbind(0)),
            above,
            StepGradients(gradients[0], gradients[1], self._extra[layer]),
            flow=row[1],
            keep=keep,
            scale=problem.scale,
        )
        self._to_rows[layer].into(row, gradients)
