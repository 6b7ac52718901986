"""Times linear recurrence against a copy of its bytes.

    python -m scripts.bench scan
    python -m scripts.bench scan --shape 1x65536x128 --csv scan.csv

A forward pass reads decay and inputs and writes outputs; a backward pass reads decay, outputs and their gradients and
writes two gradients: 3 and 5 tensors. The copy moves as many bytes, half of them read and half written. Every
implementation is compared with float64 before it is timed. accelerated-scan, which compiles its kernels for a minute,
is timed on a GPU where it is installed.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

import econmt_ops
from econmt.bench.rows import Row, Say
from econmt.checkpoint.tensor_files import dtype_name
from econmt.engine.devices import reproducible
from econmt.errors import EconmtError
from econmt_ops.core.arguments import RecurrenceArguments
from econmt_ops.dispatch.rule import can_run
from econmt_ops.dispatch.traits import implementations_of
from scripts.bench import layers
from scripts.bench.frame import Bench, in_turns, replayed
from scripts.bench.layers import Size

Scan = Callable[[Tensor, Tensor], Tensor]
"""Decay and inputs (B, T, H) to outputs (B, T, H)."""


SHAPES = (Size(1, 65_536, 128), Size(1, 1_048_576, 128), Size(8, 4096, 1536), Size(128, 100, 512))
TENSORS = {"forward": 3, "backward": 5, "both": 8}
"""Fewest tensors that a pass moves."""

PEER = "accelerated-scan"
LONGEST = 8192
"""Most steps for accelerated-scan 0.3.1: from 16,384 on it is wrong by 1 %, and in bfloat16 ends in an error."""

GIVEN_MEMORY = "c, given memory"
"""Name of the C library's kernel without its allocations, see `into_given_memory`."""

LOOP_STEPS = 5000
"""Most steps on which the reference, a loop in Python, is timed; its time is scaled to all steps."""

_ALLOWED = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.float64: 1e-12}
"""Largest difference from float64, relative to a tensor's largest value."""

_CHECKED_STEPS = 8192
"""Most steps whose results are compared, in 32 units of 2 rows."""


def scans(shape: Size, dtype: torch.dtype, device: torch.device) -> dict[str, Scan]:
    """Returns the implementations that can run here, by name."""
    found: dict[str, Scan] = {
        each.name: functools.partial(econmt_ops.linear_recurrence, implementation=each.name)
        for each in implementations_of("linear_recurrence").values()
        if can_run(each.traits, device.type, dtype)
    }
    if "c" in found:
        found[GIVEN_MEMORY] = found["c"]
    in_reach = shape.steps.bit_count() == 1 and shape.steps <= LONGEST
    if device.type == "cuda" and importlib.util.find_spec("accelerated_scan") and in_reach:
        found[PEER] = importlib.import_module("accelerated_scan.warp").scan
    return found


