"""Devices and links by their published figures, and what a recipe's layers take on one of them on paper.

A layer takes the longer of its operations at the device's peak and its bytes at the memory's bandwidth (the roofline of
Williams et al., 2009), and a launch a kernel. No device reaches these peaks, so that computing comes out too quick
and the share of exchanges too large: what is predicted of a division is less than it would gain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from econmt.config.model import LayerShape, Model, layer_shapes
from econmt.config.recipe import LanguageModelSection, Recipe
from econmt.data.batching.pair_flops import PairFlops, pair_flops
from econmt.parallel.cost_layers import Layer, Points, Profile, Side, Unit
from econmt.parallel.cost_network import Link, Machine

LINKS = {
    link.name: link
    for link in (
        Link("pcie2-x8", 20e-6, 4.0e9, "5 GT/s a lane, 8b/10b; latency of a copy through the host"),
        Link("pcie3-x8", 20e-6, 7.88e9, "8 GT/s a lane, 128b/130b; latency of a copy through the host"),
        Link("pcie3-x16", 20e-6, 15.75e9, "8 GT/s a lane, 128b/130b; latency of a copy through the host"),
        Link(
            "nvlink4",
            3e-6,
            370e9,
            "NCCL, by its maintainers: issue 212 of NVIDIA/nccl-tests, 1259 of NVIDIA/nccl",
        ),
        Link("10gbe", 30e-6, 1.25e9, "line rate; TCP takes 20 to 50 us a message"),
        Link("100gbe", 10e-6, 12.5e9, "line rate; RDMA"),
        Link("hdr", 5e-6, 25.0e9, "InfiniBand, 200 Gb/s line rate; 2 to 5 us a message through NCCL"),
        Link("ndr", 5e-6, 50.0e9, "InfiniBand, 400 Gb/s line rate; 2 to 5 us a message through NCCL"),
    )
}
"""Links by name. Latency is that of a message as a program sees it."""


class Device(NamedTuple):
    """One card.

    Attributes:
        name: for tables.
        flops: operations a second of matrix products, by bytes of a value: 4 for float32, 2 for bfloat16.
        bandwidth: of its memory, bytes a second.
        launch: seconds a kernel takes at least.
        source: where the figures are from.
    """

    name: str
    flops: dict[int, float]
    bandwidth: float
    launch: float
    source: str

    def seconds(self, operations: float, size: float, kernels: float, value_bytes: int) -> float:
        """Of so many operations, bytes of memory and kernels."""
        return max(operations / self.flops[value_bytes], size / self.bandwidth) + kernels * self.launch


GTX_750 = Device(
    "GTX 750",
    {4: 1.044e12},
    80e9,
    5e-6,
    "512 cores x 2 x 1.02 GHz, 80 GB/s: hothardware.com/reviews/nvidia-geforce-gtx-750-ti-maxwell-gpu-review; a "
    "launch of 5 us is assumed",
)
H200 = Device(
    "H200",
    {4: 67e12, 2: 989e12},
    4.8e12,
    2e-6,
    "NVIDIA's data sheet, dense, no TF32; a node of a CUDA graph is taken as 2 us",
)


class Hardware(NamedTuple):
    """A kind of machine that is not here: its cards and what joins them."""

    device: Device
    machine: Machine


HARDWARE = {
    # The poster names the card, not what joins the four: slots of desktop boards with four cards have 8 lanes.
    "seed": Hardware(GTX_750, Machine("four GTX 750", 4, LINKS["pcie3-x8"], LINKS["10gbe"])),
    "h200": Hardware(H200, Machine("H200, eight a host", 8, LINKS["nvlink4"], LINKS["ndr"])),
}

ROWS = tuple(float(2**power) for power in range(13))
"""Rows for which a paper profile has times; between them they are interpolated."""

_POSITIONS = tuple(float(2**power) for power in range(0, 23, 2))


class _Paper:
    """Layers on a device, on paper."""

    def __init__(self, device: Device, value_bytes: int, source: int) -> None:
        self.device, self.bytes, self.source = device, value_bytes, source

    def recurrent(self, name: str, side: Side, node: str, shape: LayerShape) -> Layer:
        """An LSTM layer: the product of a step's state reads the matrix anew each step, all others are large ones."""
        inputs, size, directions = shape
        parameters = directions * 4 * size * (inputs + size + 1)
        forward, backward = self._recurrence(shape, 1.0), self._recurrence(shape, 2.0)
        whole, width = directions == 2, directions * size
        kept = 6.0 * width * self.bytes
        # Each call multiplies with the matrix of the inputs; after all of them the gradients of both matrices are made
        # and added to those that are there, in float32.
        read = self._time(0.0, directions * 4 * size * inputs * self.bytes, 1)
        once = self._time(0.0, 16 * parameters, 2)
        return Layer(
            name,
            side,
            node,
            parameters,
            "steps",
            forward,
            backward,
            (read, read),
            whole,
            width,
            kept,
            self._gather(shape),
            once,
        )

    def _gather(self, shape: LayerShape) -> Points:
        """The products that make the gradients of both matrices."""
        inputs, size, directions = shape

        def step(rows: float) -> float:
            operations = directions * 2 * rows * 4 * size * (inputs + size)
            return self._time(operations, directions * rows * (inputs + 4 * size) * self.bytes, 0)

        return _points(step, ROWS)

    def _recurrence(self, shape: LayerShape, passes: float) -> Points:
        """``passes``: 1 forward, 2 backward."""
        inputs, size, directions = shape

        def step(rows: float) -> float:
            # One product a step waits for the step before; backward, that for the inputs comes after the loop.
            product = directions * 2 * rows * 4 * size * size
            matrix = directions * (4 * size * size + rows * 5 * size) * self.bytes
            pointwise = passes * directions * rows * 11 * size * self.bytes
            bulk = directions * 2 * rows * 4 * size * inputs
            waiting = self._time(product, matrix, 1) + self._time(0.0, pointwise, 1)
            return waiting + self._time(bulk, directions * rows * (inputs + 4 * size) * self.bytes, 0)

        return _points(step, ROWS)

    def dense(
        self,
        name: str,
        side: Side,
        node: str,
        operations: float,
        parameters: float,
        width: int,
        unit: Unit = "positions",
    ) -> Layer:
        """Something that multiplies ``operations`` a position, or a pair of positions, whatever the order."""

        def of(passes: float) -> Points:
            size = passes * parameters * self.bytes
            return _points(lambda count: self._time(passes * operations * count, size, 2), _POSITIONS)

        kept = float(width * self.bytes)
        return Layer(name, side, node, parameters, unit, of(1.0), of(2.0), width=width, kept=kept)

    def loop(self, layers: Sequence[LayerShape], attention: float, width: int) -> Layer:
        """A decoder with input feeding: all its layers and the attention at a step before any of the next step."""
        parts = [self.recurrent("", "target", "decoder", shape) for shape in layers]

        def of(passes: float, *points: Callable[[Layer], Points]) -> Points:
            def step(place: int) -> float:
                read = self._time(passes * attention * ROWS[place] * self.source, 0.0, 2)
                return read + sum(each(part)[place][1] for part in parts for each in points)

            return tuple((rows, step(place)) for place, rows in enumerate(ROWS))

        forward = of(1.0, lambda part: part.forward)
        backward = of(2.0, lambda part: part.backward, lambda part: part.gather)
        parameters, kept = sum(part.parameters for part in parts), sum(part.kept for part in parts)
        return Layer(
            "decoder", "target", "decoder", parameters, "steps", forward, backward, width=width, kept=kept
        )

    def _time(self, operations: float, size: float, kernels: float) -> float:
        return self.device.seconds(operations, size, kernels, self.bytes)


