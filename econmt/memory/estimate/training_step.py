"""The ledger of a training step, predicted: no data, no GPU and next to no memory.

The step runs under a Tracker as a measured one does, but on fake tensors, which have
shapes and no values. What depends on values is taken at its worst: every row is full, and words repeat just as often
as it takes for each to be multiplied once.

For ``device="cuda"`` the fake tensors are those of a CPU, because PyTorch without CUDA has no others, and the rest is
assumed: sizes are rounded to blocks of 512 bytes and the caching allocator's segments are simulated; cuBLAS has the
workspaces that PyTorch gives it; the LSTMs of PyTorch run in cuDNN, which is taken to keep gates, cell states and
outputs of every step and to work in the gates of one layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from econmt.engine.precision import Precision, precision_of
from econmt.memory.estimate.allocator import CachingAllocator
from econmt.memory.estimate.fake import ON_GPU, REPLACEMENTS, standing_in
from econmt.memory.estimate.shape_cache import RememberedShapes
from econmt.memory.measure.ledger import Ledger, track_step
from econmt.memory.measure.tracker import BLOCK, Storage, Tracker
from econmt.model import Implementations
from econmt.parallel.simulated_rank import ALONE, Rank, simulated_step
from econmt.tasks.protocol import Shape, Task
from econmt_ops.core.loops import shortened
from econmt_ops.dispatch.rule import captured

CUBLAS_WORKSPACE = 32 << 20
"""Bytes that PyTorch gives cuBLAS on a GPU of compute capability 9.0; others get 8.1 MiB.

A workspace belongs to a handle and a handle to a thread (ATen/cuda/CublasHandlePool.cpp), and backward passes on a GPU
have a thread of their own. Both stay from the first step on; in a CUDA graph the first is given back before the second
is taken.
"""

_CPU = torch.device("cpu")


def estimate_step(
    task: Task,
    shape: tuple[int, int, int],
    device: str = "cpu",
    *,
    precision: torch.dtype | None = None,
    implementations: Implementations | None = None,
    accumulating: bool | None = None,
    rank: Rank = ALONE,
) -> Ledger:
    """Predict the ledger of a training step: what ``measure_step`` would measure, without times.

    Args:
        task: what is trained, by the training section of its recipe.
        shape: (B, S, T): sentence pairs, source positions, target positions; of a rank its own.
        device: "cpu" or "cuda".
        precision: of products and feature maps; None: as the recipe says, "auto" being float32 on a CPU.
        implementations: instead of those that the recipe asks for.
        accumulating: whether the step finds gradients to add to; None: if an update has several batches.
        rank: of several, whose step it is, which share work as the recipe says.

    Returns:
        The ledger; on cuda with ``allocated`` and ``reserved``, and sizes in whole blocks.
    """
    cuda = device == "cuda"
    training = task.recipe.training
    if precision is None:
        # What is faster on a CPU is not measured on the one where it is asked.
        precision = precision_of(
            training.precision, torch.device(device), saved="" if cuda else "float32"
        ).dtype
    if accumulating is None:
        accumulating = training.update_interval > 1
    if implementations is None:
        implementations = Implementations.of(task.recipe.ops)
    in_graphs = cuda and training.in_graphs
    with standing_in(device) as mode, captured(in_graphs):
        model = task.build_model().train()
        step = simulated_step(
            task,
            model,
            rank,
            Shape(*shape),
            Precision(precision),
            implementations=implementations,
            target_device=device,
        )
        step.overlaps = training.memory_budget is None
        step.prepare()
        batch = task.example(Shape(*shape))
        tracker = Tracker(
            _CPU,
            block=BLOCK if cuda else 1,
            replacements=ON_GPU if cuda else REPLACEMENTS,
            run=RememberedShapes(mode),
        )
        workspaces = cublas_workspaces(tracker, 1 if in_graphs else 2) if cuda else []
        with shortened(tracker.repeating):
            ledger = track_step(tracker, step, batch, accumulating=accumulating)
        del workspaces
    ledger.device, ledger.rank = device, rank.text
    if cuda:
        allocator = simulate(tracker)
        ledger.allocated, ledger.reserved = allocator.peak_allocated, allocator.peak_reserved
    return ledger


def cublas_workspaces(tracker: Tracker, threads: int) -> list[Tensor]:
    """Stand-ins for what cuBLAS has taken before the step, to be kept while it runs."""
    found = [torch.empty(CUBLAS_WORKSPACE, dtype=torch.uint8) for _ in range(threads)]
    for workspace in found:
        tracker.label(workspace, "workspace", "other")
    return found


def simulate(tracker: Tracker) -> CachingAllocator:
    """The caching allocator after the allocations that a tracker has seen."""
    allocator = CachingAllocator()
    blocks: dict[Storage, tuple[int, int]] = {}
    for storage, size in [*tracker.before, *((change.storage, change.size) for change in tracker.changes)]:
        before, address = blocks.pop(storage, (0, 0))
        if before + size:
            blocks[storage] = before + size, allocator.allocate(before + size)
        if before:
            allocator.free(address)
    return allocator
