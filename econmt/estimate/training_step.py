"""Predicts the ledger of a training step without data, without a GPU and with hardly any memory.

The step runs under a Tracker like a measured one, but on fake tensors, which have shapes and no values. Where memory
depends on values, the worst case is assumed: every row is full, and words repeat just often enough for the model to
multiply each distinct one once.

For ``device="cuda"`` the fake tensors are CPU tensors, because PyTorch without CUDA has no others, and the rest is
assumed: sizes are rounded up to blocks of 512 bytes, the caching allocator's segments are simulated, cuBLAS has the
workspaces that PyTorch gives it, sums need the buffers that they need on an H100 or H200, and PyTorch's LSTMs run in
cuDNN, which is assumed to keep gates, cell states and outputs of every step and to need a workspace of one layer's
gates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from econmt.engine.measurement import track_step
from econmt.engine.outside_memory import ASSUMED, workspace_bytes
from econmt.engine.precision import Precision, precision_of
from econmt.model import Implementations, translation
from econmt.parallel.simulated_rank import ALONE, Rank, simulated_step
from econmt.tasks.protocol import Shape, Task
from econmt_memory.estimate.allocator import CachingAllocator
from econmt_memory.estimate.fake import ON_GPU, assuming_distinct, fake_tensors
from econmt_memory.estimate.gpu_workspaces import REDUCTIONS
from econmt_memory.estimate.shape_cache import ShapeCache
from econmt_memory.measure.ledger import Ledger
from econmt_memory.measure.storages import BLOCK, REPEATED, Storage
from econmt_memory.measure.tracker import Tracker
from econmt_ops.core.loops import shortened
from econmt_ops.dispatch.rule import captured

_CPU = torch.device("cpu")


def estimate_step(
    task: Task,
    shape: tuple[int, int, int],
    device: str = "cpu",
    *,
    precision: Precision | None = None,
    implementations: Implementations | None = None,
    accumulating: bool | None = None,
    rank: Rank = ALONE,
) -> Ledger:
    """Predicts the ledger that ``measure_step`` would measure, without times.

    Args:
        shape: Shape of the rank's batch.
        device: "cpu" or "cuda".
        precision: Precision of products and feature maps; None: that of the recipe, where "auto" is float32 on a CPU.
        implementations: Implementations of the ops; None: those of the recipe.
        accumulating: True if the step adds to existing gradients; None: if an update has several batches.

    Returns:
        The ledger; for cuda with ``allocated`` and ``reserved``, and sizes in whole blocks.
    """
    cuda = device == "cuda"
    training = task.recipe.training
    if precision is None:
        # The CPU that predicts need not be the one that trains, so "auto" is not measured.
        precision = precision_of(training.precision, torch.device(device), saved="" if cuda else "float32")
    if accumulating is None:
        accumulating = training.update_interval > 1
    in_graphs = cuda and training.in_graphs
    with fake_tensors(device) as mode, captured(in_graphs):
        model = task.build_model().train()
        step = simulated_step(
            task, model, rank, Shape(*shape), precision, implementations=implementations, target_device=device
        )
        step.overlaps = training.memory_budget is None
        step.prepare()
        batch = task.example(Shape(*shape))
        tracker = Tracker(
            _CPU,
            block=BLOCK if cuda else 1,
            replacements=replacements(device),
            workspace=REDUCTIONS.get if cuda else None,
            run=ShapeCache(mode),
        )
        workspaces = (
            cublas_workspaces(tracker, 1 if in_graphs else 2, workspace_bytes(precision.dtype))
            if cuda
            else []
        )
        with shortened(tracker.repeating):
            ledger = track_step(tracker, step, batch, accumulating=accumulating)
        del workspaces
    ledger.device, ledger.rank = device, rank.text
    if cuda:
        allocator = simulate(tracker, in_graphs=in_graphs)
        ledger.allocated, ledger.reserved = allocator.peak_allocated, allocator.peak_reserved
        ledger.outside = ASSUMED
    return ledger


def replacements(device: str) -> Mapping[OpOverload[..., Any], Callable[..., Any]]:
    """Returns the functions to run in place of operators of "cpu" or "cuda" that fake tensors cannot run.

    On a GPU the model does not look for distinct words, which would synchronize; on a CPU there are as many as it
    multiplies once.
    """
    return ON_GPU if device == "cuda" else assuming_distinct(translation.most_distinct)


def cublas_workspaces(tracker: Tracker, threads: int, size: int) -> list[Tensor]:
    """Creates tensors of ``size`` bytes in place of cuBLAS's workspaces, which exist before the step; keep them."""
    workspaces = [torch.empty(size, dtype=torch.uint8) for _ in range(threads)]
    for workspace in workspaces:
        tracker.label(workspace, "workspace", "other")
    return workspaces


def simulate(tracker: Tracker, *, in_graphs: bool) -> CachingAllocator:
    """Returns a simulated caching allocator after the allocations that a tracker has recorded.

    ``in_graphs``: True if the step is a CUDA graph, which has a pool of its own beside what was there before.
    """
    allocator = CachingAllocator()
    sizes: Counter[Storage] = Counter()

    def follow(storage: Storage, size: int) -> None:
        sizes[storage] += size
        allocator.hold(storage, sizes[storage])

    for storage, size in tracker.before:
        follow(storage, size)
    if in_graphs:
        allocator.begin_pools()
    for change in tracker.changes:
        if change.storage is not REPEATED:
            follow(change.storage, change.size)
    return allocator
