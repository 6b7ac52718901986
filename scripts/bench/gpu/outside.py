"""Measures all memory that training takes of a GPU.

    python -m scripts.bench gpu.outside

Plain PyTorch, econmt in a graph and econmt without one train W2 and W1 in bfloat16. Workloads and variants are those of
gpu.step, each in a process of its own. "of the GPU" is by NVIDIA's management library, what is taken more than before
the process began; "outside" is without what PyTorch's allocator has reserved.
"""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor

import torch

from econmt.bench.rows import Row
from econmt.config.recipe import load_recipe
from econmt.engine.outside_memory import limit_workspaces, outside_meter, taken_by_all
from econmt.tasks.translation import TranslationTask
from econmt_memory.report.tables import format_bytes
from econmt_ops.dispatch.rule import rules_only
from scripts.bench.frame import CUDA, Bench
from scripts.bench.gpu.step import WORKLOADS, batches_of, prepare


def measure(workload: str, variant: str, precision: str) -> Row:
    """Trains some steps in this process, and returns the bytes that it takes."""
    before = taken_by_all(0)
    if variant != "plain":
        limit_workspaces(precision)
        outside_meter(CUDA)
    recipe, shapes, source, target, full = WORKLOADS[workload]
    task = TranslationTask(load_recipe(recipe), source, target)
    with rules_only():
        run = prepare(variant, task, batches_of(task, shapes, full), precision)
    torch.cuda.synchronize()
    all_bytes, reserved = taken_by_all(0) - before, torch.cuda.memory_reserved()
    row: Row = {"workload": workload, "variant": variant, "allocated": run.allocated, "reserved": reserved}
    return row | {"outside": all_bytes - reserved, "of the GPU": all_bytes}


def main(words: Sequence[str] | None = None) -> None:
    bench = Bench(__doc__)
    bench.begin(words)
    bench.device = CUDA

    def rows() -> Iterator[Row]:
        for workload, variant in itertools.product(("W2", "W1"), ("plain", "auto", "eager")):
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                row = process.submit(measure, workload, variant, "bfloat16").result()
            yield {name: format_bytes(it) if isinstance(it, int) else it for name, it in row.items()}

    bench.report(rows(), "memory of a GPU, bfloat16")
