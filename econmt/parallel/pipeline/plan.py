"""A training step as a graph of parts on several ranks: what each rank runs, sends and receives, in which order.

A recurrent stack is divided over time as well as over layers: layer l works on a chunk of time steps while layer l + 1
works on the chunk before it. Each layer at each chunk is a *part*; the values that other parts read, including
recurrent states, are its outputs. Every rank lists the same parts in the same order, runs its own, and exchanges with
the others exactly the values that their parts read; the backward pass goes the same way in reverse.

All ranks walk through all parts in one order, in which a part follows those that it reads, and an output is sent as
soon as its part has run. So both ends of the earliest unfinished transfer always wait for it, and there is no deadlock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from econmt.parallel.groups import Pending
from econmt.parallel.pipeline.stages import Stages
from econmt_ops.core.scopes import layer

Output = tuple[int, int]
"""Number of a part, and index of one of its outputs."""


class Like(NamedTuple):
    """Shape and type of a tensor that is received."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class PipelinePart(NamedTuple):
    """Piece of a forward pass that one rank runs without interruption.

    Attributes:
        run: Computes the outputs from the inputs; gradients of the rank's parameters that it uses are accumulated.
        outputs: Shapes and types of the outputs; required for those that another rank reads.
        layer: Layer of the memory ledger that its allocations are counted for.
        after: Called after its backward pass, and so after that of all parts listed behind it.
    """

    rank: int
    run: Callable[..., Sequence[Tensor]]
    inputs: tuple[Output, ...] = ()
    outputs: tuple[Like, ...] = ()
    layer: str = "other"
    after: Callable[[], None] | None = None


class Action(NamedTuple):
    """One action of a rank.

    Attributes:
        kind: Run a part, or send or receive one of its outputs (in the backward pass, the output's gradient).
        output: Part and index of the output; the index is 0 for a run.
        peer: The other rank of a transfer.
    """

    kind: Literal["run", "send", "receive"]
    output: Output
    peer: int = -1


def actions_of(parts: Sequence[PipelinePart], rank: int, *, backward: bool = False) -> list[Action]:
    """Returns the actions of a rank in the forward pass, or in the backward pass, which sends gradients the other way.

    An output travels once to each other rank: to the first part there that reads it.
    """
    travelling: dict[int, list[tuple[Output, int]]] = {}
    arrived: set[tuple[Output, int]] = set()
    for number, part in enumerate(parts):
        for output in part.inputs:
            if part.rank != parts[output[0]].rank and (output, part.rank) not in arrived:
                arrived.add((output, part.rank))
                travelling.setdefault(number if backward else output[0], []).append((output, number))
    actions = []
    for number in reversed(range(len(parts))) if backward else range(len(parts)):
        if parts[number].rank == rank:
            actions.append(Action("run", (number, 0)))
        for output, reader in sorted(travelling.get(number, ())):
            ends = parts[output[0]].rank, parts[reader].rank
            source, destination = reversed(ends) if backward else ends
            if rank == source:
                actions.append(Action("send", output, destination))
            elif rank == destination:
                actions.append(Action("receive", output, source))
    return actions


def early(actions: Sequence[Action]) -> list[Action]:
    """Moves each receive as early as possible, so that transfers overlap computation.

    Transfers between two ranks keep their order, since both directions may share a queue. On a GPU this would be
    harmful: a receive is a kernel that occupies the GPU while it waits, and a kernel that needs the whole GPU at once,
    such as an LSTM's recurrence in one launch, could not start.
    """
    reordered: list[Action] = []
    for action in actions:
        position = len(reordered)
        if action.kind == "receive":
            while position and reordered[position - 1].peer != action.peer:
                position -= 1
        reordered.insert(position, action)
    return reordered


class Boundary:
    """Boundary between two autograd graphs, which may be on different ranks.

    It makes a value of one graph an input of the other, and stores its ``gradient`` to be passed back.

    A leaf tensor would do the same, but would copy each gradient whose memory layout differs from its value's.
    """

    def __init__(self) -> None:
        self.gradient: Tensor | None = None

    def cross(self, value: Tensor) -> Tensor:
        """Returns the value as an input of a new graph."""
        crossed: Tensor = _Cross.apply(value.new_empty(0).requires_grad_(), value.detach(), self)  # type: ignore[no-untyped-call]
        return crossed


