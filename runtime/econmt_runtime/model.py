"""Translation model: encodes whole sentences and decodes one word at a time.

B sentences, S source positions, R rows (hypotheses), H decoder size, A attention size, E encoder size, V target
vocabulary, N words of an output layer, W width of the coverage.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from econmt_runtime import library
from econmt_runtime.arrays import Arrays, RuntimeProduct, Table
from econmt_runtime.cells import CELLS, RuntimeLayer
from econmt_runtime.library import Floats, Ids
from econmt_runtime.shapes import COVERAGES, VECTORS, decoder_products, reads_contexts

LAYER_NORM_EPSILON = 1e-5
STEP_PRODUCTS = ("words", "own", "query", "readout", "output", "coverage")
"""Products of a decoder step, in the order of kernels.h; here, readout and output are not computed by the library."""


class State(NamedTuple):
    """Decoder state of R rows: the sentence of each (R,), and h and c (layers, R, H), o (R, H), coverage (R, S, W)."""

    owners: Ids
    hidden: Floats
    memory: Floats
    output: Floats
    coverage: Floats

    def select(self, rows: Ids, owners: Ids) -> State:
        """Returns the rows with the given numbers, which may repeat, as rows of the sentences ``owners``."""
        hidden, memory = (np.take(part, rows, 1) for part in (self.hidden, self.memory))
        return State(owners, hidden, memory, self.output[rows], self.coverage[rows])


class OutputLayer(NamedTuple):
    """Output layer for the words that the sentences of a batch may use.

    Attributes:
        product: Returns the logits (R, N) for its inputs (R, .) and the sentences of the rows (R,).
        size: N, the most words that a sentence may use.
        words: Ids (B, N) of each sentence's words, ascending, then zeros, which have logits of -inf. None if all
            sentences may use all words.
    """

    product: Callable[[Floats, Ids], Floats]
    size: int
    words: Ids | None


class RuntimeEncoder:
    """Stacked layers, each in one direction or both.

    Attributes:
        width: E, values of an output.
    """

    def __init__(self, arrays: Arrays, config: dict[str, Any]) -> None:
        self._config = config
        names = [
            [f"encoder.{layer}.{way}" for way in range(ways)]
            for layer, ways in enumerate(config["directions"])
        ]
        self._cell = CELLS[config["cell"]]
        self._layers = [[RuntimeLayer.named(arrays, name, self._cell) for name in ways] for ways in names]
        self.width = sum(layer.read.outputs // self._cell.gates for layer in self._layers[-1])

    def __call__(self, words: Floats, places: Ids, lengths: Ids) -> tuple[Floats, Floats]:
        """Encodes sentences of the given lengths (B,).

        Args:
            words: Embeddings (N, .) of distinct words. places: Number of the word at each position, (S, B).

        Returns:
            Outputs (S, B, E), zero at padded positions, and the last ones (B, E).
        """
        steps, batch = places.shape
        read, outputs, last = words, words, words
        for number, ways in enumerate(self._layers):
            shares = [layer.read(read) for layer in ways]
            sizes = [share.shape[1] // self._cell.gates for share in shares]
            below, outputs = outputs, np.zeros((steps, batch, sum(sizes)), np.float32)
            last = np.empty((batch, sum(sizes)), np.float32)
            for way, (layer, share, size) in enumerate(zip(ways, shares, sizes, strict=True)):
                columns = slice(sum(sizes[:way]), sum(sizes[:way]) + size)
                backwards = way == 1 if len(ways) > 1 else bool(self._config["reverse_input"])
                recurrent = None if layer.recur is None else layer.recur.structure(size)
                library.layer_sequence(
                    self._cell.number, recurrent, layer.vectors, share, places, lengths,
                    outputs[:, :, columns], last[:, columns], backwards=backwards,
                )  # fmt: skip
            if self._config["residual"] and number > 0:
                outputs += below
            read, places = outputs.reshape(steps * batch, -1), np.arange(steps * batch).reshape(steps, batch)
        return outputs, last


class RuntimeModel:
    """Translation model with the weights of an exported folder; the C library computes the steps of its decoder.

    Args:
        arrays: Arrays written by econmt's export. config: Content of the folder's model.json.
    """

    def __init__(self, arrays: Arrays, config: dict[str, Any]) -> None:
        self._decoder: dict[str, Any] = config["decoder"]
        self._source = Table.named(arrays, "source")
        self._target = self._source if config["one_table"] else Table.named(arrays, "target")
        self._encoder = RuntimeEncoder(arrays, config["encoder"])
        self._output = self._target if config["tied_output"] else Table.named(arrays, "output")
        self._output_bias = arrays["output.bias"]
        self._whole: OutputLayer | None = None
        self._keys, self._start, self._readout = (
            RuntimeProduct.named(arrays, name) if f"{name}.weight" in arrays else None
            for name in ("keys", "start", "readout")
        )
        self._start_norm = (arrays["start.gain"], arrays["start.shift"]) if "start.gain" in arrays else None
        sizes = decoder_products(arrays, self._decoder, self._encoder.width, self._target.width)
        products = {name: RuntimeProduct.named(arrays, name) for name in sizes}
        self._values, self._shares = products["values"], products.get("coverage_shares")
        layers = [f"layers.{number}" for number in range(self._decoder["layers"])]
        names = [*STEP_PRODUCTS, *(f"{layer}.{part}" for layer in layers for part in ("read", "recur"))]
        words, gates = len(self._output_bias), products["words"].outputs
        self._arguments = {
            **{
                name: int(self._decoder[name])
                for name in ("layers", "size", "fed", "residual", "asked", "width")
            },
            **{name: arrays[name] for name in VECTORS if name in arrays},
            **self._target.rows(),
            "cell": CELLS[self._decoder["cell"]].number,
            "coverage": COVERAGES.index(self._decoder["coverage"]),
            "contexts": int(reads_contexts(self._decoder)),
            "weights": library.weight_array(
                [products[name].structure(sizes[name][0]) if name in products else None for name in names]
            ),
            # Shared by threads: the library writes a row before it marks it as known.
            "shares": np.empty((words, gates), np.float32),
            "known": np.zeros(words, np.uint8),
        }

    def encode(self, source: Ids, padding: npt.NDArray[np.bool_]) -> tuple[Any, State]:
        """Encodes sentences (B, S), EOS included, with their padding (B, S).

        Returns:
            Arguments of :meth:`step` for these sentences, and one decoder row per sentence.
        """
        batch, steps = source.shape
        words, places = np.unique(source.T, return_inverse=True)
        lengths = (~padding).sum(1)
        outputs, summary = self._encoder(self._source[words], places.reshape(steps, batch), lengths)
        values = np.ascontiguousarray(outputs.transpose(1, 0, 2))
        if self._decoder["average"]:
            # In float64, whose sum rounds to the same values in whichever order it is computed.
            summary = (values.sum(1, dtype=np.float64) / lengths[:, None]).astype(np.float32)
        flat = values.reshape(batch * steps, -1)
        keys = values if self._keys is None else self._keys(flat).reshape(batch, steps, -1)
        summed = self._values(flat).reshape(batch, steps, -1)
        if self._decoder["scale"] != 1.0:
            keys = keys * np.float32(self._decoder["scale"])
        if self._arguments["contexts"]:
            summed = np.concatenate([summed, values], 2)
        search = library.search_structure(
            **self._arguments,
            sentences=batch,
            positions=steps,
            compared=keys.shape[2],
            summed=summed.shape[2],
            keys=np.ascontiguousarray(keys),
            values=np.ascontiguousarray(summed),
            coverage_shares=None if self._shares is None else self._shares(flat),
            padding=np.ascontiguousarray(padding),
        )
        first = self._first(summary)
        hidden, memory = (np.array(first[:, kind].swapaxes(0, 1), order="C") for kind in (0, -1))
        coverage = np.zeros((batch, steps, self._decoder["width"]), np.float32)
        return search, State(np.arange(batch), hidden, memory, np.zeros_like(hidden[0]), coverage)

    def _first(self, summary: Floats) -> Floats:
        """Returns the initial states (B, states, layers, H) from a summary (B, E) of the sentences."""
        count, size = self._decoder["layers"], self._decoder["size"]
        shape = len(summary), CELLS[self._decoder["cell"]].states, count, size
        if self._start is None:
            return np.zeros(shape, np.float32)
        # Rounded from float64, so that it is the value that PyTorch computes.
        exact = self._start(np.ascontiguousarray(summary)).astype(np.float64).reshape(len(summary), -1, size)
        if self._start_norm is not None:
            gain, shift = self._start_norm
            exact -= exact.mean(2, keepdims=True)
            exact *= gain / np.sqrt(np.square(exact).mean(2, keepdims=True) + LAYER_NORM_EPSILON)
            exact += shift
        return np.tanh(exact).astype(np.float32).reshape(shape)

    def output_layer(self, allowed: npt.NDArray[np.bool_] | None) -> OutputLayer:
        """Returns the output layer for sentences that may use the words ``allowed`` (B, V); None for all."""
        if allowed is None:
            if self._whole is None:
                product = self._output.product(self._output_bias, None)
                self._whole = OutputLayer(lambda left, _: product(left), product.outputs, None)
            return self._whole
        lists = [np.flatnonzero(row) for row in allowed]
        size = max(len(own) for own in lists)
        words = np.zeros((len(lists), size), np.int64)
        for row, own in zip(words, lists, strict=True):
            row[: len(own)] = own
        weights = library.weight_array([self._output.structure(self._output_bias, own) for own in lists])
        return OutputLayer(partial(library.products_by_owner, weights, size), size, words)

    def step(self, words: Ids, search: Any, state: State, output: OutputLayer) -> tuple[Floats, State]:
        """Reads words (R,) and returns the logits (R, N) and the state after the step, which overwrites the state."""
        library.search_step(search, state.owners, words, state[1:])
        read = state.output if self._readout is None else self._readout(state.output)
        return output.product(read, state.owners), state
