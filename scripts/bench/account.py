"""Compares memory accounts with the allocator's bytes.

    python -m scripts.bench account
    python -m scripts.bench account --models GPT ViT --size 2

Each row is one of twelve models: the peak of its account, the difference to the allocator's, that of the prediction,
the time of a step in the block of memory.track beside the time alone, and the peak that PyTorch's MemTracker reports.
"""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
from rich.console import Console
from torch.distributed._tools.mem_tracker import MemTracker

from econmt import memory
from econmt_memory.report.layout import print_table
from econmt_memory.report.tables import ReportTable
from scripts.bench.account_models import CASES, Case
from scripts.bench.arguments import parser_of

SIZES = {
    "GPT": 4,
    "ResNet": 8,
    "encoder-decoder": 8,
    "ViT": 12,
    "LSTM classifier": 12,
    "GRU language model": 8,
    "diffusion U-Net": 8,
    "mixture of experts": 16,
    "LoRA": 4,
    "shared weights": 4,
    "checkpointing": 4,
    "econmt's own": 16,
}
"""Sizes with which a step takes about 0.1 to 1 s on one core."""


def counted_peak(make: Callable[[], Callable[[], object]]) -> int:
    """Returns the most live CPU bytes during a step, by the memory events of PyTorch's profiler alone.

    All memory counts that was allocated since before the model was made.

    Args:
        make: Makes the model and returns its step, which runs twice to warm up, and once to be counted.
    """
    gc.collect()
    with torch.profiler.profile(profile_memory=True) as profile:
        step = make()
        step()
        step()
        gc.collect()
        with torch.profiler.record_function("counted step"):
            step()
    begin = end = 0
    events: list[tuple[int, int, int]] = []
    results: Any = profile.profiler
    waiting: list[Any] = list(results.kineto_results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.name == "counted step":
            begin, end = event.start_time_ns, event.end_time_ns
        if event.tag.name == "Allocation":
            events.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
    live: dict[int, int] = {}
    total = peak = 0
    for moment, address, size in sorted(events):
        if size < 0 and address not in live:
            continue  # allocated before
        total += size
        if size > 0:
            live[address] = size
        else:
            del live[address]
        if begin <= moment <= end:
            peak = max(peak, total)
        elif moment < begin:
            peak = total
    return peak


def _make(name: str, device: str, size: int | None) -> Case:
    torch.manual_seed(0)
    with torch.device(device):
        return CASES[name](size or SIZES[name])


def _seconds(run: Callable[[], object], device: str) -> float:
    """Returns the seconds of a call: of the processor on a CPU, of the clock on a GPU."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    begin = clock()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return clock() - begin


def _allocator_peak(case: Case, name: str, device: str, size: int | None) -> int:
    if device == "cpu":
        return counted_peak(lambda: _make(name, device, size).step)
    torch.cuda.reset_peak_memory_stats()
    case.step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def _mem_tracker(case: Case, device: str) -> str:
    """Returns the peak of MemTracker, in MB, or the class of its error."""
    tracker = MemTracker()
    try:
        tracker.track_external(case.model, case.optimizer)
        with tracker:
            case.step()
    except RuntimeError as error:  # also its subclass NotImplementedError
        return type(error).__name__
    peaks = tracker.get_tracker_snapshot("peak")
    return f"{sum(sizes['Total'] for kind, sizes in peaks.items() if kind.type == device) / 1e6:,.3f}"


def measure(name: str, device: str, rounds: int, size: int | None) -> list[str]:
    """Returns a row of the table."""
    torch.set_flush_denormal(True)  # otherwise steps of a few models become slower as they train
    fake = _make(name, "cpu", size)  # predictions need no GPU
    begin = time.perf_counter()
    predicted = memory.predict(fake.step, fake.model, fake.optimizer, device=device, nonzero=0.25)
    took = time.perf_counter() - begin
    del fake
    case = _make(name, device, size)
    case.step()
    case.step()
    gc.collect()
    peak = _allocator_peak(case, name, device, size)
    bare, tracked = [], []
    for _ in range(rounds):
        bare.append(_seconds(case.step, device))
        with memory.track(case.model, case.optimizer) as account:
            tracked.append(_seconds(case.step, device))
    error = predicted.peak_bytes / account.peak_bytes - 1
    return [
        name,
        f"{account.peak_bytes:,}",
        "0" if account.peak_bytes == peak else f"{account.peak_bytes - peak:+,}",
        f"{100 * error:+.2f} %",
        f"{took:.1f}",
        f"{1000 * min(bare):,.0f}",
        f"{100 * (min(tracked) / min(bare) - 1):.0f} %",
        _mem_tracker(case, device),
    ]


def main() -> None:
    """Measures all models and prints a table."""
    parser = parser_of(__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="Device of the models.")
    parser.add_argument(
        "--rounds", default=5, type=int, help="Number of timed steps, of which the fastest counts."
    )
    parser.add_argument(
        "--models", nargs="*", default=list(CASES), choices=list(CASES), help="Names of models."
    )
    parser.add_argument("--size", type=int, help="Size of the models, from 1, instead of one for each.")
    options = parser.parse_args()
    columns = (
        "model",
        "peak, bytes",
        "against the allocator",
        "prediction",
        "s",
        "step, ms",
        "overhead",
        "MemTracker, MB",
    )
    # Each model has its own process, since workspaces and blocks of an allocator stay.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
        rows = [
            pool.submit(measure, name, options.device, options.rounds, options.size).result()
            for name in options.models
        ]
    print_table(Console(width=140), ReportTable("memory account", columns, rows).for_terminal())


if __name__ == "__main__":
    main()