def _points(function: Callable[[float], float], places: Sequence[float]) -> Points:
    return tuple((place, function(place)) for place in places)


def paper_profile(
    recipe: Recipe, sizes: Sequence[int], device: Device, value_bytes: int, source: int
) -> Profile:
    """What a recipe's layers take on a device.

    Args:
        recipe: whose model it is; recurrent layers are taken as LSTMs.
        sizes: entries of its vocabularies.
        device: the card. value_bytes: of a value, 4 or 2.
        source: positions that an attention inside a decoder's loop looks at.
    """
    paper = _Paper(device, value_bytes, source)
    model = recipe.model
    layers = (
        _language_model(paper, model, sizes[0])
        if isinstance(model, LanguageModelSection)
        else _translation(paper, model, sizes)
    )
    moments = recipe.training.optimizer.moments
    # Weight, gradient and state are read, weight and state written, in float32; the gradient once more for its norm.
    update = (4 + 2 * moments) * 4 / device.bandwidth
    return Profile(
        tuple(layers),
        update,
        value_bytes=value_bytes,
        gradient_bytes=2 if recipe.parallel.reduction == "bfloat16" else 4,
        state_bytes=round(4 * moments),
        tied=_tied(model),
    )


def _tied(model: LanguageModelSection | Model) -> str:
    """The name of the table that is the output layer's matrix."""
    names = {"softmax": "target", "trg_softmax": "target", "src_trg_softmax": "source"}
    side = names.get(model.weight_tying)
    return "" if side is None else f"{side} embedding"


