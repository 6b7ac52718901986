"""Tracks a step of a program that knows nothing of the account, by hooks on its modules and optimizers."""

from __future__ import annotations

import gc
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._guards import active_fake_mode
from torch.nn.modules.module import _global_forward_pre_hooks, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook

from econmt_memory.account.account import Account
from econmt_memory.account.tracking import track
from econmt_memory.report.tables import format_bytes


class watch:  # noqa: N801 # called like track
    """Tracks the first training steps within the context, and writes a page and, to standard error, a paragraph.

    A step begins with the first forward pass in training mode whose gradient is computed, and ends when the optimizer
    has stepped; of several optimizers, the last to come. Predictions are no steps. Models and optimizers are found. It
    writes the account of the step in which the memory is full, or, if RANK is 0 or not set, that of step ``step``.

    Args:
        page: HTML page, in a folder that exists; None: no page.
        step: Number of the step, from 1 on; ValueError is raised for another.

    Attributes:
        account: Account that was written; None before.
        steps: Number of tracked steps that have ended.
    """

    def __init__(self, page: Path | str | None = "memory.html", *, step: int = 3) -> None:
        if step < 1:
            raise ValueError(f"memory.watch: step {step} is not a step; the first one is 1")
        self._page, self._step = None if page is None else Path(page).absolute(), step
        if self._page is not None and not self._page.parent.is_dir():
            raise ValueError(f"memory.watch: there is no folder for the page {page}")
        self._hooks, self._block = ExitStack(), ExitStack()
        self._updates: dict[Optimizer, int] = {}
        self._running: Account | None = None
        self.account: Account | None = None
        self.steps = 0

    def __enter__(self) -> watch:  # noqa: PYI034 # Python 3.10 has no Self
        """Waits for a training step."""
        self._hooks.callback(register_module_forward_pre_hook(self._before_forward).remove)
        self._hooks.callback(register_optimizer_step_pre_hook(self._meet).remove)
        return self

    def __exit__(self, *error: object) -> None:
        """Ends the step that runs, and writes its account if the memory is full."""
        self._hooks.close()
        self._block.__exit__(*error)  # type: ignore[arg-type]
        if self._running is not None and self._running.full is not None:
            self._write(self._running)
        self._running = None

    def _begin(self, parameter: torch.Tensor) -> bool:
        """Begins to track a step; returns False if it cannot be tracked.

        It begins with a forward pass, since a program may have the profiler name a part of its step: the end of a name
        that has begun in one profile must not come in another.
        """
        # The model that trains comes first.
        models = sorted(live_models(), key=lambda it: all(each is not parameter for each in it.parameters()))
        try:
            block = track(models, list(self._updates), device=parameter.device)
            self._running = self._block.enter_context(block)
        except ValueError as error:
            print(error, file=sys.stderr)
            self._step = 0
        return self._running is not None

    def _waits(self) -> bool:
        return self._running is None and self.steps < self._step and active_fake_mode() is None

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self.steps >= self._step:  # here, since hooks of the optimizer that runs must stay
            self._hooks.close()
        elif self._waits() and module.training and torch.is_grad_enabled():
            parameter = next((each for each in module.parameters() if each.requires_grad), None)
            if parameter is not None and self._begin(parameter):
                # PyTorch calls the block's hook, which is the newest, from the next module on.
                next(reversed(_global_forward_pre_hooks.values()))(module, args)

    def _meet(self, optimizer: Optimizer, *_: Any) -> None:
        """Adds hooks to an optimizer, which are called when those of all optimizers may change."""
        if optimizer not in self._updates:
            self._updates[optimizer] = 0
            self._hooks.callback(optimizer.register_step_pre_hook(self._before_update).remove)
            self._hooks.callback(optimizer.register_step_post_hook(self._after_update).remove)

    def _before_update(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        has_closure = any(map(callable, (*args[1:], *kwargs.values())))  # which runs the forward pass
        if self._waits() and has_closure and self._begin(optimizer.param_groups[0]["params"][0]):
            return next(reversed(_global_optimizer_pre_hooks.values()))(optimizer, args, kwargs)
        return None

    def _after_update(self, optimizer: Optimizer, *_: Any) -> None:
        self._updates[optimizer] += active_fake_mode() is None
        if self._running is None or optimizer is not next(reversed(self._updates)):
            return
        self.steps = self._updates[optimizer]
        self._block.close()
        account, self._running = self._running, None
        if self.steps == self._step and os.environ.get("RANK", "0") == "0":
            self._write(account)

    def _write(self, account: Account) -> None:
        self.account = account
        print(in_words(account), file=sys.stderr)
        if self._page is not None:
            account.save(self._page)


def live_models() -> list[nn.Module]:
    """Returns the program's modules that have parameters and belong to no other module."""
    gc.collect()
    found = (each for each in gc.get_objects() if issubclass(type(each), nn.Module))
    modules = [each for each in found if "_modules" in vars(each)]
    inner = {id(child) for module in modules for child in module.children()}
    return [each for each in modules if id(each) not in inner and next(each.parameters(), None) is not None]


def in_words(account: Account) -> str:
    """Describes an account in a paragraph: bytes by category, the largest modules, and what would make room."""
    largest = account.rolled_up(2).by_layer().most_common(3)
    kinds, most, changes = (
        ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes if size)
        for sizes in (account.by_category().items(), largest, account.advice())
    )
    text = f"{' '.join(account.notes)} Memory of a training step: {kinds}. The largest modules: {most}."
    return f"{text} What would make room: {changes or 'nothing that is known'}.".strip()
