"""Times training steps with and without a memory account.

    python -m scripts.bench account-overhead
    python -m scripts.bench account-overhead --device cuda --long

A step is timed alone, in the block of memory.track, and under a dispatch mode that does nothing, in turns; the fastest
of each counts. What a block costs once is apart: entering and leaving it, and reading the account afterwards.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import econmt_memory as memory
from econmt.bench.rows import Row
from scripts.bench.account import make, seconds_of
from scripts.bench.frame import Bench
from tests.unit.memory.account.models import CASES, LONG, Case


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


def measure(name: str, case: Case, device: str, rounds: int) -> Row:
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
    add("--rounds", default=10, type=int, help="rounds (%(default)s)")
    add("--models", nargs="*", help="names of models; all by default")
    add("--size", type=int, help="size of the models, from 1, instead of one for each")
    add("--long", action="store_true", help="four models with batches that take a GPU 150 ms and more")
    given = bench.begin(words)
    torch.set_flush_denormal(True)
    device, names = given.device.type, given.models or (LONG if given.long else CASES)
    cases = ((name, make(name, device, given.size, given.long)) for name in names)
    bench.report(
        (measure(name, case, device, given.rounds) for name, case in cases), "overhead of a memory account"
    )
