"""Recomputation, by large products, of what the backward pass of the attentional decoder needs for a block of steps."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from econmt_ops.attentional_lstm.layers import RebuiltCells, RebuiltLSTM
from econmt_ops.attentional_lstm.problem import AttentionalProblem, BlockTensors, Result
from econmt_ops.backends.protocol import AttentionKernels
from econmt_ops.core.chunks import previous
from econmt_ops.products.low_rank import project


class BackwardTensors(NamedTuple):
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

    problem: AttentionalProblem
    stash: Result
    projected: Tensor
    attention: AttentionKernels
    weights: Tensor
    dscores: Tensor
    doutputs: Tensor | None
    dweights: Tensor | None
    last_dh: Tensor | None
    dothers: Tensor
    dcoverage: Tensor | None


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
        tensors: see `BlockTensors`. layers: what the layers recompute.
        top: (K, B, H), output of the stack. query: (K, B, A).
        share, state: (K, B, P), the stack's shares of o and of the coverage; None where nothing reads them.
        coverage: K + 1 coverages (B, S, W), from that before the first step on; or None.
    """

    def __init__(self, problem: AttentionalProblem, stash: Result, number: int) -> None:
        self.begin, self.end = begin, end = problem.blocks[number]
        call = problem.call
        reads, self.top = problem.stack(stash.h, begin, end)
        self.tensors = BlockTensors(
            problem.read(begin, end),
            previous(stash.outputs, call.first_output, begin, end),
            [previous(h, first, begin, end) for h, first in zip(stash.h, call.first_h, strict=True)],
            reads,
        )
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
        kind = RebuiltLSTM if problem.is_lstm else RebuiltCells
        self.layers = kind(problem, stash, number, self.tensors)
