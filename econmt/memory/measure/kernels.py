"""GPU profile of a step: kernels by class, launch times, and gaps between kernels.

Kernels are seen through CUPTI (``torch.profiler``), those of a replayed CUDA graph too.
"""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

_PATTERNS = {
    "optimizer": "multi_tensor_apply|lpnorm|fused_?(adam|sgd)",
    "loss": "^loss_|log_?softmax|nll_loss",
    "recurrences": "^lstm_|^cell_|rnn|lstm|elementwise_[fb]p",
    "attention": "^attention_|^plain_attention_|softmax|fmha|flash",
    "embedding and dropout": "^embedding_|^dropout_|^reversal_|radix_?sort|compute_grad_weight|vectorized_gather"
    "|indexselect|indexing|index_elementwise|embedding|krn_partial|sum_and_scatter|dropout|distribution_|devicescan"
    "|unique",
    "products": "nvjet|cutlass|gemm|gemv|splitkreduce|cublas|xmma|dot_kernel",
    "copies and pointwise": "memcpy|memset|copy|elementwise|reduce_kernel|^triton_|fill",
}
"""By class, what a kernel's name has in it, in any case; the first class that fits is the kernel's."""

CLASSES = (
    "products",
    "recurrences",
    "attention",
    "loss",
    "optimizer",
    "embedding and dropout",
    "copies and pointwise",
    "other",
)
"""The classes, in the order of a table."""

_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_HOST = ("cuda_runtime", "cuda_driver")
_TIMED = 10
"""Steps whose time is taken, without a profiler."""

_COPIED = 1 << 28
"""Bytes that are copied to see how fast the device copies."""


class KernelRow(NamedTuple):
    """The kernels of one class in a step.

    Attributes:
        kind: one of :data:`CLASSES`.
        launches: how many there are.
        milliseconds: that they take together.
        bytes: that they read and write; None where that is not known.
    """

    kind: str
    launches: int
    milliseconds: float
    bytes: int | None = None


@dataclass
class KernelTimes:
    """The kernels of a step.

    Attributes:
        name: how the step is run.
        step: milliseconds of a step, without a profiler.
        rows: one a class that occurs.
        busy: milliseconds in which any kernel runs.
        launches: calls of the host that launch a kernel, or a graph of them.
        launching: milliseconds that those take on the host, with a profiler.
        copy_rate: bytes a second that the device reads and writes when it copies a large tensor.
    """

    name: str
    step: float
    rows: list[KernelRow]
    busy: float
    launches: int
    launching: float
    copy_rate: float

    @property
    def kernels(self) -> int:
        """Number of kernels."""
        return sum(row.launches for row in self.rows)

    @property
    def gaps(self) -> float:
        """Milliseconds of a step in which no kernel runs."""
        return max(0.0, self.step - self.busy)


def kernel_class(name: str) -> str:
    """The class of a kernel, or of a copy, by its name."""
    lower = name.lower()
    return next((kind for kind, pattern in _PATTERNS.items() if re.search(pattern, lower)), "other")


def measure_kernels(
    name: str, run: Callable[[], object], device: torch.device, known: Mapping[str, int] | None = None
) -> KernelTimes:
    """Runs a step some times and looks at the kernels of one.

    Args:
        name: how it is run.
        run: enqueues it; it has been run before.
        device: of CUDA.
        known: bytes that classes read and write in a step.
    """

    def timed(count: int) -> float:
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        for _ in range(count):
            run()
        torch.cuda.synchronize(device)
        return 1e3 * (time.perf_counter() - began) / count

    step = min(timed(_TIMED) for _ in range(3))
    for _ in range(2):  # the first profile sets CUPTI up, which takes longer than the step
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            timed(1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return summarise(name, step, events, copy_rate(device), known or {})


def summarise(
    name: str, step: float, events: Sequence[Mapping[str, Any]], rate: float, known: Mapping[str, int]
) -> KernelTimes:
    """The kernels of one step.

    Args:
        name: how it was run. step: its milliseconds without a profiler. rate: of copies.
        events: of a Chrome trace.
        known: bytes that classes read and write in a step.
    """
    kernels = [event for event in events if event.get("cat") in _DEVICE]
    launches = [event for event in events if event.get("cat") in _HOST and "aunch" in event["name"]]
    found: dict[str, list[float]] = {}
    for kernel in kernels:
        found.setdefault(kernel_class(kernel["name"]), []).append(float(kernel["dur"]) / 1e3)
    rows = [
        KernelRow(kind, len(found[kind]), sum(found[kind]), known.get(kind))
        for kind in CLASSES
        if kind in found
    ]
    busy, end = 0.0, 0.0
    for kernel in sorted(kernels, key=lambda event: float(event["ts"])):
        begin, last = float(kernel["ts"]), float(kernel["ts"]) + float(kernel["dur"])
        busy += max(0.0, last - max(begin, end))
        end = max(end, last)
    launching = sum(float(event["dur"]) for event in launches)
    return KernelTimes(name, step, rows, busy / 1e3, len(launches), launching / 1e3, rate)


def copy_rate(device: torch.device) -> float:
    """Bytes a second that the device reads and writes when it copies a large tensor."""
    source = torch.empty(_COPIED, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(4):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        for _ in range(_TIMED):
            target.copy_(source)
        torch.cuda.synchronize(device)
        best = min(best, (time.perf_counter() - began) / _TIMED)
    return 2 * _COPIED / best


def optimizer_bytes(parameters: int, moments: int) -> int:
    """Returns the bytes that an optimizer reads and writes in float32: gradients twice, values and moments.

    Args:
        parameters: their values. moments: the values of all of them.
    """
    return 4 * (parameters * (2 + 2) + 2 * moments)
