"""Compares memory accounts with the allocator's bytes.

    python -m scripts.bench account
    python -m scripts.bench account --models GPT ViT --size 2
    python -m scripts.bench account --overhead --device cuda --long

Each row is one of twelve models: the peak of its account, the difference to the allocator's, that of the prediction,
the time of a step in the block of memory.track beside the time alone, and the peak that PyTorch's MemTracker reports.

With --overhead a step is timed alone, in the block of memory.track, and under a dispatch mode that does nothing, in
turns; the fastest of each counts. What a block costs once is apart: entering and leaving it, and reading the account
afterwards.
"""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._python_dispatch import TorchDispatchMode

import econmt_memory as memory
from econmt.bench.rows import Row
from scripts.bench.frame import Bench
from tests.unit.memory.account.models import CASES, LONG, Case, counted_peak

SIZES = {
    "GPT": 4, "ResNet": 8, "encoder-decoder": 8, "ViT": 12, "LSTM classifier": 12, "GRU language model": 8,
    "diffusion U-Net": 8, "mixture of experts": 16, "LoRA": 4, "shared weights": 4, "checkpointing": 4,
    "econmt's own": 16,
}  # fmt: skip
"""Sizes with which a step takes about 0.1 to 1 s on one core."""


def make(name: str, device: str, size: int | None, long: bool = False) -> Case:
    """Makes a model with its training step, or with one that takes long on a GPU."""
    torch.manual_seed(0)
    with torch.device(device):
        return LONG[name]() if long else CASES[name](size or SIZES[name])


def seconds_of(run: Callable[[], object], device: str) -> float:
    """Returns the seconds of a call: of the processor on a CPU, of the clock on a GPU."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    if device == "cuda":
        torch.cuda.synchronize()
    begin = clock()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return clock() - begin


def _allocator_peak(case: Case, name: str, device: str, size: int | None) -> int:
    if device == "cpu":
        return counted_peak(lambda: make(name, device, size).step)
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


def measure(name: str, device: str, rounds: int, size: int | None) -> Row:
    """Returns a row of the table."""
    torch.set_flush_denormal(True)  # otherwise steps of a few models become slower as they train
    fake = make(name, "cpu", size)  # predictions need no GPU
    begin = time.perf_counter()
    predicted = memory.predict(fake.step, fake.model, fake.optimizer, device=device, nonzero=0.25)
    took = time.perf_counter() - begin
    del fake
    case = make(name, device, size)
    case.step()
    case.step()
    gc.collect()
    peak = _allocator_peak(case, name, device, size)
    bare, tracked = [], []
    for _ in range(rounds):
        bare.append(seconds_of(case.step, device))
        with memory.track(case.model, case.optimizer) as account:
            tracked.append(seconds_of(case.step, device))
    return {
        "model": name,
        "peak, bytes": f"{account.peak_bytes:,}",
        "against the allocator": f"{account.peak_bytes - peak:+,}",
        "prediction": f"{100 * (predicted.peak_bytes / account.peak_bytes - 1):+.2f} %",
        "s": f"{took:.1f}",
        "step, ms": f"{1000 * min(bare):,.0f}",
        "overhead": f"{100 * (min(tracked) / min(bare) - 1):.0f} %",
        "MemTracker, MB": _mem_tracker(case, device),
    }


class _Nothing(TorchDispatchMode):
    """Passes each operator through Python."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def overhead(name: str, case: Case, device: str, rounds: int) -> Row:
    """Returns a row of the table: a step alone, tracked, and under a mode that does nothing."""
    for _ in range(3):
        case.step()
    with _Nothing() as mode:
        case.step()
    best = [float("inf")] * 5

    def in_block() -> None:
        nonlocal account
        with memory.track(case.model, case.optimizer) as account:
            inside.append(seconds_of(case.step, device))

    account: Any = None
    for _ in range(rounds):
        gc.collect()
        case.step()  # as before the other two, since the first step after a collection is slower
        inside: list[float] = []
        bare, block = seconds_of(case.step, device), seconds_of(in_block, device)
        with _Nothing():
            nothing = seconds_of(case.step, device)
        reading = seconds_of(lambda: account.ledger, device)
        took = bare, inside[0], nothing, block - inside[0], reading
        best = [min(pair) for pair in zip(best, took, strict=True)]
    bare, tracked, nothing, once, reading = (1000 * each for each in best)
    return {
        "model": name,
        "operators": mode.calls,
        "step, ms": f"{bare:,.1f}",
        "tracked, ms": f"{tracked:,.1f}",
        "overhead": f"{100 * (tracked / bare - 1):.0f} %",
        "us per operator": f"{1000 * (tracked - bare) / mode.calls:.1f}",
        "empty mode": f"{100 * (nothing / bare - 1):.0f} %",
        "once, ms": f"{once:.1f}",
        "reading, ms": f"{reading:.0f}",
    }


def main(words: Sequence[str] | None = None) -> None:
    """Measures the models and prints a table."""
    bench = Bench(__doc__, device="cpu")
    add = bench.add_argument
    add("--rounds", type=int, help="timed steps, of which the fastest counts (5; with --overhead 10)")
    add("--models", nargs="*", choices=list(CASES), help="names of models; all by default")
    add("--size", type=int, help="size of the models, from 1, instead of one for each")
    add("--overhead", action="store_true", help="time steps with and without an account, in this process")
    add("--long", action="store_true", help="with --overhead: batches that take a GPU 150 ms and more")
    given = bench.begin(words)
    device, names = given.device.type, given.models or (LONG if given.long else CASES)
    torch.set_flush_denormal(True)  # otherwise steps of a few models become slower as they train
    if given.overhead:
        cases = ((name, make(name, device, given.size, given.long)) for name in names)
        bench.report(overhead(name, case, device, given.rounds or 10) for name, case in cases)
        return
    # Each model has its own process, since workspaces and blocks of an allocator stay.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
        options = device, given.rounds or 5, given.size
        bench.report(pool.submit(measure, name, *options).result() for name in names)
