"""GPU profile of a step: kernels by class, launch times, and gaps between kernels.

CUPTI (``torch.profiler``) records the kernels, including those of a replayed CUDA graph.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from econmt.engine.devices import shortest_seconds

_PATTERNS = {
    "optimizer": "multi_tensor_apply|lpnorm|adam|fused_?sgd",
    "loss": "^loss_|^slice_|log_?softmax|nll_loss",
    "recurrences": "^(cell|decoder|gru|output|recurrence|scan)_|rnn|lstm|elementwise_[fb]p",
    "attention": "^attention_|^plain_attention_|^cover(age|ed)_|softmax|fmha|flash",
    "embedding and dropout": "^embedding_|^dropout_|^reversal_|radix_?sort|compute_grad_weight|vectorized_gather"
    "|indexselect|indexing|index_elementwise|embedding|krn_partial|sum_and_scatter|dropout|distribution_|devicescan"
    "|unique",
    "products": "nvjet|cutlass|gemm|gemv|splitkreduce|cublas|xmma|dot_kernel",
    "copies and pointwise": "memcpy|memset|copy|elementwise|reduce_kernel|^triton_|fill",
}
"""Patterns of kernel names in lower case by class; the first class that matches is the kernel's."""

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
"""Classes of kernels, in the order of a table."""

_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_HOST = ("cuda_runtime", "cuda_driver")
_TIMED = 10
"""Number of steps, or of copies, that are timed together."""

_COPIED = 1 << 28
"""Bytes of the tensor whose copy is timed."""


class KernelRow(NamedTuple):
    """Kernels of one of the :data:`CLASSES` in a step; the ``bytes`` that they read and write are None if unknown."""

    kind: str
    launches: int
    milliseconds: float
    bytes: int | None = None


@dataclass
class KernelTimes:
    """Kernels of a step.

    Attributes:
        name: Description of how the step runs.
        step: Milliseconds of a step without a profiler.
        rows: Kernels by class, for the classes that occur.
        busy: Milliseconds in which at least one kernel runs.
        launches: Number of host calls that launch a kernel or a graph.
        launching: Milliseconds of these calls on the host, with a profiler.
        copy_rate: Bytes per second that the device reads and writes while it copies a large tensor.
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
        """Milliseconds of a step without a running kernel."""
        return max(0.0, self.step - self.busy)


def kernel_class(name: str) -> str:
    """Returns the class of a kernel or copy by its name."""
    lower = name.lower()
    return next((kind for kind, pattern in _PATTERNS.items() if re.search(pattern, lower)), "other")


def measure_kernels(
    name: str, run: Callable[[], object], device: torch.device, known: Mapping[str, int] | None = None
) -> KernelTimes:
    """Times a step, which ``run`` enqueues, and profiles its kernels.

    ``known`` has the bytes that kernels read and write in a step, by class.
    """

    def several() -> None:
        for _ in range(_TIMED):
            run()

    step = 1e3 * shortest_seconds(several, device, repeats=3) / _TIMED
    for _ in range(2):  # the first profile initializes CUPTI, which takes longer than the step
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            run()
            torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return summarise(name, step, events, copy_rate(device), known or {})


def summarise(
    name: str, step: float, events: Sequence[Mapping[str, Any]], rate: float, known: Mapping[str, int]
) -> KernelTimes:
    """Summarizes a trace of one step.

    Args:
        step: Milliseconds of a step without a profiler.
        rate: Bytes per second of copies.
        known: Bytes that kernels read and write in a step, by class.
    """
    kernels = [event for event in events if event.get("cat") in _DEVICE]
    launches = [event for event in events if event.get("cat") in _HOST and "aunch" in event["name"]]
    times: dict[str, list[float]] = {}
    for kernel in kernels:
        times.setdefault(kernel_class(kernel["name"]), []).append(float(kernel["dur"]) / 1e3)
    rows = [
        KernelRow(kind, len(times[kind]), sum(times[kind]), known.get(kind))
        for kind in CLASSES
        if kind in times
    ]
    busy, end = 0.0, 0.0
    for kernel in sorted(kernels, key=lambda event: float(event["ts"])):
        begin, last = float(kernel["ts"]), float(kernel["ts"]) + float(kernel["dur"])
        busy += max(0.0, last - max(begin, end))
        end = max(end, last)
    launching = sum(float(event["dur"]) for event in launches)
    return KernelTimes(name, step, rows, busy / 1e3, len(launches), launching / 1e3, rate)


def copy_rate(device: torch.device) -> float:
    """Measures the bytes per second that the device reads and writes while it copies a large tensor."""
    source = torch.empty(_COPIED, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        for _ in range(_TIMED):
            target.copy_(source)

    return 2 * _COPIED * _TIMED / shortest_seconds(copy, device, repeats=3)


def optimizer_bytes(parameters: int, moments: int) -> int:
    """Returns the bytes that a float32 optimizer reads and writes, of gradients, parameters and ``moments``."""
    return 4 * (parameters * (2 + 2) + 2 * moments)
