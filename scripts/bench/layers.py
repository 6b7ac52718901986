"""Weights and passes of layers, and errors and peak memory of results, for the benchmarks of layers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from econmt_ops import LSTMWeights
from scripts.bench.frame import Call


class Size(NamedTuple):
    """Rows, steps and units of a layer, whose inputs are as wide."""

    batch: int
    steps: int
    hidden: int

    @classmethod
    def of(cls, text: str) -> Size:
        """Reads a size such as "64x100x512"."""
        return cls(*map(int, text.split("x")))


def lstm_weights(hidden: int, dtype: torch.dtype, device: torch.device) -> LSTMWeights:
    """Draws the weights of a layer whose inputs are as wide as its outputs."""
    shapes = (4 * hidden, hidden), (4 * hidden, hidden), (4 * hidden,)
    parts = (torch.randn(shape, device=device) * hidden**-0.5 for shape in shapes)
    return LSTMWeights(*(part.to(dtype).requires_grad_() for part in parts))


def passes(
    run: Callable[[], Tensor], leaves: Sequence[Tensor], incoming: Tensor | None = None
) -> dict[str, Call]:
    """Returns the forward pass, which keeps nothing, and both passes with the gradients of ``leaves``.

    ``incoming`` is the gradient of the outputs; ones if it is None.
    """

    def both() -> tuple[Tensor, ...]:
        outputs = run()
        gradient = torch.ones_like(outputs) if incoming is None else incoming
        return outputs, *torch.autograd.grad(outputs, leaves, gradient)

    return {"forward": torch.no_grad()(run), "both": both}


def torch_lstm(size: Size, dtype: torch.dtype, device: torch.device) -> dict[str, Call]:
    """Returns the passes of torch.nn.LSTM, in cuDNN's fastest layout on a GPU, which has time first."""
    batch, steps, hidden = size
    rows_first = device.type == "cpu"
    module = nn.LSTM(hidden, hidden, batch_first=rows_first).to(device, dtype)
    shape = (batch, steps, hidden) if rows_first else (steps, batch, hidden)
    inputs = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
    return passes(lambda: module(inputs)[0], [inputs, *module.parameters()], torch.randn_like(inputs))


def by_torch(inputs: Tensor, layers: Sequence[LSTMWeights]) -> Tensor:
    """Computes torch's own LSTM, all layers in one call, from inputs (B, T, I) to (B, T, H)."""
    none = torch.zeros_like(layers[0].bias)
    flat = [tensor for layer in layers for tensor in (*layer, none)]
    zero = inputs.new_zeros(len(layers), inputs.shape[0], layers[0].hidden.shape[1])
    training = torch.is_grad_enabled()
    outputs: Tensor = torch.lstm(inputs, (zero, zero), flat, True, len(layers), 0.0, training, False, True)[0]
    return outputs


def relative(value: Tensor, expected: Tensor) -> float:
    """Returns the norm of the difference relative to that of the expected values."""
    return float((value.detach().double() - expected.detach()).norm() / (expected.detach().norm() + 1e-12))


def largest_difference(values: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Returns the largest difference of any tensor from the expected one, relative to that one's largest value."""
    pairs = [
        (value.detach().double(), wanted.detach()) for value, wanted in zip(values, expected, strict=True)
    ]
    return max(float((value - wanted).abs().max() / wanted.abs().max()) for value, wanted in pairs)


def peak_bytes(function: Callable[[], object], device: torch.device) -> int:
    """Returns the most bytes that a call allocates beyond those allocated before it.

    On the CPU the profiler reports every allocation, also those of libraries and compiled code.
    """
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        function()
        return torch.cuda.max_memory_allocated(device) - before
    with torch.autograd.profiler.profile(profile_memory=True) as profiler:
        function()
    assert profiler.kineto_results is not None
    requests = [event for event in profiler.kineto_results.events() if event.name() == "[memory]"]
    requests.sort(key=lambda event: event.start_ns())
    peak: int = max(itertools.accumulate((event.nbytes() for event in requests), initial=0))
    return peak


class KernelTime(NamedTuple):
    """Name of a kernel, the number of its launches and the microseconds that these took."""

    name: str
    launches: int
    microseconds: float


def kernel_times(call: Call) -> list[KernelTime]:
    """Returns the kernels that a call launches, those that take longest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    events = [event for event in profile.key_averages() if str(event.device_type).endswith("CUDA")]
    kernels = [KernelTime(event.key, event.count, event.self_device_time_total) for event in events]
    return sorted(kernels, key=lambda kernel: -kernel.microseconds)
