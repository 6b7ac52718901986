"""Checks that the arrays fit one another and model.json; the C library reads without bounds checks.

N outputs and K inputs of a product, V words of a vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from econmt_runtime.arrays import FILLED, GROUP, LANES, Arrays
from econmt_runtime.cells import CELLS, DECODER_CELLS, RuntimeLayer, RuntimeSSRU


class ShapeError(ValueError):
    """Error of an array whose shape or type does not fit the model."""


def check_shapes(arrays: Arrays, config: dict[str, Any], source_words: int, target_words: int) -> None:
    """Compares every array of a model with the model's sizes and those of its vocabularies.

    Raises:
        ShapeError: If an array does not fit; the message names it.
        KeyError: If an array, or a key of the ``config``, is missing.
    """
    checker = _Arrays(arrays)
    words, embedded = checker.table("source")
    table_words, target = (words, embedded) if config["one_table"] else checker.table("target")
    outputs, read = (table_words, target) if config["tied_output"] else checker.table("output")
    if table_words != outputs:
        raise ShapeError(f"'output.weight' has {outputs} words instead of {table_words}")
    for name, count, expected in (("source", words, source_words), ("output", outputs, target_words)):
        if count != expected:
            raise ShapeError(f"'{name}.weight' has {count} words, but the vocabulary has {expected}")
    checker.vector("output.bias", outputs)
    encoded = _check_encoder(checker, config["encoder"], embedded)
    _check_decoder(checker, config, encoded, target, read)
    if "lexicon" in arrays:
        lexicon = arrays["lexicon"]
        kind = np.int16 if lexicon.dtype == np.int16 else np.int32
        checker.expect("lexicon", (words, *lexicon.shape[1:2]), kind)
        if lexicon.size and not 0 <= int(lexicon.min()) <= int(lexicon.max()) < outputs:
            raise ShapeError("'lexicon' contains word ids outside of the vocabulary")


def _check_encoder(checker: _Arrays, config: dict[str, Any], width: int) -> int:
    """Checks the encoder's arrays and returns the size of its outputs."""
    kind = CELLS[config["cell"]]
    for layer, ways in enumerate(config["directions"]):
        below, width = width, 0
        for way in range(ways):
            name = f"encoder.{layer}.{way}"
            gates = checker.product(f"{name}.read", below)
            size = gates // kind.gates
            checker.layer(name, kind, below, size, size)
            width += size
        if config["residual"] and layer > 0 and width != below:
            raise ShapeError(f"'encoder.{layer}' has {width} outputs instead of {below}")
    return width


def _check_decoder(checker: _Arrays, config: dict[str, Any], encoded: int, embedded: int, read: int) -> None:
    """Checks the arrays of attention, decoder and output layer for encoder outputs of size ``encoded``."""
    decoder = config["decoder"]
    size, layers, asked = decoder["size"], decoder["layers"], decoder["asked"]
    cell, feeding = DECODER_CELLS[decoder["cell"]], decoder["feeding"]
    checker.layer("decoder.0", cell, embedded, size, 2 * size if feeding else size)
    for layer in range(1, layers):
        below = size if feeding else size + encoded
        if cell is RuntimeSSRU:
            checker.layer(f"decoder.{layer}", cell, below, size, size)
        else:
            checker.product(f"decoder.{layer}.recur", below + size, cell.gates * size)
    if "start.weight" in checker.arrays:
        checker.product("start", encoded, layers * cell.states * size)
    keys = checker.product("attention.key", encoded) if "attention.key.weight" in checker.arrays else encoded
    queries = asked or size
    if layers > 1 and not feeding:
        queries = checker.product("query", size) if "query.weight" in checker.arrays else size
    if asked not in (0, queries) or asked < 0:
        raise ShapeError(f"'own' gives {asked} values of queries, not {queries}")
    if queries != keys:
        raise ShapeError(f"queries have {queries} values, keys {keys}")
    for name in ("score", *(("gain", "shift") if config["attention"]["norm"] else ())):
        if name != "score" or f"attention.{name}" in checker.arrays:
            checker.vector(f"attention.{name}", keys)
    checker.product("own", size, asked + size)
    checker.product("values", encoded, size)
    output_size = checker.product("readout", size) if "readout.weight" in checker.arrays else size
    if output_size != read:
        raise ShapeError(f"the output layer expects {read} inputs but gets {output_size}")


class _Arrays:
    """Arrays of a model, with a check for each kind of array."""

    def __init__(self, arrays: Arrays) -> None:
        self.arrays = arrays

    def expect(self, name: str, shape: tuple[int, ...], kind: npt.DTypeLike = np.float32) -> None:
        """Raises ShapeError if an array has another shape or type, or a value that has no negative in its type."""
        array = self.arrays[name]
        if array.shape != shape or array.dtype != kind:
            raise ShapeError(f"'{name}' is {array.dtype} {array.shape}, expected {np.dtype(kind)} {shape}")
        if array.dtype == np.int8 and array.size and int(array.min()) < -127:
            raise ShapeError(f"'{name}' contains -128, which not all processors multiply exactly")

    def vector(self, name: str, size: int) -> None:
        """Raises ShapeError if an array is not a float32 vector of this size."""
        self.expect(name, (size,))

    def table(self, name: str) -> tuple[int, int]:
        """Returns V and K of an embedding table after checking its arrays."""
        weight = self.arrays[f"{name}.weight"]
        if weight.ndim != 2:
            raise ShapeError(f"'{name}.weight' has shape {weight.shape}, expected two dimensions")
        if f"{name}.steps" in self.arrays:
            self.vector(f"{name}.steps", len(weight))
        self.expect(f"{name}.weight", weight.shape, np.int8 if f"{name}.steps" in self.arrays else np.float32)
        return len(weight), int(weight.shape[1])

    def product(self, name: str, inputs: int, outputs: int | None = None) -> int:
        """Checks a product's arrays against K (rounded up in 8 bits) and N, if given; returns N."""
        weight = self.arrays[f"{name}.weight"]
        steps = self.arrays.get(f"{name}.steps")
        if outputs is None:
            outputs = len(weight) if steps is None else len(steps)
        if steps is None:
            self.expect(f"{name}.weight", (outputs, inputs))
        else:
            groups = -(-outputs // LANES)
            shape = groups, (inputs + -inputs % FILLED) // GROUP, LANES, GROUP
            self.expect(f"{name}.weight", shape, np.int8)
            self.vector(f"{name}.steps", outputs)
            self.expect(f"{name}.sums", (groups * LANES,), np.int32)
        if f"{name}.bias" in self.arrays:
            self.vector(f"{name}.bias", outputs)
        return outputs

    def layer(self, name: str, cell: type[RuntimeLayer], inputs: int, size: int, recurrent: int) -> None:
        """Checks a layer's products with its input and with its ``recurrent`` values."""
        gates = cell.gates * size
        self.product(f"{name}.read", inputs, gates)
        if cell is not RuntimeSSRU:
            self.product(f"{name}.recur", recurrent, gates)
