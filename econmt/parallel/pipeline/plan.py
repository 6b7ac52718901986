"""A training step as a graph of parts on several ranks: what each rank runs, sends and receives, and in which order.

A recurrent stack is divided over time as well as over layers: layer l works at a chunk of time steps while layer l + 1
works at the chunk before it. Each layer at each chunk is a *part*; what it gives to other parts, the carried state
among it, are its outputs. Every rank lists the same parts in the same order, runs its own, and exchanges with the
others exactly what their parts need; the backward pass takes the same way back.

All ranks walk one order of all parts, in which a part comes after those that it needs, and an output travels as soon as
its part has run. So the earliest transfer that is not done yet always has both its ends waiting for it, and none can
wait for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from econmt.parallel.groups import Pending
from econmt.parallel.pipeline.boundary import Boundary
from econmt_ops.core.scopes import layer

Output = tuple[int, int]
"""Index of a part, and of one of its outputs."""


class Like(NamedTuple):
    """Shape and type of a transferred tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class PipelinePart(NamedTuple):
    """A piece of a forward pass that one rank runs at once.

    Attributes:
        rank: whose it is.
        run: gives the outputs from the inputs; it may use the rank's parameters, whose gradients add up.
        inputs: outputs of parts before it.
        outputs: what its outputs look like; needed of those that another rank reads.
        layer: the ledger's, which has what it makes.
        after: what is done when the way back has come to it, and so has passed all parts that are listed behind it.
    """

    rank: int
    run: Callable[..., Sequence[Tensor]]
    inputs: tuple[Output, ...] = ()
    outputs: tuple[Like, ...] = ()
    layer: str = "other"
    after: Callable[[], None] | None = None


class Exchange(Protocol):
    """Transfers of tensors between the ranks of a pipeline."""

    def send(self, tensor: Tensor, rank: int) -> Pending:
        """Begins to send; the tensor must stay as it is until that is done."""

    def receive(self, tensor: Tensor, rank: int) -> Pending:
        """Begins to fill the tensor with what the rank sends."""


class Action(NamedTuple):
    """Something that a rank does.

    Attributes:
        kind: run a part, or send or receive one of its outputs (or, on the way back, its gradient).
        output: the part and the output, which is 0 where a part runs.
        peer: the other rank of a transfer.
    """

    kind: Literal["run", "send", "receive"]
    output: Output
    peer: int = -1


def readers(parts: Sequence[PipelinePart]) -> dict[Output, list[int]]:
    """By output the first part of each other rank that reads it, by rising number."""
    found: dict[Output, list[int]] = {}
    for number, part in enumerate(parts):
        for output in part.inputs:
            home = parts[output[0]].rank
            there = found.setdefault(output, [])
            if part.rank != home and part.rank not in [parts[reader].rank for reader in there]:
                there.append(number)
    return {output: there for output, there in found.items() if there}


def forward_actions(parts: Sequence[PipelinePart], rank: int) -> list[Action]:
    """Returns the actions of a rank in the forward pass."""
    crossing = readers(parts)
    actions = []
    for number, part in enumerate(parts):
        if part.rank == rank:
            actions.append(Action("run", (number, 0)))
        for output in sorted(each for each in crossing if each[0] == number):
            for reader in crossing[output]:
                actions += _transfer(output, part.rank, parts[reader].rank, rank)
    return actions


def backward_actions(parts: Sequence[PipelinePart], rank: int) -> list[Action]:
    """Returns the actions of a rank in the backward pass, in which gradients travel against the outputs."""
    returned: dict[int, list[Output]] = {}
    for output, numbers in readers(parts).items():
        for number in numbers:
            returned.setdefault(number, []).append(output)
    actions = []
    for number in range(len(parts) - 1, -1, -1):
        part = parts[number]
        if part.rank == rank:
            actions.append(Action("run", (number, 0)))
        for output in sorted(returned.get(number, ())):
            actions += _transfer(output, part.rank, parts[output[0]].rank, rank)
    return actions


