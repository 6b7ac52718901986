"""Schedules of an LSTM stack, from eight products a cell to the fastest, for ``python -m scripts.bench lstm``.

Most are written here in plain PyTorch with autograd; from "own backward pass" on it is `econmt_ops.lstm`. All compute
the same function.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import econmt_ops
from econmt_ops import LSTMWeights
from econmt_ops.backends.compiled import allow_variants, has_compiler
from econmt_ops.core.precision import accumulate_dtype
from econmt_ops.dispatch.rule import captured, rules_only
from econmt_ops.lstm import recompute
from econmt_ops.products.stack import StackOptions
from scripts.bench.layers import by_torch

Stack = Callable[[Tensor, Sequence[LSTMWeights]], Tensor]
Pointwise = Callable[[Sequence[Tensor], Tensor, torch.dtype], tuple[Tensor, Tensor]]


@functools.cache
def streams(count: int) -> tuple[torch.cuda.Stream, ...]:
    """Returns as many CUDA streams, the same ones at each call."""
    return tuple(torch.cuda.Stream() for _ in range(count))  # type: ignore[no-untyped-call]


def side_by_side(calls: Sequence[Callable[[], Tensor]], reads: Sequence[Tensor], count: int) -> list[Tensor]:
    """Runs calls that do not depend on each other on ``count`` CUDA streams in turn.

    On a CPU, or if ``count`` is 0, they run one after the other. ``reads`` are tensors that the calls read and that may
    be freed soon after.
    """
    if not count or not reads[0].is_cuda:
        return [call() for call in calls]
    current, others = torch.cuda.current_stream(), streams(count)
    for stream in others:
        stream.wait_stream(current)
    results = []
    for call, stream in zip(calls, itertools.cycle(others), strict=False):
        with torch.cuda.stream(stream):
            results.append(call())
    for stream in others:
        current.wait_stream(stream)
        for tensor in reads:
            tensor.record_stream(stream)
    for result in results:
        result.record_stream(current)
    return results


def pointwise(products: Sequence[Tensor], c: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Computes h and c of a cell from its products: the sums of all gates (B, 4H), or one for each gate (B, H).

    If there are twice as many products, those of the inputs come first and those of h after them, to be added.
    """
    half = len(products) // 2
    sums = [x + h for x, h in zip(products[:half], products[half:], strict=True)] if half else products
    gates = sums if len(sums) == 4 else sums[0].chunk(4, 1)
    i, f, g, o = (gate.to(c.dtype) for gate in gates)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return (torch.sigmoid(o) * torch.tanh(c)).to(dtype), c


@functools.cache
def fused_pointwise() -> Pointwise:
    """Returns `pointwise` compiled into one kernel forward and one backward."""
    allow_variants()
    return torch.compile(pointwise, dynamic=False)


def plain_layer(
    inputs: Tensor,
    layer: LSTMWeights,
    *,
    combined: bool = False,
    at_once: bool = False,
    transposed: bool = False,
    fused: bool = False,
    lanes: int = 0,
) -> Tensor:
    """Computes a layer (B, T, I) to (B, T, H) from zero states, as a loop of plain operations.

    ``combined`` computes the four gates of a cell in one product, ``at_once`` also the inputs' products of all steps
    before the loop. ``transposed`` stores the weights for X W' before the loop. ``fused`` compiles what is between the
    products. ``lanes`` are CUDA streams on which the products of a cell run at the same time.
    """
    between = fused_pointwise() if fused else pointwise
    read, recurrent = layer.input, layer.hidden
    if transposed:
        read, recurrent = read.t().contiguous().t(), recurrent.t().contiguous().t()
    h = inputs.new_zeros(inputs.shape[0], layer.hidden.shape[1])
    c = h.to(accumulate_dtype(h.dtype))
    steps = functional.linear(inputs, read, layer.bias).unbind(1) if at_once else inputs.unbind(1)
    count = 1 if combined else 4
    parts = list(zip(read.chunk(count), layer.bias.chunk(count), strict=True))
    squares, outputs = recurrent.chunk(count), []
    for x in steps:
        if at_once:
            products = [torch.addmm(x, h, recurrent.t())]
        else:
            calls = [partial(functional.linear, x, each, bias) for each, bias in parts]
            calls += [partial(functional.linear, h, square) for square in squares]
            products = side_by_side(calls, [inputs, h], lanes)
        h, c = between(products, c, inputs.dtype)
        outputs.append(h)
    return torch.stack(outputs, 1)


