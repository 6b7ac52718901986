"""The walk of the attentional decoder's passes through its layers, which those of every cell share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from econmt_ops.attentional_lstm.problem import AttentionalProblem, Result
from econmt_ops.backends.protocol import Read


class ForwardLayers(ABC):
    """Layers of a forward pass.

    Args:
        problem, result, keep: Call, its result, and True if a backward pass will follow.
        top: (B, H), receives the stack's output at each step.
        rows: Memory of each layer's input, and of its h before the next step, (B, H) each.

    Attributes:
        others: The states beside h before the next step, (B, H) each, layer by layer.
        fed: (B, H), the output o of the step before, to be written before each step.
    """

    def __init__(
        self, problem: AttentionalProblem, result: Result, keep: bool, top: Tensor, rows: list[list[Tensor]]
    ) -> None:
        self.problem, self.result, self.keep, self.top = problem, result, keep, top
        self.reads, self.states = rows
        self.fed, self.others = self.reads[0], list(result.last_c.unbind(0))
        firsts = *problem.call.first_h, *problem.call.first_c
        for memory, first in zip((*self.states, *self.others), firsts, strict=True):
            memory.copy_(first)

    def step(self, number: int, position: int) -> None:
        """Runs a step, the ``number``-th of its block."""
        for layer, inputs in enumerate(self.reads):
            destination = self.top if layer + 1 == len(self.reads) else self.reads[layer + 1]
            read = self.problem.read_of(layer, position, inputs, destination)
            self._cell(layer, number, position, destination, read)

    @abstractmethod
    def _cell(self, layer: int, number: int, position: int, destination: Tensor, read: Read | None) -> None:
        """Runs a layer; its h goes to ``destination`` (B, H), unless ``read`` says what is written there."""

    def finish(self) -> None:
        """Writes the state after the last step."""
        for layer, h in enumerate(self.states):
            self.result.last_h[layer] = h


class BackwardLayers(ABC):
    """Layers of a backward pass, last step first.

    Args:
        problem: Call.
        dothers: (N, B, H), gradients of the last states beside h; overwritten by those of the states before the steps
            that have run.
        reads: Memory of the gradient of each layer's input, (B, H) each.

    Attributes:
        do: Gradient of o before the last step that has run, (B, H).
    """

    def __init__(self, problem: AttentionalProblem, dothers: Tensor, reads: list[Tensor]) -> None:
        self.problem, self.dothers, self.reads = problem, dothers, reads
        self.do = reads[0]

    @property
    def extra(self) -> Sequence[Tensor]:
        """Gradients of the layers' further weights, layer by layer, in the accumulate type."""
        return ()

    def step(self, block: Any, number: int, position: int, dtop: Tensor) -> None:
        """Propagates a step through the stack, given the gradient (B, H) of the stack's output."""
        above, keep = dtop, None
        for layer in reversed(range(len(self.reads))):
            self._cell(block, layer, number, above, keep)
            above, keep = self.problem.below(layer, position, self.reads[layer], above)

    @abstractmethod
    def _cell(self, block: Any, layer: int, number: int, above: Tensor, keep: Tensor | None) -> None:
        """Runs a layer backward, given the gradient of its output, to which dropout by ``keep`` is applied."""
