"""Measures all memory that training takes of a GPU.

    python -m scripts.bench gpu.outside                    # W2 and W1: plain PyTorch, econmt in a graph, econmt eager
    python -m scripts.bench gpu.outside --only W2 --variants plain auto

Workloads and variants are those of gpu.step, each in a process of its own. "of the GPU" is by NVIDIA's management
library, what is taken more than before the process began; "outside" is without what PyTorch's allocator has reserved.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys

import torch
from rich.console import Console

from econmt.bench.rows import Row, table
from econmt.config.recipe import load_recipe
from econmt.engine.outside_memory import limit_workspaces, outside_meter, taken_by_all
from econmt.tasks.translation import TranslationTask
from econmt_memory.report.tables import format_bytes
from econmt_ops.dispatch.rule import rules_only
from scripts.bench.arguments import parser_of
from scripts.bench.gpu.step import DEVICE, PRECISIONS, VARIANTS, WORKLOADS, batches_of, prepare


def measure(workload: str, variant: str, precision: str) -> Row:
    """Trains some steps in this process, and returns the bytes that it takes."""
    before = taken_by_all(0)
    if variant != "plain":
        limit_workspaces(precision)
        outside_meter(DEVICE)
    recipe, shapes, source, target, full = WORKLOADS[workload]
    task = TranslationTask(load_recipe(recipe), source, target)
    run = prepare(variant, task, batches_of(task, shapes, full), precision)
    torch.cuda.synchronize()
    all_bytes, reserved = taken_by_all(0) - before, torch.cuda.memory_reserved()
    row: Row = {"workload": workload, "variant": variant, "allocated": run.allocated, "reserved": reserved}
    return row | {"outside": all_bytes - reserved, "of the GPU": all_bytes}


def main() -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--only", nargs="+", choices=WORKLOADS, default=["W2", "W1"], help="workloads")
    add("--variants", nargs="+", choices=VARIANTS, default=["plain", "auto", "eager"], help="variants")
    add("--precision", choices=PRECISIONS, default="bfloat16", help="precision (%(default)s)")
    add("--here", action="store_true", help="measure in this process, and print JSON")
    given = parser.parse_args()
    rows: list[Row] = []
    for workload, variant in itertools.product(given.only, given.variants):
        if given.here:
            with rules_only():
                print(json.dumps(measure(workload, variant, given.precision)))
            return
        options = ("--only", workload, "--variants", variant, "--precision", given.precision, "--here")
        command = [sys.executable, "-m", "scripts.bench", "gpu.outside", *options]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode:
            raise SystemExit(ended.stderr)
        row = json.loads(ended.stdout.splitlines()[-1])
        rows.append({name: format_bytes(it) if isinstance(it, int) else it for name, it in row.items()})
    Console(width=100).print(table(rows, rows[0], f"memory of a GPU, {given.precision}"))


if __name__ == "__main__":
    main()
