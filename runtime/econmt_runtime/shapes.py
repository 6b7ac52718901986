"""Checks that the arrays fit one another and model.json; the C library reads without bounds checks.

N outputs and K inputs of a product, V words of a vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from econmt_runtime.arrays import FILLED, GROUP, LANES, Arrays
from econmt_runtime.cells import CELLS

COVERAGES = ("none", "count", "fertility", "tanh", "sigmoid", "relu", "softrelu", "gru")
"""Updates of the coverage in the order of kernels.h."""
VECTORS = (
    *("score", "gain", "shift", "vectors", "context_bias", "output_gain", "output_shift"),
    *("coverage_key", "coverage_attention", "coverage_recurrent"),
)
"""Arrays of a decoder step that are no products, by their names in kernels.h."""


def check_shapes(arrays: Arrays, config: dict[str, Any], source_words: int, target_words: int) -> None:
    """Compares every array of a model with the model's sizes and those of its vocabularies.

    Raises:
        ValueError: If an array does not fit; the message names it.
        KeyError: If an array, or a key of the ``config``, is missing.
    """
    checker = _Arrays(arrays)
    words, embedded = checker.table("source")
    table_words, target = (words, embedded) if config["one_table"] else checker.table("target")
    outputs, read = (table_words, target) if config["tied_output"] else checker.table("output")
    if table_words != outputs:
        raise ValueError(f"'output.weight' has {outputs} words instead of {table_words}")
    for name, count, expected in (("source", words, source_words), ("output", outputs, target_words)):
        if count != expected:
            raise ValueError(f"'{name}.weight' has {count} words, but the vocabulary has {expected}")
    checker.vector("output.bias", outputs)
    encoded = _check_encoder(checker, config["encoder"], embedded)
    _check_decoder(checker, config, encoded, target, read)
    if "lexicon" in arrays:
        lexicon = arrays["lexicon"]
        kind = np.int16 if lexicon.dtype == np.int16 else np.int32
        checker.expect("lexicon", (words, *lexicon.shape[1:2]), kind)
        if lexicon.size and not 0 <= int(lexicon.min()) <= int(lexicon.max()) < outputs:
            raise ValueError("'lexicon' contains word ids outside of the vocabulary")


def _check_encoder(checker: _Arrays, config: dict[str, Any], width: int) -> int:
    """Checks the encoder's arrays and returns the size of its outputs."""
    cell = CELLS[config["cell"]]
    for layer, ways in enumerate(config["directions"]):
        below, width = width, 0
        for way in range(ways):
            name = f"encoder.{layer}.{way}"
            size = checker.product(f"{name}.read", below) // cell.gates
            checker.product(f"{name}.read", below, cell.gates * size)
            if cell.hidden:
                checker.product(f"{name}.recur", size, cell.gates * size)
            if cell.vectors:
                checker.vector(f"{name}.vectors", cell.vectors * size)
            width += size
        if config["residual"] and layer > 0 and width != below:
            raise ValueError(f"'encoder.{layer}' has {width} outputs instead of {below}")
    return width


def _check_decoder(checker: _Arrays, config: dict[str, Any], encoded: int, embedded: int, read: int) -> None:
    """Checks the arrays of attention, decoder and output layer for encoder outputs of size ``encoded``."""
    decoder, arrays = config["decoder"], checker.arrays
    size, asked, cell = decoder["size"], decoder["asked"], CELLS[decoder["cell"]]
    if "start.weight" in arrays:
        checker.product("start", encoded, decoder["layers"] * cell.states * size)
        if "start.gain" in arrays or "start.shift" in arrays:
            for name in ("start.gain", "start.shift"):
                checker.expect(name, (decoder["layers"] * cell.states, size))
    keys = checker.product("keys", encoded) if "keys.weight" in arrays else encoded
    for name, (inputs, outputs) in decoder_products(arrays, decoder, encoded, embedded).items():
        checker.product(name, inputs, outputs)
    queries = asked or (checker.product("query", size) if "query.weight" in arrays else size)
    if queries != keys:
        raise ValueError(f"queries have {queries} values, keys {keys}")
    if cell.vectors:
        checker.vector("vectors", decoder["layers"] * cell.vectors * size)
    for names, width in (
        (("score",), keys),
        (("gain", "shift"), keys),
        (("output_gain", "output_shift"), size),
    ):
        for name in names if any(name in arrays for name in names) else ():
            checker.vector(name, width)
    width, parts = decoder["width"], coverage_parts(decoder)
    if (width > 0) != (decoder["coverage"] != "none") or (width > 0 and "score" not in arrays):
        raise ValueError(
            f"coverage {decoder['coverage']} of {width} values is not possible with these scores"
        )
    if width:
        checker.expect("coverage_key", (width, keys))
    if parts:
        checker.vector("coverage_attention", parts)
        checker.expect("coverage_recurrent", (parts, width))
    if "context_bias" in arrays:
        checker.vector("context_bias", size)
    output_size = checker.product("readout", size) if "readout.weight" in arrays else size
    if output_size != read:
        raise ValueError(f"the output layer expects {read} inputs but gets {output_size}")


