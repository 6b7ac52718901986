"""One step of each supported cell: LSTM, GRU and SSRU; econmt_ops documents their equations.

R rows, H hidden size, G gates of a cell.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from econmt_runtime import library
from econmt_runtime.arrays import Arrays, RuntimeProduct
from econmt_runtime.library import Floats, Ids

States = tuple[Floats, ...]


class RuntimeLayer:
    """Layer of a cell.

    Attributes:
        read: Product with the layer's input, including its bias; None in upper LSTM layers of decoders.
        recur: Product with the state h, of cells that have one; in those layers, of the input and h together.
        gates: G.
        states: Number of states.
        number: Number of the cell in the C library.
    """

    read: RuntimeProduct | None = None
    recur: RuntimeProduct | None = None
    gates = 2
    states = 1
    number = 2

    def __init__(self, arrays: Arrays, name: str) -> None:
        if f"{name}.read.weight" in arrays:
            self.read = RuntimeProduct.named(arrays, f"{name}.read")
        if f"{name}.recur.weight" in arrays:
            self.recur = RuntimeProduct.named(arrays, f"{name}.recur")

    def run(
        self, table: Floats, places: Ids, lengths: Ids, outputs: Floats, last: Floats, *, backwards: bool
    ) -> None:
        """Runs all steps of an encoder layer; see `library.layer_sequence`."""
        recurrent = None if self.recur is None else self.recur.structure(outputs.shape[2])
        library.layer_sequence(
            self.number, recurrent, table, places, lengths, outputs, last, backwards=backwards
        )


class RuntimeDecoderLayer(RuntimeLayer, ABC):
    """Layer of a cell that decoders may have."""

    @abstractmethod
    def step(self, share: Floats, states: States) -> tuple[Floats, States]:
        """Returns the output (R, H) and the states after a step.

        Args:
            share: Result of :attr:`read`, (R, G H); may be overwritten. states: States before the step, (R, H) each.
        """

    def upper_step(self, read: Floats, states: States) -> tuple[Floats, States]:
        """Computes :meth:`step` of an upper layer from its input (R, .)."""
        assert self.read is not None
        return self.step(self.read(read), states)


class RuntimeLSTM(RuntimeDecoderLayer):
    """LSTM layer with the states h and c."""

    gates = 4
    states = 2
    number = 0

    def step(self, share: Floats, states: States) -> tuple[Floats, States]:
        """See :class:`RuntimeDecoderLayer`."""
        return self.advance(states[0], share, states[1])

    def upper_step(self, read: Floats, states: States) -> tuple[Floats, States]:
        """See :class:`RuntimeDecoderLayer`."""
        return self.advance(np.concatenate([read, states[0]], 1), None, states[1])

    def advance(self, h: Floats, share: Floats | None, c: Floats) -> tuple[Floats, States]:
        """Computes the step from what the recurrent product reads, the share (R, 4H) of other inputs, and c."""
        assert self.recur is not None
        h, after = library.lstm_step(self.recur(h, share), c)
        return h, (h, after)


class RuntimeGRU(RuntimeLayer):
    """GRU layer with the state h."""

    gates = 3
    number = 1


class RuntimeSSRU(RuntimeDecoderLayer):
    """SSRU layer with the state c."""

    def step(self, share: Floats, states: States) -> tuple[Floats, States]:
        """See :class:`RuntimeDecoderLayer`."""
        h, after = library.ssru_step(share, states[0])
        return h, (after,)


CELLS: dict[str, type[RuntimeLayer]] = {"lstm": RuntimeLSTM, "gru": RuntimeGRU, "ssru": RuntimeSSRU}
DECODER_CELLS: dict[str, type[RuntimeDecoderLayer]] = {"lstm": RuntimeLSTM, "ssru": RuntimeSSRU}
