"""Tracks the memory of a training step of any PyTorch program."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.optim import Optimizer

from econmt.errors import InputError
from econmt.memory.account.account import Account
from econmt.memory.account.module_scopes import ModuleScopes
from econmt.memory.measure.allocations import AllocationLog
from econmt.memory.measure.storages import BLOCK
from econmt.memory.measure.tracker import Tracker


class StepTracker(Tracker):  # type: ignore[no-untyped-call]
    """Tracker of a program's step, which tells by itself which phase the step is in."""

    scopes: ModuleScopes | None = None

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Lets compiled functions run compiled."""
        return True

    def phase(self) -> str:
        """Returns the current phase, and begins it if it is another one than before."""
        if self.scopes is not None and self.scopes.updating:
            phase = "optimizer"
        else:
            phase = "backward" if torch._C._current_graph_task_id() >= 0 else "forward"
        if not self.begins or self.begins[-1].phase != phase:
            self.begin(phase)
        return phase


@contextmanager
def track(
    model: nn.Module | Sequence[nn.Module] | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    device: torch.device | str | None = None,
) -> Iterator[Account]:
    """Accounts for every byte of the code within the context, which is usually one training step.

    The account may be read when the context has ended, also if it ended with an error.

    Args:
        model: Model or models whose modules are named; others are named when they run.
        optimizer: Optimizer or optimizers whose state exists already; others are known from their first step on.
        device: Device whose memory counts; None: that of the model's first parameter, or the CPU.

    Returns:
        The account.

    Raises:
        InputError: The device is neither a CPU nor a CUDA device.
    """
    models: list[nn.Module] = [model] if isinstance(model, nn.Module) else list(model or ())
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer or ())
    parameter = next((each for one in models for each in one.parameters()), None)
    where = torch.device(device or ("cpu" if parameter is None else parameter.device))
    if where.type not in ("cpu", "cuda"):
        raise InputError(f"memory.track: device '{where}' cannot be tracked; use cpu or cuda")
    if where == torch.device("cuda"):
        where = torch.device("cuda", torch.cuda.current_device())
    if "torch._dynamo" in sys.modules:  # keeps its compiler from compiling the tracker itself
        disabled = torch._disable_dynamo(Tracker.__torch_dispatch__)  # type: ignore[attr-defined]
        StepTracker.__torch_dispatch__ = disabled  # type: ignore[method-assign]
    tracker = StepTracker(where, block=BLOCK if where.type == "cuda" else 1, log=AllocationLog(where))
    tracker.scopes = scopes = ModuleScopes(tracker, models, optimizers)
    account = Account(tracker)
    try:
        with tracker.recording():
            tracker.begin("forward")
            with scopes.watching():
                yield account
    finally:
        account.close(scopes)