def tensors_for(
    label: str, shape: Size, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Draws decay, inputs and the gradient of the outputs, each (B, T, H), or (B, H, T) for accelerated-scan."""
    draw = torch.Generator(device).manual_seed(1)
    decay, inputs, gradient = (torch.randn(shape, generator=draw, device=device) for _ in range(3))
    made = [each.to(dtype) for each in (decay.sigmoid_(), inputs, gradient)]
    decay, inputs, gradient = (each.mT.contiguous() for each in made) if label == PEER else made
    return decay.requires_grad_(), inputs.requires_grad_(), gradient


def passes(scan: Scan, decay: Tensor, inputs: Tensor, incoming: Tensor) -> dict[str, Callable[[], Any]]:
    """Returns the forward pass alone, which keeps nothing, the backward pass alone, and both."""
    outputs: list[Tensor] = []

    def backward() -> tuple[Tensor, ...]:
        if not outputs:
            outputs.append(scan(decay, inputs))
        return torch.autograd.grad(outputs[0], (decay, inputs), incoming, retain_graph=True)

    both = layers.passes(functools.partial(scan, decay, inputs), (decay, inputs), incoming)
    return {"forward": both["forward"], "backward": backward, "both": both["both"]}


def check(name: str, scan: Scan, shape: Size, dtype: torch.dtype, device: torch.device) -> float:
    """Returns the largest difference of outputs and gradients from float64 at a smaller shape, relative to each tensor.

    Raises:
        EconmtError: The difference is larger than rounding explains.
    """
    small = Size(min(2, shape.batch), min(_CHECKED_STEPS, shape.steps), min(32, shape.hidden))
    chunk = functools.partial(econmt_ops.linear_recurrence, implementation="chunk")
    exact = [tensor.detach().double() for tensor in tensors_for("chunk", small, dtype, device)]
    expected = passes(chunk, exact[0].requires_grad_(), exact[1].requires_grad_(), exact[2])["both"]()
    runs = passes(scan, *tensors_for(name, small, dtype, device))
    results = [runs["forward"](), *runs["backward"]()]
    if name == PEER:
        results = [result.mT for result in results]
    worst = layers.largest_difference(results, expected)
    if not worst <= _ALLOWED[dtype]:
        allowed = f"at most {_ALLOWED[dtype]} is allowed"
        raise EconmtError(f"bench scan: {name} differs from float64 by {worst:.2g}; {allowed}")
    return worst


def into_given_memory(what: str, decay: Tensor, inputs: Tensor, given: Tensor) -> Callable[[], object]:
    """Returns a pass of the C library that writes into existing memory, so that no allocation is timed."""
    kernels = importlib.import_module("econmt_ops.backends.c.recurrence")
    decay, inputs, outputs = decay.detach(), inputs.detach(), torch.zeros_like(inputs.detach())
    call = RecurrenceArguments(decay, inputs, None, None, False, "c")
    if what == "forward":
        return lambda: kernels.forward(call, outputs)
    made = [torch.zeros_like(outputs) for _ in range(2)]
    call = call._replace(inputs=outputs)
    return lambda: kernels.backward(call, given, made)


def copy_of(count: int, shape: Size, dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
    """Returns a copy that moves the bytes of ``count`` tensors of the shape, half read and half written."""
    source = torch.randn(prod(shape) * count // 2, device=device).to(dtype)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def rows(
    shapes: Sequence[Size], dtypes: Sequence[torch.dtype], device: torch.device, say: Say, *, seconds: float
) -> Iterator[Row]:
    """Times every implementation at each shape and type for ``seconds`` a pass, and calls ``say`` with its progress.

    Yields:
        A row for each implementation and pass: median milliseconds, bytes that the pass must move, bytes a second, and
        the share of the copy's rate.
    """
    loops = {each.name for each in implementations_of("linear_recurrence").values() if each.traits.is_last}
    for shape, dtype in itertools.product(shapes, dtypes):
        found = scans(shape, dtype, device)
        differences = {}
        for label, scan in found.items():
            say(f"{'x'.join(map(str, shape))}, {dtype_name(dtype)}, {label}")
            differences[label] = check(label, scan, shape, dtype, device)
        for (what, count), (label, scan) in itertools.product(TENSORS.items(), found.items()):
            if (what, label) == ("both", GIVEN_MEMORY):
                continue
            steps = min(shape.steps, LOOP_STEPS) if label in loops else shape.steps
            operands = tensors_for(label, shape._replace(steps=steps), dtype, device)
            run = passes(scan, *operands)[what]
            if label == GIVEN_MEMORY:
                run = into_given_memory(what, *operands)
            run = run if label in loops else replayed(run, device)
            copy = replayed(copy_of(count, shape, dtype, device), device)
            timings = in_turns({"copy": copy, label: run}, device, seconds=seconds)
            moved, scale = count * prod(shape) * dtype.itemsize, shape.steps / steps
            taken, copied = timings[label].median * scale, timings["copy"].median
            yield {
                "batch": shape.batch, "steps": shape.steps, "hidden": shape.hidden,
                "dtype": dtype_name(dtype), "pass": what, "implementation": label, "milliseconds": 1e3 * taken,
                "lowest decile": 1e3 * timings[label].low * scale, "highest decile": 1e3 * timings[label].high * scale,
                "copy milliseconds": 1e3 * copied, "bytes": moved, "GB/s": moved / taken / 1e9,
                "share of a copy": copied / taken, "difference": differences[label],
            }  # fmt: skip
            del run, operands, copy


def main(words: Sequence[str] | None = None) -> None:
    bench = Bench(__doc__, device="auto", seconds=1.0)
    add = bench.add_argument
    add("--shape", action="append", type=Size.of, metavar="BxTxH", help="rows, steps and units")
    add("--dtype", action="append", help="float32, bfloat16, float16 or float64; may be repeated (float32)")
    given = bench.begin(words)
    types = [getattr(torch, name) for name in given.dtype or ["float32"]]
    with reproducible(given.device, given.threads):
        columns = ("batch", "steps", "hidden", "dtype", "pass", "implementation")
        figures = ("milliseconds", "highest decile", "bytes", "GB/s", "share of a copy", "difference")
        measured = rows(given.shape or SHAPES, types, given.device, bench.say, seconds=given.seconds)
        bench.report(measured, "linear recurrence", (*columns, *figures))
