"""Predicts the memory of a training step on tensors that have shapes and no memory."""

from __future__ import annotations

import functools
import gc
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from operator import is_not
from types import CellType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_map

from econmt_memory.account.account import Account
from econmt_memory.account.module_scopes import ModuleScopes
from econmt_memory.account.predicting_tracker import PredictingTracker
from econmt_memory.account.stand_ins import OnCPU, autocast_on_cpu, during_backward, fake_scalers
from econmt_memory.account.tracking import nested_hooks, several
from econmt_memory.estimate import gpu_kernels
from econmt_memory.estimate.allocator import CachingAllocator
from econmt_memory.estimate.cpu_workspaces import cpu_workspace
from econmt_memory.estimate.fake import ON_GPU, REPLACEMENTS, elements_not_zero, fake_tensors
from econmt_memory.estimate.shape_cache import ShapeCache
from econmt_memory.measure.patches import patched

aten = torch.ops.aten


def predict(
    step: Callable[[], object],
    model: nn.Module | Sequence[nn.Module] | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    device: torch.device | str = "cuda",
    nonzero: float = 1.0,
) -> Account:
    """Predicts the account of a training step without running it; a GPU's needs no GPU.

    The step runs twice on tensors without memory: once so that the optimizer has its state, and once to be counted.
    Afterwards the models, optimizers, schedules and containers that the step can reach are as before, and PyTorch's
    random state. Variables that the step assigns, and files and iterators that it reads, are not.

    Args:
        step: Runs a training step of ``model`` and ``optimizer``. Without a model, it makes all it needs itself; if it
            returns a function, that one runs the step.
        model: Model or models; on any device, also ``meta``, as all tensors that the step reads.
        optimizer: Optimizer or optimizers.
        device: Device of the prediction, "cpu" or "cuda".
        nonzero: Share of elements that are not zero, where the program looks for them (``torch.nonzero``, boolean
            masks): k/n for a mixture of n experts of which k compute each token.

    Returns:
        The account, without times. Compiled functions count as if they were not compiled.

    Raises:
        ValueError: The device is neither "cpu" nor "cuda", the share is not between 0 and 1, a module is one of
            TorchScript, or tensors are nested, or parameters lazy or sparse.
        TypeError: ``step``, ``model`` or ``optimizer`` is something else.
    """
    device = str(device).partition(":")[0]
    if device not in ("cpu", "cuda"):
        raise ValueError(f"memory.predict: device '{device}' is unknown; use cpu or cuda")
    if not callable(step):
        raise TypeError(f"memory.predict: step is no function that runs a step, but {type(step).__name__}")
    if not isinstance(nonzero, int | float) or not 0.0 <= nonzero <= 1.0:
        raise ValueError(f"memory.predict: nonzero {nonzero!r} is no share; give a number from 0 to 1")
    on_gpu = device == "cuda"
    models: list[nn.Module] = several(model, nn.Module)
    optimizers: list[Optimizer] = several(optimizer, Optimizer)
    if any(isinstance(each, torch.jit.ScriptModule) for one in models for each in one.modules()):
        raise ValueError(
            "memory.predict: modules of torch.jit.script cannot be predicted; give the Python module"
        )
    if any(hasattr(each, "unshard") for one in models for each in one.modules()):
        raise ValueError(
            "memory.predict: step must make a model of fully_shard, and return the function that trains"
        )
    uncompiled = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    with (
        _values_unknown(),
        torch.random.fork_rng(devices=[]),
        _restored(step, models, optimizers),
        fake_tensors(device) as mode,
        OnCPU(like_gpu=on_gpu) as stand_ins,
        during_backward(stand_ins),
        autocast_on_cpu(),
        fake_scalers(),
        uncompiled,
        ExitStack() as resized,
        _faked(models, optimizers, stand_ins),
    ):
        mode.allow_non_fake_inputs = True
        replacements = dict(ON_GPU if on_gpu else REPLACEMENTS)
        replacements[aten.nonzero.default] = functools.partial(elements_not_zero, nonzero)
        allocator = CachingAllocator() if on_gpu else None
        tracker = PredictingTracker(allocator, replacements=replacements, run=ShapeCache(mode))
        resized.enter_context(
            patched(torch.UntypedStorage, resize_=lambda memory, size: tracker.resize(memory, size))
        )
        tracker.workspace = gpu_kernels.Workspaces(tracker.label) if on_gpu else cpu_workspace
        for parameter in [each for one in models for each in (*one.parameters(), *one.buffers())]:
            if parameter.layout is not torch.strided:
                raise ValueError("memory.predict: sparse parameters cannot be predicted; use memory.track")
            tracker.find(parameter)
        # DistributedDataParallel copies gradients to buckets, which exist from its beginning to its end.
        modules = [each for one in models for each in one.modules()]
        parallel = [each for each in modules if getattr(each, "gradient_as_bucket_view", None) is False]
        weights = [each for one in parallel for each in one.parameters() if each.requires_grad]
        buckets = list(map(torch.empty_like, weights))
        for bucket in buckets:
            tracker.find(bucket)
        with tracker:  # without a record
            made = step()
            run = made if callable(made) else step
            del made  # a result, which would stay in memory
            if run is not step:
                run()
        scopes = ModuleScopes(tracker, models, optimizers)
        account = Account(tracker)
        with tracker.recording():
            tracker.start_over()
            tracker.begin("forward")
            with scopes.active(), nested_hooks(tracker):
                run()
        account.close(scopes)
    account.ledger.device = device
    account.ledger.milliseconds.clear()
    if allocator is not None:
        account.ledger.allocated, account.ledger.reserved = allocator.peak_allocated, allocator.peak_reserved
    account.notes += [f"Predicted for {device}; no step was run.", *_left_out(models, scopes)]
    return account


