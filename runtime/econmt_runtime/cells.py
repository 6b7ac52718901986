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
        read: Product with the layer's input, including its bias; None in upper LSTM and GRU layers of decoders.
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
    def step(self, share: Floats | None, states: States, fed: Floats | None = None) -> tuple[Floats, States]:
        """Returns the output (R, H) and the states after a step.

        Args:
            share: Result of :attr:`read`, (R, G H); may be overwritten. None in layers without it.
            states: States before the step, (R, H) each.
            fed: Values that the recurrent product reads before h: with input feeding the attentional output before the
                step (R, H), in upper layers their input (R, .); None: it reads h alone.
        """

    def upper_step(self, read: Floats, states: States) -> tuple[Floats, States]:
        """Computes :meth:`step` of an upper layer from its input (R, .)."""
        return self.step(None, states, read)

    def gate_sums(self, share: Floats | None, h: Floats, fed: Floats | None) -> Floats:
        """Returns the sums under the gates (R, G H) of a cell with a recurrent product."""
        assert self.recur is not None
        return self.recur(h if fed is None else np.concatenate([fed, h], 1), share)


class RuntimeLSTM(RuntimeDecoderLayer):
    """LSTM layer with the states h and c."""

    gates = 4
    states = 2
    number = 0

    def step(self, share: Floats | None, states: States, fed: Floats | None = None) -> tuple[Floats, States]:
        """See :class:`RuntimeDecoderLayer`."""
        h, after = library.lstm_step(self.gate_sums(share, states[0], fed), states[1])
        return h, (h, after)


class RuntimeDecoderGRU(RuntimeDecoderLayer):
    """GRU layer of a decoder with the state h; the two products of n are gates of their own."""

    gates = 4

    def step(self, share: Floats | None, states: States, fed: Floats | None = None) -> tuple[Floats, States]:
        """See :class:`RuntimeDecoderLayer`."""
        h = library.gru_step(self.gate_sums(share, states[0], fed), states[0])
        return h, (h,)


class RuntimeGRU(RuntimeLayer):
    """GRU layer of an encoder with the state h."""

    gates = 3
    number = 1


class RuntimeSSRU(RuntimeDecoderLayer):
    """SSRU layer with the state c."""

    def step(self, share: Floats | None, states: States, fed: Floats | None = None) -> tuple[Floats, States]:
        """See :class:`RuntimeDecoderLayer`; the cell has no input feeding."""
        assert share is not None
        assert fed is None
        h, after = library.ssru_step(share, states[0])
        return h, (after,)

    def upper_step(self, read: Floats, states: States) -> tuple[Floats, States]:
        """See :class:`RuntimeDecoderLayer`."""
        assert self.read is not None
        return self.step(self.read(read), states)


CELLS: dict[str, type[RuntimeLayer]] = {"lstm": RuntimeLSTM, "gru": RuntimeGRU, "ssru": RuntimeSSRU}
DECODER_CELLS: dict[str, type[RuntimeDecoderLayer]] = {
    "lstm": RuntimeLSTM,
    "gru": RuntimeDecoderGRU,
    "ssru": RuntimeSSRU,
}
