"""Where the time of a linear recurrence goes: each implementation beside a copy of the bytes that it must move.

A forward pass reads decay and inputs and writes outputs, a backward pass reads decay, outputs and their gradients and
writes two gradients: 3 and 5 tensors. The copy moves as many bytes, half of them read and half written. Others that are
timed where they can be, on a GPU: torch.associative_scan, accelerated-scan (if it is installed; T a power of two), and
a kernel with one thread a channel. All are held to float64 first.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import econmt_ops
from econmt.bench.rows import Row, Say, dtype_name, time_in_turns
from econmt.data.files import notice
from econmt.errors import EconmtError
from econmt_ops.backends.compiled import has_compiler
from econmt_ops.dispatch.capture import Capturer
from econmt_ops.dispatch.rule import can_run
from econmt_ops.dispatch.traits import implementations_of

Scan = Callable[[Tensor, Tensor], Tensor]
"""Decay and inputs (B, T, H) to outputs (B, T, H)."""


class ScanShape(NamedTuple):
    """Rows, steps and units of a recurrence."""

    batch: int
    steps: int
    hidden: int

    @property
    def values(self) -> int:
        """Of one of its tensors."""
        return self.batch * self.steps * self.hidden


SHAPES = (
    ScanShape(1, 65_536, 128),
    ScanShape(1, 1_048_576, 128),
    ScanShape(8, 4096, 1536),
    ScanShape(128, 100, 512),
)
TENSORS = {"forward": 3, "backward": 5}
"""Tensors that a pass must move at least."""

GIVEN_MEMORY = "c, given memory"
"""The C library alone, see `into_given_memory`."""

LOOP_STEPS = 5000
"""Of the reference, a loop in Python, timed on as many steps at most; its time is scaled to all of them."""

_ALLOWED = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.float64: 1e-12}
"""How far a result may lie from float64's, of the largest value."""

_CHECKED_STEPS = 8192
"""Of which results are compared, at most, and 32 units of 2 rows."""


