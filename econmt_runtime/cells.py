"""One step of each supported cell: LSTM, GRU and SSRU; econmt_ops documents their equations.

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
    """Computes 1 / (1 + exp(-x)) without overflow."""
    result: Floats = 0.5 * (1.0 + np.tanh(0.5 * x))
    return result.astype(np.float32, copy=False)


class RuntimeLayer(ABC):
    """Layer of a cell.

    Attributes:
        read: Product with the layer's input, including its bias.
        recur: Product with the state h, of cells that have one.
        gates: G.
        states: Number of states.
    """

    recur: RuntimeProduct
    gates = 2
    states = 1

    def __init__(self, arrays: Arrays, name: str) -> None:
        self.read = RuntimeProduct.named(arrays, f"{name}.read")
        if f"{name}.recur.weight" in arrays:
            self.recur = RuntimeProduct.named(arrays, f"{name}.recur")

    @abstractmethod
    def step(self, share: Floats, states: States) -> tuple[Floats, States]:
        """Returns the output (R, H) and the states after a step.

        Args:
            share: Result of :attr:`read`, (R, G H); may be overwritten. states: States before the step, (R, H) each.
        """


class RuntimeLSTM(RuntimeLayer):
    """LSTM layer with the states h and c."""

    gates = 4
    states = 2

    def step(self, share: Floats, states: States) -> tuple[Floats, States]:
        """See :class:`RuntimeLayer`."""
        return self.advance(self.recur(states[0], share), states[1])

    def advance(self, gates: Floats, c: Floats) -> tuple[Floats, States]:
        """Computes the step from the sum of all products (R, 4H) and c."""
        h, after = library.lstm_step(gates, c)
        return h, (h, after)


class RuntimeGRU(RuntimeLayer):
    """GRU layer with the state h."""

    gates = 3

    def step(self, share: Floats, states: States) -> tuple[Floats, States]:
        """See :class:`RuntimeLayer`."""
        (h,) = states
        size = h.shape[1]
        other = self.recur(h)
        gates = sigmoid(share[:, : 2 * size] + other[:, : 2 * size])
        r, z = gates[:, :size], gates[:, size:]
        n = np.tanh(share[:, 2 * size :] + r * other[:, 2 * size :])
        after = n + z * (h - n)
        return after, (after,)


class RuntimeSSRU(RuntimeLayer):
    """SSRU layer with the state c."""

    def step(self, share: Floats, states: States) -> tuple[Floats, States]:
        """See :class:`RuntimeLayer`."""
        (c,) = states
        size = c.shape[1]
        u, f = share[:, :size], sigmoid(share[:, size:])
        after = u + f * (c - u)
        return np.maximum(after, 0.0), (after,)


CELLS: dict[str, type[RuntimeLayer]] = {"lstm": RuntimeLSTM, "gru": RuntimeGRU, "ssru": RuntimeSSRU}


def stack(cell: str, arrays: Arrays, names: Sequence[str]) -> list[RuntimeLayer]:
    """Creates the layers of a cell from their names."""
    return [CELLS[cell](arrays, name) for name in names]
