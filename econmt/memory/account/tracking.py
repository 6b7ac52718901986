"""Tracks the memory of a training step of any PyTorch program."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from econmt.errors import InputError
from econmt.memory.account.account import Account
from econmt.memory.account.module_scopes import ModuleScopes
from econmt.memory.account.step_tracker import StepTracker
from econmt.memory.measure.allocations import AllocationLog
from econmt.memory.measure.layer_times import Clock
from econmt.memory.measure.ledger import read_allocator
from econmt.memory.measure.storages import BLOCK
from econmt.memory.measure.tracker import Tracker

_Any = TypeVar("_Any")


@contextmanager
def track(
    model: nn.Module | Sequence[nn.Module] | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    device: torch.device | str | None = None,
) -> Iterator[Account]:
    """Accounts for every byte of the code within the context, which is usually one training step.

    The account may be read when the context has ended, also if it ended with an error. On a GPU the peaks of
    `torch.cuda.memory_stats` are reset.

    Args:
        model: Model or models whose modules are named; others are named when they run.
        optimizer: Optimizer or optimizers whose state exists already; others are known from their first step on.
        device: Device whose memory counts; None: that of the model's first parameter, or the CPU.

    Returns:
        The account.

    Raises:
        InputError: The device is neither a CPU nor a CUDA device.
    """
    models = several(model, nn.Module)
    optimizers = several(optimizer, Optimizer)
    parameter = next((each for one in models for each in one.parameters()), None)
    where = torch.device(device or ("cpu" if parameter is None else parameter.device))
    if where.type not in ("cpu", "cuda"):
        raise InputError(f"memory.track: device '{where}' cannot be tracked; use cpu or cuda")
    if where == torch.device("cuda"):
        where = torch.device("cuda", torch.cuda.current_device())
    log = None
    if where.type == "cuda":  # its allocator reports nothing to the profiler, but counts by itself
        tracker = StepTracker(where, block=BLOCK, meter=lambda: read_allocator(where), follows=False)
        tracker.clock = Clock(
            where
        )  # operators return before they have run, so times need marks on the device
    else:
        log = AllocationLog()
        tracker = StepTracker(where, log=log, follows=False)
    tracker.scopes = scopes = ModuleScopes(tracker, models, optimizers)
    dynamo = sys.modules.get("torch._dynamo.convert_frame")
    if dynamo is not None and (
        scopes.compiled or dynamo.input_codes.seen
    ):  # else it would compile the tracker, too
        disabled = torch._disable_dynamo(Tracker.__torch_dispatch__)  # type: ignore[attr-defined]
        StepTracker.__torch_dispatch__ = disabled  # type: ignore[method-assign]
    account = Account(tracker)
    try:
        with tracker.recording():
            tracker.begin("forward")
            with scopes.watching(), nested_hooks(tracker), warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Using `torch.compile")  # of hooks that see a module twice
                yield account
                if tracker.clock is not None:
                    tracker.clock.begin(None)
    except BaseException as error:
        account.fail(error)
        raise
    finally:
        account.close(scopes)
        if log is not None and not log.has_events:
            account.notes.append("A profiler ran already, so memory inside of operators is not counted.")


def several(given: _Any | Sequence[_Any] | None, kind: type[_Any]) -> list[_Any]:
    """Returns one object, or several ones, as a list."""
    return [given] if isinstance(given, kind) else list(given or ())  # type: ignore[arg-type]


@contextmanager
def nested_hooks(tracker: Tracker) -> Iterator[None]:
    """Follows the hooks for saved tensors that a program sets, as activation checkpointing does.

    Hooks replace the tracker's own. In the forward pass they may keep a tensor, put it elsewhere or forget it; what
    they receive in the backward pass is recomputed, and kept until its gradient is computed.
    """
    hooks = torch.autograd.graph.saved_tensors_hooks
    enter = hooks.__enter__

    def enter_followed(self: torch.autograd.graph.saved_tensors_hooks) -> None:
        pack = self.pack_hook

        def followed(tensor: Tensor) -> Any:
            packed = pack(tensor)
            recomputed = torch._C._current_graph_task_id() >= 0
            tracker.keep(tensor if recomputed else packed)
            return packed

        self.pack_hook = followed
        try:
            enter(self)
        finally:
            self.pack_hook = pack

    hooks.__enter__ = enter_followed  # type: ignore[method-assign]
    try:
        yield
    finally:
        hooks.__enter__ = enter  # type: ignore[method-assign]
