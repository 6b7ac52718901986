"""Recomputation, by large products, of what the backward pass of the attentional LSTM needs for a block of steps."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from econmt_ops.attentional_lstm.problem import AttentionalProblem, Result
from econmt_ops.backends.protocol import AttentionKernels
from econmt_ops.core.chunks import previous
from econmt_ops.core.low_rank import add_linear, linear_into


class BackwardTensors(NamedTuple):
    """Tensors of a backward pass that its steps read and write.

    Attributes:
        projected: (B, S, H). attention: the kernels of the call.
        weights: (T, B, S), attention weights, filled block by block unless they are stashed.
        dscores: (T, B, S), gradients of the scores; written.
        doutputs: (T, B, H), dweights: (T, B, S), last_dh: (L, B, H), gradients of the forward pass's results; or None.
        dc: (L, B, H), gradients of the last c; overwritten by those of the c before the steps that have run.
    """

    problem: AttentionalProblem
    stash: Result
    projected: Tensor
    attention: AttentionKernels
    weights: Tensor
    dscores: Tensor
    doutputs: Tensor | None
    dweights: Tensor | None
    last_dh: Tensor | None
    dc: Tensor


class Block:
    """Recomputed tensors of the steps begin to end.

    Attributes:
        inputs: as returned by `Problem.read`. fed: (K, B, H), o of the previous step.
        before: per layer, (K, B, H), h of the previous step. reads: inputs of layers l > 0, (K, B, H).
        gates: per layer, (K, B, 4H), as the backend's cell reads them. dgates: memory for the gradients of the gates'
            sums; recomputed sums are stored there first.
        cells: per layer, K + 1 states (B, H), from c before the first step on; one tensor if they were recomputed.
        top: (K, B, H), output of the stack. query: (K, B, A).
    """

    def __init__(self, problem: AttentionalProblem, stash: Result, number: int) -> None:
        self.begin, self.end = begin, end = problem.blocks[number]
        call = problem.call
        self.inputs = problem.read(begin, end)
        self.fed = previous(stash.outputs, call.first_output, begin, end)
        self.before = [previous(h, first, begin, end) for h, first in zip(stash.h, call.first_h, strict=True)]
        self.reads, self.top = problem.stack(stash.h, begin, end)
        self.query = problem.queries(self.top)
        self.gates: list[Tensor] = []
        self.dgates: list[Tensor] = []
        self.cells: list[Tensor | list[Tensor]] = []
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

    def _cells(
        self, problem: AttentionalProblem, stash: Result, layer: int, number: int
    ) -> Tensor | list[Tensor]:
        if not problem.keeps("cells"):
            return problem.run.scan_cells(self.gates[layer], stash.c[layer, number])
        first = stash.c[layer, self.begin - 1] if self.begin else problem.call.first_c[layer]
        return [first, *stash.c[layer, self.begin : self.end].unbind(0)]