class _Cross(torch.autograd.Function):
    """Identity function that stores its gradient; the first argument makes autograd call the backward pass."""

    @staticmethod
    def forward(ctx: Any, _anchor: Tensor, value: Tensor, boundary: Boundary) -> Tensor:
        ctx.boundary = boundary
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.boundary.gradient = gradient
        return None, None, None


class Walk:
    """One forward and one backward pass of this rank's parts.

    No autograd graph spans two parts: each has its own, from its inputs to its outputs, and its backward pass runs as
    soon as the gradients of its outputs are complete. ``parts`` has those of all ranks, each after those that it reads.
    """

    def __init__(
        self, parts: Sequence[PipelinePart], rank: int, stages: Stages, device: torch.device
    ) -> None:
        self._parts = parts
        self._rank = rank
        self._stages = stages
        self._device = device
        self._values: dict[Output, Tensor] = {}
        self._inputs: dict[int, list[Boundary]] = {}
        self._gradients: dict[Output, Tensor] = {}
        self._receiving: dict[Output, list[tuple[Pending, Tensor]]] = {}
        self._sending: list[tuple[Pending, Tensor]] = []

    def forward(self, wanted: Sequence[Output] = ()) -> list[Tensor]:
        """Runs this rank's parts; returns those of the ``wanted`` outputs that they computed."""
        for kind, output, peer in self._order(backward=False):
            if kind == "send":
                self._send(self._values[output].detach(), peer)
            elif kind == "receive":
                self._receive(output, peer)
            else:
                self._run(output[0])
        return [self._values[output] for output in wanted if self._parts[output[0]].rank == self._rank]

    def backward(self, gradients: Mapping[Output, Tensor]) -> None:
        """Adds the gradients of this rank's parameters to the existing ones.

        ``gradients`` of outputs of this rank's parts are added to those from parts that read them.
        """
        self._gradients.update(gradients)
        for kind, output, peer in self._order(backward=True):
            if kind == "send":
                self._send(self._gradient_of_copy(output), peer)
            elif kind == "receive":
                self._receive(output, peer)
            else:
                self._run_back(output[0])
        for pending, _ in self._sending:
            pending.wait()
        self._sending.clear()

    def _order(self, *, backward: bool) -> list[Action]:
        actions = actions_of(self._parts, self._rank, backward=backward)
        return actions if self._device.type == "cuda" else early(actions)

    def _run(self, number: int) -> None:
        part = self._parts[number]
        inputs, boundaries = [], []
        for output in part.inputs:
            for pending, buffer in self._receiving.pop(output, ()):
                pending.wait()
                self._values[output] = buffer
            boundaries.append(Boundary())
            inputs.append(boundaries[-1].cross(self._values[output]))
        self._inputs[number] = boundaries
        with layer(part.layer):
            outputs = part.run(*inputs)
        for index, value in enumerate(outputs):
            self._values[number, index] = value

    def _run_back(self, number: int) -> None:
        outputs, gradients = [], []
        for index in range(self._count(number)):
            output = number, index
            for pending, buffer in self._receiving.pop(output, ()):
                pending.wait()
                self._add(output, buffer)
            value, gradient = self._values.pop(output), self._gradients.pop(output, None)
            if gradient is not None and value.requires_grad:
                outputs.append(value)
                gradients.append(gradient)
        if outputs:
            torch.autograd.backward(outputs, gradients)
        for output, boundary in zip(self._parts[number].inputs, self._inputs.pop(number), strict=True):
            if boundary.gradient is not None:
                self._add(output, boundary.gradient)
        part = self._parts[number]
        if part.after is not None:
            with layer(part.layer):
                part.after()

    def _count(self, number: int) -> int:
        index = 0
        while (number, index) in self._values:
            index += 1
        return index

    def _add(self, output: Output, gradient: Tensor) -> None:
        known = self._gradients.get(output)
        self._gradients[output] = gradient if known is None else known + gradient

    def _gradient_of_copy(self, output: Output) -> Tensor:
        """Returns the gradient of another rank's output, and drops the local copy of its value."""
        value, gradient = self._values.pop(output), self._gradients.pop(output, None)
        return torch.zeros_like(value) if gradient is None else gradient

    def _send(self, tensor: Tensor, peer: int) -> None:
        message = tensor.contiguous()
        self._sending.append((self._stages.send(message, peer), message))

    def _receive(self, output: Output, peer: int) -> None:
        like = self._parts[output[0]].outputs[output[1]]
        buffer = torch.empty(like.shape, dtype=like.dtype, device=self._device)
        self._receiving.setdefault(output, []).append((self._stages.receive(buffer, peer), buffer))