def coverage_parts(decoder: dict[str, Any]) -> int:
    """Returns the values that state and position add in the update of the coverage; 0 for sums of attention."""
    kind = COVERAGES.index(decoder["coverage"])
    return 0 if kind < 3 else int(decoder["width"]) * (3 if decoder["coverage"] == "gru" else 1)


def reads_contexts(decoder: dict[str, Any]) -> bool:
    """Returns True if the bottom layer attends and the upper layers read its context."""
    return not decoder["fed"] and decoder["layers"] > 1


def decoder_products(
    arrays: Arrays, decoder: dict[str, Any], encoded: int, embedded: int
) -> dict[str, tuple[int, int | None]]:
    """Returns K and N, if it is given, of the decoder's products by name, without the output layer.

    Args:
        arrays: Arrays of the model, which decide what it has.
        decoder: Section of model.json.
        encoded: Values of an encoder output. embedded: Values of a target embedding.
    """
    size, cell, contexts = decoder["size"], CELLS[decoder["cell"]], reads_contexts(decoder)
    gates, combined = cell.gates * size, 2 * size if "context_bias" in arrays else size
    products: dict[str, tuple[int, int | None]] = {
        "words": (embedded, gates),
        "own": (size, decoder["asked"] + combined),
        "values": (encoded, combined),
    }
    if contexts and "query.weight" in arrays:
        products["query"] = size, None
    if parts := coverage_parts(decoder):
        products["coverage"] = size, parts
    if parts or decoder["coverage"] == "fertility":
        products["coverage_shares"] = encoded, parts or 1
    for layer in range(decoder["layers"]):
        inputs = size if layer or decoder["fed"] else 0
        inputs += (encoded if layer and contexts else 0) + (size if cell.adds else 0)
        if inputs:
            products[f"layers.{layer}.read"] = inputs, gates
        if cell.hidden and not cell.adds:
            products[f"layers.{layer}.recur"] = size, gates
    return products


class _Arrays:
    """Arrays of a model, with a check for each kind of array."""

    def __init__(self, arrays: Arrays) -> None:
        self.arrays = arrays

    def expect(self, name: str, shape: tuple[int, ...], kind: npt.DTypeLike = np.float32) -> None:
        """Raises ValueError if an array has another shape or type, or a value that has no negative in its type."""
        array = self.arrays[name]
        if array.shape != shape or array.dtype != kind:
            raise ValueError(f"'{name}' is {array.dtype} {array.shape}, expected {np.dtype(kind)} {shape}")
        if array.dtype == np.int8 and array.size and int(array.min()) < -127:
            raise ValueError(f"'{name}' contains -128, which not all processors multiply exactly")

    def vector(self, name: str, size: int) -> None:
        """Raises ValueError if an array is not a float32 vector of this size."""
        self.expect(name, (size,))

    def table(self, name: str) -> tuple[int, int]:
        """Returns V and K of an embedding table after checking its arrays."""
        weight = self.arrays[f"{name}.weight"]
        if weight.ndim != 2:
            raise ValueError(f"'{name}.weight' has shape {weight.shape}, expected two dimensions")
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