def _left_out(models: Sequence[nn.Module], scopes: ModuleScopes) -> Iterator[str]:
    """Yields notes on what a prediction does not count."""
    if scopes.has_sparse:
        yield "Gradients are sparse; what operators on sparse tensors allocate is not counted."
    parameters = (parameter for one in models for parameter in one.parameters())
    if any(each._backward_hooks or each._post_accumulate_grad_hooks for each in parameters):
        yield "Hooks of parameters did not run, so an optimizer that they run in the backward pass is missing."


@contextmanager
def _values_unknown() -> Iterator[None]:
    """Names operators whose results have shapes that depend on values."""
    try:
        yield
    except DynamicOutputShapeException as error:
        raise ValueError(
            f"memory.predict: the shape of the result of {error.func} depends on values, which a prediction does not "
            "have; give sizes as numbers where PyTorch takes them (repeat_interleave: output_size)"
        ) from error


@contextmanager
def _faked(models: Sequence[nn.Module], optimizers: Sequence[Optimizer], stand_ins: OnCPU) -> Iterator[None]:
    """Replaces parameters, buffers, gradients and optimizer state by fake tensors, until they are restored.

    The program may hold parameters elsewhere, such as in a list, and may run optimizers that were not given.
    """
    fakes: dict[Tensor, Tensor] = {}
    faked: list[Optimizer] = []

    def fake(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.layout is not torch.strided:
            return value
        if value not in fakes:
            plain = stand_ins.empty_like(value)
            is_parameter = isinstance(value, nn.Parameter)
            fakes[value] = nn.Parameter(plain, value.requires_grad) if is_parameter else plain
            stand_ins.know(value, fakes[value])
            if value.is_leaf and value.grad is not None:
                fakes[value].grad = fake(value.grad)
        return fakes[value]

    def fake_optimizer(optimizer: Optimizer) -> None:
        faked.append(optimizer)
        for group in optimizer.param_groups:
            group["params"] = [fake(parameter) for parameter in group["params"]]
        state = {fake(parameter): tree_map(fake, state) for parameter, state in optimizer.state.items()}
        optimizer.state = defaultdict(dict, state)

    def find_optimizer(optimizer: Optimizer, *_: Any) -> None:
        parameters = (each for group in optimizer.param_groups for each in group["params"])
        if optimizer not in faked and any(each in fakes for each in parameters):
            fake_optimizer(optimizer)

    for module in [each for model in models for each in model.modules()]:
        for name, parameter in module._parameters.items():
            if parameter is not None:
                setattr(module, name, fake(parameter))  # as an RNN notices
        module._buffers.update({name: fake(buffer) for name, buffer in module._buffers.items()})
    for optimizer in optimizers:
        fake_optimizer(optimizer)
    hook = register_optimizer_step_pre_hook(find_optimizer)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def _restored(*roots: Any) -> Iterator[None]:
    """Restores dicts, lists, sets, deques and attributes that can be reached from functions and objects.

    From a function these are what it takes from functions around it, and the globals that it names. Objects of the
    standard library and most of PyTorch are not looked into.
    """
    seen: dict[int, Any] = {}  # by id, which no other object gets meanwhile
    before: list[tuple[Any, Any, list[Any]]] = []
    waiting = list(roots)
    while waiting:
        each = waiting.pop()
        if id(each) in seen or isinstance(each, Tensor | str | bytes | type | ModuleType):
            continue
        seen[id(each)] = each
        kind = next((kind for kind in _CONTAINERS if isinstance(each, kind)), None)
        if kind is not None:
            before.append((kind, each, _parts(kind, each)))
            waiting += before[-1][2]
        elif isinstance(each, FunctionType):
            named = (each.__globals__.get(name) for name in each.__code__.co_names)
            waiting += [each.__closure__, each.__defaults__, each.__kwdefaults__, *named]
        elif isinstance(each, tuple | frozenset | MethodType | CellType | functools.partial):
            waiting += gc.get_referents(each)
        elif isinstance(each, _LOOKED_INTO) or type(each).__module__.partition(".")[0] not in _LIBRARIES:
            waiting.append(getattr(each, "__dict__", None))
    try:
        yield
    finally:
        for kind, each, parts in before:
            now = _parts(kind, each)
            if len(now) != len(parts) or any(map(is_not, now, parts)):
                kind.clear(each)  # by methods of the kind, which a subclass may forbid
                _CONTAINERS[kind](
                    each, zip(parts[::2], parts[1::2], strict=True) if issubclass(kind, dict) else parts
                )


def _parts(kind: Any, container: Any) -> list[Any]:
    """Returns what a container holds, of a dict each key and its value."""
    if issubclass(kind, dict):
        return [part for item in dict.items(container) for part in item]
    return list(kind.__iter__(container))


_CONTAINERS: dict[Any, Callable[[Any, Any], object]] = {
    OrderedDict: OrderedDict.update, dict: dict.update, list: list.extend, deque: deque.extend, set: set.update,
}  # fmt: skip
"""Functions that fill containers, by class."""
_LOOKED_INTO = (nn.Module, Optimizer, LRScheduler, GradScaler, SimpleNamespace)
_LIBRARIES = {*sys.stdlib_module_names, "torch"} - {"__main__"}
