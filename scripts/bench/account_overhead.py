"""Times training steps with and without a memory account.

    python -m scripts.bench account-overhead
    python -m scripts.bench account-overhead --device cuda --long

A step is timed alone, in the block of memory.track, and under a dispatch mode that does nothing, in turns; the fastest
of each counts. What a block costs once is apart: entering and leaving it, and reading the account afterwards.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from torch.utils._python_dispatch import TorchDispatchMode

from econmt import memory
from econmt_memory.report.layout import print_table
from econmt_memory.report.tables import ReportTable
from scripts.bench.account import SIZES
from scripts.bench.account_models import CASES, LONG, Case
from scripts.bench.arguments import parser_of


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


class _Timer:
    """Times functions: of the processor on a CPU, of the clock on a GPU, which has finished before and after."""

    def __init__(self, device: str) -> None:
        self.now: Callable[[], float] = time.process_time if device == "cpu" else self._finished

    @staticmethod
    def _finished() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    def __call__(self, run: Callable[[], object]) -> float:
        """Returns the seconds of a call."""
        begin = self.now()
        run()
        return self.now() - begin


def measure(make: Callable[[], Case], device: str, rounds: int) -> list[float]:
    """Returns milliseconds of a step alone, tracked, and under a mode that does nothing.

    Then milliseconds of entering and leaving a block, of reading the account, and the number of operators.
    """
    timer = _Timer(device)
    torch.manual_seed(0)
    with torch.device(device):
        case = make()
    for _ in range(3):
        case.step()
    with _Nothing() as mode:
        case.step()
    best = [float("inf")] * 5
    for _ in range(rounds):
        gc.collect()
        case.step()  # as before the other two, since the first step after a collection is slower
        bare = timer(case.step)
        begin = timer.now()
        with memory.track(case.model, case.optimizer) as account:
            tracked = timer(case.step)
        block = timer.now() - begin
        with _Nothing():
            nothing = timer(case.step)
        reading = timer(lambda account=account: account.ledger)
        took = (bare, tracked, nothing, block - tracked, reading)
        best = [min(pair) for pair in zip(best, took, strict=True)]
    return [*(1000 * each for each in best), mode.calls]


def main() -> None:
    """Measures the models and prints a table."""
    parser = parser_of(__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="Device of the models.")
    parser.add_argument("--rounds", default=10, type=int, help="Number of rounds.")
    parser.add_argument("--models", nargs="*", help="Names of models; all by default.")
    parser.add_argument("--size", type=int, help="Size of the models, from 1, instead of one for each.")
    parser.add_argument(
        "--long", action="store_true", help="Four models with batches that take a GPU 150 ms and more."
    )
    options = parser.parse_args()
    torch.set_flush_denormal(True)
    cases: dict[str, Callable[[], Case]] = (
        LONG
        if options.long
        else {
            name: lambda name=name: CASES[name](options.size or SIZES[name])  # type: ignore[misc]
            for name in CASES
        }
    )
    columns = (
        *("model", "operators", "step, ms", "tracked, ms", "overhead", "us per operator"),
        *("empty mode", "once, ms", "reading, ms"),
    )
    console = Console(width=140)
    rows = []
    for name in options.models or cases:
        bare, tracked, nothing, once, reading, calls = measure(cases[name], options.device, options.rounds)
        rows.append(
            [
                *(
                    name,
                    f"{calls:.0f}",
                    f"{bare:,.1f}",
                    f"{tracked:,.1f}",
                    f"{100 * (tracked / bare - 1):.0f} %",
                ),
                *(f"{1000 * (tracked - bare) / calls:.1f}", f"{100 * (nothing / bare - 1):.0f} %"),
                *(f"{once:.1f}", f"{reading:.0f}"),
            ]
        )
        print(*rows[-1], flush=True)
    print_table(console, ReportTable("overhead of a memory account", columns, rows).for_terminal())


if __name__ == "__main__":
    main()
