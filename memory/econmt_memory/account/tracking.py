"""Tracks the memory of a training step of any PyTorch program."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._functorch import eager_transforms, vmap
from torch.optim import Optimizer

from econmt_memory.account.account import Account
from econmt_memory.account.module_scopes import ModuleScopes, StepFollower
from econmt_memory.account.step_recorder import StepRecorder
from econmt_memory.measure.allocations import profiler_is_free
from econmt_memory.measure.patches import patched

_Any = TypeVar("_Any")


@contextmanager
def track(
    model: nn.Module | Sequence[nn.Module] | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    device: torch.device | str | None = None,
) -> Iterator[Account]:
    """Accounts for every byte of the code within the context, which is usually one training step.

    The account may be read when the context has ended, also if it ended with an error. It is made from the events of
    PyTorch's profiler.

    Args:
        model: Model or models whose modules are named; others are named when they run.
        optimizer: Optimizer or optimizers whose state exists already; others are known from their first step on.
        device: Device whose memory counts; None: that of the model's first parameter, or the CPU.

    Returns:
        The account.

    Raises:
        ValueError: The device is neither a CPU nor a CUDA device that is there, or PyTorch's profiler runs already.
        TypeError: ``model`` or ``optimizer`` is something else.
    """
    models = several(model, nn.Module)
    optimizers = several(optimizer, Optimizer)
    parameter = next((each for one in models for each in one.parameters()), None)
    where = torch.device(str(device or ("cpu" if parameter is None else parameter.device)))
    if where.type not in ("cpu", "cuda"):
        raise ValueError(f"memory.track: device '{where}' cannot be tracked; use cpu or cuda")
    if where.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"memory.track: there is no GPU for device '{where}'; memory.predict needs none")
    if not profiler_is_free():
        raise ValueError(
            "memory.track: PyTorch's profiler runs already (torch.profiler, or a block of memory.track); end that first"
        )
    if str(where) == "cuda":
        where = torch.device("cuda", torch.cuda.current_device())
    tracker = StepRecorder(where)
    scopes = ModuleScopes(tracker, models, optimizers)
    account = Account(tracker)
    try:
        with tracker.recording(), scopes.active(), nested_hooks(tracker), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Using `torch.compile")  # of hooks that see a module twice
            yield account
    except BaseException as error:
        account.fail(error)
        raise
    finally:
        account.close(scopes)


def several(given: _Any | Sequence[_Any] | None, kind: type[_Any]) -> list[_Any]:
    """Returns one object, or several ones, as a list; raises TypeError if one of them is of another class."""
    if given is None:
        return []
    all_given = list(given) if isinstance(given, Iterable) and not isinstance(given, kind) else [given]
    for each in all_given:
        if not isinstance(each, kind):
            raise TypeError(
                f"memory account: expected a torch {kind.__name__} or a list of them, but got {type(each).__name__}; "
                "the model comes first, then the optimizer"
            )
    return all_given


@contextmanager
def nested_hooks(tracker: StepFollower) -> Iterator[None]:
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
            kept = tensor if recomputed else packed
            if isinstance(kept, Tensor):
                tracker.keep(kept)
            return packed

        with patched(self, pack_hook=followed):
            enter(self)

    with patched(hooks, __enter__=enter_followed), _without_hooks_in_transforms(), _unrecorded_transforms():
        yield


def _without_hooks_in_transforms() -> AbstractContextManager[None]:
    """Takes the tracker's hooks off while a transform of torch.func runs, which refuses hooks for saved tensors."""
    graph: Any = torch.autograd.graph
    autograd = torch._C._autograd
    disable, own = graph.disable_saved_tensors_hooks, autograd._top_saved_tensors_default_hooks(True)

    @contextmanager
    def disabled(message: str) -> Iterator[None]:
        is_own = own is not None and autograd._top_saved_tensors_default_hooks(True) == own
        if is_own:
            autograd._pop_saved_tensors_default_hooks()
        try:
            with disable(message):
                yield
        finally:
            if is_own:
                autograd._push_saved_tensors_default_hooks(*own)

    return patched(graph, disable_saved_tensors_hooks=disabled)


@contextmanager
def _unrecorded_transforms() -> Iterator[None]:
    """Records no operators while a transform of torch.func runs, since records keep what it has wrapped in memory."""

    def recording_after(nest: Callable[..., Any]) -> Callable[..., Any]:
        def nested(*args: Any) -> Any:
            level = nest(*args)
            torch._C._autograd._enable_record_function(torch._C._functorch.peek_interpreter_stack() is None)
            return level

        return nested

    with ExitStack() as stack:
        for module, kinds in ((vmap, ["vmap"]), (eager_transforms, ["grad", "jvp"])):
            names = [f"_{kind}_{way}_nesting" for kind in kinds for way in ("increment", "decrement")]
            nests = {name: recording_after(getattr(module, name)) for name in names}
            stack.enter_context(patched(module, **nests))
        yield