def _plain(**options: Any) -> Stack:
    def run(inputs: Tensor, layers: Sequence[LSTMWeights]) -> Tensor:
        for layer in layers:
            inputs = plain_layer(inputs, layer, **options)
        return inputs

    return run


def wavefront(inputs: Tensor, layers: Sequence[LSTMWeights], fused: bool = False) -> Tensor:
    """Computes all cells (layer l, step t) of the same l + t in one batched product, L + T - 1 instead of L T.

    ``fused`` compiles what is between the products.
    """
    between = fused_pointwise() if fused else pointwise
    count, (batch, steps, hidden) = len(layers), inputs.shape
    weights = torch.stack([torch.cat([layer.input, layer.hidden], 1).t() for layer in layers])
    biases = torch.stack([layer.bias for layer in layers]).unsqueeze(1)
    h = [inputs.new_zeros(batch, hidden)] * count
    c = [h[0].to(accumulate_dtype(h[0].dtype))] * count
    outputs = []
    for diagonal in range(steps + count - 1):
        low, high = max(0, diagonal - steps + 1), min(count - 1, diagonal) + 1
        below = [inputs[:, min(diagonal, steps - 1)], *h]
        reads = torch.stack([torch.cat([below[layer], h[layer]], 1) for layer in range(low, high)])
        sums = torch.baddbmm(biases[low:high], reads, weights[low:high])
        made_h, made_c = between([sums.flatten(0, 1)], torch.cat(c[low:high]), inputs.dtype)
        h[low:high], c[low:high] = made_h.chunk(high - low), made_c.chunk(high - low)
        outputs += [h[-1]] if high == count else []
    return torch.stack(outputs, 1)


def own_layers(backend: str = "eager") -> Stack:
    """Returns `econmt_ops.lstm` with its own backward pass, all gates kept."""

    def run(inputs: Tensor, layers: Sequence[LSTMWeights]) -> Tensor:
        h = inputs.new_zeros(inputs.shape[0], layers[0].hidden.shape[1])
        zero = (h, h.to(accumulate_dtype(h.dtype)))
        state, options = (zero,) * len(layers), StackOptions(from_zero=True)
        return recompute.lstm(inputs, tuple(layers), state, options, stash="gates", backend=backend)[0]

    return run


def _chosen(inputs: Tensor, layers: Sequence[LSTMWeights]) -> Tensor:
    """Runs `econmt_ops.lstm` with the implementation that the rule takes for a captured step."""
    with captured(), rules_only():
        return econmt_ops.lstm(inputs, tuple(layers))[0]


def streamed_stages(fused: bool) -> dict[str, Stack]:
    """Returns schedules of a GPU, in the published order: decisions alone, and with all of those before.

    ``fused`` is true if there is a compiler, which fuses the operations between products.
    """
    alone = {"eight products, transposed": _plain(transposed=True)}
    both = {"two products, a stream each": _plain(combined=True, lanes=2)}
    if fused:
        alone["eight products, pointwise fused"] = _plain(fused=True)
        both["layer wavefront, pointwise fused"] = partial(wavefront, fused=True)
    return {**alone, "eight products, a stream each": _plain(lanes=8), **both}


def stages(on_gpu: bool = False) -> dict[str, Stack]:
    """Returns the schedules by name, each with all decisions of those before it, then those it is compared with.

    ``on_gpu`` adds the schedules that only a GPU has.
    """
    fused = has_compiler()
    schedules = {
        "eight products a cell": _plain(),
        **(streamed_stages(fused) if on_gpu else {}),
        "four gates in one product": _plain(combined=True),
        "input products of all steps in one": _plain(at_once=True),
        "weights transposed": _plain(at_once=True, transposed=True),
        "layer wavefront": wavefront,
        "own backward pass, weights packed": own_layers(),
    }
    if fused:
        schedules["pointwise fused (compiled)"] = own_layers("compiled")
    if on_gpu:
        schedules["econmt_ops, auto"] = _chosen
    return {**schedules, "torch.nn.LSTM": by_torch}
