"""Translation model: encodes whole sentences and decodes one word at a time.

B sentences, S source positions, R rows (hypotheses), H decoder size, A attention size, E encoder size, V target
vocabulary, N words of an output layer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from econmt_runtime import library
from econmt_runtime.arrays import Arrays, RuntimeProduct, Table
from econmt_runtime.cells import CELLS, DECODER_CELLS
from econmt_runtime.library import Floats, Ids


class RuntimeSources(NamedTuple):
    """Encoded sentences: scaled keys (B, S, A), what the attention sums (B, S, .), and padding (B, S).

    It sums the shares of the encoder's outputs in the decoder's output (B, S, H) and, where upper layers of the decoder
    read their sum, the encoder's outputs behind them, (B, S, H + E).
    """

    keys: Floats
    values: Floats
    padding: npt.NDArray[np.bool_]


class State(NamedTuple):
    """Decoder state of R rows: the sentence of each, the states of every layer, and the attentional output o (R, H)."""

    owners: Ids
    layers: tuple[tuple[Floats, ...], ...]
    output: Floats

    def select(self, rows: Ids, owners: Ids) -> State:
        """Returns the rows with the given numbers, which may repeat, as rows of the sentences ``owners``."""
        layers = tuple(tuple(part[rows] for part in parts) for parts in self.layers)
        return State(owners, layers, self.output[rows])


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
    """Stacked layers, each in one direction or both."""

    def __init__(self, arrays: Arrays, config: dict[str, Any]) -> None:
        self._config = config
        names = [
            [f"encoder.{layer}.{way}" for way in range(ways)]
            for layer, ways in enumerate(config["directions"])
        ]
        cell = CELLS[config["cell"]]
        self._layers = [[cell(arrays, name) for name in ways] for ways in names]

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
            shares = [layer.read(read) for layer in ways if layer.read is not None]
            sizes = [share.shape[1] // layer.gates for share, layer in zip(shares, ways, strict=True)]
            below, outputs = outputs, np.zeros((steps, batch, sum(sizes)), np.float32)
            last = np.empty((batch, sum(sizes)), np.float32)
            for way, (layer, share, size) in enumerate(zip(ways, shares, sizes, strict=True)):
                columns = slice(sum(sizes[:way]), sum(sizes[:way]) + size)
                backwards = way == 1 if len(ways) > 1 else bool(self._config["reverse_input"])
                layer.run(
                    share, places, lengths, outputs[:, :, columns], last[:, columns], backwards=backwards
                )
            if self._config["residual"] and number > 0:
                outputs += below
            read, places = outputs.reshape(steps * batch, -1), np.arange(steps * batch).reshape(steps, batch)
        return outputs, last


class RuntimeAttention:
    """Attention scores of keys for queries: additive, optionally with layer normalization, or inner products."""

    def __init__(self, arrays: Arrays, config: dict[str, Any]) -> None:
        self._score: Floats | None = arrays.get("attention.score")
        self._norm = (arrays["attention.gain"], arrays["attention.shift"]) if config["norm"] else None
        self._key = (
            RuntimeProduct.named(arrays, "attention.key") if "attention.key.weight" in arrays else None
        )
        self._scale = float(config["scale"])

    def keys(self, values: Floats) -> Floats:
        """Returns the keys (B, S, A) of the encoder's outputs (B, S, E)."""
        keys, (batch, steps, width) = values, values.shape
        if self._key is not None:
            keys = self._key(values.reshape(-1, width)).reshape(batch, steps, -1)
        return keys if self._scale == 1.0 else keys * np.float32(self._scale)

    def weights(self, query: Floats, sources: RuntimeSources, owners: Ids) -> Floats:
        """Returns the attention weights (R, S) of queries (R, A)."""
        return library.attention_weights(
            query, sources.keys, self._score, self._norm, sources.padding, owners
        )


