"""One step of the cells that a runtime knows: LSTM, GRU and SSRU; their mathematics is in econmt_ops, folder by folder.

R rows, H hidden size, G gates of a cell.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from econmt_runtime import library
from econmt_runtime.arrays import Arrays, RuntimeProduct
from econmt_runtime.library import Floats

States = tuple[Floats, ...]


def sigmoid(x: Floats) -> Floats:
    """1 / (1 + exp(-x)), without overflow."""
    made: Floats = 0.5 * (1.0 + np.tanh(0.5 * x))
    return made.astype(np.float32, copy=False)


class RuntimeLayer(ABC):
    """A layer of a cell.

    Attributes:
        read: the product of what the layer reads, with its bias. gates: G. states: how many it hands on.
    """

    gates = 2
    states = 1

    def __init__(self, arrays: Arrays, name: str) -> None:
        self.read = RuntimeProduct.named(arrays, f"{name}.read")

    @abstractmethod
    def step(self, share: Floats, states: States) -> tuple[Floats, States]:
        """The output (R, H) and the states after a step.

        Args:
            share: (R, G H) what :attr:`read` gave; may be overwritten. states: before, (R, H) each.
        """


class RuntimeLSTM(RuntimeLayer):
    """States h and c."""

    gates = 4
    states = 2

    def __init__(self, arrays: Arrays, name: str) -> None:
        super().__init__(arrays, name)
        self.recur = RuntimeProduct.named(arrays, f"{name}.recur")

    def step(self, share: Floats, states: States) -> tuple[Floats, States]:
        """See :class:`RuntimeLayer`."""
        return self.advance(self.recur(states[0], share), states[1])

    def advance(self, gates: Floats, c: Floats) -> tuple[Floats, States]:
        """The same from the sum of all products (R, 4H) and c."""
        h, after = library.lstm_step(gates, c)
        return h, (h, after)


class RuntimeGRU(RuntimeLayer):
    """State h."""

    gates = 3

    def __init__(self, arrays: Arrays, name: str) -> None:
        super().__init__(arrays, name)
        self.recur = RuntimeProduct.named(arrays, f"{name}.recur")

    def step(self, share: Floats, states: States) -> tuple[Floats, States]:
        """See :class:`RuntimeLayer`."""
        (h,) = states
        size = h.shape[1]
        other = self.recur(h)
        gates = sigmoid(share[:, : 2 * size] + other[:, : 2 * size])
        r, z = gates[:, :size], gates[:, size:]
        n = np.tanh(share[:, 2 * size :] + r * other[:, 2 * size :])
        made = n + z * (h - n)
        return made, (made,)


class RuntimeSSRU(RuntimeLayer):
    """State c."""

    def step(self, share: Floats, states: States) -> tuple[Floats, States]:
        """See :class:`RuntimeLayer`."""
        (c,) = states
        size = c.shape[1]
        u, f = share[:, :size], sigmoid(share[:, size:])
        after = u + f * (c - u)
        return np.maximum(after, 0.0), (after,)


CELLS: dict[str, type[RuntimeLayer]] = {"lstm": RuntimeLSTM, "gru": RuntimeGRU, "ssru": RuntimeSSRU}


def stack(cell: str, arrays: Arrays, names: Sequence[str]) -> list[RuntimeLayer]:
    """Layers of a cell by their names."""
    return [CELLS[cell](arrays, name) for name in names]