def _transfer(output: Output, source: int, destination: int, rank: int) -> list[Action]:
    if rank == source:
        return [Action("send", output, destination)]
    return [Action("receive", output, source)] if rank == destination else []


def early(actions: Sequence[Action]) -> list[Action]:
    """Moves every receive to the earliest possible moment, so that transfers overlap with computation.

    The transfers between two ranks stay in their order, since these may have one queue for both directions. On a GPU it
    is better not done: a receipt is a kernel that waits there, and one that needs the whole GPU at once, as an LSTM's
    walk in one launch, would not begin before.
    """
    found: list[Action] = []
    for action in actions:
        place = len(found)
        if action.kind == "receive":
            while place and found[place - 1].peer != action.peer:
                place -= 1
        found.insert(place, action)
    return found


class Walk:
    """One forward and one backward pass of this rank's parts.

    Between two parts no graph of autograd reaches: each has a graph of its own, from its inputs to its outputs, and is
    walked back as soon as the gradients of its outputs are there.

    Args:
        parts: of all ranks, in an order in which each comes after those that it reads.
        rank: this one.
        exchange: with the others.
        device: of the tensors.
    """

    def __init__(
        self, parts: Sequence[PipelinePart], rank: int, exchange: Exchange, device: torch.device
    ) -> None:
        self._parts = parts
        self._rank = rank
        self._exchange = exchange
        self._device = device
        self._values: dict[Output, Tensor] = {}
        self._inputs: dict[int, list[Boundary]] = {}
        self._gradients: dict[Output, Tensor] = {}
        self._receiving: dict[Output, list[tuple[Pending, Tensor]]] = {}
        self._sending: list[tuple[Pending, Tensor]] = []

    def forward(self, wanted: Sequence[Output] = ()) -> list[Tensor]:
        """Runs every part; returns, of the ``wanted`` outputs, those of this rank's parts."""
        for kind, output, peer in self._order(forward_actions(self._parts, self._rank)):
            if kind == "send":
                self._send(self._values[output].detach(), peer)
            elif kind == "receive":
                self._receive(output, peer)
            else:
                self._run(output[0])
        return [self._values[output] for output in wanted if self._parts[output[0]].rank == self._rank]

    def backward(self, gradients: Mapping[Output, Tensor]) -> None:
        """Adds the gradients of this rank's parameters to those that are there.

        Args:
            gradients: of outputs of this rank's parts, beside those that come from parts that read them.
        """
        self._gradients.update(gradients)
        for kind, output, peer in self._order(backward_actions(self._parts, self._rank)):
            if kind == "send":
                self._send(self._gradient_of_copy(output), peer)
            elif kind == "receive":
                self._receive(output, peer)
            else:
                self._run_back(output[0])
        for pending, _ in self._sending:
            pending.wait()
        self._sending.clear()

    def _order(self, actions: list[Action]) -> list[Action]:
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
        for place, value in enumerate(outputs):
            self._values[number, place] = value

    def _run_back(self, number: int) -> None:
        outputs, gradients = [], []
        for place in range(self._count(number)):
            output = number, place
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
        place = 0
        while (number, place) in self._values:
            place += 1
        return place

    def _add(self, output: Output, gradient: Tensor) -> None:
        there = self._gradients.get(output)
        self._gradients[output] = gradient if there is None else there + gradient

    def _gradient_of_copy(self, output: Output) -> Tensor:
        """The gradient of another rank's output, whose value here is needed no more."""
        value, gradient = self._values.pop(output), self._gradients.pop(output, None)
        return torch.zeros_like(value) if gradient is None else gradient

    def _send(self, tensor: Tensor, peer: int) -> None:
        whole = tensor.contiguous()
        self._sending.append((self._exchange.send(whole, peer), whole))

    def _receive(self, output: Output, peer: int) -> None:
        like = self._parts[output[0]].outputs[output[1]]
        buffer = torch.empty(like.shape, dtype=like.dtype, device=self._device)
        self._receiving.setdefault(output, []).append((self._exchange.receive(buffer, peer), buffer))