class RuntimeModel:
    """Translation model with the weights of an exported folder.

    Args:
        arrays: Arrays written by econmt's export. config: Content of the folder's model.json.
    """

    def __init__(self, arrays: Arrays, config: dict[str, Any]) -> None:
        decoder = config["decoder"]
        self._source = Table.named(arrays, "source")
        self._target = self._source if config["one_table"] else Table.named(arrays, "target")
        self._encoder = RuntimeEncoder(arrays, config["encoder"])
        self._attention = RuntimeAttention(arrays, config["attention"])
        names = [f"decoder.{layer}" for layer in range(decoder["layers"])]
        self._layers = [DECODER_CELLS[decoder["cell"]](arrays, name) for name in names]
        self._feeding, self._residual = decoder["feeding"], decoder["residual"]
        self._average, self._size = decoder["average"], decoder["size"]
        self._start = RuntimeProduct.named(arrays, "start") if "start.weight" in arrays else None
        self._query = RuntimeProduct.named(arrays, "query") if "query.weight" in arrays else None
        self._combine, self._values = (
            RuntimeProduct.named(arrays, "own"),
            RuntimeProduct.named(arrays, "values"),
        )
        self._query_size = int(decoder["asked"])
        self._readout = RuntimeProduct.named(arrays, "readout") if "readout.weight" in arrays else None
        self._output = self._target if config["tied_output"] else Table.named(arrays, "output")
        self._output_bias = arrays["output.bias"]
        self._whole: OutputLayer | None = None
        # Shared by threads: a row is written before it is marked as known, and the arrays are never replaced.
        self._read = RuntimeProduct.named(arrays, "decoder.0.read")
        self._shares: Floats = np.empty((len(self._output_bias), self._read.outputs), np.float32)
        self._known = np.zeros(len(self._output_bias), np.bool_)

    def encode(self, source: Ids, padding: npt.NDArray[np.bool_]) -> tuple[RuntimeSources, State]:
        """Encodes sentences (B, S), EOS included, with their padding (B, S); returns one decoder row per sentence."""
        batch, steps = source.shape
        words, places = np.unique(source.T, return_inverse=True)
        lengths = (~padding).sum(1)
        outputs, summary = self._encoder(self._source[words], places.reshape(steps, batch), lengths)
        values = np.ascontiguousarray(outputs.transpose(1, 0, 2))
        if self._average:
            # In float64, whose sum rounds to the same values in whichever order it is computed.
            summary = (values.sum(1, dtype=np.float64) / lengths[:, None]).astype(np.float32)
        summed = self._values(values.reshape(batch * steps, -1)).reshape(batch, steps, -1)
        if self._reads_contexts:
            summed = np.concatenate([summed, values], 2)
        sources = RuntimeSources(np.ascontiguousarray(self._attention.keys(values)), summed, padding)
        return sources, State(
            np.arange(batch), self._first(summary), np.zeros((batch, self._size), np.float32)
        )

    @property
    def _reads_contexts(self) -> bool:
        """True if the upper layers read the attention's context."""
        return not self._feeding and len(self._layers) > 1

    def _first(self, summary: Floats) -> tuple[tuple[Floats, ...], ...]:
        """Returns the initial states of all layers from a summary (B, E) of the sentences."""
        count, kinds = len(self._layers), self._layers[0].states
        shape = len(summary), kinds, count, self._size
        initial = np.zeros(shape, np.float32)
        if self._start is not None:
            # Rounded from float64, so that it is the value that PyTorch computes.
            exact = np.tanh(self._start(np.ascontiguousarray(summary)).astype(np.float64))
            initial = exact.astype(np.float32).reshape(shape)
        return tuple(
            tuple(np.ascontiguousarray(initial[:, kind, layer]) for kind in range(kinds))
            for layer in range(count)
        )

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

    def step(
        self, words: Ids, sources: RuntimeSources, state: State, output: OutputLayer
    ) -> tuple[Floats, State]:
        """Reads words (R,) and returns the logits (R, N) and the state after the step."""
        fed = state.output if self._feeding else None
        top, after = self._layers[0].step(self._share(words), state.layers[0], fed)
        layers = [after]
        if self._reads_contexts:
            query = top if self._query is None else self._query(top)
            weights = self._attention.weights(query, sources, state.owners)
            nothing = np.zeros((len(top), sources.values.shape[2]), np.float32)
            sums = library.weighted_sums(nothing, weights, sources.values, state.owners, squash=False)
        for number in range(1, len(self._layers)):
            read = np.concatenate([top, sums[:, self._size :]], 1) if self._reads_contexts else top
            result, after = self._layers[number].upper_step(read, state.layers[number])
            layers.append(after)
            top = result + top if self._residual else result
        shares = self._combine(top)  # of the query and the attentional output
        if self._reads_contexts:
            attentional = library.squashed(shares + sums[:, : self._size])
        else:
            query = shares[:, : self._query_size] if self._query_size else top
            weights = self._attention.weights(query, sources, state.owners)
            share = shares[:, self._query_size :]
            attentional = library.weighted_sums(share, weights, sources.values, state.owners, squash=True)
        read = attentional if self._readout is None else self._readout(attentional)
        return output.product(read, state.owners), State(state.owners, tuple(layers), attentional)

    def _share(self, words: Ids) -> Floats:
        """Returns the contribution of words (R,) to the bottom layer's gates, cached per word."""
        new = ~self._known[words]
        if new.any():
            is_new = np.zeros_like(self._known)
            is_new[words[new]] = True
            unknown = np.flatnonzero(is_new)
            self._shares[unknown] = self._read(self._target[unknown])
            self._known[unknown] = True
        return self._shares[words]