def _join(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return left[0] * right[0], right[0] * left[1] + right[1]


@functools.cache
def _associative() -> Scan:
    """torch.associative_scan, compiled: on a GPU by a scan of Triton's, elsewhere generic."""
    function = importlib.import_module("torch._higher_order_ops.associative_scan").associative_scan

    def run(decay: Tensor, inputs: Tensor) -> Tensor:
        mode = "pointwise" if inputs.is_cuda else "generic"
        outputs: Tensor = function(_join, (decay, inputs), 1, combine_mode=mode)[1]
        return outputs

    return torch.compile(run)


def _turned(module: str, decay: Tensor, inputs: Tensor) -> Tensor:
    """accelerated-scan, which has time last: of tensors whose memory is that of (B, H, T)."""
    outputs: Tensor = importlib.import_module(f"accelerated_scan.{module}").scan(decay.mT, inputs.mT)
    return outputs.mT


def scans(shape: ScanShape, dtype: torch.dtype, device: torch.device, others: bool = True) -> dict[str, Scan]:
    """What can run a shape here, by name."""
    own = [
        each
        for each in implementations_of("linear_recurrence").values()
        if can_run(each.traits, device.type, dtype)
    ]
    found: dict[str, Scan] = {}
    for each in own:
        for stash in ("outputs",) if each.traits.is_last else ("outputs", "carries"):
            label = each.name if stash == "outputs" else f"{each.name}, {stash}"
            found[label] = functools.partial(
                econmt_ops.linear_recurrence, implementation=each.name, stash=stash
            )
    if "c" in found:
        found[GIVEN_MEMORY] = found["c"]
    if not others:
        return found
    if device.type == "cuda" and dtype == torch.float32:
        found["serial kernel"] = importlib.import_module("scripts.bench.serial_scan").serial
    if has_compiler() and device.type == "cuda":
        found["torch.associative_scan"] = lambda decay, inputs: _associative()(decay, inputs)
    power_of_two = shape.steps & (shape.steps - 1) == 0
    if device.type == "cuda" and power_of_two and importlib.util.find_spec("accelerated_scan") is not None:
        for module in "warp", "triton":
            found[f"accelerated-scan, {module}"] = functools.partial(_turned, module)
    return found


def tensors_for(shape: ScanShape, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Decay, inputs and the gradient of the outputs."""
    draw = torch.Generator(device).manual_seed(1)
    made = [torch.randn(shape, generator=draw, device=device) for _ in range(3)]
    return (
        made[0].sigmoid_().to(dtype).requires_grad_(),
        made[1].to(dtype).requires_grad_(),
        made[2].to(dtype),
    )


def _as_wanted(name: str, given: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """The tensors in the memory layout that a scan reads: accelerated-scan takes no other than (B, H, T)."""
    if not name.startswith("accelerated-scan"):
        return given
    decay, inputs, outputs = (
        each.detach().mT.contiguous().mT.requires_grad_(each.requires_grad) for each in given
    )
    return decay, inputs, outputs


def passes(scan: Scan, decay: Tensor, inputs: Tensor, given: Tensor) -> dict[str, Callable[[], Any]]:
    """The forward pass alone, keeping nothing, and the backward pass alone."""

    def forward() -> Tensor:
        with torch.no_grad():
            return scan(decay, inputs)

    outputs: list[Tensor] = []

    def backward() -> tuple[Tensor, ...]:
        if not outputs:
            outputs.append(scan(decay, inputs))
        return torch.autograd.grad(outputs[0], (decay, inputs), given, retain_graph=True)

    return {"forward": forward, "backward": backward}


def check(name: str, scan: Scan, shape: ScanShape, dtype: torch.dtype, device: torch.device) -> float:
    """How far outputs and gradients lie from float64's at a smaller shape, of the largest value of each tensor.

    Raises:
        EconmtError: further than rounding explains.
    """
    small = ScanShape(min(2, shape.batch), min(_CHECKED_STEPS, shape.steps), min(32, shape.hidden))
    decay, inputs, given = _as_wanted(name, tensors_for(small, dtype, device))
    exact = [tensor.detach().double().requires_grad_() for tensor in (decay, inputs)]
    wanted = passes(
        functools.partial(econmt_ops.linear_recurrence, implementation="chunk"),
        exact[0],
        exact[1],
        given.double(),
    )
    worst = 0.0
    for what, run in passes(scan, decay, inputs, given).items():
        found, expected = run(), wanted[what]()
        pairs = [(found, expected)] if isinstance(found, Tensor) else zip(found, expected, strict=True)
        for one, other in pairs:
            worst = max(worst, float((one.double() - other).abs().max() / other.abs().max()))
    if not worst <= _ALLOWED[dtype]:
        raise EconmtError(f"bench scan: {name} lies {worst:.2g} from float64, {_ALLOWED[dtype]} is allowed")
    return worst


def into_given_memory(what: str, decay: Tensor, inputs: Tensor, given: Tensor) -> Callable[[], object]:
    """A pass of the C library that writes to memory that is there: without the time the system takes to give it."""
    kernels = importlib.import_module("econmt_ops.backends.c.recurrence")
    decay, inputs, outputs = decay.detach(), inputs.detach(), torch.zeros_like(inputs.detach())
    steps = decay.shape[1]
    if what == "forward":
        return lambda: kernels.walk(decay, inputs, None, None, False, steps, outputs, None, None)
    made = [torch.zeros_like(outputs) for _ in range(2)]
    return lambda: kernels.walk_back(decay, outputs, None, None, None, False, steps, given, None, *made)


def copy_of(count: int, shape: ScanShape, dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
    """A copy that moves as many bytes as ``count`` tensors of the shape have, half read and half written."""
    source = torch.randn(shape.values * count // 2, device=device).to(dtype)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def captured(function: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """On a GPU the function in a CUDA graph, since what launches take is not the question; else itself."""
    if device.type != "cuda":
        return function
    capturer = Capturer(device)
    with capturer.warming_up():
        function()
        function()
    graph, kept = capturer.capture(function)

    def replay(_: object = (function, kept)) -> None:  # whose tensors the graph reads and writes
        graph.replay()

    return replay


def rows(
    shapes: Sequence[ScanShape],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    say: Say,
    *,
    seconds: float,
    others: bool = True,
) -> Iterator[Row]:
    """Times everything at each shape and type.

    Args:
        shapes, dtypes: of the rows. device: where. say: told what is being measured.
        seconds: for each shape, type and pass.
        others: also what is not of this package.

    Yields:
        One row an implementation and pass: milliseconds (median), bytes that the pass must move, bytes a second, and
        the share of what the copy reaches. Others whose results are wrong are left out, and that is said.
    """
    for shape in shapes:
        for dtype in dtypes:
            name = "x".join(map(str, shape))
            found = scans(shape, dtype, device, others)
            differences = {}
            for label, scan in found.items():
                say(f"scan: {name}, {dtype_name(dtype)}, {label}")
                try:
                    differences[label] = check(label, scan, shape, dtype, device)
                except EconmtError as error:
                    if label.partition(",")[0] in implementations_of("linear_recurrence"):
                        raise
                    notice(f"{error}: left out")
            right = {label: scan for label, scan in found.items() if label in differences}
            for what, count in TENSORS.items():
                yield from _timed(right, differences, shape, dtype, device, what, count, seconds)


def _timed(
    found: dict[str, Scan],
    differences: dict[str, float],
    shape: ScanShape,
    dtype: torch.dtype,
    device: torch.device,
    what: str,
    count: int,
    seconds: float,
) -> Iterator[Row]:
    """The rows of one pass; each implementation takes turns with the copy."""
    moved = count * shape.values * dtype.itemsize
    copy = captured(copy_of(count, shape, dtype, device), device)
    loops = {each.name for each in implementations_of("linear_recurrence").values() if each.traits.is_last}
    for label, scan in found.items():
        is_loop = label in loops
        steps = min(shape.steps, LOOP_STEPS) if is_loop else shape.steps
        given = _as_wanted(label, tensors_for(shape._replace(steps=steps), dtype, device))
        run = passes(scan, given[0], given[1], given[2])[what]
        if label == GIVEN_MEMORY:
            run = into_given_memory(what, given[0], given[1], given[2])
        run = run if is_loop else captured(run, device)
        timings = time_in_turns({"copy": copy, label: run}, seconds, device)
        scale = shape.steps / steps
        taken, copied = timings[label].median * scale, timings["copy"].median
        yield {
            "bench": "scan", "batch": shape.batch, "steps": shape.steps, "hidden": shape.hidden,
            "dtype": dtype_name(dtype), "pass": what, "implementation": label, "milliseconds": 1e3 * taken,
            "lowest decile": 1e3 * timings[label].low * scale, "highest decile": 1e3 * timings[label].high * scale,
            "copy milliseconds": 1e3 * copied, "bytes": moved, "GB/s": moved / taken / 1e9,
            "share of a copy": copied / taken, "difference": differences[label],
        }  # fmt: skip
        del run, given
