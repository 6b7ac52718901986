"""Recomputation, by large products, of what the backward pass of the attentional decoder needs for a block of steps."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from econmt_ops.attentional_lstm.problem import AttentionalProblem, Result
from econmt_ops.backends.protocol import CellStep
from econmt_ops.core.chunks import previous
from econmt_ops.dispatch.registration import Incoming
from econmt_ops.dispatch.rule import device_of
from econmt_ops.layers.stepped import states_beside_h
from econmt_ops.products.low_rank import AnyProduct, project


class BackwardTensors:
    """Tensors of a backward pass that its steps read and write.

    Attributes:
        projected: (B, S, P). attention: the kernels of the call.
        weights: (T, B, S), attention weights, filled block by block unless they are stashed.
        dscores: (T, B, S), gradients of the scores; written.
        doutputs: (T, B, H), dweights: (T, B, S), last_dh: (L, B, H), gradients of the forward pass's results; or None.
        dothers: (N, B, H), gradients of the last states beside h; overwritten by those of the states before the steps
            that have run.
        dcoverage: (B, S, W), likewise of the coverage; or None.
    """

    def __init__(self, problem: AttentionalProblem, stash: Result, incoming: Incoming) -> None:
        self.problem, self.stash, call = problem, stash, problem.call
        space, exact = problem.inputs.new_empty, problem.accumulate
        shape = problem.steps, problem.batch, call.keys.shape[1]
        self.projected = problem.projected()
        self.attention = problem.attention(self.projected)
        self.weights = stash.attention if problem.keeps("attention") else space(shape)
        self.dscores = space(shape, dtype=exact)
        self.doutputs, self.dweights = incoming["outputs"], incoming["attention"]
        self.last_dh, last_dothers = incoming["last_h"], incoming["last_c"]
        self.dothers = space(len(call.first_c), problem.batch, problem.hidden, dtype=exact).zero_()
        if last_dothers is not None:
            self.dothers.copy_(last_dothers)
        self.dcoverage: Tensor | None = None
        if call.first_coverage is not None:
            self.dcoverage = torch.zeros_like(call.first_coverage)
            if incoming["last_coverage"] is not None:
                self.dcoverage.copy_(incoming["last_coverage"])


class ShareGradients(NamedTuple):
    """Gradients of the products of the stack's output, in a block of steps.

    Attributes:
        query: (K, B, A). share: (K, B, P). state: (K, B, P'), of the coverage; or None.
    """

    query: Tensor
    share: Tensor
    state: Tensor | None


class Block:
    """Recomputed tensors of the steps begin to end.

    Attributes:
        inputs: As returned by `AttentionalProblem.read`. fed: (K, B, H), o of the previous step.
        before: Per layer, (K, B, H), h of the previous step. reads: Inputs of layers l > 0, (K, B, H).
        top: (K, B, H), output of the stack. query: (K, B, A).
        share, state: (K, B, P), the stack's shares of o and of the coverage; None where nothing reads them.
        coverage: K + 1 coverages (B, S, W), from that before the first step on; or None.
        dreads, drecurrents: Per layer (K, B, G H), memory for the gradients of the products of inputs and of h.
    """

    dreads: list[Tensor]
    drecurrents: list[Tensor]

    def __init__(self, problem: AttentionalProblem, stash: Result, number: int) -> None:
        self.begin, self.end = begin, end = problem.blocks[number]
        self.problem, call = problem, problem.call
        self.inputs = problem.read(begin, end)
        self.fed = previous(stash.outputs, call.first_output, begin, end)
        self.before = [previous(h, first, begin, end) for h, first in zip(stash.h, call.first_h, strict=True)]
        self.reads, self.top = problem.stack(stash.h, begin, end)
        self.share: Tensor | None = None
        self.state: Tensor | None = None
        if problem.squashes and call.coverage_state is None:
            self.query = problem.queries(self.top)
        else:
            both = project(self.top, problem.both(), problem.both_bias())
            if problem.query is None:
                self.query = self.top
                self.share, self.state = problem.parts_of_both(both, 0)
            else:
                self.query = both[..., : problem.size].contiguous()
                self.share, self.state = problem.parts_of_both(both, problem.size)
        self.coverage: list[Tensor] | None = None
        if call.first_coverage is not None:
            first = stash.coverage[begin - 1] if begin else call.first_coverage
            self.coverage = [first, *stash.coverage[begin:end].unbind(0)]

    def release(self) -> None:
        """Frees what only the steps read, before large products need memory of their own."""
        self.query = self.query.new_empty(0)
        self.share = self.state = self.coverage = None

    def read_product(self, layer: int, out: Tensor) -> None:
        """Writes the product of a layer's inputs, (K, B, G H), with its bias."""
        if layer == 0:
            self.problem.bottom_gates(self.inputs, out)
            project(self.fed, self.problem.from_output, out=out, adds=True)
        else:
            weights = self.problem.layers[layer]
            project(self.reads[layer - 1], weights.input, weights.read_bias, out)


class LSTMBlock(Block):
    """Block of a stack of LSTMs.

    Attributes:
        gates: Per layer (K, B, 4H), as the backend's cell reads them; recomputed sums are stored in ``dreads`` first,
            which are ``drecurrents``, too.
        cells: Per layer, K + 1 states (B, H), from c before the first step on; one tensor if they were recomputed.
    """

    def __init__(self, problem: AttentionalProblem, stash: Result, number: int) -> None:
        super().__init__(problem, stash, number)
        steps = slice(self.begin, self.end)
        self.gates: list[Tensor] = []
        self.cells: list[Tensor | list[Tensor]] = []
        width = 4 * problem.hidden
        self.dreads = [self.fed.new_empty(*self.fed.shape[:2], width) for _ in problem.layers]
        self.drecurrents = self.dreads
        for layer, weights in enumerate(problem.layers):
            if problem.keeps("gates"):
                self.gates.append(stash.gates[layer, steps])
            else:
                sums = self.dreads[layer]
                self.read_product(layer, sums)
                project(self.before[layer], weights.hidden, out=sums, adds=True)
                self.gates.append(problem.run.prepare_gates(sums))
            if problem.keeps("cells"):
                first = stash.c[layer, self.begin - 1] if self.begin else problem.call.first_c[layer]
                self.cells.append([first, *stash.c[layer, steps].unbind(0)])
            else:
                self.cells.append(problem.run.scan_cells(self.gates[layer], stash.c[layer, number]))

    def release(self) -> None:
        """See `Block`."""
        super().release()
        self.gates.clear()
        self.cells.clear()


def bottom_or_input(problem: AttentionalProblem, layer: int) -> Tensor:
    """Returns the weight of a layer's input; at the bottom of o, because that of its inputs is multiplied before."""
    read = problem.from_output if layer == 0 else problem.layers[layer].input
    assert isinstance(read, Tensor)
    return read


class CellsBlock(Block):
    """Block of a stack of other cells.

    Attributes:
        sums: Per layer (2, K, B, G H), the products of inputs and of h. gradients: Memory for their gradients.
        states: Per layer (K + 1, states beside h, B, H).
    """

    def __init__(self, problem: AttentionalProblem, stash: Result, number: int) -> None:
        super().__init__(problem, stash, number)
        self.each = len(stash.c) // len(problem.layers)
        self.sums: list[Tensor] = []
        self.states: list[Tensor] = []
        for layer, weights in enumerate(problem.layers):
            sums = self.fed.new_empty(2, *self.fed.shape[:2], len(weights.input))
            self.read_product(layer, sums[0])
            project(self.before[layer], weights.hidden, weights.recurrent_bias, sums[1])
            self.sums.append(sums)
            kept = stash.c[layer * self.each : (layer + 1) * self.each, number]
            step_at = functools.partial(self.step, layer)
            self.states.append(states_beside_h(problem.run, step_at, self.before[layer], kept))
        self.gradients = [torch.empty_like(sums) for sums in self.sums]
        self.dreads, self.drecurrents = ([part[number] for part in self.gradients] for number in range(2))

    def release(self) -> None:
        """See `Block`."""
        super().release()
        self.sums.clear()
        self.states.clear()

    def step(self, layer: int, number: int, others: Tensor) -> CellStep:
        """Returns the arguments of a step of a layer; ``others`` are the states beside h before it, (., B, H)."""
        sums, states = self.sums[layer][:, number], (self.before[layer][number], *others.unbind(0))
        return CellStep(self.problem.cell, sums[0], sums[1], states, self.problem.layers[layer].extra, None)


class BottomGates:
    """Inputs' share and bias of the bottom layer's gates, a block of steps at a time, in the stash or a workspace."""

    def __init__(self, problem: AttentionalProblem, result: Result, keep: bool) -> None:
        self._problem, self._kept, self._workspace = problem, result.gates, None
        if not (keep and problem.keeps("gates")):
            longest = max(end - begin for begin, end in problem.blocks)
            self._workspace = problem.inputs.new_empty(longest, problem.batch, 4 * problem.hidden)

    def __call__(self, begin: int, end: int) -> Tensor:
        """Returns the gates (K, B, 4H) of a block."""
        workspace = self._workspace
        gates = self._kept[0, begin:end] if workspace is None else workspace[: end - begin]
        self._problem.bottom_gates(self._problem.read(begin, end), gates)
        return gates


class ProductPair:
    """Products of a layer's input and of its h, which every step computes once.

    Args:
        problem: Call.
        input, hidden: Weights (N, K) each, applied transposed if ``back``.
    """

    def __init__(self, problem: AttentionalProblem, input: Tensor, hidden: Tensor, back: bool) -> None:  # noqa: A002
        self._both = input
        self._each: list[AnyProduct] = []
        if device_of(problem.inputs) == "cuda":
            both = torch.stack([input, hidden])
            self._both = both if back else both.transpose(1, 2)
        else:
            self._each = [problem.product(part.t() if back else part) for part in (input, hidden)]

    def into(self, out: Tensor, rows: Tensor, start: Tensor | None = None) -> None:
        """Writes the products of rows (2, B, K) plus ``start`` (2, B, N) to ``out`` (2, B, N), which may be it."""
        if self._each:
            for number, product in enumerate(self._each):
                product.into(out[number], rows[number], None if start is None else start[number])
        elif start is None:
            torch.bmm(rows, self._both, out=out)
        else:
            torch.baddbmm(start, rows, self._both, out=out)