def _language_model(paper: _Paper, model: LanguageModelSection, words: int) -> list[Layer]:
    layers = [_embedding(paper, "target", words, model.embedding)]
    for number in range(model.layers):
        shape = LayerShape(model.embedding if number == 0 else model.size, model.size, 1)
        layers.append(paper.recurrent(f"layer {number + 1}", "target", "decoder", shape))
    tied = model.weight_tying == "softmax"
    return [*layers, _output(paper, model.embedding if tied else model.size, words, 0 if tied else words)]


def _translation(paper: _Paper, model: Model, sizes: Sequence[int]) -> list[Layer]:
    below, above = layer_shapes(model)
    work = pair_flops(model, sizes[1])
    layers = [_embedding(paper, "source", sizes[0], model.embedding)]
    factors = zip(sizes[2:], model.source_factors_num_embed, strict=True)
    tables = float(sum(entries * width for entries, width in factors))
    layers[0] = layers[0]._replace(parameters=layers[0].parameters + tables)
    for number, shape in enumerate(below):
        layers.append(paper.recurrent(f"encoder {number + 1}", "source", "encoder", shape))
    own = 0 if model.weight_tying in ("src_trg", "src_trg_softmax") else sizes[1]
    layers.append(_embedding(paper, "target", own, model.embedding))
    if model.decoder.input_feeding:
        layers.append(paper.loop(above, float(work.pair), model.decoder.size))
    else:
        layers += _above(paper, model, above, work)
    tied = model.weight_tying in ("trg_softmax", "src_trg_softmax")
    return [
        *layers,
        _output(paper, model.embedding if tied else model.decoder.size, sizes[1], 0 if tied else sizes[1]),
    ]


def _above(paper: _Paper, model: Model, above: Sequence[LayerShape], work: PairFlops) -> list[Layer]:
    """A decoder's layers without input feeding: attention from the bottom one, its context read by the others."""
    layers = [paper.recurrent("decoder 1", "target", "decoder", above[0])]
    width, parameters = model.decoder.size, model.attention.size * (model.decoder.size + model.encoder.size)
    pairs = paper.dense("attention", "target", "attention", float(work.pair), parameters, width, "pairs")
    layers.append(pairs._replace(width=width + model.encoder.size))
    for number, shape in enumerate(above[1:], 2):
        layer = paper.recurrent(f"decoder {number}", "target", "decoder", shape)
        # What goes on to the next layer is its output and the context.
        layers.append(layer._replace(width=width + model.encoder.size))
    layers[-1] = layers[-1]._replace(width=width)
    return layers


def _embedding(paper: _Paper, side: Side, entries: int, width: int) -> Layer:
    name = f"{side} embedding"
    return paper.dense(name, side, name, 0.0, 0.0, width)._replace(parameters=float(entries * width))


def _output(paper: _Paper, width: int, words: int, own: int) -> Layer:
    layer = paper.dense("output", "target", "output", 2.0 * width * words, float(width * words), width)
    # Logits are made in chunks and not kept; a matrix that is the embedding's counts there.
    return layer._replace(parameters=float(own * width), kept=0.0)
