"""Do the arrays fit one another and model.json? C takes pointers, and would read beyond the end of those that do not.

N outputs and K inputs of a product, V words of a vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from econmt_runtime.arrays import FILLED, GROUP, LANES, Arrays
from econmt_runtime.cells import CELLS


class ShapeError(ValueError):
    """An array has another shape or type than the rest asks for."""


def check_shapes(arrays: Arrays, config: dict[str, Any], source_words: int, target_words: int) -> None:
    """Compares every array that a model reads with the model's shape and the sizes of its vocabularies.

    Raises:
        ShapeError: naming an array. KeyError: naming an array, or a key of the ``config``, that is missing.
    """
    found = _Arrays(arrays)
    words, embedded = found.table("source")
    own, target = (words, embedded) if config["one_table"] else found.table("target")
    outputs, read = (own, target) if config["tied_output"] else found.table("output")
    if own != outputs:
        raise ShapeError(f"'output.weight' is of {outputs} words, not of {own}")
    for name, have, wanted in (("source", words, source_words), ("output", outputs, target_words)):
        if have != wanted:
            raise ShapeError(f"'{name}.weight' is of {have} words, and the vocabulary has {wanted}")
    found.vector("output.bias", outputs)
    encoded = _check_encoder(found, config["encoder"], embedded)
    _check_decoder(found, config, encoded, target, read)
    if "lexicon" in arrays:
        lexicon = arrays["lexicon"]
        found.expect("lexicon", (words, *lexicon.shape[1:2]), np.int32)
        if lexicon.size and not 0 <= int(lexicon.min()) <= int(lexicon.max()) < outputs:
            raise ShapeError("'lexicon' names words that there are not")


def _check_encoder(found: _Arrays, config: dict[str, Any], width: int) -> int:
    """The size of the encoder's outputs, of what it reads."""
    kind = CELLS[config["cell"]]
    for layer, ways in enumerate(config["directions"]):
        below, width = width, 0
        for way in range(ways):
            name = f"encoder.{layer}.{way}"
            gates = found.product(f"{name}.read", below)
            size = gates // kind.gates
            found.layer(name, config["cell"], below, size, size)
            width += size
        if config["residual"] and layer > 0 and width != below:
            raise ShapeError(f"'encoder.{layer}' gives {width} values, not {below}")
    return width


def _check_decoder(found: _Arrays, config: dict[str, Any], encoded: int, embedded: int, read: int) -> None:
    """Everything behind the encoder, whose outputs are ``encoded`` wide; the output layer reads ``read`` values."""
    decoder = config["decoder"]
    cell, size, layers, asked = decoder["cell"], decoder["size"], decoder["layers"], decoder["asked"]
    feeding = decoder["feeding"]
    found.layer("decoder.0", cell, embedded, size, 2 * size if feeding else size)
    for layer in range(1, layers):
        found.layer(f"decoder.{layer}", cell, size if feeding else size + encoded, size, size)
    if "start.weight" in found.arrays:
        found.product("start", encoded, layers * CELLS[cell].states * size)
    keys = found.product("attention.key", encoded) if "attention.key.weight" in found.arrays else encoded
    queries = asked or size
    if layers > 1 and not feeding:
        queries = found.product("query", size) if "query.weight" in found.arrays else size
    if asked not in (0, queries) or asked < 0:
        raise ShapeError(f"'own' gives {asked} values of queries, not {queries}")
    if queries != keys:
        raise ShapeError(f"queries have {queries} values, keys {keys}")
    for name in ("score", *(("gain", "shift") if config["attention"]["norm"] else ())):
        if name != "score" or f"attention.{name}" in found.arrays:
            found.vector(f"attention.{name}", keys)
    found.product("own", size, asked + size)
    found.product("values", encoded, size)
    made = found.product("readout", size) if "readout.weight" in found.arrays else size
    if made != read:
        raise ShapeError(f"the output layer reads {read} values and gets {made}")


class _Arrays:
    """Arrays that are looked at one by one."""

    def __init__(self, arrays: Arrays) -> None:
        self.arrays = arrays

    def expect(self, name: str, shape: tuple[int, ...], kind: npt.DTypeLike = np.float32) -> None:
        """Raises ShapeError if an array has another shape or type."""
        found = self.arrays[name]
        if found.shape != shape or found.dtype != kind:
            raise ShapeError(f"'{name}' is {found.dtype} {found.shape}, not {np.dtype(kind)} {shape}")

    def vector(self, name: str, size: int) -> None:
        """The same of a vector of float32."""
        self.expect(name, (size,))

    def table(self, name: str) -> tuple[int, int]:
        """V and K of the vectors of words."""
        weight = self.arrays[f"{name}.weight"]
        if weight.ndim != 2:
            raise ShapeError(f"'{name}.weight' has shape {weight.shape}, not two sizes")
        if f"{name}.steps" in self.arrays:
            self.vector(f"{name}.steps", len(weight))
        self.expect(f"{name}.weight", weight.shape, np.int8 if f"{name}.steps" in self.arrays else np.float32)
        return len(weight), int(weight.shape[1])

    def product(self, name: str, inputs: int, outputs: int | None = None) -> int:
        """N of a product, which must be ``outputs`` if they are given; K must be ``inputs``, of 8 bits as filled up."""
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

    def layer(self, name: str, cell: str, inputs: int, size: int, recurrent: int) -> None:
        """A layer's products, of what it reads and of its ``recurrent`` values."""
        gates = CELLS[cell].gates * size
        self.product(f"{name}.read", inputs, gates)
        if cell != "ssru":
            self.product(f"{name}.recur", recurrent, gates)
