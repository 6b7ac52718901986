"""Measures the times of layers and links in a few seconds, and plans the pipeline from them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from econmt.engine.devices import shortest_seconds
from econmt.engine.precision import Precision
from econmt.model import Implementations, TranslationModel
from econmt.model.decoder import ParallelDecoder
from econmt.model.language_model import LanguageModel
from econmt.model.layers import RecurrentLayer
from econmt.parallel.pipeline.partition import Link, Piece, PipelinePlan, divide
from econmt.parallel.pipeline.stages import Stages
from econmt.tasks.protocol import Shape
from econmt_ops.dispatch.capture import GraphCache
from econmt_ops.dispatch.rule import MODE, rules_only
from econmt_ops.lstm.chunked import ChunkedLSTM

_REPEATS = 3

_SHORT = 8
"""Divisor of the number of steps for a second, shorter timing; the difference gives the time per step."""


class _Stack(NamedTuple):
    """Recurrent layers that a pipeline divides, bottom first, with the options of their op and their time steps."""

    name: str
    layers: nn.ModuleList
    options: dict[str, Any]
    steps: int


def _stacks(model: nn.Module, shape: Shape, implementations: Implementations) -> list[_Stack]:
    """Returns the stacks of a model for batches of a shape; one may be empty."""
    if isinstance(model, LanguageModel):
        return [_Stack("", model.layers, implementations.recurrent("encoder"), shape.target)]
    assert isinstance(model, TranslationModel)
    upper = model.encoder.upper_layers
    stacks = [_Stack("encoder: ", upper, implementations.recurrent("encoder"), shape.source)]
    if isinstance(model.decoder, ParallelDecoder):
        layers = model.decoder.layers
        stacks.append(_Stack("decoder: ", layers, implementations.recurrent("decoder"), shape.target))
    return stacks


def plan_pipeline(
    model: nn.Module,
    stages: int,
    shape: Shape,
    link: Link,
    precision: Precision,
    implementations: Implementations,
) -> PipelinePlan:
    """Plans the division that is predicted to be fastest; this process times the layers for it.

    ``shape`` is the most frequent one of a rank's batches.
    """
    stacks = _stacks(model, shape, implementations)
    timer = _LayerTimer(model, shape.rows, precision)
    return _planned(model, stages, link, [(stack, timer.pieces(stack)) for stack in stacks])


def plan_by_weights(model: nn.Module, stages: int, shape: Shape) -> PipelinePlan:
    """Plans a division without timing: a step costs as much as a layer has weights, and transfers cost nothing.

    The cost per chunk is that of one more step.
    """
    stacks = _stacks(model, shape, Implementations())
    return _planned(model, stages, Link(0.0, 0.0), [(stack, _pieces_by_weights(stack)) for stack in stacks])


def _pieces_by_weights(stack: _Stack) -> list[Piece]:
    sizes = [float(sum(part.numel() for part in layer.parameters())) for layer in stack.layers]
    return [Piece(f"layer {number}", size, size, 0.0) for number, size in enumerate(sizes)]


def _planned(
    model: nn.Module, stages: int, link: Link, stacks: Sequence[tuple[_Stack, list[Piece]]]
) -> PipelinePlan:
    """Divides stacks, each with the costs of its layers."""
    divisions = [divide(pieces, stages, stack.steps, link) for stack, pieces in stacks]
    texts = [
        f"{stack.name}{division.text(pieces)}"
        for (stack, pieces), division in zip(stacks, divisions, strict=True)
        if pieces
    ]
    homes = [[*division.homes] for division in divisions]
    chunks = [division.chunks for division in divisions]
    if isinstance(model, TranslationModel):
        homes.insert(0, [0, min(1, stages - 1)] * len(model.encoder.forward_layers))
        if len(stacks) == 1:  # input feeding does not allow to divide the decoder
            homes.append([stages - 1] * len(model.decoder.layers))
            chunks.append(1)
            texts.append(f"decoder with input feeding on rank {stages - 1}")
    alone, together = (sum(getattr(each, name) for each in divisions) for name in ("alone", "seconds"))
    gain = f"; these layers are predicted to run {alone / (together or 1.0):.2f} times as fast as on one rank"
    return PipelinePlan(homes, chunks, f"pipeline: {'; '.join(texts)}{gain if together else ''}")


def measured_link(stages: Stages, device: torch.device, size: int) -> Link:
    """Measures the link between the first two stages for transfers of ``size`` bytes; all stages call this together."""
    seconds = []
    for count in (1, max(2, size // 4)):
        tensor = torch.zeros(count, device=device)

        def round_trip(tensor: Tensor = tensor) -> None:
            if stages.rank == 0:
                stages.send(tensor, 1).wait()
                stages.receive(tensor, 1).wait()
            elif stages.rank == 1:
                stages.receive(tensor, 0).wait()
                stages.send(tensor, 0).wait()

        seconds.append(shortest_seconds(round_trip, device, _REPEATS) / 2.0)
    return Link(seconds[0], max(0.0, seconds[1] - seconds[0]) / size)


class _LayerTimer:
    """Times layers, forward and backward."""

    def __init__(self, model: nn.Module, rows: int, precision: Precision) -> None:
        self._rows, self._precision = rows, precision
        self._device = next(model.parameters()).device
        self._measured: dict[tuple[int, int, int], list[float]] = {}

    def pieces(self, stack: _Stack) -> list[Piece]:
        """Returns the costs of a stack's layers, bottom first."""
        costs = []
        for number, layer in enumerate(stack.layers):
            assert isinstance(layer, RecurrentLayer)
            weights = layer.weights
            matrix, size = weights.input, len(weights.bias) // 4
            read = (matrix if isinstance(matrix, Tensor) else matrix.right).shape[1]
            key = read, size, stack.steps
            if key not in self._measured:
                self._measured[key] = self._layer(weights, stack.options, read, stack.steps)
            step, chunk, once = self._measured[key]
            values = self._rows * size * self._precision.dtype.itemsize
            costs.append(Piece(f"layer {number}", step, chunk, values, once))
        return costs

    def _layer(self, weights: Any, options: dict[str, Any], read: int, steps: int) -> list[float]:
        """Measures seconds per step, seconds per chunk, and seconds once after all chunks."""
        leaves = _leaves(weights)
        prepared = ChunkedLSTM(leaves)
        graphs = GraphCache(self._device, threads=True) if MODE.captured else None
        seconds = []
        short = max(1, steps // _SHORT)
        for count, once in ((steps, False), (short, False), (steps, True)):
            inputs = torch.full((self._rows, count, read), 0.1, device=self._device, requires_grad=True)

            def run(inputs: Tensor = inputs, once: bool = once) -> None:
                layer = ChunkedLSTM(leaves) if once else prepared
                inputs.grad = None
                # With fixed rules, since "auto" could choose different implementations for the short and the long run.
                with rules_only(), self._precision.products(self._device):
                    with self._precision.autocast(self._device):
                        outputs, _ = layer(inputs, **options)
                    torch.autograd.backward(outputs, torch.ones_like(outputs))
                    if once:
                        layer.backward()
                    else:
                        layer.forget()

            # Where training uses CUDA graphs, they are replayed, since launching from Python is slower.
            timed = run if graphs is None else partial(graphs.call, (count, once), run, lambda _: None)
            seconds.append(shortest_seconds(timed, self._device, _REPEATS))
        once_for_all = max(0.0, seconds[2] - seconds[0])
        if steps == short:
            return [seconds[0] / steps, 0.0, once_for_all]
        per_step = max(0.0, seconds[0] - seconds[1]) / (steps - short)
        return [per_step, max(0.0, seconds[0] - per_step * steps), once_for_all]


def _leaves(weights: Any) -> Any:
    """Returns copies of the weights as leaf tensors, so that the model's gradients are not touched."""
    if isinstance(weights, Tensor):
        return weights.detach().requires_grad_()
    return type(weights)(*map(_leaves, weights))
